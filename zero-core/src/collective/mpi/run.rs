//! A rank's process from its start to its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded, unbounded};

use super::super::flight::Recorder;
use super::super::threads::{Stopped, ThreadOptions, panic_reason};
use super::super::{Collective, exit, launcher};
use super::comm::MpiComm;
use super::link::{Link, MAX_CHUNK};
use super::message::Trouble;
use super::pump::Pump;
use super::serve::{Job, serve};
use super::shared::{At, Command, Shared};
use crate::error::MpiError;
use crate::{CommError, LaunchError, RankFailure};

/// How a rank that is a process is run.
#[derive(Debug, Clone)]
pub struct MpiOptions {
    /// The longest that any wait for another rank may take.
    pub deadline: Duration,
    /// Where every rank writes its flight record (`flight-rank-<r>.json`) when a deadline passes or a rank fails.
    pub flight_dir: Option<PathBuf>,
    /// After a failure: how long a rank waits for the others to come to their ends too, so that each can still say what
    /// it knows. A launcher kills them all when the first ends badly.
    pub grace: Duration,
    /// So many ranks in a row count as one machine, instead of those that share memory.
    pub node_size: Option<usize>,
    /// Most bytes of one message; at most 1 GiB. Each message that ends shows that a payload moves, so that small ones keep both sides awake.
    pub chunk_bytes: usize,
}

impl Default for MpiOptions {
    fn default() -> Self {
        Self {
            deadline: ThreadOptions::default().deadline,
            flight_dir: None,
            grace: Duration::from_secs(3),
            node_size: None,
            chunk_bytes: 4 << 20,
        }
    }
}

/// How long a thread that has nothing left to do may take to end.
const JOIN: Duration = Duration::from_secs(1);

/// This process's rank, from [`start`] to [`MpiRun::finish`].
#[derive(Debug)]
pub struct MpiRun {
    comm: Arc<MpiComm>,
    grace: Duration,
    threads: Option<Threads>,
}

#[derive(Debug)]
struct Threads {
    pump: JoinHandle<Result<bool, MpiError>>,
    window: JoinHandle<()>,
}

/// Starts MPI and this process's rank. A collective: every process calls it, once.
///
/// # Errors
///
/// [`MpiError`] when MPI cannot be started, or was started before.
pub fn start(options: &MpiOptions) -> Result<MpiRun, MpiError> {
    let name = match launcher::launched() {
        Some(world) => format!("rank-{}-mpi", world.rank),
        None => "rank-0-mpi".to_string(),
    };
    let failed = |source: std::io::Error| MpiError { call: "thread", reason: source.to_string() };
    let (commands, inbox) = unbounded();
    let (jobs, requests) = unbounded();
    let (ready, started) = bounded(1);
    let MpiOptions { deadline, flight_dir, node_size, chunk_bytes, .. } = options.clone();
    let communicate = move || {
        sleep_exactly();
        let (link, place) = match Link::open(node_size) {
            Ok(opened) => opened,
            Err(error) => {
                // `start` waits for one of the two.
                let _ = ready.send(Err(error.clone()));
                return Err(error);
            }
        };
        let recorder = Recorder::new(place.rank, place.world, flight_dir);
        let shared = Shared::new(place, deadline, recorder, commands, jobs);
        let _ = ready.send(Ok(shared.clone()));
        let pump = Pump::new(link, shared.clone(), inbox, chunk_bytes.clamp(1, MAX_CHUNK));
        catch_unwind(AssertUnwindSafe(|| pump.run())).unwrap_or_else(|payload| {
            let error = MpiError { call: "the communication thread", reason: panic_reason(&*payload) };
            shared.fail(&error.to_string(), None);
            Err(error)
        })
    };
    let pump = std::thread::Builder::new().name(name).spawn(communicate).map_err(failed)?;
    // A rank that ended before it came here keeps the others inside MPI_Init.
    let shared = match started.recv_timeout(deadline) {
        Ok(shared) => shared?,
        Err(RecvTimeoutError::Disconnected) => {
            return Err(MpiError { call: "MPI_Init_thread", reason: "its thread has panicked".into() });
        }
        Err(RecvTimeoutError::Timeout) => {
            let reason = format!("it has not returned after {} s: has a rank ended before it?", deadline.as_secs());
            return Err(MpiError { call: "MPI_Init_thread", reason });
        }
    };
    // A library that does not understand its launcher (MPICH under Slurm's PMIx) starts every process as a lone rank, each of
    // which would train a copy, and write the same files.
    if let Some(launched) = launcher::launched().filter(|launched| launched.world != shared.place.world) {
        let reason = format!(
            "the launcher has started {} ranks (by {}), but MPI sees {}: use the launcher that belongs to this MPI library \
             (srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI)",
            launched.world, launched.variable, shared.place.world
        );
        return Err(MpiError { call: "MPI_Init_thread", reason });
    }
    let server = shared.clone();
    let window = std::thread::Builder::new()
        .name(format!("rank-{}-window", shared.rank()))
        .spawn(move || serve(&server, &requests, &server.parked))
        .map_err(failed)?;
    let threads = Some(Threads { pump, window });
    Ok(MpiRun { comm: MpiComm::world_of(shared), grace: options.grace, threads })
}

/// Naps of microseconds are to last that long: the system rounds them up to 50 otherwise.
fn sleep_exactly() {
    #[cfg(target_os = "linux")]
    // SAFETY: sets a property of the calling thread; a refusal changes nothing.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong);
    }
}

impl MpiRun {
    /// The group of all ranks.
    pub fn comm(&self) -> &Arc<MpiComm> {
        &self.comm
    }

    /// Counts this rank as ended, and waits until the others have ended too: what they still read from this rank (see
    /// [`crate::window`]) must stay there so long. A collective that still waits for this rank fails.
    ///
    /// # Errors
    ///
    /// [`CommError`] when a rank fails meanwhile, or does not end within the deadline.
    pub fn wait_for_others(&self) -> Result<(), CommError> {
        let shared = self.comm.shared();
        let op = "waiting for the other ranks to end";
        let at = At { group: self.comm.label(), seq: u64::MAX, op };
        shared.check(at, [])?;
        let begin = Instant::now();
        shared.say_goodbye();
        let missing = shared.wait_for_leavers(shared.deadline);
        shared.check(at, [])?;
        if missing.is_empty() {
            return Ok(());
        }
        let error = CommError::Timeout {
            group: self.comm.label().to_string(),
            seq: u64::MAX,
            rank: shared.rank(),
            op: op.to_string(),
            waited_ms: begin.elapsed().as_millis() as u64,
            missing,
        };
        shared.fail(&error.to_string(), Some(&error));
        Err(error)
    }

    /// Ends this rank. When all has gone well everywhere, MPI is ended too. When a rank has failed, MPI is left as it is
    /// (its end could wait for ever for a rank that is dead or cut off), and what is left to do is in the [`Failed`].
    ///
    /// # Errors
    ///
    /// The trouble of the first rank that failed, if one did.
    pub fn finish(self) -> Result<(), Failed<CommError>> {
        self.close(None)
    }

    /// Ends this rank, after `failure`, if it has one of its own.
    fn close<E>(mut self, failure: Option<RankFailure<E>>) -> Result<(), Failed<E>>
    where
        E: core::fmt::Display + core::fmt::Debug,
    {
        let shared = self.comm.shared().clone();
        let (rank, world) = (shared.rank(), shared.place.world);
        if let Some(failure) = &failure {
            let cause = match failure {
                RankFailure::Comm(error) => Some(&**error),
                _ => None,
            };
            // The first to fail is named by the run; what the others report is its echo.
            shared.fail(&failure.to_string(), cause);
        }
        let waited = self.wait_for_others();
        if waited.is_ok() {
            self.end();
        }
        let Some(Trouble { peer, reason, cause }) = shared.trouble() else { return Ok(()) };
        let failure = match (failure, cause) {
            // A deadline stays one, whatever the body made of it: the exit code depends on it.
            (Some(own), cause) if peer == rank && !matches!(cause, Some(CommError::Timeout { .. })) => own,
            (_, Some(error)) => RankFailure::Comm(Box::new(error)),
            (_, None) => RankFailure::Aborted(reason),
        };
        let error = LaunchError::Rank { rank: peer, world, failure: Box::new(failure) };
        Err(Failed { error, ending: Some(self) })
    }

    /// Ends the threads, and MPI if all is well.
    fn end(&mut self) {
        let Some(Threads { pump, window }) = self.threads.take() else { return };
        let shared = self.comm.shared().clone();
        let sound = shared.trouble().is_none();
        if !sound {
            shared.recorder.finish(self.grace);
            shared.send(Command::Done);
            shared.wait_for_done(self.grace);
        }
        let within = if sound { shared.deadline } else { Duration::from_millis(50) };
        shared.send(Command::Finish { finalize: sound, within });
        // The communication thread ends first: it still hands values to the other one.
        let ended = joined(pump, if sound { within + shared.deadline } else { JOIN });
        let _ = shared.jobs.send(Job::Stop);
        joined(window, JOIN);
        let reason = match ended {
            Some(Ok(Ok(true))) => return,
            Some(Ok(Err(error))) => error.to_string(),
            _ => "MPI did not end".to_string(),
        };
        // Kept as this run's trouble, if it has none yet; nobody is left to be told.
        shared.note(Trouble { peer: shared.rank(), reason, cause: None });
    }
}

/// A run that has failed, and this process's part in it that is not over: its end.
///
/// A launcher ends all ranks when the first ends badly. So a rank first says what it has to say (prints the error), and
/// then drops this, or calls [`Failed::end_process`]: it tells the others that it may be ended, and waits until all have
/// come so far, at most [`MpiOptions::grace`].
#[derive(Debug)]
pub struct Failed<E: core::fmt::Display + core::fmt::Debug> {
    /// The trouble of the first rank that failed.
    pub error: LaunchError<E>,
    /// Ended by being dropped.
    ending: Option<MpiRun>,
}

impl<E: core::fmt::Display + core::fmt::Debug> Failed<E> {
    /// The exit code that tells of the error.
    pub fn code(&self) -> i32 {
        exit::code_of(&self.error)
    }

    /// Waits for the others as described, and ends the process; without exit handlers, which an MPI library may use to
    /// wait for ranks that never come.
    pub fn end_process(self) -> ! {
        let code = self.code();
        exit::flush();
        drop(self.ending);
        exit::end_process(code)
    }
}

impl<E: core::fmt::Display + core::fmt::Debug> core::fmt::Display for Failed<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: core::fmt::Display + core::fmt::Debug> std::error::Error for Failed<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        None
    }
}

/// A thread's result, if it ends in time; one that does not (it is inside MPI) is left to the end of the process.
fn joined<T>(thread: JoinHandle<T>, within: Duration) -> Option<std::thread::Result<T>> {
    let end = Instant::now() + within;
    while !thread.is_finished() {
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Some(thread.join())
}

impl Drop for MpiRun {
    fn drop(&mut self) {
        if self.threads.is_some() {
            // Nothing new when the run has failed already.
            self.comm.abort("it ended its run without finishing it");
            self.end();
        }
    }
}

/// Runs `body` as this process's rank, from MPI's start to its end, and gives its result.
///
/// The first rank that fails, by an error, a panic or a collective, stops all the others; its trouble is the error
/// returned on every rank. A [`CommError`] may travel through code that cannot return errors as a panic payload, as with
/// [`super::super::threads::run`].
///
/// # Errors
///
/// [`Failed`] as described, to be printed and ended with; its error is [`LaunchError::Mpi`] when MPI cannot be started.
///
/// ```no_run
/// use zero_core::collective::mpi::{MpiOptions, run};
/// use zero_core::{Buffer, Collective, CommError, ReduceOp};
/// let sum = run(&MpiOptions::default(), |run| -> Result<Buffer, CommError> {
///     run.comm().all_reduce(Buffer::F32(vec![run.comm().rank() as f32]), ReduceOp::Sum)
/// });
/// if let Err(failed) = sum {
///     eprintln!("{failed}");
///     failed.end_process();
/// }
/// ```
pub fn run<T, E, F>(options: &MpiOptions, body: F) -> Result<T, Failed<E>>
where
    E: core::fmt::Display + core::fmt::Debug,
    F: FnOnce(&MpiRun) -> Result<T, E>,
{
    let run = start(options).map_err(|error| Failed { error: LaunchError::Mpi(error), ending: None })?;
    let failure = match catch_unwind(AssertUnwindSafe(|| body(&run))) {
        Ok(Ok(value)) => return run.close(None).map(|()| value),
        Ok(Err(error)) => RankFailure::Failed(error),
        Err(payload) => match payload.downcast::<CommError>() {
            Ok(error) => RankFailure::Comm(error),
            Err(payload) if payload.is::<Stopped>() => RankFailure::Aborted(panic_reason(&*payload)),
            Err(payload) => RankFailure::Panicked(panic_reason(&*payload)),
        },
    };
    let failed = run.close(Some(failure));
    Err(failed.expect_err("a run with a rank that failed has failed"))
}
