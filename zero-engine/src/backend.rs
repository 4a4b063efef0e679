//! The interface between the engine and a tensor library.

use core::fmt::Debug;
use core::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

use zero_core::Buffer;
pub use zero_core::collective::DType;
#[cfg(feature = "cuda")]
use zero_core::copies::Pinned;
use zero_kernels::Rule;
pub use zero_kernels::device::{CudaSpan, End, GradScale, PackItem, SumItem, UnpackItem, UpdateItem, Updated};
use zero_kernels::quantized::{Format, Quantized};
use zero_kernels::update::Elements;

/// A tensor's shape.
pub type Shape = Arc<[usize]>;

/// A tensor library, as far as the engine uses it. All tensors are of floats, row-major.
///
/// The functions from [`Backend::has_kernels`] on are optional: they are for devices with kernels for many tensors at once, and for CUDA.
pub trait Backend: Clone + Default + Send + Sync + 'static {
    /// A tensor. Cloning it makes another handle to the same memory.
    type Tensor: Clone + Debug + Send + Sync + 'static;
    /// A device that holds tensors.
    type Device: Clone + Debug + PartialEq + Send + Sync + 'static;
    /// A tensor's values in host memory.
    type Data: HostData;
    /// A tensor that several threads use ([`Shared`]).
    type Held: Clone + Debug + Send + Sync + 'static;
    /// A handle that does not keep its tensor alive.
    type Loan: Send + Sync + 'static;
    /// An operation that runs concurrently with the device's other work ([`Backend::begin_on_cuda`]).
    type Operation: Clone + Send + Sync + 'static;
    /// The identity under which the library knows a parameter.
    type ParamId: Copy + Debug + Eq + Hash + Send + Sync + 'static;
    /// A random draw that a parameter's first values came from.
    type Draw: Clone + Debug + Send + Sync + 'static;
    /// The queue in which a thread's operations run.
    type Stream: Copy + Send + Sync + 'static;

    /// Returns the device of `x`.
    fn device(x: &Self::Tensor) -> Self::Device;
    /// Returns the type of the elements of `x`.
    fn dtype(x: &Self::Tensor) -> DType;
    /// Returns the number of elements of `x`.
    fn numel(x: &Self::Tensor) -> usize;
    /// Creates a tensor of the data's shape and type.
    fn from_data(data: Self::Data, device: &Self::Device) -> Self::Tensor;
    /// Reads a tensor to host memory, and waits for it.
    fn read(x: Self::Tensor) -> Self::Data;
    /// Creates a tensor of zeros.
    fn zeros(shape: &[usize], device: &Self::Device, dtype: DType) -> Self::Tensor;
    /// Changes the shape; the number of elements stays.
    fn reshape(x: Self::Tensor, shape: &[usize]) -> Self::Tensor;
    /// Returns elements `range` of a flat tensor.
    fn slice(x: Self::Tensor, range: Range<usize>) -> Self::Tensor;
    /// Concatenates flat tensors.
    fn cat(parts: Vec<Self::Tensor>) -> Self::Tensor;
    /// Converts to `dtype`, rounded to nearest even.
    fn cast(x: Self::Tensor, dtype: DType) -> Self::Tensor;
    /// Copies to `device`.
    fn to_device(x: Self::Tensor, device: &Self::Device) -> Self::Tensor;
    /// Adds two tensors of one shape and type.
    fn add(a: Self::Tensor, b: Self::Tensor) -> Self::Tensor;
    /// Subtracts `b` from `a`.
    fn sub(a: Self::Tensor, b: Self::Tensor) -> Self::Tensor;
    /// Multiplies by a number.
    fn mul_scalar(x: Self::Tensor, factor: f64) -> Self::Tensor;
    /// Returns the sum of the squares of all elements, in fp32 at least.
    fn sum_of_squares(x: Self::Tensor) -> f64;

    /// Returns the elements, without a copy, if they are in host memory, in 32 or 16 bits.
    fn elements(x: &Self::Tensor) -> Option<Elements<'_>>;
    /// Returns whether tensors on `device` are in host memory, where [`Backend::elements`] finds their elements.
    fn is_host(device: &Self::Device) -> bool;
    /// Lends a tensor, if its memory can be lent.
    fn lend(x: &Self::Tensor) -> Option<Self::Loan>;
    /// Returns the lent tensor, if it still exists.
    fn borrow(loan: &Self::Loan) -> Option<Self::Tensor>;

    /// Returns the stream of the current thread.
    fn stream() -> Self::Stream;
    /// Runs `f` in a stream.
    fn in_stream<R>(stream: Self::Stream, f: impl FnOnce() -> R) -> R;

    /// Returns a tensor in memory of its own, if an operation in place could otherwise reach what another thread still reads.
    fn unaliased(x: Self::Tensor) -> Self::Tensor {
        x
    }
    /// Makes tensors usable by all threads, at the cost of one.
    fn share(tensors: Vec<Self::Tensor>) -> Vec<Self::Held>;
    /// Wraps a tensor that only this thread uses.
    fn unshared(x: Self::Tensor) -> Self::Held;
    /// Returns a tensor for the calling thread.
    fn held(held: &Self::Held) -> Self::Tensor;
    /// Returns the tensor by value, so that the backend may compute in place.
    fn into_held(held: Self::Held) -> Self::Tensor;

    /// Quantizes rows `[n, width]` to rows of codes `[n, words]`, stored in fp16. Only for ranks that gather by collectives.
    fn to_codes(x: Self::Tensor, format: Format) -> Self::Tensor {
        let _ = (x, format);
        unreachable!("this backend does not gather by collectives")
    }
    /// Decodes rows of codes to `[n, width]`. Only for ranks that gather by collectives.
    fn from_codes(codes: Self::Tensor, how: Quantized, dtype: DType) -> Self::Tensor {
        let _ = (codes, how, dtype);
        unreachable!("this backend does not gather by collectives")
    }

    /// Returns whether the kernels below exist on `device`.
    fn has_kernels(device: &Self::Device) -> bool {
        let _ = device;
        false
    }
    /// Returns whether [`Backend::fused_update`] has `rule` on `device`, with its state in this type. If not, the host updates.
    fn updates(device: &Self::Device, rule: &Rule, state_dtype: DType) -> bool {
        Self::has_kernels(device) && !matches!(rule, Rule::Muon { .. }) && state_dtype != DType::U8
    }
    /// Packs a bucket `[world, columns]`. `None` if an item does not fit the kernel.
    fn pack(items: Vec<PackItem<Self::Tensor>>, world: usize, dtype: DType, factor: f32) -> Option<Self::Tensor> {
        let _ = (items, world, dtype, factor);
        None
    }
    /// Unpacks a bucket of `world` rows. `None` if an item does not fit the kernel.
    fn unpack(
        bucket: Self::Tensor,
        world: usize,
        items: Vec<UnpackItem<Self::Tensor, DType>>,
        factor: f32,
    ) -> Option<Vec<Self::Tensor>> {
        let _ = (bucket, world, items, factor);
        None
    }
    /// Adds tensors in rank order. `None` if an item does not fit the kernel.
    fn sum_parts(items: Vec<SumItem<Self::Tensor, DType>>, factor: f32) -> Option<Vec<Self::Tensor>> {
        let _ = (items, factor);
        None
    }
    /// Updates parameters in few launches. `None` if an item does not fit the kernel.
    fn fused_update(
        items: Vec<UpdateItem<Self::Tensor, DType>>,
        scale: GradScale<Self::Tensor>,
    ) -> Option<Vec<Updated<Self::Tensor>>> {
        let _ = (items, scale);
        None
    }
    /// Sums the squares of each tensor, then counts elements that are not finite. `None` if a tensor does not fit the kernel.
    fn sums_of_squares(tensors: &[Self::Tensor]) -> Option<Self::Tensor> {
        let _ = tensors;
        None
    }

    /// Returns the number of a CUDA device.
    fn cuda_ordinal(device: &Self::Device) -> Option<usize> {
        let _ = device;
        None
    }
    /// Returns a tensor's address on a CUDA device; all work that computes it has been submitted.
    fn on_cuda(held: &Self::Held) -> Option<CudaSpan> {
        let _ = held;
        None
    }
    /// Allocates uninitialized memory on a CUDA device.
    fn uninit_on_cuda(device: &Self::Device, shape: &[usize], dtype: DType) -> Option<(Self::Held, CudaSpan)> {
        let _ = (device, shape, dtype);
        None
    }
    /// Begins an operation on a CUDA device after all work submitted so far. Returns the inputs if they are not on CUDA.
    #[allow(clippy::type_complexity)] // The arguments given back.
    fn begin_on_cuda(
        name: &'static str,
        inputs: Vec<Self::Tensor>,
        outputs: Vec<(Shape, DType)>,
        begin: impl Fn(&[CudaSpan], &[CudaSpan]) -> Option<End> + Send + Sync + 'static,
    ) -> Result<(Vec<Self::Tensor>, Self::Operation), Vec<Self::Tensor>> {
        let _ = (name, outputs, begin);
        Err(inputs)
    }
    /// Orders all later work after the operation, and returns its results.
    fn end_on_cuda(operation: Self::Operation, made: Vec<Self::Tensor>) -> Vec<Self::Tensor> {
        let _ = operation;
        made
    }
}

/// A tensor's values in host memory.
pub trait HostData: Clone + Send + Sync + 'static {
    /// Wraps elements.
    fn from_buffer(values: Buffer, shape: &[usize]) -> Self;
    /// Wraps page-locked memory, all of whose bytes are initialized.
    #[cfg(feature = "cuda")]
    fn from_pinned(pinned: Pinned, elements: usize, dtype: DType) -> Self;
    /// Returns the elements as a buffer to be sent.
    fn into_buffer(self) -> Buffer;
    /// Returns the type of the elements.
    fn dtype(&self) -> DType;
    /// Returns the number of elements.
    fn numel(&self) -> usize;
    /// Changes the shape; the number of elements stays.
    fn reshaped(self, shape: &[usize]) -> Self;
    /// Returns the bytes.
    fn bytes(&self) -> &[u8];
    /// Returns the bytes for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Converts to `dtype`; values that have it already are not copied.
    fn cast(self, dtype: DType) -> Self;

    /// Wraps elements as a flat tensor.
    fn flat_of(values: Buffer) -> Self {
        let len = values.len();
        Self::from_buffer(values, &[len])
    }
    /// Returns the values as a flat tensor.
    fn flat(self) -> Self {
        let len = self.numel();
        self.reshaped(&[len])
    }
    /// Returns the elements, which have type `E`.
    fn as_slice<E: bytemuck::Pod>(&self) -> &[E] {
        bytemuck::cast_slice(self.bytes())
    }
    /// Returns the elements, which have type `E`, for writing.
    fn as_mut_slice<E: bytemuck::Pod>(&mut self) -> &mut [E] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

/// A tensor that belongs to no thread: each thread gets its own tensor from it.
#[derive(Debug, Clone)]
pub struct Shared<B: Backend> {
    pub(crate) held: B::Held,
    dtype: DType,
    numel: usize,
    device: B::Device,
}

impl<B: Backend> Shared<B> {
    /// Shares `tensor`.
    pub fn new(tensor: B::Tensor) -> Self {
        Self::many(vec![tensor]).swap_remove(0)
    }

    /// Shares several tensors at the cost of one.
    pub fn many(tensors: Vec<B::Tensor>) -> Vec<Self> {
        let about = |tensor: &B::Tensor| (B::dtype(tensor), B::numel(tensor), B::device(tensor));
        let abouts: Vec<_> = tensors.iter().map(about).collect();
        let of = |(held, (dtype, numel, device))| Self { held, dtype, numel, device };
        B::share(tensors).into_iter().zip(abouts).map(of).collect()
    }

    /// Keeps `tensor` unshared: only the calling thread may use it.
    pub fn not(tensor: B::Tensor) -> Self {
        let (dtype, numel, device) = (B::dtype(&tensor), B::numel(&tensor), B::device(&tensor));
        Self { held: B::unshared(tensor), dtype, numel, device }
    }

    /// Allocates uninitialized memory on a CUDA device and returns its address, for copies from the host. `None` on other devices.
    #[cfg(feature = "cuda")]
    pub fn uninit_on_cuda(device: &B::Device, shape: &[usize], dtype: DType) -> Option<(Self, CudaSpan)> {
        let (held, span) = B::uninit_on_cuda(device, shape, dtype)?;
        Some((Self { held, dtype, numel: span.elements, device: device.clone() }, span))
    }

    /// Returns a tensor for the calling thread.
    pub fn tensor(&self) -> B::Tensor {
        B::held(&self.held)
    }

    /// Returns the tensor by value: without a second handle, so that the backend may compute in place.
    pub fn into_tensor(self) -> B::Tensor {
        B::into_held(self.held)
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns the device.
    pub fn device(&self) -> &B::Device {
        &self.device
    }
}
