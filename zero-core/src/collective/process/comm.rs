//! A rank's end of a group of processes: the collectives, made of exchanges between pairs of ranks.
//!
//! The calling thread lays out who gets which bytes, hands that to the communication thread, copies its own part, and
//! waits. Reductions receive the other ranks' parts and add them here, in rank order, so that every bit is that of the
//! `threads` engine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{RecvTimeoutError, bounded};

use super::super::landing::Landing;
use super::super::operation::{self, Description, child_id};
use super::super::progress::Progress;
use super::super::{Buffer, Collective, DType, Join, Joined, Pending, ReduceOp, Request, flight, launcher};
use super::commands::{Command, Exchange, ReceiveFrom, SendTo};
use super::shared::{At, Shared};
use crate::accounting::WireCounter;
use crate::{CommError, Partition};

/// What ends with the last communicator of a run.
pub(super) type Keeper = Arc<dyn std::any::Any + Send + Sync>;

/// One rank's end of a group of processes.
///
/// Errors and flight records name ranks of the whole run, also in a group of some of them ([`ProcessComm::split`]), where
/// [`Collective::rank`] and the roots of broadcasts count within the group.
pub struct ProcessComm {
    inner: Arc<Inner>,
    progress: OnceLock<Progress>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    id: u64,
    label: Arc<str>,
    /// The group's ranks in the run, ascending.
    members: Arc<[usize]>,
    /// This rank's place among them.
    me: usize,
    next: AtomicU64,
    /// Of a run that ends with its last communicator.
    keeper: Option<Keeper>,
}

impl core::fmt::Debug for ProcessComm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ProcessComm({} of {}, '{}')", self.inner.me, self.inner.members.len(), self.inner.label)
    }
}

/// The plan of one exchange: which bytes of the input each rank gets, and where its own go.
struct Plan<'a> {
    seq: u64,
    phase: u8,
    op: &'a str,
    input: &'a Arc<Buffer>,
    /// Bytes of the input for the rank at a place of the group.
    give: &'a dyn Fn(usize) -> core::ops::Range<usize>,
    /// Where in the landing the bytes of the rank at a place of the group go.
    take: &'a dyn Fn(usize) -> core::ops::Range<usize>,
    /// Bytes of the input that are part of the result as they are, and where they go.
    own: Option<(core::ops::Range<usize>, usize)>,
    /// Whether the input is wanted back.
    until_sent: bool,
    /// Whether the operation ends with this exchange.
    last: bool,
}

impl Inner {
    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.members.len()).filter(|&place| place != self.me)
    }

    /// Runs a plan, and gives what has landed.
    ///
    /// # Safety
    ///
    /// `take` and `own` do not overlap and cover the landing, and `take` is as long as what each rank gives.
    unsafe fn exchange(&self, plan: Plan<'_>, landing: Landing) -> Result<Buffer, CommError> {
        let Plan { seq, phase, op, input, give, take, own, until_sent, last } = plan;
        let at = At { group: &self.label, seq, op };
        let landing = Arc::new(landing);
        let sends = self.others().map(|place| SendTo { to: self.members[place], bytes: give(place) }).collect();
        let receives: Vec<ReceiveFrom> =
            self.others().map(|place| ReceiveFrom { from: self.members[place], bytes: take(place) }).collect();
        let entry = self.shared.recorder.open(flight::Opening {
            group: &self.label,
            group_id: self.id,
            seq,
            op: op.to_string(),
            bytes: receives.iter().map(|receive| receive.bytes.len()).sum(),
            one_sided: false,
            waiting_for: receives.iter().map(|receive| receive.from).collect(),
            last,
        });
        let (reply, result) = bounded(1);
        if receives.is_empty() {
            // A group of one has nothing to say to anybody.
            let _ = reply.send(self.shared.check(at, []));
        } else {
            self.shared.send(Command::Exchange(Exchange {
                slot: (self.id, seq, phase),
                group: self.label.clone(),
                op: op.to_string(),
                input: input.clone(),
                until_sent,
                sends,
                landing: landing.clone(),
                receives,
                entry: entry.clone(),
                reply,
            }));
        }
        if let Some((from, to)) = own {
            // SAFETY: this rank's own range, which nobody else writes (the caller's word).
            unsafe { landing.fill(to, &input.as_bytes()[from]) }
        }
        let outcome = match result.recv_timeout(self.shared.deadline) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.stopped(at)),
            Err(RecvTimeoutError::Timeout) => {
                let error = CommError::Timeout {
                    group: self.label.to_string(),
                    seq,
                    rank: self.shared.rank(),
                    op: op.to_string(),
                    waited_ms: self.shared.deadline.as_millis() as u64,
                    missing: entry.missing(),
                };
                self.shared.fail(&error.to_string(), Some(&error));
                Err(error)
            }
        };
        self.shared.recorder.close(&entry, outcome.clone().map_err(|error| error.to_string()));
        outcome?;
        let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
        // SAFETY: the exchange has ended well, so every rank's part has come, and this rank's was copied: all is written.
        Ok(unsafe { landing.into_buffer() })
    }

    fn run(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
        // Relaxed: a communicator's operations are issued by one thread at a time (its user or its progress thread).
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (world, me) = (self.members.len(), self.me);
        let _span = tracing::trace_span!("collective", op = request.name(), group = %self.label, seq).entered();
        let place = operation::Place { group: &self.label, seq, rank: self.shared.rank(), world };
        place.check(&request)?;
        let received = operation::received(&request, me, world);
        let op = Description::of_request(&request, what).to_string();
        let result = self.perform(seq, &op, request);
        if let (Ok(_), Some((kind, bytes))) = (&result, received) {
            self.shared.wire.add(kind, bytes);
        }
        result
    }

    fn perform(&self, seq: u64, op: &str, request: Request) -> Result<Buffer, CommError> {
        let (world, me) = (self.members.len(), self.me);
        let nothing = |_: usize| 0..0;
        match request {
            Request::Barrier(_) => {
                let input = Arc::new(Buffer::U8(Vec::new()));
                let plan = Plan {
                    seq,
                    phase: 0,
                    op,
                    input: &input,
                    give: &nothing,
                    take: &nothing,
                    own: None,
                    until_sent: false,
                    last: true,
                };
                // SAFETY: nothing lands.
                unsafe { self.exchange(plan, Landing::new(DType::U8, 0)) }
            }
            Request::AllGather(shard) => {
                let (bytes, landing) = (shard.bytes(), Landing::new(shard.dtype(), shard.len() * world));
                let input = Arc::new(shard);
                let take = |place: usize| place * bytes..(place + 1) * bytes;
                let own = Some((0..bytes, me * bytes));
                let plan = Plan {
                    seq,
                    phase: 0,
                    op,
                    input: &input,
                    give: &|_| 0..bytes,
                    take: &take,
                    own,
                    until_sent: false,
                    last: true,
                };
                // SAFETY: one stretch for each rank, in order.
                unsafe { self.exchange(plan, landing) }
            }
            Request::AllToAll(input) => {
                let (bytes, landing) = (input.bytes() / world, Landing::new(input.dtype(), input.len()));
                let input = Arc::new(input);
                let stretch = |place: usize| place * bytes..(place + 1) * bytes;
                let own = Some((stretch(me), me * bytes));
                let plan = Plan {
                    seq,
                    phase: 0,
                    op,
                    input: &input,
                    give: &stretch,
                    take: &stretch,
                    own,
                    until_sent: false,
                    last: true,
                };
                // SAFETY: one stretch for each rank, in order.
                unsafe { self.exchange(plan, landing) }
            }
            Request::Broadcast(buffer, root) => {
                let bytes = buffer.bytes();
                let input = Arc::new(buffer);
                if root == me {
                    let plan = Plan {
                        seq,
                        phase: 0,
                        op,
                        input: &input,
                        give: &|_| 0..bytes,
                        take: &nothing,
                        own: None,
                        until_sent: true,
                        last: true,
                    };
                    // SAFETY: nothing lands at the root.
                    unsafe { self.exchange(plan, Landing::new(DType::U8, 0)) }?;
                    return Ok(Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone()));
                }
                let landing = Landing::new(input.dtype(), input.len());
                let take = |place: usize| if place == root { 0..bytes } else { 0..0 };
                let plan = Plan {
                    seq,
                    phase: 0,
                    op,
                    input: &input,
                    give: &nothing,
                    take: &take,
                    own: None,
                    until_sent: false,
                    last: true,
                };
                // SAFETY: all of it comes from the root.
                unsafe { self.exchange(plan, landing) }
            }
            Request::ReduceScatter(input, reduce) => {
                let part = Partition::new(input.len(), world);
                self.reduce(seq, op, &Arc::new(input), &part, reduce, true)
            }
            Request::AllReduce(input, reduce) => {
                // Each rank reduces its stride of the buffer, then all gather: the order of additions, and so every bit,
                // is that of a reduce-scatter.
                let (numel, dtype) = (input.len(), input.dtype());
                let part = Partition::new(numel, world);
                let piece = Arc::new(self.reduce(seq, op, &Arc::new(input), &part, reduce, false)?);
                let stretch = |place: usize| bytes_of(&part, place, dtype);
                let own = Some((0..piece.bytes(), stretch(me).start));
                let give = |_: usize| 0..piece.bytes();
                let plan = Plan {
                    seq,
                    phase: 1,
                    op,
                    input: &piece,
                    give: &give,
                    take: &stretch,
                    own,
                    until_sent: false,
                    last: true,
                };
                // SAFETY: the parts of a partition.
                unsafe { self.exchange(plan, Landing::new(dtype, numel)) }
            }
        }
    }

    /// Gives every rank its part, and reduces what comes for this one.
    fn reduce(
        &self,
        seq: u64,
        op: &str,
        input: &Arc<Buffer>,
        part: &Partition,
        reduce: ReduceOp,
        last: bool,
    ) -> Result<Buffer, CommError> {
        let (world, me, dtype) = (self.members.len(), self.me, input.dtype());
        let (len, bytes) = (part.len(me), part.len(me) * dtype.size());
        // The others' parts lie one behind another, without a gap where this rank's would be.
        let slot = |place: usize| if place < me { place } else { place - 1 };
        let take = |place: usize| slot(place) * bytes..(slot(place) + 1) * bytes;
        let give = |place: usize| bytes_of(part, place, dtype);
        let plan = Plan { seq, phase: 0, op, input, give: &give, take: &take, own: None, until_sent: false, last };
        // SAFETY: one stretch for each other rank, in order.
        let others = unsafe { self.exchange(plan, Landing::new(dtype, len * (world - 1))) }?;
        let parts: Vec<(&Buffer, usize)> = (0..world)
            .map(|place| if place == me { (&**input, part.range(me).start) } else { (&others, slot(place) * len) })
            .collect();
        Ok(Buffer::reduce_parts(&parts, len, reduce))
    }
}

fn bytes_of(part: &Partition, place: usize, dtype: DType) -> core::ops::Range<usize> {
    let range = part.range(place);
    range.start * dtype.size()..range.end * dtype.size()
}

impl ProcessComm {
    fn new((shared, keeper): (Arc<Shared>, Option<Keeper>), id: u64, label: &str, members: Arc<[usize]>) -> Arc<Self> {
        let rank = shared.rank();
        let me = members.iter().position(|&member| member == rank).expect("a rank builds groups that it belongs to");
        let inner = Inner { shared, id, label: label.into(), members, me, next: AtomicU64::new(0), keeper };
        Arc::new(Self { inner: Arc::new(inner), progress: OnceLock::new() })
    }

    /// The group of all ranks.
    pub(super) fn world_of(shared: Arc<Shared>) -> Arc<Self> {
        let members = (0..shared.place.world).collect();
        Self::new((shared, None), 0, "world", members)
    }

    /// `comm`, with `keeper` ended when it and all groups made of it have gone.
    pub(super) fn keeping(comm: &Self, keeper: Keeper) -> Arc<Self> {
        let Inner { shared, id, label, members, next, .. } = &*comm.inner;
        let kept = Self::new((shared.clone(), Some(keeper)), *id, label, members.clone());
        // Relaxed: its operations come after those of `comm`, on the thread that goes over to it.
        kept.inner.next.store(next.load(Ordering::Relaxed), Ordering::Relaxed);
        kept
    }

    /// What a group made of this one shares with it.
    fn family(&self) -> (Arc<Shared>, Option<Keeper>) {
        (self.inner.shared.clone(), self.inner.keeper.clone())
    }

    fn progress(&self) -> &Progress {
        let Inner { shared, label, .. } = &*self.inner;
        self.progress.get_or_init(|| Progress::spawn(format!("rank-{}-{label}", shared.rank())))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// This process's rank in the run and its place among the machines.
    pub fn place(&self) -> &launcher::Place {
        &self.inner.shared.place
    }

    /// The ranks of the run that belong to this group, in the order of the group.
    pub fn members(&self) -> &[usize] {
        &self.inner.members
    }

    /// Groups of the ranks that pass the same `color`, in the order of their ranks. A collective of this group.
    ///
    /// # Errors
    ///
    /// As any collective's.
    pub fn split(&self, label: &str, color: u64) -> Result<Arc<Self>, CommError> {
        let colors = self.execute(Request::AllGather(Buffer::U8(color.to_le_bytes().to_vec())))?.into_u8();
        let seq = self.inner.next.load(Ordering::Relaxed);
        let same = colors.chunks_exact(8).zip(self.inner.members.iter()).filter(|(of, _)| **of == color.to_le_bytes());
        let members = same.map(|(_, &rank)| rank).collect();
        Ok(Self::new(self.family(), child_id(self.inner.id, seq, color.wrapping_add(1)), label, members))
    }

    /// The ranks of this group on the same machine. A collective of this group.
    ///
    /// # Errors
    ///
    /// As any collective's.
    pub fn split_by_node(&self, label: &str) -> Result<Arc<Self>, CommError> {
        self.split(label, self.place().node as u64)
    }

    /// The ranks of this group that are as many-eth on their machines as this one. A collective of this group.
    ///
    /// # Errors
    ///
    /// As any collective's.
    pub fn split_across_nodes(&self, label: &str) -> Result<Arc<Self>, CommError> {
        self.split(label, self.place().index_on_node() as u64)
    }
}

impl Collective for ProcessComm {
    fn rank(&self) -> usize {
        self.inner.me
    }

    fn world(&self) -> usize {
        self.inner.members.len()
    }

    fn local_rank(&self) -> usize {
        self.inner.shared.place.local_rank
    }

    fn label(&self) -> &str {
        &self.inner.label
    }

    fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.shared.wire
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
        // This process has one rank, which shares with nobody.
        self.progress().start(move || Ok(join(&[Arc::new(inner.run(Request::AllReduce(input, op), &what)?)])))
    }

    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError> {
        self.barrier()?;
        // Every rank has passed the same barrier, so its sequence number names this duplication on all of them.
        let seq = self.inner.next.load(Ordering::Relaxed);
        let id = child_id(self.inner.id, seq, 0);
        Ok(Self::new(self.family(), id, label, self.inner.members.clone()))
    }

    fn abort(&self, reason: &str) {
        self.inner.shared.fail(reason, None);
    }

    fn deadline(&self) -> std::time::Duration {
        self.inner.shared.deadline
    }

    fn recorder(&self) -> &flight::Recorder {
        &self.inner.shared.recorder
    }

    fn check(&self, group: &str, seq: u64, op: &str) -> Result<(), CommError> {
        let others = self.inner.others().map(|place| self.inner.members[place]);
        self.inner.shared.check(At { group, seq, op }, others)
    }
}
