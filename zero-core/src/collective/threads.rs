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
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::flight::{Entry, Opening, Recorder};
use super::operation::{Description, Place, received, reduce_name};
use super::progress::Progress;
use super::{AT_THE_END, Buffer, Collective, Join, Joined, Pending, ReduceOp, Request};
use crate::accounting::WireCounter;
use crate::{CommError, LaunchError, RankFailure};

#[derive(Debug)]
struct Slot {
    description: Description,
    first_rank: usize,
    inputs: Vec<Option<Joined>>,
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
    /// Each rank's.
    recorders: Vec<Recorder>,
}

impl Run {
    fn new(world: usize, deadline: Duration, flight_dir: Option<&Path>) -> Arc<Self> {
        let recorders = (0..world).map(|rank| Recorder::new(rank, world, flight_dir.map(Path::to_path_buf))).collect();
        Arc::new(Self { failure: Mutex::new(None), left: Mutex::new(vec![false; world]), deadline, recorders })
    }

    fn fail(&self, peer: usize, reason: &str) {
        {
            let mut failure = self.failure.lock();
            if failure.is_some() {
                return;
            }
            *failure = Some(Failure { peer, reason: reason.into() });
        }
        for recorder in &self.recorders {
            recorder.write(reason);
        }
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
    /// Tells groups of one label apart in flight records.
    id: u64,
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

/// How long the end of a failed run waits for a flight record to be written.
const FLIGHT: Duration = Duration::from_secs(5);

/// How long a waiting rank sleeps before it looks whether the run has failed elsewhere.
const POLL: Duration = Duration::from_millis(20);

impl Group {
    fn new(label: String, id: u64, world: usize, run: Arc<Run>) -> Arc<Self> {
        Arc::new(Self {
            label,
            id,
            world,
            run,
            slots: Mutex::default(),
            arrived: Condvar::new(),
            joined: Mutex::default(),
            children: Mutex::default(),
        })
    }

    /// [`Group::rendezvous`] with buffers.
    fn exchange_buffers(
        &self,
        rank: usize,
        place: (u64, u8),
        description: Description,
        input: Arc<Buffer>,
    ) -> Result<Vec<Arc<Buffer>>, CommError> {
        let bytes = input.bytes();
        let came = self.rendezvous(rank, place, description, input, bytes)?;
        let buffer =
            |input: Joined| input.downcast().expect("ranks whose operations match bring the same kind of input");
        Ok(came.into_iter().map(buffer).collect())
    }

    /// Lays `input`, of `bytes`, into slot `(seq, phase)` and returns all ranks' inputs once all have come.
    fn rendezvous(
        &self,
        rank: usize,
        (seq, phase): (u64, u8),
        description: Description,
        input: Joined,
        bytes: usize,
    ) -> Result<Vec<Joined>, CommError> {
        let recorder = &self.run.recorders[rank];
        let entry = recorder.open(Opening {
            group: &self.label,
            group_id: self.id,
            seq,
            op: description.to_string(),
            bytes,
            one_sided: false,
            waiting_for: (0..self.world).filter(|&peer| peer != rank).collect(),
            last: phase > 0 || description.op != "all_reduce",
        });
        let came = self.meet(rank, (seq, phase), description, input, &entry);
        recorder.close(&entry, came.as_ref().map(|_| ()).map_err(CommError::to_string));
        came
    }

    fn meet(
        &self,
        rank: usize,
        (seq, phase): (u64, u8),
        description: Description,
        input: Joined,
        entry: &Entry,
    ) -> Result<Vec<Joined>, CommError> {
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
            drop(slots);
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
            entry.only_waits_for(&missing);
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
                // Records are written without the slots' lock, which the other ranks want.
                drop(slots);
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
    fn run(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
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
        let describe = |buffer: &Buffer, more: &str| Description::of(op, buffer, more).labelled(what);
        match request {
            Request::Barrier(purpose) => {
                self.group.exchange_buffers(
                    rank,
                    (seq, 0),
                    Description::of_barrier(purpose).labelled(what),
                    Arc::new(Buffer::U8(Vec::new())),
                )?;
                Ok(Buffer::U8(Vec::new()))
            }
            Request::AllGather(shard) => {
                let len = shard.len();
                let inputs = self.group.exchange_buffers(rank, (seq, 0), describe(&shard, ""), Arc::new(shard))?;
                count();
                Ok(Buffer::concat(&inputs, 0..len))
            }
            Request::ReduceScatter(input, reduce) => {
                let len = input.len() / world;
                let description = describe(&input, reduce_name(reduce));
                let inputs = self.group.exchange_buffers(rank, (seq, 0), description, Arc::new(input))?;
                count();
                Ok(Buffer::reduce_range(&inputs, rank * len..(rank + 1) * len, reduce))
            }
            Request::AllReduce(input, reduce) => {
                let description = describe(&input, reduce_name(reduce));
                let pieces = self.all_reduce(seq, description, input, reduce)?;
                count();
                Ok(Buffer::join(&pieces))
            }
            Request::Broadcast(buffer, root) => {
                let description = describe(&buffer, &format!(" from rank {root}"));
                let inputs = self.group.exchange_buffers(rank, (seq, 0), description, Arc::new(buffer))?;
                count();
                Ok((*inputs[root]).clone())
            }
            Request::AllToAll(input) => {
                let len = input.len() / world;
                let inputs = self.group.exchange_buffers(rank, (seq, 0), describe(&input, ""), Arc::new(input))?;
                count();
                Ok(Buffer::concat(&inputs, rank * len..(rank + 1) * len))
            }
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
        let inputs = self.group.exchange_buffers(rank, (seq, 0), description.clone(), Arc::new(input))?;
        let piece = Arc::new(Buffer::reduce_range(&inputs, part.range(rank), reduce));
        drop(inputs);
        self.group.exchange_buffers(rank, (seq, 1), description, piece)
    }

    /// See [`Collective::start_shared`].
    fn all_reduce_shared(&self, input: Buffer, reduce: ReduceOp, what: &str, join: Join) -> Result<Joined, CommError> {
        // Relaxed: as in `run`.
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (world, rank) = (self.group.world, self.rank);
        let request = Request::AllReduce(input, reduce);
        let op = request.name();
        let _span = tracing::trace_span!("collective", op, group = %self.group.label, seq).entered();
        Place { group: &self.group.label, seq, rank, world }.check(&request)?;
        let received = received(&request, rank, world);
        let Request::AllReduce(input, reduce) = request else { unreachable!("it was made above") };
        let description = Description::of(op, &input, reduce_name(reduce)).labelled(what);
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
    ///
    /// # Errors
    ///
    /// [`CommError`] when a rank fails meanwhile, or does not end within 24 deadlines.
    pub fn wait_for_others(&self) -> Result<(), CommError> {
        let (run, rank, group) = (self.run(), self.inner.rank, &self.inner.group.label);
        let (begin, op) = (Instant::now(), "waiting for the other ranks to end");
        run.left.lock()[rank] = true;
        loop {
            run.check(group, u64::MAX, rank, &op, &[])?;
            let missing: Vec<usize> =
                run.left.lock().iter().enumerate().filter_map(|(of, left)| (!left).then_some(of)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if begin.elapsed() >= run.deadline * AT_THE_END {
                let (group, waited_ms) = (group.clone(), begin.elapsed().as_millis() as u64);
                let error = CommError::Timeout { group, seq: u64::MAX, rank, op: op.into(), waited_ms, missing };
                run.fail(rank, &error.to_string());
                return Err(error);
            }
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

    fn execute_for(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
        match self.progress.get() {
            // Order is kept by going through the same queue.
            Some(_) => self.start_for(request, what).wait(),
            None => self.inner.run(request, what),
        }
    }

    fn start_for(&self, request: Request, what: &str) -> Pending {
        let (inner, what) = (self.inner.clone(), what.to_string());
        self.progress().start(move || inner.run(request, &what))
    }

    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined> {
        let (inner, what) = (self.inner.clone(), what.to_string());
        self.progress().start(move || inner.all_reduce_shared(input, op, &what, join))
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn exchange(&self, item: Joined, bytes: usize, what: &str) -> Result<Vec<Joined>, CommError> {
        let (inner, what) = (self.inner.clone(), what.to_string());
        let run = move || {
            // Relaxed: as in `run`.
            let seq = inner.next.fetch_add(1, Ordering::Relaxed);
            let _span = tracing::trace_span!("collective", op = "exchange", group = %inner.group.label, seq).entered();
            let description = Description::of_exchange(bytes).labelled(&what);
            inner.group.rendezvous(inner.rank, (seq, 0), description, item, bytes)
        };
        match self.progress.get() {
            // Order is kept by going through the same queue.
            Some(progress) => progress.start(run).wait(),
            None => run(),
        }
    }

    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError> {
        let group = &self.inner.group;
        self.barrier()?;
        // Every rank has passed the same barrier, so its sequence number names this duplication on all of them.
        let seq = self.inner.next.load(Ordering::Relaxed);
        let mut children = group.children.lock();
        let (child, fetched) = children.entry(seq).or_insert_with(|| {
            let id = super::operation::child_id(group.id, seq, 0);
            (Group::new(label.to_string(), id, group.world, group.run.clone()), 0)
        });
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

    fn deadline(&self) -> Duration {
        self.inner.group.run.deadline
    }

    fn recorder(&self) -> &Recorder {
        &self.inner.group.run.recorders[self.inner.rank]
    }

    fn check(&self, group: &str, seq: u64, op: &str) -> Result<(), CommError> {
        let others: Vec<usize> = (0..self.inner.group.world).filter(|&peer| peer != self.inner.rank).collect();
        self.inner.group.run.check(group, seq, self.inner.rank, &op, &others)
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
    run_recorded(world, options, None, body)
}

/// As [`run`]; when a rank fails or a deadline passes, every rank's flight record goes to `flight_dir`.
///
/// # Errors
///
/// As [`run`]'s.
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
    let group = Group::new("world".to_string(), 0, world, run.clone());
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
    for recorder in &run.recorders {
        recorder.finish(FLIGHT);
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
    let run = Run::new(1, ThreadOptions::default().deadline, None);
    ThreadComm::new(0, Group::new("alone".to_string(), 0, 1, run), Arc::default())
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
