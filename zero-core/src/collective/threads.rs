//! The `threads` engine: ranks are threads of one process, and data moves through shared memory.
//!
//! An operation is a *rendezvous*: each rank puts its buffer into the slot for the group and sequence number. After the last
//! rank has arrived, every rank computes its own result by reading the others' buffers in place. The slot's mutex gives the
//! happens-before edge from the writing of a buffer to its reading. Buffers are `Arc`s, so that no rank waits for the
//! others to finish reading.
//!
//! States of a slot: *filling* (some ranks have arrived) -> *complete* (all have; inputs are immutable) -> removed by the
//! last rank that took its inputs.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::comm::{Engine, RankState};
use super::flight::{Entry, Recorder};
use super::launcher::Topology;
use super::operation::{Group, Op, Step, labelled};
use super::run_status::{Failure, RunStatus};
use super::{Buffer, Collective, Comm, InProcess, Join, Joined, ReduceOp, Request};
use crate::{CommError, LaunchError, Partition, RankFailure};

/// A slot with the inputs of the ranks that have arrived at one exchange of an operation.
#[derive(Debug)]
struct Meeting {
    words: String,
    first_rank: usize,
    /// Indexed by place in the group.
    inputs: Vec<Option<Joined>>,
    taken: usize,
}

/// A result that the first rank to need it computes.
type Once = Arc<OnceLock<Joined>>;

/// State of one run that all its groups share.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) standing: Arc<RunStatus>,
    /// State of each rank.
    states: Vec<RankState>,
    pub(crate) deadline: Duration,
    /// Keyed by group, sequence number and phase.
    slots: Mutex<HashMap<(u64, u64, u8), Meeting>>,
    arrived: Condvar,
    /// Shared results by group and sequence number, each with the number of ranks that have fetched it.
    joined: Mutex<HashMap<(u64, u64), (Once, usize)>>,
}

/// Longest time that the end of a failed run waits for a flight record to be written.
const FLIGHT: Duration = Duration::from_secs(5);

/// Interval at which a waiting rank checks whether the run has failed elsewhere.
const POLL: Duration = Duration::from_millis(20);

impl Run {
    fn new(world: usize, deadline: Duration, flight_dir: Option<&Path>) -> Arc<Self> {
        let standing = Arc::new(RunStatus::new(world, 0..world));
        let state = |rank: usize| RankState {
            place: Topology::from_leaders(rank, &vec![0; world]),
            deadline,
            recorder: Recorder::new(rank, world, flight_dir.map(Path::to_path_buf)),
            wire: Arc::default(),
            standing: standing.clone(),
        };
        Arc::new(Self {
            states: (0..world).map(state).collect(),
            standing,
            deadline,
            slots: Mutex::default(),
            arrived: Condvar::new(),
            joined: Mutex::default(),
        })
    }

    fn fail(&self, peer: usize, reason: &str) {
        if self.standing.keep(Failure { peer, reason: reason.into(), cause: None }) {
            for state in &self.states {
                state.recorder.write(reason);
            }
        }
    }
}

/// One rank of a run of threads.
#[derive(Debug, Clone)]
pub struct ThreadRank {
    run: Arc<Run>,
    rank: usize,
}

/// One rank's communicator for a group of threads.
pub type ThreadComm = Comm<ThreadRank>;

impl ThreadRank {
    /// Puts `input`, of `bytes`, into the slot for the operation's exchange `step` and returns all ranks' inputs once all have
    /// arrived.
    fn meet(&self, op: &Op<'_>, step: Step, input: Joined, bytes: usize) -> Result<Vec<Joined>, CommError> {
        let recorder = &self.state().recorder;
        let entry = recorder.open(op.opening(bytes, op.group.peers().collect(), step));
        let came = self.wait_for_all(op, step.phase, input, &entry);
        recorder.close(&entry, came.as_ref().map(|_| ()).map_err(CommError::to_string));
        came
    }

    fn wait_for_all(&self, op: &Op<'_>, phase: u8, input: Joined, entry: &Entry) -> Result<Vec<Joined>, CommError> {
        let (run, Group { id, members, me, .. }) = (&*self.run, op.group);
        let (begin, key) = (Instant::now(), (*id, op.seq, phase));
        let mut slots = run.slots.lock();
        let slot = slots.entry(key).or_insert_with(|| Meeting {
            words: op.words.to_string(),
            first_rank: self.rank,
            inputs: vec![None; members.len()],
            taken: 0,
        });
        if slot.words != op.words {
            let error = op.at().mismatch(slot.first_rank, slot.words.clone());
            drop(slots);
            run.fail(self.rank, &error.to_string());
            run.arrived.notify_all();
            return Err(error);
        }
        slot.inputs[*me] = Some(input);
        if slot.inputs.iter().all(Option::is_some) {
            run.arrived.notify_all();
        }
        loop {
            let slot = slots.get_mut(&key).expect("a slot lives until every rank has taken its inputs");
            let came = members.iter().zip(&slot.inputs);
            let missing: Vec<usize> = came.filter_map(|(&peer, input)| input.is_none().then_some(peer)).collect();
            if missing.is_empty() {
                let inputs = slot.inputs.iter().flatten().cloned().collect();
                slot.taken += 1;
                if slot.taken == members.len() {
                    slots.remove(&key);
                }
                return Ok(inputs);
            }
            entry.only_waits_for(&missing);
            run.standing.check(op.at(), missing.iter().copied())?;
            let waited = begin.elapsed();
            if waited >= run.deadline {
                let error = op.at().timeout(waited, missing);
                // Records are written without the slots' lock, which the other ranks need.
                drop(slots);
                run.fail(self.rank, &error.to_string());
                return Err(error);
            }
            run.arrived.wait_for(&mut slots, POLL.min(run.deadline - waited));
        }
    }

    /// Gathers all ranks' buffers.
    fn gather(&self, op: &Op<'_>, step: Step, input: Arc<Buffer>) -> Result<Vec<Arc<Buffer>>, CommError> {
        let bytes = input.bytes();
        let buffer =
            |input: Joined| input.downcast().expect("ranks whose operations match bring the same kind of input");
        Ok(self.meet(op, step, input, bytes)?.into_iter().map(buffer).collect())
    }

    /// Returns the parts of the reduced buffer, in rank order. Each rank reduces one part, then all exchange theirs. The order of
    /// additions, and thus every bit, is that of a reduce-scatter.
    fn all_reduce(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp) -> Result<Vec<Arc<Buffer>>, CommError> {
        let own = Partition::new(input.len(), op.group.world()).range(op.group.me);
        let inputs = self.gather(op, Step { last: false, ..Step::ONLY }, Arc::new(input))?;
        let piece = Arc::new(Buffer::reduce_range(&inputs, own, reduce));
        drop(inputs);
        self.gather(op, Step { phase: 1, ..Step::ONLY }, piece)
    }
}

impl Engine for ThreadRank {
    fn state(&self) -> &RankState {
        &self.run.states[self.rank]
    }

    fn fail(&self, reason: &str, _: Option<&CommError>) {
        self.run.fail(self.rank, reason);
    }

    fn leave(&self) {
        self.run.standing.leave(self.rank);
    }

    fn perform(&self, op: &Op<'_>, request: Request) -> Result<Buffer, CommError> {
        let (world, me) = (op.group.world(), op.group.me);
        let own = |len: usize| me * len..(me + 1) * len;
        let all = |input: Buffer| self.gather(op, Step::ONLY, Arc::new(input));
        Ok(match request {
            Request::Barrier(_) => {
                all(Buffer::U8(Vec::new()))?;
                Buffer::U8(Vec::new())
            }
            Request::AllGather(shard) => {
                let len = shard.len();
                Buffer::concat(&all(shard)?, 0..len)
            }
            Request::ReduceScatter(input, reduce) => {
                let own = own(input.len() / world);
                Buffer::reduce_range(&all(input)?, own, reduce)
            }
            Request::AllReduce(input, reduce) => Buffer::join(&self.all_reduce(op, input, reduce)?),
            Request::Broadcast(buffer, root) => (*all(buffer)?[root]).clone(),
            Request::Gather(shard, root) => {
                let len = if me == root { shard.len() } else { 0 };
                Buffer::concat(&all(shard)?, 0..len)
            }
            Request::AllToAll(input) => {
                let own = own(input.len() / world);
                Buffer::concat(&all(input)?, own)
            }
        })
    }

    fn perform_shared(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp, join: Join) -> Result<Joined, CommError> {
        let pieces = self.all_reduce(op, input, reduce)?;
        let once = {
            let mut joined = self.run.joined.lock();
            let key = (op.group.id, op.seq);
            let (once, fetched) = joined.entry(key).or_default();
            *fetched += 1;
            let (once, all) = (once.clone(), *fetched == op.group.world());
            if all {
                joined.remove(&key);
            }
            once
        };
        // The others wait only while one rank copies within this process's memory.
        Ok(once.get_or_init(|| join(&pieces)).clone())
    }

    fn in_process(comm: &ThreadComm) -> Option<&dyn InProcess> {
        Some(comm)
    }
}

impl InProcess for ThreadComm {
    fn exchange(&self, item: Joined, bytes: usize, what: &str) -> Result<Vec<Joined>, CommError> {
        let words = labelled(format!("exchange of {bytes} bytes"), what);
        self.in_order(move |inner| {
            inner.number("exchange", |seq| {
                let op = Op { group: &inner.group, seq, words: &words };
                inner.engine.meet(&op, Step::ONLY, item, bytes)
            })
        })
    }
}

impl ThreadComm {
    /// Returns the run that this rank belongs to, for waits outside of collectives.
    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.engine().run
    }
}

/// Options of [`run`].
#[derive(Debug, Clone)]
pub struct ThreadOptions {
    /// The longest time that any wait for another rank may take.
    pub deadline: Duration,
}

impl Default for ThreadOptions {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(600) }
    }
}

/// Runs `body` once per rank, each on a named thread of this process, and returns the results in rank order.
///
/// The first rank that fails, by an error, a panic or a collective, stops all the others; its failure is the error
/// returned. Code that cannot return errors may pass a [`CommError`] on as a panic payload
/// (`std::panic::resume_unwind(Box::new(error))`): it is caught here and never printed as a panic.
///
/// # Errors
///
/// [`LaunchError`] as described.
///
/// ```
/// use zero_core::{Buffer, Collective, ReduceOp, collective::threads::{ThreadOptions, run}};
/// let sums = run(3, &ThreadOptions::default(), |comm| {
///     comm.all_reduce(Buffer::F32(vec![comm.rank() as f32]), ReduceOp::Sum).map(Buffer::into_f32)
/// })
/// .unwrap();
/// assert_eq!(sums, vec![vec![3.0]; 3]);
/// ```
pub fn run<T, E, F>(world: usize, options: &ThreadOptions, body: F) -> Result<Vec<T>, LaunchError<E>>
where
    T: Send,
    E: core::fmt::Display + core::fmt::Debug + Send,
    F: Fn(Arc<ThreadComm>) -> Result<T, E> + Sync,
{
    run_recorded(world, options, None, body)
}

/// Runs `body` like [`run`]. If a rank fails or a deadline passes, every rank's flight record is written to `flight_dir`.
///
/// # Errors
///
/// [`LaunchError`], as for [`run`].
pub fn run_recorded<T, E, F>(
    world: usize,
    options: &ThreadOptions,
    flight_dir: Option<&Path>,
    body: F,
) -> Result<Vec<T>, LaunchError<E>>
where
    T: Send,
    E: core::fmt::Display + core::fmt::Debug + Send,
    F: Fn(Arc<ThreadComm>) -> Result<T, E> + Sync,
{
    if world == 0 {
        return Err(LaunchError::World { world });
    }
    let run = Run::new(world, options.deadline, flight_dir);
    let outcomes = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for rank in 0..world {
            let (body, run) = (&body, &run);
            let rank_body = move || {
                let comm = Comm::of_all(ThreadRank { run: run.clone(), rank }, "world");
                let outcome = caught(|| body(comm));
                match &outcome {
                    Ok(_) => run.standing.leave(rank),
                    // The run names the first rank to fail; the others' errors follow from it.
                    Err(failure) => run.fail(rank, &failure.to_string()),
                }
                outcome
            };
            match std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .stack_size(stack_bytes())
                .spawn_scoped(scope, rank_body)
            {
                Ok(handle) => handles.push(handle),
                Err(source) => {
                    run.fail(rank, "its thread could not be started");
                    return Err(LaunchError::Spawn { rank, source });
                }
            }
        }
        let joined =
            handles.into_iter().map(|handle| handle.join().expect("a rank's panic is caught inside its thread"));
        Ok(joined.collect::<Vec<_>>())
    })?;
    for state in &run.states {
        state.recorder.finish(FLIGHT);
    }
    if let Some(Failure { peer: rank, reason, .. }) = run.standing.trouble() {
        // A rank that called `abort` and then returned normally has left only its reason.
        let failure = outcomes.into_iter().nth(rank).and_then(Result::err);
        let failure = Box::new(failure.unwrap_or(RankFailure::Aborted(reason.to_string())));
        return Err(LaunchError::Rank { rank, world, failure });
    }
    Ok(outcomes.into_iter().map(|outcome| outcome.expect("a run in which a rank failed has failed")).collect())
}

/// Returns the stack size in bytes of a thread that runs a rank's program: the larger of `RUST_MIN_STACK` and the main thread's
/// limit (`ulimit -s`, clamped to 16 MiB..=1 GiB). Code that works on the main thread then works on a rank's thread too.
pub fn stack_bytes() -> usize {
    const LEAST: u64 = 16 << 20;
    const MOST: u64 = 1 << 30;
    if cfg!(miri) {
        return LEAST as usize; // Miri has no getrlimit.
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current.unwrap_or(LEAST);
    let asked = std::env::var("RUST_MIN_STACK").ok().and_then(|bytes| bytes.parse::<u64>().ok());
    asked.unwrap_or(0).max(limit.clamp(LEAST, MOST)) as usize
}

/// Creates a group of one rank, outside of any run. Its collectives return at once.
pub fn alone() -> Arc<dyn Collective> {
    let run = Run::new(1, ThreadOptions::default().deadline, None);
    Comm::of_all(ThreadRank { run, rank: 0 }, "alone")
}

/// Runs a rank's body and returns its value, or its failure.
pub(super) fn caught<T, E>(body: impl FnOnce() -> Result<T, E>) -> Result<T, RankFailure<E>> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(outcome) => outcome.map_err(RankFailure::Failed),
        Err(payload) => Err(match payload.downcast::<CommError>() {
            Ok(error) => RankFailure::Comm(error),
            Err(payload) if payload.is::<Stopped>() => RankFailure::Aborted(panic_reason(&*payload)),
            Err(payload) => RankFailure::Panicked(panic_reason(&*payload)),
        }),
    }
}

/// A panic payload with which code that cannot return errors ends its rank. The message is reported as the rank's
/// failure, and no panic is printed (`std::panic::resume_unwind(Box::new(Stopped(message)))`).
#[derive(Debug)]
pub struct Stopped(pub String);

/// Returns the text of a panic's payload: its message, or that of the [`CommError`] in it.
pub fn panic_reason(payload: &(dyn std::any::Any + Send)) -> String {
    if let Some(error) = payload.downcast_ref::<CommError>() {
        return error.to_string();
    }
    if let Some(Stopped(reason)) = payload.downcast_ref::<Stopped>() {
        return reason.clone();
    }
    payload
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_string())
}
