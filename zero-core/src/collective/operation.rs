//! What every engine does with a request before anything is moved: the words it is known by, whether its shapes work, and
//! the bytes that it will bring in.

use super::{Buffer, DType, ReduceOp, Request};
use crate::accounting::WireKind;
use crate::{CommError, Partition};

/// What a rank brings to an operation, in the words of the error messages; ranks whose words differ do not match.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Description {
    pub(super) op: &'static str,
    pub(super) detail: String,
}

impl core::fmt::Display for Description {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}{}", self.op, self.detail)
    }
}

impl Description {
    /// `op` with the size of its buffer and `more`.
    pub(super) fn of(op: &'static str, buffer: &Buffer, more: &str) -> Self {
        Self { op, detail: format!(" of {} {}{more}", buffer.len(), buffer.dtype().name()) }
    }

    /// An exchange of handles that stand for `bytes` each.
    pub(super) fn of_exchange(bytes: usize) -> Self {
        Self { op: "exchange", detail: format!(" of {bytes} bytes") }
    }

    /// A barrier with its purpose, if it has one.
    pub(super) fn of_barrier(purpose: &str) -> Self {
        let detail = if purpose.is_empty() { String::new() } else { format!(" ({purpose})") };
        Self { op: "barrier", detail }
    }

    /// With what the caller says it is for, if anything.
    pub(super) fn labelled(mut self, what: &str) -> Self {
        if !what.is_empty() {
            self.detail.push_str(" for ");
            self.detail.push_str(what);
        }
        self
    }

    /// The words of a whole request, for `what`.
    pub(super) fn of_request(request: &Request, what: &str) -> Self {
        let op = request.name();
        let description = match request {
            Request::Barrier(purpose) => Self::of_barrier(purpose),
            Request::AllGather(buffer) | Request::AllToAll(buffer) => Self::of(op, buffer, ""),
            Request::ReduceScatter(buffer, reduce) | Request::AllReduce(buffer, reduce) => {
                Self::of(op, buffer, reduce_name(*reduce))
            }
            Request::Broadcast(buffer, root) => Self::of(op, buffer, &format!(" from rank {root}")),
        };
        description.labelled(what)
    }
}

pub(super) fn reduce_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => " (sum)",
        ReduceOp::Mean => " (mean)",
        ReduceOp::Max => " (max)",
    }
}

/// Where an operation is called, for its errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) group: &'a str,
    pub(super) seq: u64,
    pub(super) rank: usize,
    /// Ranks of the group.
    pub(super) world: usize,
}

impl Place<'_> {
    /// Whether `request` can be run by a group of this size.
    pub(super) fn check(&self, request: &Request) -> Result<(), CommError> {
        let world = self.world;
        let expected = match request {
            Request::ReduceScatter(input, ReduceOp::Mean) | Request::AllReduce(input, ReduceOp::Mean)
                if input.dtype() == DType::U8 =>
            {
                ("floats to take a mean of".to_string(), input.dtype().name().to_string())
            }
            Request::ReduceScatter(input, _) | Request::AllToAll(input) if !input.len().is_multiple_of(world) => {
                (format!("a length that {world} ranks divide"), input.len().to_string())
            }
            Request::Broadcast(_, root) if *root >= world => (format!("a root below {world}"), root.to_string()),
            _ => return Ok(()),
        };
        Err(CommError::Shape {
            group: self.group.to_string(),
            seq: self.seq,
            rank: self.rank,
            op: request.name().to_string(),
            expected: expected.0,
            got: expected.1,
        })
    }
}

/// Identity of a group made by operation `seq` of group `parent`, the same on every rank without a message: a mix of the
/// numbers (splitmix64's finaliser).
pub(super) fn child_id(parent: u64, seq: u64, color: u64) -> u64 {
    let mut id = parent;
    for word in [seq, color] {
        id = (id ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        id = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        id = (id ^ (id >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        id ^= id >> 31;
    }
    id
}

/// Bytes that rank `rank` of `world` receives in `request`, see [`crate::accounting::WireBytes`].
pub(super) fn received(request: &Request, rank: usize, world: usize) -> Option<(WireKind, usize)> {
    let others = world - 1;
    let counted = match request {
        Request::Barrier(_) => return None,
        Request::AllGather(shard) => (WireKind::AllGather, shard.bytes() * others),
        Request::ReduceScatter(input, _) => (WireKind::ReduceScatter, input.bytes() / world * others),
        Request::AllToAll(input) => (WireKind::AllToAll, input.bytes() / world * others),
        Request::Broadcast(_, root) if *root == rank => return None,
        Request::Broadcast(buffer, _) => (WireKind::Broadcast, buffer.bytes()),
        Request::AllReduce(input, _) => {
            let mine = Partition::new(input.len(), world).len(rank);
            (WireKind::AllReduce, input.dtype().size() * (mine * others + input.len() - mine))
        }
    };
    Some(counted)
}
