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
    /// Ends with the last communicator of the run, where it is that which ends it.
    #[allow(dead_code)] // Held, not read.
    pub(super) keeper: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// One rank's end of a group of processes.
pub type ProcessComm = Comm<ProcessRank>;

/// The plan of one exchange: which bytes of the input each rank gets, and where its own go.
struct Plan<'a> {
    step: Step,
    input: &'a Arc<Buffer>,
    /// Bytes of the input, and the place in the group that they are for.
    sends: Vec<(usize, Range<usize>)>,
    /// Where in the landing the bytes from a place of the group go.
    takes: Vec<(usize, Range<usize>)>,
    /// Bytes of the input that are part of the result as they are, and where they go.
    own: Option<(Range<usize>, usize)>,
    /// Whether the input is wanted back.
    until_sent: bool,
}

impl<'a> Plan<'a> {
    /// Every rank's part of `input` to it, and what they give to where `take` says, beside this rank's own.
    fn to_all(op: &Op<'_>, input: &'a Arc<Buffer>, give: Bytes<'_>, take: Bytes<'_>) -> Self {
        let each = |part: Bytes<'_>| op.group.others().map(|place| (place, part(place))).collect();
        Self { step: Step::ONLY, input, sends: each(give), takes: each(take), own: None, until_sent: false }
    }
}

/// Bytes for, or of, the rank at a place of the group.
type Bytes<'a> = &'a dyn Fn(usize) -> Range<usize>;

impl ProcessRank {
    /// Runs a plan, and gives what has landed.
    ///
    /// # Safety
    ///
    /// `takes` and `own` do not overlap and cover the landing, and a take is as long as what its rank sends.
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
            // A group of one has nothing to say to anybody.
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
            // SAFETY: this rank's own range, which nobody else writes (the caller's word).
            unsafe { landing.fill(to, &input.as_bytes()[from]) }
        }
        self.shared.await_reply(op.at(), &result, Instant::now(), (&entry, step.behind))?;
        let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
        // SAFETY: the exchange has ended well, so every rank's part has come, and this rank's was copied: all is written.
        Ok(unsafe { landing.into_buffer() })
    }

    /// Gives every rank its part of `input`, and lays what comes, and this rank's own part, where they belong.
    ///
    /// # Safety
    ///
    /// What all ranks `take` does not overlap and covers `numel` elements, each as much as the rank gives.
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
        // SAFETY: the caller's word.
        unsafe { self.exchange(op, Plan { step, own, ..Plan::to_all(op, &input, give, take) }, landing) }
    }

    /// All ranks' shards, in their order: from each at once, or in rounds where they are small and many (see [`rounds`]).
    fn gather(&self, op: &Op<'_>, shard: Buffer) -> Result<Buffer, CommError> {
        let (world, me, dtype) = (op.group.world(), op.group.me, shard.dtype());
        let (len, bytes) = (shard.len(), shard.bytes());
        let rounds = rounds::gather(world, if op.is_in_rounds(&shard) { rounds::RADIX } else { world.max(2) });
        let (many, last) = (rounds.len() > 1, rounds.len() - 1);
        // In one round parts go where they belong. In many they lie as counted from this rank, until all are there.
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
            // SAFETY: the parts of a round follow one another, after what is held; in a single round each is one shard.
            held = unsafe { self.exchange(op, plan, Landing::new(dtype, len * after)) }?;
        }
        if many {
            held.rotate_right(me * len);
        }
        Ok(held)
    }

    /// Hands what the root has down a tree.
    fn broadcast(&self, op: &Op<'_>, buffer: Buffer, root: usize) -> Result<Buffer, CommError> {
        let Node { parent, children, depth, .. } = rounds::node(op.group.me, root, op.group.world());
        let (bytes, dtype, len) = (buffer.bytes(), buffer.dtype(), buffer.len());
        let mut input = Arc::new(buffer);
        // To whom nothing goes, words still do: who came to another operation is found by both.
        if let Some(parent) = parent {
            let step = Step { phase: depth, last: children.is_empty(), behind: depth - 1 };
            let (sends, takes) = (vec![(parent, 0..0)], vec![(parent, 0..bytes)]);
            let plan = Plan { step, input: &input, sends, takes, own: None, until_sent: false };
            // SAFETY: all of it comes from the parent.
            input = Arc::new(unsafe { self.exchange(op, plan, Landing::new(dtype, len)) }?);
        }
        if parent.is_none() || !children.is_empty() {
            let each = |part: Range<usize>| children.iter().map(|&child| (child, part.clone())).collect();
            let step = Step { phase: depth + 1, last: true, behind: 0 };
            let plan =
                Plan { step, input: &input, sends: each(0..bytes), takes: each(0..0), own: None, until_sent: true };
            // SAFETY: nothing lands.
            unsafe { self.exchange(op, plan, Landing::new(DType::U8, 0)) }?;
        }
        Ok(Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone()))
    }

    /// Hands the ranks' shards up a tree to the root.
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
            // As in a broadcast, words go where no bytes do.
            let sends = children.iter().map(|&child| (child, 0..0)).collect();
            let behind = (rounds::gather(world, rounds::RADIX).len() as u8).saturating_sub(depth + 1);
            let step = Step { phase: depth + 1, last: parent.is_none(), behind };
            let plan = Plan { step, input: &input, sends, takes, own: Some((0..bytes, 0)), until_sent: false };
            // SAFETY: this rank's shard, and behind it what is below each of its children, which is all in order.
            input = Arc::new(unsafe { self.exchange(op, plan, Landing::new(dtype, len * size)) }?);
        }
        if let Some(parent) = parent {
            let step = Step { phase: depth, last: true, behind: 0 };
            let (sends, takes) = (vec![(parent, 0..input.bytes())], vec![(parent, 0..0)]);
            let plan = Plan { step, input: &input, sends, takes, own: None, until_sent: false };
            // SAFETY: nothing lands.
            return unsafe { self.exchange(op, plan, Landing::new(dtype, 0)) };
        }
        let mut all = Arc::try_unwrap(input).unwrap_or_else(|shared| (*shared).clone());
        all.rotate_right(root * len);
        Ok(all)
    }

    /// Gives every rank its part, and reduces what comes for this one.
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
        // The others' parts lie one behind another, without a gap where this rank's would be.
        let slot = |place: usize| if place < me { place } else { place - 1 };
        let take = |place: usize| slot(place) * bytes..(slot(place) + 1) * bytes;
        let give = |place: usize| bytes_of(part, place, dtype);
        let plan = Plan { step, ..Plan::to_all(op, input, &give, &take) };
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
        let world = op.group.world();
        match request {
            Request::Barrier(_) => self.gather(op, Buffer::U8(Vec::new())),
            Request::AllGather(shard) => self.gather(op, shard),
            Request::AllToAll(input) => {
                let (bytes, numel) = (input.bytes() / world, input.len());
                let stretch = |place: usize| place * bytes..(place + 1) * bytes;
                // SAFETY: one stretch for each rank, in order.
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
                // Each rank reduces its stride of the buffer, then all gather: the order of additions, and so every bit,
                // is that of a reduce-scatter.
                let (numel, dtype) = (input.len(), input.dtype());
                let part = Partition::new(numel, world);
                let (first, second) = (Step { last: false, ..Step::ONLY }, Step { phase: 1, ..Step::ONLY });
                let piece = self.reduce(op, first, &Arc::new(input), &part, reduce)?;
                let bytes = piece.bytes();
                let take = |place: usize| bytes_of(&part, place, dtype);
                // SAFETY: the parts of a partition.
                unsafe { self.scatter(op, second, piece, (&|_| 0..bytes, &take), numel) }
            }
        }
    }

    fn perform_shared(&self, op: &Op<'_>, input: Buffer, reduce: ReduceOp, join: Join) -> Result<Joined, CommError> {
        // This process has one rank, which shares with nobody.
        Ok(join(&[Arc::new(self.perform(op, Request::AllReduce(input, reduce))?)]))
    }
}
