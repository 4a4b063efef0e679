//! Arguments of kernels that work on many tensors at once on a device. `T` is a library's tensor, `D` its name of an element type.

use std::ops::Range;

use crate::update::Kernel;

/// Columns of a bucket, which follow those of the previous item.
#[derive(Debug, Clone)]
pub struct PackItem<T> {
    /// The tensor of `numel` elements in row-major order; zeros if `None`.
    pub tensor: Option<T>,
    /// Number of elements of the full tensor.
    pub numel: usize,
    /// First of the tensor's columns.
    pub from: usize,
    /// Number of columns.
    pub columns: usize,
}

/// Destination of columns of a bucket, which follow those of the previous item.
#[derive(Debug, Clone)]
pub struct UnpackItem<T, D> {
    /// A tensor of `numel` elements whose other columns have been written already. If `None`, the other columns are zeros.
    pub target: Option<T>,
    /// Number of elements of the full target. If the bucket is one row, that of the rank's shard, which may be less than `columns`.
    pub numel: usize,
    /// First of the target's columns.
    pub from: usize,
    /// Number of columns.
    pub columns: usize,
    /// Type of the target.
    pub dtype: D,
}

/// Tensors of one length to be added in rank order.
#[derive(Debug, Clone)]
pub struct SumItem<T, D> {
    /// The tensors, of one type.
    pub parts: Vec<T>,
    /// Range of their elements in row-major order: all for an all-reduce, a rank's row of a bucket for a reduce-scatter.
    pub range: Range<usize>,
    /// Type of the result.
    pub dtype: D,
}

/// A parameter to be updated. All its tensors have the same number of elements.
#[derive(Debug, Clone)]
pub struct UpdateItem<T, D> {
    /// The rule and the numbers of the step.
    pub kernel: Kernel,
    /// The parameter, or its master, in fp32.
    pub parameter: T,
    /// The gradient, in fp32 or 16 bit.
    pub gradient: T,
    /// The rule's states. May be empty if they begin with this step.
    pub states: Vec<T>,
    /// Type in which states are stored: fp32, or bfloat16 with stochastic rounding as on the CPU ([`State::Bf16`](crate::update::State)).
    pub state_dtype: D,
    /// Index of the first element in its parameter, from which the random bits of the rounding follow.
    pub first: usize,
    /// A 16-bit tensor to which the updated parameter is also written; its elements are not read. `None` for LAMB.
    pub copy: Option<T>,
}

/// An updated parameter.
#[derive(Debug, Clone)]
pub struct Updated<T> {
    /// The parameter, or its master.
    pub parameter: T,
    /// The rule's states.
    pub states: Vec<T>,
    /// The parameter in 16 bit, if the item had a copy.
    pub copy: Option<T>,
    /// Only for LAMB, which leaves the parameter unchanged: its update `u` in fp32. The caller takes the norms of both, and then descends
    /// ([`Sweep::Second`](crate::update::Sweep)) along `u` with the learning rate times the trust ratio.
    pub direction: Option<T>,
}

/// Factor of the gradients, applied before anything else.
#[derive(Debug, Clone)]
pub enum GradScale<T> {
    /// A number known to the host.
    Number(f32),
    /// One fp32 number in a tensor, which the host need not know. If it is NaN, nothing is updated: parameters and states keep their
    /// values, and states that would begin with this step are undefined.
    Tensor(T),
}

/// Memory on a CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaSpan {
    /// Address of the first element: a `CUdeviceptr` of the device's primary context.
    pub pointer: u64,
    /// Number of elements.
    pub elements: usize,
}

/// Makes all work submitted to the device from now on wait for an operation that was begun.
pub type End = Box<dyn FnOnce() + Send>;

impl<T, D> UnpackItem<T, D> {
    /// Converts the type.
    pub fn typed<E>(self, as_other: impl Fn(D) -> E) -> UnpackItem<T, E> {
        let Self { target, numel, from, columns, dtype } = self;
        UnpackItem { target, numel, from, columns, dtype: as_other(dtype) }
    }
}

impl<T, D> SumItem<T, D> {
    /// Converts the type.
    pub fn typed<E>(self, as_other: impl Fn(D) -> E) -> SumItem<T, E> {
        SumItem { parts: self.parts, range: self.range, dtype: as_other(self.dtype) }
    }
}

impl<T, D> UpdateItem<T, D> {
    /// Converts the type.
    pub fn typed<E>(self, as_other: impl Fn(D) -> E) -> UpdateItem<T, E> {
        let Self { kernel, parameter, gradient, states, state_dtype, first, copy } = self;
        UpdateItem { kernel, parameter, gradient, states, state_dtype: as_other(state_dtype), first, copy }
    }
}
