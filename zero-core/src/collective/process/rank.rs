//! A rank that is a process, as an engine: the collectives, made of exchanges between pairs of ranks.
//!
//! The calling thread lays out who gets which bytes, hands that to the communication thread, copies its own part, and
//! waits. Reductions receive the other ranks' parts and add them here, in rank order, so that every bit is that of the
//! `threads` engine.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::bounded;

use super::super::comm::{Comm, Engine, RankState};
use super::super::landing::Landing;
use super::super::operation::Op;
use super::super::{Buffer, DType, Join, Joined, ReduceOp, Request};
use super::commands::{Command, Exchange, Share};
use super::message::Slot;
use super::shared::Shared;
use crate::{CommError, Partition};

/// One rank of a run of processes.
#[derive(Debug, Clone)]
pub struct ProcessRank {
    pub(super) shared: Arc<Shared>,
    /// Ends with the last communicator of the run, where it is that which ends it.
    #[allow(dead_code)] // Held, not read.
    pub(super) keeper: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// One rank's end of a group of processes.
pub type ProcessComm = Comm<ProcessRank>;

/// Bytes for, or of, the rank at a place of the group.
type Bytes<'a> = &'a dyn Fn(usize) -> Range<usize>;

/// The plan of one exchange: which bytes of the input each rank gets, and where its own go.
struct Plan<'a> {
    phase: u8,
    input: &'a Arc<Buffer>,
    /// Bytes of the input for the rank at a place of the group.
    give: Bytes<'a>,
    /// Where in the landing the bytes of the rank at a place of the group go.
    take: Bytes<'a>,
    /// Bytes of the input that are part of the result as they are, and where they go.
    own: Option<(Range<usize>, usize)>,
    /// Whether the input is wanted back.
    until_sent: bool,
}

impl<'a> Plan<'a> {
    /// Nobody gives anything.
    fn of(input: &'a Arc<Buffer>) -> Self {
        Self { phase: 0, input, give: &|_| 0..0, take: &|_| 0..0, own: None, until_sent: false }
    }
}

impl ProcessRank {
    /// Runs a plan, and gives what has landed.
    ///
    /// # Safety
    ///
    /// `take` and `own` do not overlap and cover the landing, and `take` is as long as what each rank gives.
    unsafe fn exchange(&self, op: &Op<'_>, plan: Plan<'_>, landing: Landing) -> Result<Buffer, CommError> {
        let (Plan { phase, input, give, take, own, until_sent }, group) = (plan, op.group);
        let landing = Arc::new(landing);
        let part = |place: usize, bytes: Range<usize>| Share { peer: group.members[place], bytes };
        let sends = group.others().map(|place| part(place, give(place))).collect();
        let receives: Vec<Share> = group.others().map(|place| part(place, take(place))).collect();
        let bytes = receives.iter().map(|receive| receive.bytes.len()).sum();
        let entry = self.shared.state.recorder.open(op.opening(phase, bytes));
        let (reply, result) = bounded(1);
        if receives.is_empty() {
            // A group of one has nothing to say to anybody.
            let _ = reply.send(self.shared.state.standing.check(op.at(), []));
        } else {
            self.shared.send(Command::Exchange(Exchange {
                slot: Slot { group: group.id, seq: op.seq, phase },
                group: group.label.clone(),
                op: op.words.to_string(),
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
        self.shared.await_reply(op.at(), &result, Instant::now(), &entry)?;
        let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
        // SAFETY: the exchange has ended well, so every rank's part has come, and this rank's was copied: all is written.
        Ok(unsafe { landing.into_buffer() })
    }

    /// Gives every rank its part of `input`, and lays what comes, and this rank's own part, where they belong.
    ///
    /// # Safety
    ///
    /// What all ranks `take` does not overlap and covers `numel` elements, each as much as the rank gives.
    unsafe fn gather(
        &self,
        op: &Op<'_>,
        phase: u8,
        input: Buffer,
        (give, take): (Bytes<'_>, Bytes<'_>),
        numel: usize,
    ) -> Result<Buffer, CommError> {
        let (landing, own) = (Landing::new(input.dtype(), numel), Some((give(op.group.me), take(op.group.me).start)));
        let input = Arc::new(input);
        // SAFETY: the caller's word.
        unsafe { self.exchange(op, Plan { phase, give, take, own, ..Plan::of(&input) }, landing) }
    }

    /// Gives every rank its part, and reduces what comes for this one.
    fn reduce(
        &self,
        op: &Op<'_>,
        input: &Arc<Buffer>,
        part: &Partition,
        reduce: ReduceOp,
    ) -> Result<Buffer, CommError> {
        let (world, me, dtype) = (op.group.world(), op.group.me, input.dtype());
        let (len, bytes) = (part.len(me), part.len(me) * dtype.size());
        // The others' parts lie one behind another, without a gap where this rank's would be.
        let slot = |place: usize| if place < me { place } else { place - 1 };
        let take = |place: usize| slot(place) * bytes..(slot(place) + 1) * bytes;
        let give = |place: usize| bytes_of(part, place, dtype);
        let plan = Plan { give: &give, take: &take, ..Plan::of(input) };
        // SAFETY: one stretch for each other rank, in order.
        let others = unsafe { self.exchange(op, plan, Landing::new(dtype, len * (world - 1))) }?;
        let parts: Vec<(&Buffer, usize)> = (0..world)
            .map(|place| if place == me { (&**input, part.range(me).start) } else { (&others, slot(place) * len) })
            .collect();
        Ok(Buffer::reduce_parts(&parts, len, reduce))
    }
}

fn bytes_of(part: &Partition, place: usize, dtype: DType) -> Range<usize> {
    let range = part.range(place);
    range.start * dtype.size()..range.end * dtype.size()
}

impl Engine for ProcessRank {
    fn state(&self) -> &RankState {
        &self.shared.state
    }

    fn fail(&self, reason: &str, cause: Option<&CommError>) {
        self.shared.fail(reason, cause);
    }

    fn leave(&self) {
        self.shared.say_goodbye();
    }

    fn perform(&self, op: &Op<'_>, request: Request) -> Result<Buffer, CommError> {
        let (world, me) = (op.group.world(), op.group.me);
        match request {
            Request::Barrier(_) => {
                let input = Arc::new(Buffer::U8(Vec::new()));
                // SAFETY: nothing lands.
                unsafe { self.exchange(op, Plan::of(&input), Landing::new(DType::U8, 0)) }
            }
            Request::AllGather(shard) => {
                let (bytes, numel) = (shard.bytes(), shard.len() * world);
                let take = |place: usize| place * bytes..(place + 1) * bytes;
                // SAFETY: one stretch for each rank, in order.
                unsafe { self.gather(op, 0, shard, (&|_| 0..bytes, &take), numel) }
            }
            Request::AllToAll(input) => {
                let (bytes, numel) = (input.bytes() / world, input.len());
                let stretch = |place: usize| place * bytes..(place + 1) * bytes;
                // SAFETY: as above.
                unsafe { self.gather(op, 0, input, (&stretch, &stretch), numel) }
            }
            Request::Broadcast(buffer, root) if root == me => {
                let (bytes, input) = (buffer.bytes(), Arc::new(buffer));
                let plan = Plan { give: &|_| 0..bytes, until_sent: true, ..Plan::of(&input) };
                // SAFETY: nothing lands at the root.
                unsafe { self.exchange(op, plan, Landing::new(DType::U8, 0)) }?;
                Ok(Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone()))
            }
            Request::Broadcast(buffer, root) => {
                let (bytes, landing) = (buffer.bytes(), Landing::new(buffer.dtype(), buffer.len()));
                let take = |place: usize| if place == root { 0..bytes } else { 0..0 };
                let input = Arc::new(buffer);
                // SAFETY: all of it comes from the root.
                unsafe { self.exchange(op, Plan { take: &take, ..Plan::of(&input) }, landing) }
            }
            Request::ReduceScatter(input, reduce) => {
                let part = Partition::new(input.len(), world);
                self.reduce(op, &Arc::new(input), &part, reduce)
            }
            Request::AllReduce(input, reduce) => {
                // Each rank reduces its stride of the buffer, then all gather: the order of additions, and so every bit,
                // is that of a reduce-scatter.
                let (numel, dtype) = (input.len(), input.dtype());
                let part = Partition::new(numel, world);
                let piece = self.reduce(op, &Arc::new(input), &part, reduce)?;
                let bytes = piece.bytes();
                // SAFETY: the parts of a partition.
                unsafe { self.gather(op, 1, piece, (&|_| 0..bytes, &|place| bytes_of(&part, place, dtype)), numel) }
            }
        }
    }

    fn perform_shared(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp, join: Join) -> Result<Joined, CommError> {
        // This process has one rank, which shares with nobody.
        Ok(join(&[Arc::new(self.perform(op, Request::AllReduce(input, reduce))?)]))
    }
}
