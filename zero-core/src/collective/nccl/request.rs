//! Collectives on device memory as they are asked for: the words they are known by, whether their sizes work, and the
//! bytes they bring in.

use crate::CommError;
use crate::accounting::WireKind;
use crate::collective::operation::{At, Moved, labelled};
use crate::collective::{DType, ReduceOp};

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
    /// The input and the output.
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

    /// What is wrong with the sizes, if anything: expected, and got.
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

/// The words of several requests that are launched as one operation, for `what`.
pub(super) fn words(requests: &[DeviceRequest], what: &str) -> String {
    let text = match requests {
        [one] => one.moved().words(),
        // Long groups are known by their first and their sums.
        [first, .., last] => {
            let elements: usize = requests.iter().map(|request| request.moved().len).sum();
            let all = requests.len();
            format!(
                "group of {all} from {} to {}, {elements} elements in all",
                first.moved().words(),
                last.moved().words()
            )
        }
        [] => "group of nothing".to_string(),
    };
    labelled(text, what)
}

/// Whether `requests` can be run by a group of this size, by one of its ranks that is `at` an operation.
pub(super) fn check(requests: &[DeviceRequest], world: usize, at: At<'_>) -> Result<(), CommError> {
    let wrong = requests.iter().find_map(|request| Some((request, request.wrong(world)?)));
    wrong.map_or(Ok(()), |(request, wrong)| Err(At { op: &request.moved().words(), ..at }.shape(wrong)))
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
        let at = At { group: "world", seq: 3, rank: 1, op: &"" };
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
            (reduce(slice(k, DType::U8), slice(k, DType::U8), ReduceOp::Mean), "floats to take a mean of, got u8"),
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
