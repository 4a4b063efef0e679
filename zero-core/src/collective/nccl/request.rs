//! Collectives on device memory as they are asked for: the words they are known by, whether their sizes work, and the
//! bytes they bring in.

use crate::accounting::WireKind;
use crate::collective::operation::reduce_name;
use crate::collective::{DType, ReduceOp};
use crate::{CommError, Partition};

/// Elements that lie one behind another in the memory of the communicator's device. Nothing is owned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Where they begin: a `CUdeviceptr`, aligned to the element.
    pub pointer: u64,
    /// Number of elements.
    pub len: usize,
    /// Their type.
    pub dtype: DType,
}

impl DeviceSlice {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// One collective on device memory. `N` is the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Concatenates the ranks' inputs (`k` elements) in rank order into every output (`N k`). In place when this rank's
    /// input is its own part of the output.
    AllGather {
        /// `k` elements.
        input: DeviceSlice,
        /// `N k` elements.
        output: DeviceSlice,
    },
    /// Reduces the ranks' inputs (`N k` elements) and gives rank `r` elements `[r k, (r + 1) k)`. In place when the output
    /// is this rank's own part of the input.
    ReduceScatter {
        /// `N k` elements.
        input: DeviceSlice,
        /// `k` elements.
        output: DeviceSlice,
        /// How.
        op: ReduceOp,
    },
    /// Reduces the ranks' inputs into every output. In place when both are the same.
    AllReduce {
        /// `k` elements.
        input: DeviceSlice,
        /// `k` elements.
        output: DeviceSlice,
        /// How.
        op: ReduceOp,
    },
    /// Gives every rank the root's elements, in its own.
    Broadcast {
        /// `k` elements; on the root what is sent.
        buffer: DeviceSlice,
        /// The rank, within the communicator.
        root: usize,
    },
}

impl DeviceRequest {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        match self {
            DeviceRequest::AllGather { .. } => "all_gather",
            DeviceRequest::ReduceScatter { .. } => "reduce_scatter",
            DeviceRequest::AllReduce { .. } => "all_reduce",
            DeviceRequest::Broadcast { .. } => "broadcast",
        }
    }

    /// As in errors and flight records: alike on all ranks.
    fn words(&self) -> String {
        let name = self.name();
        let of = |slice: &DeviceSlice| format!("{name} of {} {}", slice.len, slice.dtype.name());
        match self {
            DeviceRequest::AllGather { input, .. } => of(input),
            DeviceRequest::ReduceScatter { input, op, .. } | DeviceRequest::AllReduce { input, op, .. } => {
                of(input) + reduce_name(*op)
            }
            DeviceRequest::Broadcast { buffer, root } => format!("{} from rank {root}", of(buffer)),
        }
    }

    /// What is wrong with the sizes, if anything: expected, and got.
    fn wrong(&self, world: usize) -> Option<(String, String)> {
        let alike = |input: &DeviceSlice, output: &DeviceSlice, (more, less): (usize, usize)| {
            let fits = input.dtype == output.dtype && input.len.checked_mul(more) == output.len.checked_mul(less);
            let text = |slice: &DeviceSlice| format!("{} {}", slice.len, slice.dtype.name());
            let ratio = match (more, less) {
                (1, 1) => "an output as long as the input".to_string(),
                (1, _) => format!("an input {world} times as long as the output"),
                _ => format!("an output {world} times as long as the input"),
            };
            (!fits).then(|| (ratio, format!("{} and {}", text(input), text(output))))
        };
        let averaged = |input: &DeviceSlice, op: ReduceOp| {
            let bytes = input.dtype == DType::U8 && op == ReduceOp::Mean;
            bytes.then(|| ("floats to take a mean of".to_string(), "u8".to_string()))
        };
        match self {
            DeviceRequest::AllGather { input, output } => alike(input, output, (world, 1)),
            DeviceRequest::ReduceScatter { input, output, op } => {
                alike(input, output, (1, world)).or_else(|| averaged(input, *op))
            }
            DeviceRequest::AllReduce { input, output, op } => {
                alike(input, output, (1, 1)).or_else(|| averaged(input, *op))
            }
            DeviceRequest::Broadcast { root, .. } if *root >= world => {
                Some((format!("a root below {world}"), root.to_string()))
            }
            DeviceRequest::Broadcast { .. } => None,
        }
    }

    /// Bytes that rank `me` of `world` receives, see [`crate::accounting::WireBytes`].
    pub(super) fn received(&self, me: usize, world: usize) -> Option<(WireKind, usize)> {
        let others = world - 1;
        Some(match self {
            DeviceRequest::AllGather { input, .. } => (WireKind::AllGather, input.bytes() * others),
            DeviceRequest::ReduceScatter { output, .. } => (WireKind::ReduceScatter, output.bytes() * others),
            DeviceRequest::AllReduce { input, .. } => {
                let mine = Partition::new(input.len, world).len(me);
                (WireKind::AllReduce, input.dtype.size() * (mine * others + input.len - mine))
            }
            DeviceRequest::Broadcast { root, .. } if *root == me => return None,
            DeviceRequest::Broadcast { buffer, .. } => (WireKind::Broadcast, buffer.bytes()),
        })
    }
}

/// The words of several requests that are launched as one operation, for `what`.
pub(super) fn words(requests: &[DeviceRequest], what: &str) -> String {
    let mut text = match requests {
        [one] => one.words(),
        // Long groups are known by their first and their sums.
        [first, .., last] => {
            let elements: usize = requests.iter().map(|request| request.elements()).sum();
            let all = requests.len();
            format!("group of {all} from {} to {}, {elements} elements in all", first.words(), last.words())
        }
        [] => "group of nothing".to_string(),
    };
    if !what.is_empty() {
        text.push_str(" for ");
        text.push_str(what);
    }
    text
}

impl DeviceRequest {
    fn elements(&self) -> usize {
        match self {
            DeviceRequest::AllGather { input, .. }
            | DeviceRequest::ReduceScatter { input, .. }
            | DeviceRequest::AllReduce { input, .. } => input.len,
            DeviceRequest::Broadcast { buffer, .. } => buffer.len,
        }
    }
}

/// Where requests are made, for their errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Here<'a> {
    pub(super) group: &'a str,
    pub(super) seq: u64,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) op: &'a str,
}

impl Here<'_> {
    pub(super) fn check(&self, requests: &[DeviceRequest]) -> Result<(), CommError> {
        let wrong = requests.iter().find_map(|request| Some((request, request.wrong(self.world)?)));
        let Some((request, (expected, got))) = wrong else { return Ok(()) };
        let (group, seq, rank) = (self.group.to_string(), self.seq, self.rank);
        Err(CommError::Shape { group, seq, rank, op: request.words(), expected, got })
    }

    pub(super) fn failed(&self, reason: impl core::fmt::Display) -> CommError {
        CommError::Device {
            group: self.group.to_string(),
            seq: self.seq,
            rank: self.rank,
            op: self.op.to_string(),
            reason: reason.to_string().into(),
        }
    }

    pub(super) fn stalled(&self, waited_ms: u64, state: &str) -> CommError {
        CommError::Stalled {
            group: self.group.to_string(),
            seq: self.seq,
            rank: self.rank,
            op: self.op.to_string(),
            waited_ms,
            state: state.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(len: usize, dtype: DType) -> DeviceSlice {
        DeviceSlice { pointer: 0, len, dtype }
    }

    #[test]
    fn sizes_are_checked_and_bytes_counted_as_the_other_engines_do() {
        let (k, f32) = (10, DType::F32);
        let gather = DeviceRequest::AllGather { input: slice(k, f32), output: slice(4 * k, f32) };
        let scatter = |op| DeviceRequest::ReduceScatter { input: slice(4 * k, f32), output: slice(k, f32), op };
        let here = Here { group: "world", seq: 3, rank: 1, world: 4, op: "" };
        here.check(&[gather, scatter(ReduceOp::Mean)]).unwrap();
        assert_eq!(gather.received(1, 4), Some((WireKind::AllGather, 120)));
        assert_eq!(scatter(ReduceOp::Sum).received(1, 4), Some((WireKind::ReduceScatter, 120)));
        let reduce = |input, output, op| DeviceRequest::AllReduce { input, output, op };
        let all = reduce(slice(k, f32), slice(k, f32), ReduceOp::Sum);
        // 10 elements on 4 ranks are pieces of 3, 3, 2 and 2, or 3, 3, 3 and 1: whichever, as the other engines count.
        let request = crate::Request::AllReduce(crate::Buffer::F32(vec![0.0; k]), ReduceOp::Sum);
        for rank in 0..4 {
            assert_eq!(all.received(rank, 4), crate::collective::operation::received(&request, rank, 4));
        }
        let cast = DeviceRequest::Broadcast { buffer: slice(k, f32), root: 1 };
        assert_eq!((cast.received(1, 4), cast.received(0, 4)), (None, Some((WireKind::Broadcast, 40))));
        for (bad, words) in [
            (reduce(slice(k, f32), slice(k, DType::F16), ReduceOp::Sum), "an output as long as the input, got 10 f32"),
            (reduce(slice(k, DType::U8), slice(k, DType::U8), ReduceOp::Mean), "floats to take a mean of, got u8"),
            (DeviceRequest::AllGather { input: slice(k, f32), output: slice(k, f32) }, "4 times as long as the input"),
            (DeviceRequest::Broadcast { buffer: slice(k, f32), root: 4 }, "a root below 4, got 4"),
        ] {
            let error = here.check(&[gather, bad]).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("rank 1, group 'world', operation 3"), "{error}");
        }
    }

    #[test]
    fn words_tell_operations_apart() {
        let one = DeviceRequest::Broadcast { buffer: slice(8, DType::Bf16), root: 2 };
        assert_eq!(words(&[one], "bias"), "broadcast of 8 bf16 from rank 2 for bias");
        assert!(words(&[one, one, one], "").starts_with("group of 3 from broadcast of 8 bf16 from rank 2 to "));
    }
}
