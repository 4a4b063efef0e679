//! Requests of collectives on device memory: their descriptions, the check of their sizes, and the number of bytes that they
//! receive.

use crate::CommError;
use crate::accounting::WireKind;
use crate::collective::operation::{Moved, OperationContext, labelled};
use crate::collective::{DType, ReduceOp};

/// Contiguous elements in the memory of the communicator's device. It does not own them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Address of the first element: a `CUdeviceptr`, aligned to the element.
    pub pointer: u64,
    /// Number of elements.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
}

impl DeviceSlice {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// One collective on device memory. `N` is the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Concatenates the ranks' inputs (`k` elements) in rank order into every output (`N k`). In place if this rank's
    /// input is its own shard of the output.
    AllGather {
        /// `k` elements.
        input: DeviceSlice,
        /// `N k` elements.
        output: DeviceSlice,
    },
    /// Reduces the ranks' inputs (`N k` elements); rank `r` gets elements `[r k, (r + 1) k)`. In place if the output
    /// is this rank's own shard of the input.
    ReduceScatter {
        /// `N k` elements.
        input: DeviceSlice,
        /// `k` elements.
        output: DeviceSlice,
        /// The reduction.
        op: ReduceOp,
    },
    /// Reduces the ranks' inputs into every output. In place if both are the same.
    AllReduce {
        /// `k` elements.
        input: DeviceSlice,
        /// `k` elements.
        output: DeviceSlice,
        /// The reduction.
        op: ReduceOp,
    },
    /// Copies the root's elements to every rank's buffer, in place.
    Broadcast {
        /// `k` elements; the root's are sent.
        buffer: DeviceSlice,
        /// The root's rank in the communicator.
        root: usize,
    },
}

impl DeviceRequest {
    /// Returns the input and the output.
    pub(super) fn slices(&self) -> (DeviceSlice, DeviceSlice) {
        match *self {
            DeviceRequest::AllGather { input, output }
            | DeviceRequest::ReduceScatter { input, output, .. }
            | DeviceRequest::AllReduce { input, output, .. } => (input, output),
            DeviceRequest::Broadcast { buffer, .. } => (buffer, buffer),
        }
    }

    pub(super) fn moved(&self) -> Moved {
        let (kind, reduce, root) = match *self {
            DeviceRequest::AllGather { .. } => (WireKind::AllGather, None, None),
            DeviceRequest::ReduceScatter { op, .. } => (WireKind::ReduceScatter, Some(op), None),
            DeviceRequest::AllReduce { op, .. } => (WireKind::AllReduce, Some(op), None),
            DeviceRequest::Broadcast { root, .. } => (WireKind::Broadcast, None, Some(root)),
        };
        let DeviceSlice { len, dtype, .. } = self.slices().0;
        Moved { kind, len, dtype, reduce, root }
    }

    /// Describes the expected and the actual arguments if these are invalid.
    fn wrong(&self, world: usize) -> Option<(String, String)> {
        let (input, output) = self.slices();
        let (more, less, expected) = match self {
            DeviceRequest::AllGather { .. } => (world, 1, format!("an output {world} times as long as the input")),
            DeviceRequest::ReduceScatter { .. } => (1, world, format!("an input {world} times as long as the output")),
            _ => (1, 1, "an output as long as the input".to_string()),
        };
        if input.dtype != output.dtype || input.len.checked_mul(more) != output.len.checked_mul(less) {
            let text = |slice: DeviceSlice| format!("{} {}", slice.len, slice.dtype.name());
            return Some((expected, format!("{} and {}", text(input), text(output))));
        }
        self.moved().wrong(world)
    }
}

/// Describes requests that are launched as one operation, with their purpose `what`.
pub(super) fn words(requests: &[DeviceRequest], what: &str) -> String {
    let text = match requests {
        [one] => one.moved().words(),
        // Groups are described by their first and last request and the total number of elements.
        [first, .., last] => {
            let elements: usize = requests.iter().map(|request| request.moved().len).sum();
            let all = requests.len();
            format!(
                "group of {all} from {} to {}, {elements} elements in all",
                first.moved().words(),
                last.moved().words()
            )
        }
        [] => "empty group".to_string(),
    };
    labelled(text, what)
}

/// Checks `requests` for a group of `world` ranks; `at` is the operation that an error names.
pub(super) fn check(requests: &[DeviceRequest], world: usize, at: OperationContext<'_>) -> Result<(), CommError> {
    let wrong = requests.iter().find_map(|request| Some((request, request.wrong(world)?)));
    wrong.map_or(Ok(()), |(request, wrong)| Err(OperationContext { op: &request.moved().words(), ..at }.shape(wrong)))
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
        let at = OperationContext { group: "world", seq: 3, rank: 1, op: &"" };
        check(&[gather, scatter(ReduceOp::Mean)], 4, at).unwrap();
        assert_eq!(gather.moved().received(1, 4), Some((WireKind::AllGather, 120)));
        assert_eq!(scatter(ReduceOp::Sum).moved().received(1, 4), Some((WireKind::ReduceScatter, 120)));
        let reduce = |input, output, op| DeviceRequest::AllReduce { input, output, op };
        let all = reduce(slice(k, f32), slice(k, f32), ReduceOp::Sum);
        // 10 elements on 4 ranks are pieces of 3, 3, 2 and 2, or 3, 3, 3 and 1: whichever, as the other engines count.
        let request = crate::Request::AllReduce(crate::Buffer::F32(vec![0.0; k]), ReduceOp::Sum);
        for rank in 0..4 {
            assert_eq!(all.moved().received(rank, 4), Moved::by(&request).unwrap().received(rank, 4));
        }
        let cast = DeviceRequest::Broadcast { buffer: slice(k, f32), root: 1 };
        assert_eq!((cast.moved().received(1, 4), cast.moved().received(0, 4)), (None, Some((WireKind::Broadcast, 40))));
        for (bad, words) in [
            (reduce(slice(k, f32), slice(k, DType::F16), ReduceOp::Sum), "an output as long as the input, got 10 f32"),
            (
                reduce(slice(k, DType::U8), slice(k, DType::U8), ReduceOp::Mean),
                "expected a float type for a mean, got u8",
            ),
            (DeviceRequest::AllGather { input: slice(k, f32), output: slice(k, f32) }, "4 times as long as the input"),
            (DeviceRequest::Broadcast { buffer: slice(k, f32), root: 4 }, "a root below 4, got 4"),
        ] {
            let error = check(&[gather, bad], 4, at).unwrap_err().to_string();
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
