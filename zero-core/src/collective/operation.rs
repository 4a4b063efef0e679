//! The part of an operation that is the same in every engine: its description, the check of its shapes, the number of bytes it
//! receives, and the errors that name it.

use std::sync::Arc;
use std::time::Duration;

use super::flight::Opening;
use super::rounds;
use super::{Buffer, DType, ReduceOp, Request};
use crate::accounting::WireKind;
use crate::random::{WEYL, mix};
use crate::{CommError, OperationCall, Partition};

/// Name and ranks of a group, as seen by one of them.
#[derive(Debug)]
pub struct Group {
    /// Distinguishes groups with the same label. The same on all ranks of the group.
    pub(super) id: u64,
    pub(super) label: Arc<str>,
    /// The group's ranks in the run, in the group's order.
    pub(super) members: Arc<[usize]>,
    /// Index of this rank in `members`.
    pub(super) me: usize,
}

impl Group {
    /// Creates the group of `members`, one of which is `rank`.
    pub(super) fn new(id: u64, label: &str, members: Arc<[usize]>, rank: usize) -> Self {
        let me = members.iter().position(|&member| member == rank).expect("a rank builds groups that it belongs to");
        Self { id, label: label.into(), members, me }
    }

    pub(super) fn world(&self) -> usize {
        self.members.len()
    }

    /// Returns this rank's number in the run.
    pub(super) fn rank(&self) -> usize {
        self.members[self.me]
    }

    /// Returns the places of the other ranks in the group.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.members.len()).filter(|&place| place != self.me)
    }

    /// Returns the other ranks' numbers in the run.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        self.others().map(|place| self.members[place])
    }

    pub(super) fn at<'a>(&'a self, seq: u64, op: &'a dyn core::fmt::Display) -> OperationContext<'a> {
        OperationContext { group: &self.label, seq, rank: self.rank(), op }
    }

    /// Builds the flight recorder's description of operation `seq`, which receives `bytes` from other ranks.
    pub(super) fn opening(&self, seq: u64, op: &str, bytes: usize, waiting_for: Vec<usize>, last: bool) -> Opening<'_> {
        let op = op.to_string();
        Opening { group: &self.label, group_id: self.id, seq, op, bytes, one_sided: false, waiting_for, last }
    }
}

/// One operation of a group.
pub struct Op<'a> {
    pub(super) group: &'a Group,
    pub(super) seq: u64,
    /// Description with the size, as in errors and flight records; ranks whose descriptions differ do not match.
    pub(super) words: &'a str,
}

impl Op<'_> {
    pub(super) fn at(&self) -> OperationContext<'_> {
        self.group.at(self.seq, &self.words)
    }

    /// Returns `true` if the gather of `input` is small enough to run in rounds.
    pub(super) fn is_in_rounds(&self, input: &Buffer) -> bool {
        rounds::are_for(self.group.world(), input.bytes() * self.group.world())
    }

    /// Builds the flight recorder's description of one of its exchanges, which receives `bytes` from `peers`.
    pub(super) fn opening(&self, bytes: usize, peers: Vec<usize>, step: Step) -> Opening<'_> {
        self.group.opening(self.seq, self.words, bytes, peers, step.last)
    }
}

/// One of the exchanges that make up an operation, which has one or several in sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) phase: u8,
    /// `true` for the operation's last exchange.
    pub(super) last: bool,
    /// Longest chain of ranks that may wait for one another before a rank that this one waits for arrives.
    pub(super) behind: u8,
}

impl Step {
    /// The exchange of an operation that has only one.
    pub(super) const ONLY: Self = Self { phase: 0, last: true, behind: 0 };
}

/// The operation that a rank is in, for its errors.
#[derive(Clone, Copy)]
pub struct OperationContext<'a> {
    pub(crate) group: &'a str,
    pub(crate) seq: u64,
    /// Rank in the run.
    pub(crate) rank: usize,
    pub(crate) op: &'a dyn core::fmt::Display,
}

impl OperationContext<'_> {
    fn called(&self) -> OperationCall {
        OperationCall::new(self.group, self.seq, self.rank, self.op)
    }

    pub(super) fn mismatch(&self, other_rank: usize, other_op: String) -> CommError {
        CommError::Mismatch { at: self.called(), other_rank, other_op }
    }

    pub(crate) fn timeout(&self, waited: Duration, missing: Vec<usize>) -> CommError {
        CommError::Timeout { at: self.called(), waited_ms: waited.as_millis() as u64, missing }
    }

    pub(super) fn left(&self, peer: usize) -> CommError {
        CommError::PeerLeft { at: self.called(), peer }
    }

    pub(super) fn failed(&self, peer: usize, reason: Arc<str>) -> CommError {
        CommError::PeerFailed { at: self.called(), peer, reason }
    }

    pub(crate) fn shape(&self, (expected, got): (String, String)) -> CommError {
        CommError::Shape { at: self.called(), expected, got }
    }

    #[cfg(feature = "nccl")]
    pub(super) fn device(&self, reason: impl core::fmt::Display) -> CommError {
        CommError::Device { at: self.called(), reason: reason.to_string().into() }
    }

    #[cfg(feature = "nccl")]
    pub(super) fn stalled(&self, waited: Duration, state: &str) -> CommError {
        CommError::Stalled { at: self.called(), waited_ms: waited.as_millis() as u64, state: state.to_string() }
    }
}

/// Description of the data that an operation moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    pub(super) kind: WireKind,
    /// Number of elements of this rank's input, or of the root's.
    pub(super) len: usize,
    pub(super) dtype: DType,
    pub(super) reduce: Option<ReduceOp>,
    pub(super) root: Option<usize>,
}

impl Moved {
    /// Describes the data that `request` moves; `None` for a barrier.
    pub(super) fn by(request: &Request) -> Option<Self> {
        let (kind, buffer, reduce, root) = match request {
            Request::AllGather(shard) => (WireKind::AllGather, shard, None, None),
            Request::ReduceScatter(input, op) => (WireKind::ReduceScatter, input, Some(*op), None),
            Request::AllReduce(input, op) => (WireKind::AllReduce, input, Some(*op), None),
            Request::Broadcast(buffer, root) => (WireKind::Broadcast, buffer, None, Some(*root)),
            Request::Gather(shard, root) => (WireKind::Gather, shard, None, Some(*root)),
            Request::AllToAll(input) => (WireKind::AllToAll, input, None, None),
            Request::Barrier(_) => return None,
        };
        Some(Self { kind, len: buffer.len(), dtype: buffer.dtype(), reduce, root })
    }

    /// Describes the operation with its size.
    pub(super) fn words(&self) -> String {
        let more = match (self.reduce, self.root) {
            (Some(ReduceOp::Sum), _) => " (sum)".to_string(),
            (Some(ReduceOp::Mean), _) => " (mean)".to_string(),
            (Some(ReduceOp::Max), _) => " (max)".to_string(),
            (None, Some(root)) => {
                let way = if self.kind == WireKind::Gather { "to" } else { "from" };
                format!(" {way} rank {root}")
            }
            (None, None) => String::new(),
        };
        format!("{} of {} {}{more}", self.kind.name(), self.len, self.dtype.name())
    }

    /// Returns the expected and the actual value if `world` ranks cannot run the operation.
    pub(super) fn wrong(&self, world: usize) -> Option<(String, String)> {
        match *self {
            Self { reduce: Some(ReduceOp::Mean), dtype: DType::U8, .. } => {
                Some(("a float type for a mean".to_string(), "u8".to_string()))
            }
            Self { kind: WireKind::ReduceScatter | WireKind::AllToAll, len, .. } if !len.is_multiple_of(world) => {
                Some((format!("a length divisible by the number of ranks ({world})"), len.to_string()))
            }
            Self { root: Some(root), .. } if root >= world => Some((format!("a root below {world}"), root.to_string())),
            _ => None,
        }
    }

    /// Returns the places that send to `place` of `world`, each with its number of bytes (see [`crate::accounting::WireBytes`]):
    /// every other place directly or, `in_rounds`, a few that forward data of others.
    pub(super) fn sources(&self, place: usize, world: usize, in_rounds: bool) -> Vec<(usize, usize)> {
        let bytes = self.len * self.dtype.size();
        let others = (0..world).filter(|&other| other != place);
        match self.kind {
            WireKind::AllGather | WireKind::AllReduce if in_rounds => {
                let takes = rounds::gather(world, rounds::RADIX).into_iter().flatten();
                takes.map(|take| ((place + take.distance) % world, bytes * take.parts.len())).collect()
            }
            WireKind::Broadcast => {
                let node = rounds::node(place, self.root.unwrap_or(0), world);
                node.parent.map(|parent| (parent, bytes)).into_iter().collect()
            }
            WireKind::Gather => {
                let root = self.root.unwrap_or(0);
                let of = |child| (child, bytes * rounds::node(child, root, world).size);
                rounds::node(place, root, world).children.into_iter().map(of).collect()
            }
            WireKind::AllGather => others.map(|other| (other, bytes)).collect(),
            WireKind::ReduceScatter | WireKind::AllToAll => others.map(|other| (other, bytes / world)).collect(),
            // Its input for this rank's stride, and its reduced stride.
            WireKind::AllReduce => {
                let part = Partition::new(self.len, world);
                others.map(|other| (other, (part.len(place) + part.len(other)) * self.dtype.size())).collect()
            }
        }
    }

    /// Returns `true` if each rank communicates with a few others, which forward data. An all-reduce then gathers the full inputs.
    pub(super) fn is_in_rounds(&self, world: usize) -> bool {
        rounds::are_for(world, self.len * self.dtype.size() * world)
    }

    /// Returns kind and number of the [`crate::accounting::WireBytes`] that `rank` of `world` receives without rounds; `None` for the root.
    #[cfg(feature = "nccl")]
    pub(super) fn received(&self, rank: usize, world: usize) -> Option<(WireKind, usize)> {
        let received = self.sources(rank, world, false).into_iter().map(|(_, bytes)| bytes).sum();
        (self.root != Some(rank)).then_some((self.kind, received))
    }
}

/// Describes `request`, followed by its purpose `what` unless that is empty.
pub(super) fn words(request: &Request, what: &str) -> String {
    let words = match (request, Moved::by(request)) {
        (Request::Barrier(purpose), _) if !purpose.is_empty() => format!("barrier ({purpose})"),
        (_, moved) => moved.map_or("barrier".to_string(), |moved| moved.words()),
    };
    labelled(words, what)
}

/// Appends the caller's purpose `what` to `words`, unless it is empty.
pub(super) fn labelled(words: String, what: &str) -> String {
    if what.is_empty() { words } else { format!("{words} for {what}") }
}

/// Returns the identity of a group created by operation `seq` of group `parent`. It is a hash of the numbers, so every rank
/// computes the same one without a message.
pub(super) fn child_id(parent: u64, seq: u64, color: u64) -> u64 {
    let mut id = parent;
    for word in [seq, color] {
        id = mix((id ^ word).wrapping_add(WEYL));
    }
    id
}
