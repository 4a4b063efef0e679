//! The `threads` engine: ranks are threads of one process, data moves through shared memory.
//!
//! An operation is a *rendezvous*: each rank lays its buffer into the slot of its sequence number; when the last has
//! come, every rank computes its own result by reading the others' buffers where they lie. The slot's mutex gives the
//! happens-before edge from the writing of a buffer to its reading; buffers are `Arc`s, so that no rank waits for the
//! others to finish reading.
//!
//! States of a slot: *filling* (some ranks have come) -> *complete* (all have; inputs are immutable) -> removed by the
//! last rank that took its inputs. States of a group: *sound* -> *failed* (first cause kept; every wait ends with it).

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::operation::{Description, Place, received};
use super::progress::Progress;
use super::{Buffer, Collective, Join, Joined, Pending, ReduceOp, Request};
use crate::accounting::WireCounter;
use crate::{CommError, LaunchError, RankFailure};

#[derive(Debug)]
struct Slot {
    description: Description,
    first_rank: usize,
    inputs: Vec<Option<Arc<Buffer>>>,
    taken: usize,
}

/// Why a group, and with it every group of the same run, can no longer be used.
#[derive(Debug, Clone)]
struct Failure {
    peer: usize,
    reason: Arc<str>,
}

/// The ranks of one run: what all its groups share.
#[derive(Debug)]
pub(crate) struct Run {
    failure: Mutex<Option<Failure>>,
    left: Mutex<Vec<bool>>,
    pub(crate) deadline: Duration,
}

impl Run {
    fn fail(&self, peer: usize, reason: &str) {
        self.failure.lock().get_or_insert_with(|| Failure { peer, reason: reason.into() });
    }

    /// Ends a wait of `rank` when the run has failed or a rank it waits for has ended.
    pub(crate) fn check(
        &self,
        group: &str,
        seq: u64,
        rank: usize,
        op: &dyn core::fmt::Display,
        missing: &[usize],
    ) -> Result<(), CommError> {
        if let Some(Failure { peer, reason }) = self.failure.lock().clone() {
            return Err(CommError::PeerFailed { group: group.into(), seq, rank, op: op.to_string(), peer, reason });
        }
        let left = self.left.lock();
        if let Some(&peer) = missing.iter().find(|&&peer| left[peer]) {
            return Err(CommError::PeerLeft { group: group.into(), seq, rank, op: op.to_string(), peer });
        }
        Ok(())
    }
}

/// A result that the first rank to need it makes.
type Shared = Arc<OnceLock<Joined>>;

#[derive(Debug)]
struct Group {
    label: String,
    world: usize,
    run: Arc<Run>,
    /// Keyed by sequence number and phase (an all-reduce has two).
    slots: Mutex<HashMap<(u64, u8), Slot>>,
    arrived: Condvar,
    /// Shared results by sequence number, and how many ranks have fetched theirs.
    joined: Mutex<HashMap<u64, (Shared, usize)>>,
    /// Groups made by [`Collective::duplicate`], by sequence number, until every rank has fetched its end.
    children: Mutex<HashMap<u64, (Arc<Group>, usize)>>,
}

/// How long a waiting rank sleeps before it looks whether the run has failed elsewhere.
const POLL: Duration = Duration::from_millis(20);

impl Group {
    fn new(label: String, world: usize, run: Arc<Run>) -> Arc<Self> {
        Arc::new(Self {
            label,
            world,
            run,
            slots: Mutex::default(),
            arrived: Condvar::new(),
            joined: Mutex::default(),
            children: Mutex::default(),
        })
    }

    /// Lays `input` into slot `(seq, phase)` and returns all ranks' inputs once all have come.
    fn rendezvous(
        &self,
        rank: usize,
        (seq, phase): (u64, u8),
        description: Description,
        input: Arc<Buffer>,
    ) -> Result<Vec<Arc<Buffer>>, CommError> {
        let begin = Instant::now();
        let mut slots = self.slots.lock();
        let slot = slots.entry((seq, phase)).or_insert_with(|| Slot {
            description: description.clone(),
            first_rank: rank,
            inputs: vec![None; self.world],
            taken: 0,
        });
        if slot.description != description {
            let error = CommError::Mismatch {
                group: self.label.clone(),
                seq,
                rank,
                op: description.to_string(),
                other_rank: slot.first_rank,
                other_op: slot.description.to_string(),
            };
            self.run.fail(rank, &error.to_string());
            self.arrived.notify_all();
            return Err(error);
        }
        slot.inputs[rank] = Some(input);
        if slot.inputs.iter().all(Option::is_some) {
            self.arrived.notify_all();
        }
        loop {
            let slot = slots.get_mut(&(seq, phase)).expect("a slot lives until every rank has taken its inputs");
            let missing: Vec<usize> = (0..self.world).filter(|&peer| slot.inputs[peer].is_none()).collect();
            if missing.is_empty() {
                let inputs = slot.inputs.iter().flatten().cloned().collect();
                slot.taken += 1;
                if slot.taken == self.world {
                    slots.remove(&(seq, phase));
                }
                return Ok(inputs);
            }
            self.run.check(&self.label, seq, rank, &description, &missing)?;
            let waited = begin.elapsed();
            if waited >= self.run.deadline {
                let error = CommError::Timeout {
                    group: self.label.clone(),
                    seq,
                    rank,
                    op: description.to_string(),
                    waited_ms: waited.as_millis() as u64,
                    missing,
                };
                self.run.fail(rank, &error.to_string());
                return Err(error);
            }
            self.arrived.wait_for(&mut slots, POLL.min(self.run.deadline - waited));
        }
    }
}

/// One rank's end of a group of threads.
pub struct ThreadComm {
    inner: Arc<Inner>,
    progress: OnceLock<Progress>,
}

#[derive(Debug)]
struct Inner {
    rank: usize,
    group: Arc<Group>,
    wire: Arc<WireCounter>,
    next: AtomicU64,
}

impl core::fmt::Debug for ThreadComm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ThreadComm({} of {}, '{}')", self.inner.rank, self.inner.group.world, self.inner.group.label)
    }
}

impl Inner {
    fn run(&self, request: Request) -> Result<Buffer, CommError> {
        // Relaxed: a communicator's operations are issued by one thread at a time (its user or its progress thread).
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (world, rank) = (self.group.world, self.rank);
        let op = request.name();
        let _span = tracing::trace_span!("collective", op, group = %self.group.label, seq).entered();
        Place { group: &self.group.label, seq, rank, world }.check(&request)?;
        let received = received(&request, rank, world);
        let count = || {
            if let Some((kind, bytes)) = received {
                self.wire.add(kind, bytes);
            }
        };
        let description = Description::of_request(&request);
        let meet = |input| self.group.rendezvous(rank, (seq, 0), description.clone(), Arc::new(input));
        match request.without_name() {
            Request::Barrier(_) => {
                meet(Buffer::U8(Vec::new()))?;
                Ok(Buffer::U8(Vec::new()))
            }
            Request::AllGather(shard) => {
                let len = shard.len();
                let inputs = meet(shard)?;
                count();
                Ok(Buffer::concat(&inputs, 0..len))
            }
            Request::ReduceScatter(input, reduce) => {
                let len = input.len() / world;
                let inputs = meet(input)?;
                count();
                Ok(Buffer::reduce_range(&inputs, rank * len..(rank + 1) * len, reduce))
            }
            Request::AllReduce(input, reduce) => {
                let pieces = self.all_reduce(seq, description, input, reduce)?;
                count();
                Ok(Buffer::join(&pieces))
            }
            Request::Broadcast(buffer, root) => {
                let inputs = meet(buffer)?;
                count();
                Ok((*inputs[root]).clone())
            }
            Request::AllToAll(input) => {
                let len = input.len() / world;
                let inputs = meet(input)?;
                count();
                Ok(Buffer::concat(&inputs, rank * len..(rank + 1) * len))
            }
            Request::Named(..) => unreachable!("the name was taken off"),
        }
    }
}

impl Inner {
    /// The pieces of the reduced buffer, in rank order. Each rank reduces its stride of the buffer, then all exchange
    /// them: the order of additions, and so every bit, is that of a reduce-scatter.
    fn all_reduce(
        &self,
        seq: u64,
        description: Description,
        input: Buffer,
        reduce: ReduceOp,
    ) -> Result<Vec<Arc<Buffer>>, CommError> {
        let rank = self.rank;
        let part = crate::Partition::new(input.len(), self.group.world);
        let inputs = self.group.rendezvous(rank, (seq, 0), description.clone(), Arc::new(input))?;
        let piece = Arc::new(Buffer::reduce_range(&inputs, part.range(rank), reduce));
        drop(inputs);
        self.group.rendezvous(rank, (seq, 1), description, piece)
    }

    /// See [`Collective::start_shared`].
    fn all_reduce_shared(&self, request: Request, join: Join) -> Result<Joined, CommError> {
        // Relaxed: as in `run`.
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (world, rank) = (self.group.world, self.rank);
        let op = request.name();
        let _span = tracing::trace_span!("collective", op, group = %self.group.label, seq).entered();
        Place { group: &self.group.label, seq, rank, world }.check(&request)?;
        let received = received(&request, rank, world);
        let description = Description::of_request(&request);
        let Request::AllReduce(input, reduce) = request.without_name() else {
            unreachable!("`start_shared` takes the input of an all-reduce")
        };
        let pieces = self.all_reduce(seq, description, input, reduce)?;
        if let Some((kind, bytes)) = received {
            self.wire.add(kind, bytes);
        }
        let once = {
            let mut joined = self.group.joined.lock();
            let (once, fetched) = joined.entry(seq).or_default();
            *fetched += 1;
            let (once, all) = (once.clone(), *fetched == world);
            if all {
                joined.remove(&seq);
            }
            once
        };
        // Others wait for as long as one copies: memory that this process has.
        Ok(once.get_or_init(|| join(&pieces)).clone())
    }
}

impl ThreadComm {
    fn new(rank: usize, group: Arc<Group>, wire: Arc<WireCounter>) -> Arc<Self> {
        let inner = Arc::new(Inner { rank, group, wire, next: AtomicU64::new(0) });
        Arc::new(Self { inner, progress: OnceLock::new() })
    }

    /// Counts this rank as ended, and waits until the others have ended too or one has failed: what they still read
    /// from this rank (see [`crate::window`]) stays there so long. A collective that still waits for this rank fails at
    /// once, as it does when the rank returns.
    pub fn wait_for_others(&self) {
        let run = self.run();
        run.left.lock()[self.inner.rank] = true;
        // Bounded by the others' own deadlines: each of them ends, well or badly.
        while run.failure.lock().is_none() && !run.left.lock().iter().all(|left| *left) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn progress(&self) -> &Progress {
        let Inner { rank, group, .. } = &*self.inner;
        self.progress.get_or_init(|| Progress::spawn(format!("rank-{rank}-{}", group.label)))
    }

    /// The run that this rank belongs to, for waits outside of collectives.
    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.inner.group.run
    }
}

impl Collective for ThreadComm {
    fn rank(&self) -> usize {
        self.inner.rank
    }

    fn world(&self) -> usize {
        self.inner.group.world
    }

    fn label(&self) -> &str {
        &self.inner.group.label
    }

    fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.wire
    }

    fn execute(&self, request: Request) -> Result<Buffer, CommError> {
        match self.progress.get() {
            // Order is kept by going through the same queue.
            Some(_) => self.start(request).wait(),
            None => self.inner.run(request),
        }
    }

    fn start(&self, request: Request) -> Pending {
        let inner = self.inner.clone();
        self.progress().start(move || inner.run(request))
    }

    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined> {
        let inner = self.inner.clone();
        let request = Request::AllReduce(input, op).named(what);
        self.progress().start(move || inner.all_reduce_shared(request, join))
    }

    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError> {
        let group = &self.inner.group;
        self.barrier()?;
        // Every rank has passed the same barrier, so its sequence number names this duplication on all of them.
        let seq = self.inner.next.load(Ordering::Relaxed);
        let mut children = group.children.lock();
        let (child, fetched) =
            children.entry(seq).or_insert_with(|| (Group::new(label.to_string(), group.world, group.run.clone()), 0));
        *fetched += 1;
        let (child, all) = (child.clone(), *fetched == group.world);
        if all {
            children.remove(&seq);
        }
        Ok(ThreadComm::new(self.inner.rank, child, self.inner.wire.clone()))
    }

    fn abort(&self, reason: &str) {
        self.inner.group.run.fail(self.inner.rank, reason);
    }
}

/// How ranks are run.
#[derive(Debug, Clone)]
pub struct ThreadOptions {
    /// The longest that any wait for another rank may take.
    pub deadline: Duration,
}

impl Default for ThreadOptions {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(600) }
    }
}

/// Runs `body` once per rank, each on a named thread of this process, and returns the results in rank order.
///
/// The first rank that fails, by an error, a panic or a collective, stops all the others; its trouble is the error
/// returned. A [`CommError`] may travel through code that cannot return errors as a panic payload
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
    if world == 0 {
        return Err(LaunchError::World { world });
    }
    let run =
        Arc::new(Run { failure: Mutex::new(None), left: Mutex::new(vec![false; world]), deadline: options.deadline });
    let group = Group::new("world".to_string(), world, run.clone());
    let failures: Mutex<Vec<Option<RankFailure<E>>>> = Mutex::new((0..world).map(|_| None).collect());
    let mut results: Vec<Option<T>> = Vec::new();
    let mut spawn_error = None;

    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for rank in 0..world {
            let (group, rank_run) = (group.clone(), run.clone());
            let (body, failures) = (&body, &failures);
            let rank_body = move || {
                let comm = ThreadComm::new(rank, group, Arc::default());
                let outcome = catch_unwind(AssertUnwindSafe(|| body(comm)));
                let failure = match outcome {
                    Ok(Ok(value)) => {
                        rank_run.left.lock()[rank] = true;
                        return Some(value);
                    }
                    Ok(Err(error)) => RankFailure::Failed(error),
                    Err(payload) => match payload.downcast::<CommError>() {
                        Ok(error) => RankFailure::Comm(error),
                        Err(payload) if payload.is::<Stopped>() => RankFailure::Aborted(panic_reason(&*payload)),
                        Err(payload) => RankFailure::Panicked(panic_reason(&*payload)),
                    },
                };
                // The first to fail is named by the run; what the others report is its echo.
                rank_run.fail(rank, &failure.to_string());
                failures.lock()[rank] = Some(failure);
                None
            };
            match std::thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(scope, rank_body) {
                Ok(handle) => handles.push(handle),
                Err(source) => {
                    run.fail(rank, "its thread could not be started");
                    spawn_error = Some(LaunchError::Spawn { rank, source });
                    break;
                }
            }
        }
        results = handles
            .into_iter()
            .map(|handle| handle.join().expect("a rank's panic is caught inside its thread"))
            .collect();
    });

    if let Some(error) = spawn_error {
        return Err(error);
    }
    let first = run.failure.lock().clone();
    if let Some(Failure { peer: rank, reason }) = first {
        // A rank that called `abort` and then returned normally has left only its reason.
        let failure = failures.into_inner()[rank].take().unwrap_or(RankFailure::Aborted(reason.to_string()));
        return Err(LaunchError::Rank { rank, world, failure: Box::new(failure) });
    }
    Ok(results.into_iter().map(|value| value.expect("a rank without failure has a result")).collect())
}

/// A group of one rank, outside of any run: its collectives return at once.
pub fn alone() -> Arc<dyn Collective> {
    let run =
        Run { failure: Mutex::new(None), left: Mutex::new(vec![false]), deadline: ThreadOptions::default().deadline };
    ThreadComm::new(0, Group::new("alone".to_string(), 1, Arc::new(run)), Arc::default())
}

/// A panic payload with which code that cannot return errors ends its rank: the message is reported as the rank's
/// failure, and nothing is printed on the way (`std::panic::resume_unwind(Box::new(Stopped(message)))`).
#[derive(Debug)]
pub struct Stopped(pub String);

/// What a panic's payload says: its message, or the [`CommError`] that travels in it.
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
