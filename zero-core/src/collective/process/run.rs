//! Lifecycle of a rank that is a process, from its start to its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded, unbounded};

use super::super::comm::{Comm, RankState};
use super::super::flight::Recorder;
use super::super::launcher::{Rendezvous, Start, Topology, World};
use super::super::progress::joined;
use super::super::rounds;
use super::super::run_status::{Failure, RunStatus};
use super::super::threads::{ThreadOptions, caught, panic_reason};
use super::super::{Collective, exit};
use super::commands::{Command, Job};
use super::link::tcp::TcpLink;
use super::link::{Link, MAX_CHUNK};
use super::pump::Pump;
use super::rank::{ProcessComm, ProcessRank};
use super::rendezvous::{self, Mesh, RefusedConnections};
use super::serve::serve;
use super::shared::Shared;
use crate::collective::error::{LinkError, StartError};
use crate::{CommError, LaunchError, RankFailure};

/// Options for running a rank that is a process.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    /// The longest time that any wait for another rank may take, including the wait for all to connect.
    pub deadline: Duration,
    /// Folder to which every rank writes its flight record (`flight-rank-<r>.json`) if a deadline passes or a rank fails.
    pub flight_dir: Option<PathBuf>,
    /// Longest time that a rank waits, after a failure, for the others to reach their ends too, so that each can still report
    /// its error. A launcher kills all ranks when the first exits with an error.
    pub grace: Duration,
    /// Number of consecutive ranks that count as one machine; `None` detects the machines.
    pub node_size: Option<usize>,
    /// Maximum size of one message in bytes, up to 1 GiB. Each completed message is a sign of progress: small ones keep both sides awake.
    pub chunk_bytes: usize,
    /// Allows ranks without a secret to connect at an address that other machines can reach, because nobody else is on their
    /// network; [`Rendezvous::trusted_network`] does the same.
    pub trusted_network: bool,
}

impl Default for ProcessOptions {
    fn default() -> Self {
        Self {
            deadline: ThreadOptions::default().deadline,
            flight_dir: None,
            grace: Duration::from_secs(3),
            node_size: None,
            chunk_bytes: 4 << 20,
            trusted_network: false,
        }
    }
}

/// Longest time that a communicator that ends its run waits for the other ranks to end theirs.
const LEAVE: Duration = Duration::from_secs(10);

/// Longest time that a thread without work may take to end.
const JOIN: Duration = Duration::from_secs(1);

/// This process's rank, from [`start`] to [`ProcessRun::finish`].
#[derive(Debug)]
pub struct ProcessRun {
    comm: Arc<ProcessComm>,
    grace: Duration,
    threads: Option<Threads>,
    warnings: Box<[String]>,
}

#[derive(Debug)]
struct Threads {
    pump: JoinHandle<Result<bool, LinkError>>,
    window: JoinHandle<()>,
}

/// Connects this process with the other ranks of the job described by `start` ([`Start::from_environment`]), and starts its
/// rank. A collective operation: every process calls it, once.
///
/// # Errors
///
/// [`StartError`] if the ranks do not find each other within the deadline, or if MPI is needed but cannot be started or is not
/// compiled in.
pub fn start(options: &ProcessOptions, start: &Start) -> Result<ProcessRun, StartError> {
    match start {
        Start::Alone => over(options, 0, over_sockets(Mesh::alone())),
        Start::Job(job) => {
            let ProcessOptions { deadline, node_size, trusted_network, .. } = *options;
            let mut mesh = rendezvous::connect(job, deadline, node_size, trusted_network)?;
            let mut warnings = warnings(job, &std::mem::take(&mut mesh.refused));
            warnings.extend(beyond_sockets(&mesh.place));
            let mut run = over(options, job.rank, over_sockets(mesh))?;
            run.warnings = warnings.into();
            Ok(run)
        }
        Start::Mpi(world) => over_mpi(options, world),
    }
}

/// Returns warnings for the user about the connections between the ranks.
fn warnings(job: &Rendezvous, refused: &[RefusedConnections]) -> Vec<String> {
    let Rendezvous { rank, host, port, .. } = job;
    let mut all = Vec::new();
    if *rank == 0 && job.secret.is_none() {
        let who = if job.is_local() { "any user of this machine" } else { "anyone who could reach rank 0" };
        all.push(format!("the ranks have no ZERO_SECRET: {who} could have joined the job at {host}:{port}"));
    }
    all.extend(refused.iter().map(|refused| {
        let RefusedConnections { count, from, reason } = refused;
        let (were, first) = if *count == 1 { ("was", "from") } else { ("were", "the first from") };
        format!("{count} connection(s) to rank {rank}, {first} {from}, {were} refused: {reason}")
    }));
    all
}

/// Largest number of ranks, and of machines, for sockets: each rank sends large data to every other, through one thread.
const MOST_RANKS: usize = 64;
const MOST_MACHINES: usize = 16;

/// Returns advice on the alternatives to sockets if there are more ranks or machines than these are meant for.
fn beyond_sockets(place: &Topology) -> Option<String> {
    let is_beyond = place.world > MOST_RANKS || place.nodes > MOST_MACHINES;
    (place.rank == 0 && is_beyond).then(|| {
        format!(
            "{} ranks on {} machine(s) are connected by sockets, which are intended for one machine or a first try, \
             with at most {MOST_RANKS} ranks and {MOST_MACHINES} machines: for more, use MPI (build with --features \
             mpi, start with mpirun or srun), and on GPUs also NCCL (--features cuda), which does not send its data \
             through these sockets",
            place.world, place.nodes
        )
    })
}

fn over_sockets(mesh: Mesh) -> impl FnOnce() -> Result<(TcpLink, Topology), LinkError> + Send {
    move || Ok((TcpLink::new(mesh.streams, mesh.dial)?, mesh.place))
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: &ProcessOptions, world: &World) -> Result<ProcessRun, StartError> {
    let World { rank, world, variable, .. } = *world;
    Err(StartError::WithoutMpi { rank, world, variable })
}

#[cfg(feature = "mpi")]
fn over_mpi(options: &ProcessOptions, world: &World) -> Result<ProcessRun, StartError> {
    let node_size = options.node_size;
    let run = over(options, world.rank, move || super::link::mpi::MpiLink::open(node_size))?;
    let sees = run.comm.place().world;
    // A library that does not understand its launcher (MPICH under Slurm's PMIx) starts every process as the only rank. Each
    // would train a copy, and write the same files.
    if world.world != sees {
        let reason = format!(
            "the launcher started {} ranks (by {}), but MPI sees {sees}: use the launcher that belongs to this MPI \
             library (srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI)",
            world.world, world.variable
        );
        return Err(StartError::Mpi(LinkError { call: "MPI_Init_thread", reason }));
    }
    Ok(run)
}

/// Starts rank `rank` over a link, which `open` opens on the thread that will use it.
pub(super) fn over<L: Link>(
    options: &ProcessOptions,
    rank: usize,
    open: impl FnOnce() -> Result<(L, Topology), LinkError> + Send + 'static,
) -> Result<ProcessRun, StartError> {
    let failed = |source: std::io::Error| StartError::Thread { rank, source };
    let (commands, inbox) = unbounded();
    let (jobs, requests) = unbounded();
    let (ready, started) = bounded(1);
    let ProcessOptions { deadline, flight_dir, chunk_bytes, .. } = options.clone();
    let communicate = move || {
        sleep_exactly();
        let (link, place) = match open() {
            Ok(opened) => opened,
            Err(error) => {
                // `over` waits for one of the two.
                let _ = ready.send(Err(error.clone()));
                return Err(error);
            }
        };
        let recorder = Recorder::new(place.rank, place.world, flight_dir);
        let near = rounds::neighbours(place.rank, place.world).into_iter().chain([place.rank]);
        let standing = Arc::new(RunStatus::new(place.world, near));
        let state = RankState { place, deadline, recorder, wire: Arc::default(), standing };
        let shared = Shared::new(state, commands, jobs);
        let _ = ready.send(Ok(shared.clone()));
        let pump = Pump::new(link, shared.clone(), inbox, chunk_bytes.clamp(1, MAX_CHUNK));
        catch_unwind(AssertUnwindSafe(|| pump.run())).unwrap_or_else(|payload| {
            let error = LinkError { call: "the communication thread", reason: panic_reason(&*payload) };
            shared.fail(&error.to_string(), None);
            Err(error)
        })
    };
    let pump = std::thread::Builder::new().name(format!("rank-{rank}-link")).spawn(communicate).map_err(failed)?;
    // Sockets are already connected. With MPI, a rank that ended before this point blocks the others in MPI_Init.
    let unopened = |reason: String| StartError::Mpi(LinkError { call: "MPI_Init_thread", reason });
    let shared = match started.recv_timeout(deadline) {
        Ok(shared) => shared.map_err(StartError::Mpi)?,
        Err(RecvTimeoutError::Disconnected) => return Err(unopened("its thread has panicked".into())),
        Err(RecvTimeoutError::Timeout) => {
            let waited = deadline.as_secs();
            return Err(unopened(format!(
                "it has not returned after {waited} s; check whether a rank ended before calling it"
            )));
        }
    };
    let server = shared.clone();
    let window = std::thread::Builder::new()
        .name(format!("rank-{rank}-window"))
        .spawn(move || serve(&server, &requests, &server.parked))
        .map_err(failed)?;
    let threads = Some(Threads { pump, window });
    let comm = Comm::of_all(ProcessRank { shared, keeper: None }, "world");
    Ok(ProcessRun { comm, grace: options.grace, threads, warnings: Box::default() })
}

/// Lets the calling thread sleep for single microseconds, which the system otherwise rounds up to 50.
fn sleep_exactly() {
    #[cfg(target_os = "linux")]
    // SAFETY: sets a property of the calling thread; a refusal changes nothing.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong);
    }
}

impl ProcessRun {
    /// Returns the group of all ranks.
    pub fn comm(&self) -> &Arc<ProcessComm> {
        &self.comm
    }

    /// Returns warnings for the user about the connections between the ranks: refused connections, each reason once, and a
    /// missing secret.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Ends this rank. If all ranks have succeeded, this also closes the link. If a rank has failed, the link stays
    /// open (`MPI_Finalize` could wait forever for a rank that is dead or cut off), and [`Failed`] does the remaining work.
    ///
    /// # Errors
    ///
    /// The failure of the first rank that failed, if one did.
    pub fn finish(self) -> Result<(), Failed<CommError>> {
        self.close(None)
    }

    /// Converts the run into the group of all ranks. When that and all groups made from it are dropped, this rank ends:
    /// successfully, unless its thread panics. Use it for a group alongside another engine that ends by itself.
    pub fn into_comm(self) -> Arc<ProcessComm> {
        let (comm, shared) = (self.comm.clone(), self.shared().clone());
        comm.moved_to(ProcessRank { shared, keeper: Some(Arc::new(Ending(Some(self)))) })
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.comm.engine().shared
    }

    /// Ends this rank, with its own `failure` if it has one.
    fn close<E>(mut self, failure: Option<RankFailure<E>>) -> Result<(), Failed<E>>
    where
        E: core::fmt::Display + core::fmt::Debug,
    {
        let shared = self.shared().clone();
        let (rank, world) = (shared.rank(), shared.state.place.world);
        if let Some(failure) = &failure {
            let cause = match failure {
                RankFailure::Comm(error) => Some(&**error),
                _ => None,
            };
            // The run names the first rank to fail; the others' errors follow from it.
            shared.fail(&failure.to_string(), cause);
        }
        let waited = self.comm.wait_for_others();
        if waited.is_ok() {
            self.end();
        }
        let Some(Failure { peer, reason, cause }) = shared.state.standing.trouble() else { return Ok(()) };
        let failure = match (failure, cause) {
            // A passed deadline stays one, whatever error the body made of it: the exit code depends on it.
            (Some(own), cause) if peer == rank && !matches!(cause, Some(CommError::Timeout { .. })) => own,
            (_, Some(error)) => RankFailure::Comm(Box::new(error)),
            (_, None) => RankFailure::Aborted(reason.to_string()),
        };
        let error = LaunchError::Rank { rank: peer, world, failure: Box::new(failure) };
        Err(Failed { error, ending: Some(self) })
    }

    /// Ends the threads, and closes the link if the run has not failed.
    fn end(&mut self) {
        let Some(Threads { pump, window }) = self.threads.take() else { return };
        let shared = self.shared().clone();
        let sound = shared.state.standing.trouble().is_none();
        if !sound {
            shared.state.recorder.finish(self.grace);
            shared.send(Command::Done);
            shared.state.standing.wait_for_done(self.grace);
        }
        let within = if sound { shared.state.deadline } else { Duration::from_millis(50) };
        shared.send(Command::Finish { finalize: sound, within });
        // The communication thread ends first: it still passes values to the other one.
        let ended = joined(pump, if sound { within + shared.state.deadline } else { JOIN });
        let _ = shared.jobs.send(Job::Stop);
        joined(window, JOIN);
        let reason = match ended {
            Some(Ok(Ok(true))) => return,
            Some(Ok(Err(error))) => error.to_string().into(),
            _ => "its communication did not end cleanly".into(),
        };
        // Kept as this run's failure, if it has none yet. No rank is left to be notified.
        shared.note(Failure { peer: shared.rank(), reason, cause: None });
    }
}

/// Ends a run when the last of the communicators that it was converted into is dropped.
#[derive(Debug)]
struct Ending(Option<ProcessRun>);

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(mut run) = self.0.take() else { return };
        if std::thread::panicking() {
            run.comm.abort("it panicked");
        }
        let shared = run.shared().clone();
        shared.say_goodbye();
        // The others may continue without this rank. Those that end too are waited for, so that none is cut off.
        shared.state.standing.wait_for_leavers(LEAVE.min(shared.state.deadline));
        run.end();
    }
}

/// A failed run that this process still has to end.
///
/// A launcher kills all ranks when the first exits with an error. So a rank first prints the error, and then drops this value
/// or calls [`Failed::end_process`]. Either notifies the others that this rank may be ended, and waits, at most
/// [`ProcessOptions::grace`], until all have done so.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failed<E: core::fmt::Display + core::fmt::Debug> {
    /// The failure of the first rank that failed.
    pub error: LaunchError<E>,
    /// The run, which ends when dropped.
    ending: Option<ProcessRun>,
}

impl<E: core::fmt::Display + core::fmt::Debug> Failed<E> {
    /// Returns the exit code for the error.
    pub fn code(&self) -> i32 {
        exit::code_of(&self.error)
    }

    /// Waits for the others as described, and ends the process without exit handlers, which an MPI library may use to
    /// wait for ranks that never come.
    pub fn end_process(self) -> ! {
        let code = self.code();
        exit::flush();
        drop(self.ending);
        exit::end_process(code)
    }
}

impl Drop for ProcessRun {
    fn drop(&mut self) {
        if self.threads.is_some() {
            // Has no effect if the run has failed already.
            self.comm.abort("it dropped its run without finishing it");
            self.end();
        }
    }
}

/// Connects the ranks, runs `body` as this process's rank, ends the rank, and returns the result of `body`.
///
/// The first rank that fails, by an error, a panic or a collective, stops all the others; its failure is the error
/// returned on every rank. Code that cannot return errors may pass a [`CommError`] on as a panic payload, as with
/// [`super::super::threads::run`].
///
/// # Errors
///
/// [`Failed`], to be printed before the process ends; its error is [`LaunchError::Start`] if this process cannot become a rank.
///
/// ```no_run
/// use zero_core::collective::launcher::Start;
/// use zero_core::collective::process::{ProcessOptions, run};
/// use zero_core::{Buffer, Collective, CommError, ReduceOp};
/// let start = Start::from_environment()?;
/// let sum = run(&ProcessOptions::default(), &start, |run| -> Result<Buffer, CommError> {
///     run.comm().all_reduce(Buffer::F32(vec![run.comm().rank() as f32]), ReduceOp::Sum)
/// });
/// if let Err(failed) = sum {
///     eprintln!("{failed}");
///     failed.end_process();
/// }
/// # Ok::<(), zero_core::collective::launcher::EnvironmentError>(())
/// ```
pub fn run<T, E, F>(options: &ProcessOptions, start: &Start, body: F) -> Result<T, Failed<E>>
where
    E: core::fmt::Display + core::fmt::Debug,
    F: FnOnce(&ProcessRun) -> Result<T, E>,
{
    let run = self::start(options, start)
        .map_err(|error| Failed { error: LaunchError::Start(Box::new(error)), ending: None })?;
    let failure = match caught(|| body(&run)) {
        Ok(value) => return run.close(None).map(|()| value),
        Err(failure) => failure,
    };
    let failed = run.close(Some(failure));
    Err(failed.expect_err("a run with a rank that failed has failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_than_sockets_are_for_are_told_what_to_take() {
        let told = |rank, world, nodes| {
            let node_of = (0..world).map(|rank| rank % nodes).collect();
            beyond_sockets(&Topology {
                rank,
                world,
                local_rank: 0,
                local_world: world / nodes,
                node: 0,
                nodes,
                node_of,
            })
        };
        assert!(told(0, 64, 16).is_none() && told(1, 65, 1).is_none());
        for (world, nodes) in [(65, 1), (34, 17)] {
            let told = told(0, world, nodes).expect("it is beyond");
            assert!(told.contains(&format!("{world} ranks on {nodes} machine")) && told.contains("mpirun"), "{told}");
        }
    }
}
