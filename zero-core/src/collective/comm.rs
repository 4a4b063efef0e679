//! A rank's communicator for collectives on host memory: the part that all engines share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing::field::Empty;

use super::flight::Recorder;
use super::launcher::Topology;
use super::operation::{Group, Moved, Op, OperationContext, child_id, words};
use super::progress::Progress;
use super::run_status::RunStatus;
use super::{Buffer, Collective, InProcess, Join, Joined, Pending, ReduceOp, Request};
use crate::CommError;
use crate::accounting::WireCounter;

/// Number of deadlines that a rank that has ended waits for the others to end. Work after the last collective (such as an export
/// by one rank) has no deadline of its own. With a deadline of 10 minutes, this is 4 hours.
const AT_THE_END: u32 = 24;

/// State of one rank, shared by all its groups.
#[derive(Debug)]
pub struct RankState {
    pub(super) place: Topology,
    pub(super) deadline: Duration,
    pub(super) recorder: Recorder,
    pub(super) wire: Arc<WireCounter>,
    pub(super) standing: Arc<RunStatus>,
}

/// One rank's engine, which moves bytes between the ranks of a run.
pub trait Engine: core::fmt::Debug + Clone + Send + Sync + 'static {
    fn state(&self) -> &RankState;

    /// Fails the run for a reason on this rank, and notifies all ranks.
    fn fail(&self, reason: &str, cause: Option<&CommError>);

    /// Notifies the other ranks that this rank takes part in no further operation. Called once.
    fn leave(&self);

    /// Runs `request`. The caller has checked its shapes.
    fn perform(&self, op: &Op<'_>, request: Request) -> Result<Buffer, CommError>;

    /// See [`Collective::start_shared`].
    fn perform_shared(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp, join: Join) -> Result<Joined, CommError>;

    fn in_process(_: &Comm<Self>) -> Option<&dyn InProcess> {
        None
    }
}

/// One rank's communicator for a group.
///
/// In a group of some ranks of a run ([`Collective::split`]), [`Collective::rank`] and the roots of broadcasts count within the
/// group; errors and flight records name ranks of the run.
pub struct Comm<E: Engine> {
    inner: Arc<Inner<E>>,
    progress: OnceLock<Progress>,
}

#[derive(Debug)]
pub(super) struct Inner<E> {
    pub(super) engine: E,
    pub(super) group: Group,
    next: AtomicU64,
}

impl<E: Engine> core::fmt::Debug for Comm<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Group { label, members, me, .. } = &self.inner.group;
        write!(f, "Comm({me} of {}, '{label}')", members.len())
    }
}

impl<E: Engine> Inner<E> {
    /// Runs the next operation; `run` gets its sequence number.
    pub(super) fn number<T>(
        &self,
        op: &'static str,
        run: impl FnOnce(u64) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        // Relaxed: a communicator's operations are issued by one thread at a time (its user or its progress thread).
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let _span = tracing::trace_span!("collective", op, group = %self.group.label, seq, bytes = Empty).entered();
        run(seq)
    }

    fn run<T>(
        &self,
        request: Request,
        what: &str,
        perform: impl FnOnce(&E, &Op<'_>, Request) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let (group, name) = (&self.group, request.name());
        self.number(name, |seq| {
            let moved = Moved::by(&request);
            if let Some(wrong) = moved.and_then(|moved| moved.wrong(group.world())) {
                return Err(group.at(seq, &name).shape(wrong));
            }
            if let Some(Moved { len, dtype, .. }) = moved {
                tracing::Span::current().record("bytes", len * dtype.size());
            }
            let op = Op { group, seq, words: &words(&request, what) };
            let result = perform(&self.engine, &op, request)?;
            if let Some(moved) = moved {
                let (RankState { wire, place, .. }, world) = (self.engine.state(), group.world());
                for (from, bytes) in moved.sources(group.me, world, moved.is_in_rounds(world)) {
                    wire.add(moved.kind, bytes);
                    wire.add_from_other_machines(place.from_other_machines(bytes, &[group.members[from]]));
                }
            }
            Ok(result)
        })
    }
}

impl<E: Engine> Comm<E> {
    /// Creates the group of all ranks.
    pub(super) fn of_all(engine: E, label: &str) -> Arc<Self> {
        let Topology { rank, world, .. } = engine.state().place;
        Self::new(engine, Group::new(0, label, (0..world).collect(), rank), 0)
    }

    fn new(engine: E, group: Group, next: u64) -> Arc<Self> {
        let inner = Inner { engine, group, next: AtomicU64::new(next) };
        Arc::new(Self { inner: Arc::new(inner), progress: OnceLock::new() })
    }

    /// Returns this rank's communicator for the same group over `engine`. Its sequence numbers continue from this one's.
    pub(super) fn moved_to(&self, engine: E) -> Arc<Self> {
        let Group { id, label, members, .. } = &self.inner.group;
        let group = Group::new(*id, label, members.clone(), self.inner.group.rank());
        // Relaxed: its operations come after those of this one, on the thread that switches to it.
        Self::new(engine, group, self.inner.next.load(Ordering::Relaxed))
    }

    pub(super) fn engine(&self) -> &E {
        &self.inner.engine
    }

    /// Creates a group of `members` after the operation that all of them have just completed.
    fn child(&self, label: &str, color: u64, members: Arc<[usize]>) -> Arc<dyn Collective> {
        let Inner { engine, group, next } = &*self.inner;
        // Its sequence number identifies this group on all of them.
        let id = child_id(group.id, next.load(Ordering::Relaxed), color);
        Self::new(engine.clone(), Group::new(id, label, members, group.rank()), 0)
    }

    fn progress(&self) -> &Progress {
        let Group { label, .. } = &self.inner.group;
        self.progress.get_or_init(|| Progress::spawn(format!("rank-{}-{label}", self.inner.group.rank())))
    }

    fn start_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Inner<E>) -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let inner = self.inner.clone();
        self.progress().start(move || job(&inner))
    }

    /// Runs `job` on the calling thread or, if operations have been started, after them on the progress thread.
    pub(super) fn in_order<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Inner<E>) -> Result<T, CommError> + Send + 'static,
    ) -> Result<T, CommError> {
        match self.progress.get() {
            // Order is kept by going through the same queue.
            Some(_) => self.start_job(job).wait(),
            None => job(&self.inner),
        }
    }

    /// Marks this rank as ended, and waits until the others have ended too or one has failed: data that they still read
    /// from this rank (see [`crate::window`]) must stay available until then. A collective that still waits for this rank fails.
    ///
    /// The other ranks may still have long local work to do, such as an export, so the limit is 24 deadlines. A rank
    /// that fails is still noticed at once.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank fails meanwhile, or does not end within the limit.
    pub fn wait_for_others(&self) -> Result<(), CommError> {
        let Inner { engine, group, next } = &*self.inner;
        let at = group.at(next.load(Ordering::Relaxed), &"the final wait for all ranks");
        engine.state().standing.check(at, [])?;
        let begin = Instant::now();
        engine.leave();
        let missing = engine.state().standing.wait_for_leavers(engine.state().deadline * AT_THE_END);
        engine.state().standing.check(at, [])?;
        if missing.is_empty() {
            return Ok(());
        }
        let error = at.timeout(begin.elapsed(), missing);
        engine.fail(&error.to_string(), Some(&error));
        Err(error)
    }
}

impl<E: Engine> Collective for Comm<E> {
    fn rank(&self) -> usize {
        self.inner.group.me
    }

    fn world(&self) -> usize {
        self.inner.group.world()
    }

    fn members(&self) -> &[usize] {
        &self.inner.group.members
    }

    fn place(&self) -> &Topology {
        &self.inner.engine.state().place
    }

    fn label(&self) -> &str {
        &self.inner.group.label
    }

    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError> {
        self.barrier()?;
        Ok(self.child(label, 0, self.inner.group.members.clone()))
    }

    fn split_by(&self, label: &str, color: u64, key: u64) -> Result<Arc<dyn Collective>, CommError> {
        let mine = [color, key].map(u64::to_le_bytes).concat();
        let all = self.all_gather(Buffer::U8(mine))?.into_u8();
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("words of 8 bytes"));
        let ranks = all.chunks_exact(16).zip(self.members()).map(|(of, &rank)| (word(&of[..8]), word(&of[8..]), rank));
        let mut same: Vec<(u64, usize)> = ranks.filter(|of| of.0 == color).map(|(_, key, rank)| (key, rank)).collect();
        same.sort_by_key(|&(key, _)| key);
        Ok(self.child(label, color.wrapping_add(1), same.into_iter().map(|(_, rank)| rank).collect()))
    }

    fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.engine.state().wire
    }

    fn execute_for(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
        let what = what.to_string();
        self.in_order(move |inner| inner.run(request, &what, E::perform))
    }

    fn start_for(&self, request: Request, what: &str) -> Pending {
        let what = what.to_string();
        self.start_job(move |inner| inner.run(request, &what, E::perform))
    }

    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined> {
        let what = what.to_string();
        self.start_job(move |inner| {
            inner.run(Request::AllReduce(input, op), &what, |engine, of, request| match request {
                Request::AllReduce(input, op) => engine.perform_shared(of, input, op, join),
                _ => unreachable!("it was made above"),
            })
        })
    }

    fn in_process(&self) -> Option<&dyn InProcess> {
        E::in_process(self)
    }

    fn check(&self, group: &str, seq: u64, op: &dyn core::fmt::Display) -> Result<(), CommError> {
        let Inner { engine, group: own, .. } = &*self.inner;
        engine.state().standing.check(OperationContext { group, ..own.at(seq, op) }, own.peers())
    }

    fn abort(&self, reason: &str) {
        self.inner.engine.fail(reason, None);
    }

    fn deadline(&self) -> Duration {
        self.inner.engine.state().deadline
    }

    fn recorder(&self) -> &Recorder {
        &self.inner.engine.state().recorder
    }
}
