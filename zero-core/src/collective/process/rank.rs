//! The engine of a rank that is a process: collectives made of exchanges between pairs of ranks.
//!
//! The calling thread plans which rank gets which bytes, passes the plan to the communication thread, copies its own part, and
//! waits. Reductions receive the other ranks' parts and add them locally, in rank order, so that every bit equals that of the
//! `threads` engine.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::bounded;

use super::super::comm::{Comm, Engine, RankState};
use super::super::landing::Landing;
use super::super::operation::{Op, Step};
use super::super::rounds::{self, Node};
use super::super::{Buffer, DType, Join, Joined, ReduceOp, Request};
use super::commands::{Command, Exchange, Share};
use super::message::Slot;
use super::shared::Shared;
use crate::{CommError, Partition};

/// One rank of a run of processes.
#[derive(Debug, Clone)]
pub struct ProcessRank {
    pub(super) shared: Arc<Shared>,
    /// Ends the run when the last communicator is dropped, if the run was converted into communicators.
    #[allow(dead_code)] // Held, not read.
    pub(super) keeper: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// One rank's communicator for a group of processes.
pub type ProcessComm = Comm<ProcessRank>;

/// The plan of one exchange: the bytes of the input that each rank gets, and the destinations of those that come in.
struct Plan<'a> {
    step: Step,
    input: &'a Arc<Buffer>,
    /// Place in the group, and the bytes of the input that are sent to it.
    sends: Vec<(usize, Range<usize>)>,
    /// Place in the group, and the range of the landing for the bytes from it.
    takes: Vec<(usize, Range<usize>)>,
    /// Bytes of the input that are copied to the result, and their destination.
    own: Option<(Range<usize>, usize)>,
    /// `true` if the input is needed again afterwards.
    until_sent: bool,
}

impl<'a> Plan<'a> {
    /// Plans an exchange that sends each rank the part `give` of `input`, and receives its data at `take`; excludes this rank's part.
    fn to_all(op: &Op<'_>, input: &'a Arc<Buffer>, give: Bytes<'_>, take: Bytes<'_>) -> Self {
        let each = |part: Bytes<'_>| op.group.others().map(|place| (place, part(place))).collect();
        Self { step: Step::ONLY, input, sends: each(give), takes: each(take), own: None, until_sent: false }
    }
}

/// Byte range for, or from, the rank at a place of the group.
type Bytes<'a> = &'a dyn Fn(usize) -> Range<usize>;

impl ProcessRank {
    /// Runs a plan, and returns the received buffer.
    ///
    /// # Safety
    ///
    /// `takes` and `own` do not overlap and cover the landing, and each take is as long as the data that its rank sends.
    unsafe fn exchange(&self, op: &Op<'_>, plan: Plan<'_>, landing: Landing) -> Result<Buffer, CommError> {
        let (Plan { step, input, sends, takes, own, until_sent }, group) = (plan, op.group);
        let landing = Arc::new(landing);
        let shares = |parts: Vec<(usize, Range<usize>)>| -> Vec<Share> {
            parts.into_iter().map(|(place, bytes)| Share { peer: group.members[place], bytes }).collect()
        };
        let (sends, receives) = (shares(sends), shares(takes));
        let bytes = receives.iter().map(|receive| receive.bytes.len()).sum();
        let peers = receives.iter().map(|receive| receive.peer).collect();
        let entry = self.shared.state.recorder.open(op.opening(bytes, peers, step));
        let (reply, result) = bounded(1);
        if receives.is_empty() && sends.is_empty() {
            // A group of one rank exchanges no messages.
            let _ = reply.send(self.shared.state.standing.check(op.at(), []));
        } else {
            self.shared.send(Command::Exchange(Exchange {
                slot: Slot { group: group.id, seq: op.seq, phase: step.phase },
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
            // SAFETY: this rank's own range, which nobody else writes (guaranteed by the caller).
            unsafe { landing.fill(to, &input.as_bytes()[from]) }
        }
        self.shared.await_reply(op.at(), &result, Instant::now(), (&entry, step.behind))?;
        let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
        // SAFETY: the exchange has succeeded, so every rank's part has arrived, and this rank's was copied: all bytes are written.
        Ok(unsafe { landing.into_buffer() })
    }

    /// Sends every rank its part of `input`, and puts the received parts, and this rank's own, in their places.
    ///
    /// # Safety
    ///
    /// The `take` ranges of all ranks do not overlap and cover `numel` elements; each is as long as the data that its rank sends.
    unsafe fn scatter(
        &self,
        op: &Op<'_>,
        step: Step,
        input: Buffer,
        (give, take): (Bytes<'_>, Bytes<'_>),
        numel: usize,
    ) -> Result<Buffer, CommError> {
        let (landing, own) = (Landing::new(input.dtype(), numel), Some((give(op.group.me), take(op.group.me).start)));
        let input = Arc::new(input);
        // SAFETY: guaranteed by the caller.
        unsafe { self.exchange(op, Plan { step, own, ..Plan::to_all(op, &input, give, take) }, landing) }
    }

    /// Gathers all ranks' shards in order: directly from each rank, or in rounds if they are small and many (see [`rounds`]).
    fn gather(&self, op: &Op<'_>, shard: Buffer) -> Result<Buffer, CommError> {
        let (world, me, dtype) = (op.group.world(), op.group.me, shard.dtype());
        let (len, bytes) = (shard.len(), shard.bytes());
        let rounds = rounds::gather(world, if op.is_in_rounds(&shard) { rounds::RADIX } else { world.max(2) });
        let (many, last) = (rounds.len() > 1, rounds.len() - 1);
        // In a single round, parts go to their final places. In several, they are ordered from this rank on until all have arrived.
        let at = |part: usize| if many { part } else { (me + part) % world };
        let mut held = shard;
        for (phase, round) in rounds.into_iter().enumerate() {
            let step = Step { phase: phase as u8, last: phase == last, behind: phase as u8 };
            let after = round.last().map_or(1, |take| take.parts.end);
            let input = Arc::new(held);
            let own = Some((0..input.bytes(), at(0) * bytes));
            let sends = round.iter().map(|take| ((me + world - take.distance) % world, 0..take.parts.len() * bytes));
            let takes = round.iter().map(|take| {
                let begin = at(take.parts.start) * bytes;
                ((me + take.distance) % world, begin..begin + take.parts.len() * bytes)
            });
            let plan =
                Plan { step, input: &input, sends: sends.collect(), takes: takes.collect(), own, until_sent: false };
            // SAFETY: the parts of a round are contiguous, after the parts already held; in a single round each is one shard.
            held = unsafe { self.exchange(op, plan, Landing::new(dtype, len * after)) }?;
        }
        if many {
            held.rotate_right(me * len);
        }
        Ok(held)
    }

    /// Sends the root's buffer down a tree.
    fn broadcast(&self, op: &Op<'_>, buffer: Buffer, root: usize) -> Result<Buffer, CommError> {
        let Node { parent, children, depth, .. } = rounds::node(op.group.me, root, op.group.world());
        let (bytes, dtype, len) = (buffer.bytes(), buffer.dtype(), buffer.len());
        let mut input = Arc::new(buffer);
        // A rank that gets no bytes still gets an announcement, so that both sides detect a mismatch.
        if let Some(parent) = parent {
            let step = Step { phase: depth, last: children.is_empty(), behind: depth - 1 };
            let (sends, takes) = (vec![(parent, 0..0)], vec![(parent, 0..bytes)]);
            let plan = Plan { step, input: &input, sends, takes, own: None, until_sent: false };
            // SAFETY: all bytes come from the parent.
            input = Arc::new(unsafe { self.exchange(op, plan, Landing::new(dtype, len)) }?);
        }
        if parent.is_none() || !children.is_empty() {
            let each = |part: Range<usize>| children.iter().map(|&child| (child, part.clone())).collect();
            let step = Step { phase: depth + 1, last: true, behind: 0 };
            let plan =
                Plan { step, input: &input, sends: each(0..bytes), takes: each(0..0), own: None, until_sent: true };
            // SAFETY: nothing is received.
            unsafe { self.exchange(op, plan, Landing::new(DType::U8, 0)) }?;
        }
        Ok(Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone()))
    }

    /// Sends the ranks' shards up a tree to the root.
    fn gather_to(&self, op: &Op<'_>, shard: Buffer, root: usize) -> Result<Buffer, CommError> {
        let (world, dtype, len, bytes) = (op.group.world(), shard.dtype(), shard.len(), shard.bytes());
        let Node { parent, children, depth, size } = rounds::node(op.group.me, root, world);
        let mut input = Arc::new(shard);
        if !children.is_empty() || parent.is_none() {
            let mut at = bytes;
            let takes = children.iter().map(|&child| {
                let begin = at;
                at += rounds::node(child, root, world).size * bytes;
                (child, begin..at)
            });
            let takes = takes.collect();
            // As in a broadcast, ranks that get no bytes get an announcement.
            let sends = children.iter().map(|&child| (child, 0..0)).collect();
            let behind = (rounds::gather(world, rounds::RADIX).len() as u8).saturating_sub(depth + 1);
            let step = Step { phase: depth + 1, last: parent.is_none(), behind };
            let plan = Plan { step, input: &input, sends, takes, own: Some((0..bytes, 0)), until_sent: false };
            // SAFETY: this rank's shard, followed by those of each child's subtree, in order and without gaps.
            input = Arc::new(unsafe { self.exchange(op, plan, Landing::new(dtype, len * size)) }?);
        }
        if let Some(parent) = parent {
            let step = Step { phase: depth, last: true, behind: 0 };
            let (sends, takes) = (vec![(parent, 0..input.bytes())], vec![(parent, 0..0)]);
            let plan = Plan { step, input: &input, sends, takes, own: None, until_sent: false };
            // SAFETY: nothing is received.
            return unsafe { self.exchange(op, plan, Landing::new(dtype, 0)) };
        }
        let mut all = Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone());
        all.rotate_right(root * len);
        Ok(all)
    }

    /// Sends every rank its part, and reduces the parts received for this one.
    fn reduce(
        &self,
        op: &Op<'_>,
        step: Step,
        input: &Arc<Buffer>,
        part: &Partition,
        reduce: ReduceOp,
    ) -> Result<Buffer, CommError> {
        let (world, me, dtype) = (op.group.world(), op.group.me, input.dtype());
        let (len, bytes) = (part.len(me), part.len(me) * dtype.size());
        // The others' parts are contiguous, without a gap for this rank's.
        let slot = |place: usize| if place < me { place } else { place - 1 };
        let take = |place: usize| slot(place) * bytes..(slot(place) + 1) * bytes;
        let give = |place: usize| bytes_of(part, place, dtype);
        let plan = Plan { step, ..Plan::to_all(op, input, &give, &take) };
        // SAFETY: one range for each other rank, in order.
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
        let world = op.group.world();
        match request {
            Request::Barrier(_) => self.gather(op, Buffer::U8(Vec::new())),
            Request::AllGather(shard) => self.gather(op, shard),
            Request::AllToAll(input) => {
                let (bytes, numel) = (input.bytes() / world, input.len());
                let stretch = |place: usize| place * bytes..(place + 1) * bytes;
                // SAFETY: one range for each rank, in order.
                unsafe { self.scatter(op, Step::ONLY, input, (&stretch, &stretch), numel) }
            }
            Request::Broadcast(buffer, root) => self.broadcast(op, buffer, root),
            Request::Gather(shard, root) => self.gather_to(op, shard, root),
            Request::ReduceScatter(input, reduce) => {
                let part = Partition::new(input.len(), world);
                self.reduce(op, Step::ONLY, &Arc::new(input), &part, reduce)
            }
            Request::AllReduce(input, reduce) if op.is_in_rounds(&input) => {
                let len = input.len();
                let all = self.gather(op, input)?;
                let inputs: Vec<(&Buffer, usize)> = (0..world).map(|place| (&all, place * len)).collect();
                Ok(Buffer::reduce_parts(&inputs, len, reduce))
            }
            Request::AllReduce(input, reduce) => {
                // Each rank reduces its part of the buffer, then all gather: the order of additions, and thus every bit,
                // is that of a reduce-scatter.
                let (numel, dtype) = (input.len(), input.dtype());
                let part = Partition::new(numel, world);
                let (first, second) = (Step { last: false, ..Step::ONLY }, Step { phase: 1, ..Step::ONLY });
                let piece = self.reduce(op, first, &Arc::new(input), &part, reduce)?;
                let bytes = piece.bytes();
                let take = |place: usize| bytes_of(&part, place, dtype);
                // SAFETY: the ranges are the parts of a partition.
                unsafe { self.scatter(op, second, piece, (&|_| 0..bytes, &take), numel) }
            }
        }
    }

    fn perform_shared(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp, join: Join) -> Result<Joined, CommError> {
        // This process has one rank, so the result is not shared.
        Ok(join(&[Arc::new(self.perform(op, Request::AllReduce(input, reduce))?)]))
    }
}
