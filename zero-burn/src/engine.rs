//! The inner backend as the engine's tensor library, and the engine's types over it.

use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::mem::MaybeUninit;
use std::ops::Range;

use burn_backend::distributed::DistributedParamId;
use burn_backend::{Backend, StreamId, TensorData, TensorMetadata};
#[cfg(feature = "cuda")]
use burn_std::{AllocationController, AllocationProperty, Bytes};
use burn_std::{DType, Shape, Slice};
use zero_core::Buffer;
#[cfg(feature = "cuda")]
use zero_core::copies::Pinned;
use zero_engine::backend::{self, HostData};
use zero_ops::Elements;
use zero_ops::quantized::{Format, Quantized};

use crate::abort::stop;
use crate::values;

pub(crate) use zero_engine::backend::DType as EngineDType;
pub(crate) use zero_engine::cell::{Kind, Origin};
pub(crate) use zero_engine::reduce::Phase;
pub(crate) use zero_engine::tier::SwapDisk;

/// The inner backend `B` as the engine's tensor library.
#[derive(Clone, Default)]
pub(crate) struct Inner<B>(PhantomData<fn() -> B>);

pub(crate) type Cell<B> = zero_engine::cell::Cell<Inner<B>>;
pub(crate) type Template<B> = zero_engine::cell::Template<Inner<B>>;
pub(crate) type Slot<B> = zero_engine::cell::slot::Slot<Inner<B>>;
pub(crate) type Runtime<B> = zero_engine::runtime::Runtime<Inner<B>>;
pub(crate) type ParamState<B> = zero_engine::update::plan::ParamState<Inner<B>>;
pub(crate) type Operand<B> = zero_engine::update::plan::Operand<Inner<B>>;
pub(crate) type Step<B> = zero_engine::update::step::Step<Inner<B>>;

/// Burn's tensor data in the engine.
#[derive(Clone)]
pub(crate) struct Data(pub(crate) TensorData);

/// Returns a type of Burn's as the engine knows it.
pub(crate) fn engine_dtype(dtype: DType) -> EngineDType {
    match dtype {
        DType::F32 => EngineDType::F32,
        DType::F64 => EngineDType::F64,
        DType::F16 => EngineDType::F16,
        DType::BF16 => EngineDType::Bf16,
        // Blocks of 8 bits.
        DType::U8 => EngineDType::U8,
        other => stop(format!("a tensor of type {other:?} cannot be a parameter: expected F64, F32, F16 or BF16")),
    }
}

/// Returns a type of the engine's as Burn knows it.
pub(crate) fn burn_dtype(dtype: EngineDType) -> DType {
    match dtype {
        EngineDType::F32 => DType::F32,
        EngineDType::F64 => DType::F64,
        EngineDType::F16 => DType::F16,
        EngineDType::Bf16 => DType::BF16,
        EngineDType::U8 => DType::U8,
    }
}

/// Returns a shape of the engine's as Burn knows it.
pub(crate) fn burn_shape(shape: &[usize]) -> Shape {
    Shape::from(shape.to_vec())
}

/// Returns a shape of Burn's as the engine knows it.
pub(crate) fn engine_shape(shape: &Shape) -> backend::Shape {
    shape.as_slice().into()
}

impl HostData for Data {
    fn from_buffer(values: Buffer, shape: &[usize]) -> Self {
        Self(values::data(values, burn_shape(shape)))
    }

    #[cfg(feature = "cuda")]
    fn from_pinned(pinned: Pinned, elements: usize, dtype: EngineDType) -> Self {
        let len = pinned.len();
        // SAFETY: all bytes of page-locked memory have values, `len` of them.
        let bytes = unsafe { Bytes::from_controller(Box::new(PageLocked(pinned)), len) };
        Self(TensorData::from_bytes(bytes, [elements], burn_dtype(dtype)))
    }

    fn into_buffer(self) -> Buffer {
        values::buffer(self.0)
    }

    fn dtype(&self) -> EngineDType {
        engine_dtype(self.0.dtype)
    }

    fn numel(&self) -> usize {
        self.0.num_elements()
    }

    fn reshaped(mut self, shape: &[usize]) -> Self {
        self.0.shape = burn_shape(shape);
        self
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0.bytes
    }

    fn cast(self, dtype: EngineDType) -> Self {
        Self(self.0.convert_dtype(burn_dtype(dtype)))
    }
}

impl<B: Backend> backend::Backend for Inner<B> {
    type Tensor = B::FloatTensorPrimitive;
    type Device = B::Device;
    type Data = Data;
    type Held = zero_ops::Shared<B>;
    type Loan = zero_ops::Lent;
    #[cfg(feature = "cuda")]
    type Operation = zero_ops::OnCuda;
    #[cfg(not(feature = "cuda"))]
    type Operation = ();
    type ParamId = DistributedParamId;
    type Draw = crate::random::Drawn;
    type Stream = StreamId;

    fn device(x: &Self::Tensor) -> B::Device {
        B::float_device(x)
    }

    fn dtype(x: &Self::Tensor) -> EngineDType {
        engine_dtype(x.dtype())
    }

    fn numel(x: &Self::Tensor) -> usize {
        x.shape().num_elements()
    }

    fn from_data(Data(data): Data, device: &B::Device) -> Self::Tensor {
        B::float_from_data(data, device)
    }

    fn read(x: Self::Tensor) -> Data {
        Data(values::read::<B>(x))
    }

    fn zeros(shape: &[usize], device: &B::Device, dtype: EngineDType) -> Self::Tensor {
        B::float_zeros(burn_shape(shape), device, burn_dtype(dtype).into())
    }

    fn reshape(x: Self::Tensor, shape: &[usize]) -> Self::Tensor {
        B::float_reshape(x, burn_shape(shape))
    }

    fn slice(x: Self::Tensor, range: Range<usize>) -> Self::Tensor {
        B::float_slice(x, &[Slice::from(range)])
    }

    fn cat(parts: Vec<Self::Tensor>) -> Self::Tensor {
        B::float_cat(parts, 0)
    }

    fn cast(x: Self::Tensor, dtype: EngineDType) -> Self::Tensor {
        zero_ops::cast::<B>(x, burn_dtype(dtype).into())
    }

    fn to_device(x: Self::Tensor, device: &B::Device) -> Self::Tensor {
        B::float_to_device(x, device)
    }

    fn add(a: Self::Tensor, b: Self::Tensor) -> Self::Tensor {
        B::float_add(a, b)
    }

    fn sub(a: Self::Tensor, b: Self::Tensor) -> Self::Tensor {
        B::float_sub(a, b)
    }

    fn mul_scalar(x: Self::Tensor, factor: f64) -> Self::Tensor {
        B::float_mul_scalar(x, factor.into())
    }

    fn sum_of_squares(x: Self::Tensor) -> f64 {
        // One pass over memory if the elements are accessible on the host, otherwise three.
        if let Some(sum) = zero_ops::sum_of_squares::<B>(&x) {
            return sum;
        }
        // In fp32, because squares of 16-bit values may not fit into 16 bits.
        let x = if x.dtype().size() < 4 { B::float_cast(x, DType::F32.into()) } else { x };
        let sum = B::float_sum(B::float_mul(x.clone(), x));
        values::read::<B>(sum).iter::<f64>().next().expect("a full reduction gives one number")
    }

    fn elements(x: &Self::Tensor) -> Option<Elements<'_>> {
        zero_ops::elements::<B>(x)
    }

    fn is_host(_: &B::Device) -> bool {
        zero_ops::is_host::<B>()
    }

    fn lend(x: &Self::Tensor) -> Option<zero_ops::Lent> {
        zero_ops::Lent::of::<B>(x)
    }

    fn borrow(loan: &zero_ops::Lent) -> Option<Self::Tensor> {
        loan.borrow::<B>()
    }

    fn stream() -> StreamId {
        StreamId::current()
    }

    fn in_stream<R>(stream: StreamId, f: impl FnOnce() -> R) -> R {
        stream.executes(f)
    }

    fn share(tensors: Vec<Self::Tensor>) -> Vec<Self::Held> {
        zero_ops::Shared::many(tensors)
    }

    fn unshared(x: Self::Tensor) -> Self::Held {
        zero_ops::Shared::not(x)
    }

    fn held(held: &Self::Held) -> Self::Tensor {
        held.tensor()
    }

    fn into_held(held: Self::Held) -> Self::Tensor {
        held.into_tensor()
    }

    fn to_codes(x: Self::Tensor, format: Format) -> Self::Tensor {
        zero_ops::to_codes::<B>(x, format)
    }

    fn from_codes(codes: Self::Tensor, how: Quantized, dtype: EngineDType) -> Self::Tensor {
        zero_ops::from_codes::<B>(codes, how, burn_dtype(dtype))
    }

    #[cfg(feature = "cubecl")]
    fn has_kernels(_: &B::Device) -> bool {
        zero_ops::is_cube::<B>()
    }

    #[cfg(feature = "cubecl")]
    fn pack(
        items: Vec<backend::PackItem<Self::Tensor>>,
        world: usize,
        dtype: EngineDType,
        factor: f32,
    ) -> Option<Self::Tensor> {
        zero_ops::pack::<B>(items, world, burn_dtype(dtype), factor).ok()
    }

    #[cfg(feature = "cubecl")]
    fn unpack(
        bucket: Self::Tensor,
        world: usize,
        items: Vec<backend::UnpackItem<Self::Tensor, EngineDType>>,
        factor: f32,
    ) -> Option<Vec<Self::Tensor>> {
        let items = items.into_iter().map(|item| item.typed(burn_dtype)).collect();
        zero_ops::unpack::<B>(bucket, world, items, factor).ok()
    }

    #[cfg(feature = "cubecl")]
    fn sum_parts(items: Vec<backend::SumItem<Self::Tensor, EngineDType>>, factor: f32) -> Option<Vec<Self::Tensor>> {
        let items = items.into_iter().map(|item| item.typed(burn_dtype)).collect();
        zero_ops::sum_parts::<B>(items, factor).ok()
    }

    #[cfg(feature = "cubecl")]
    fn fused_update(
        items: Vec<backend::UpdateItem<Self::Tensor, EngineDType>>,
        scale: backend::GradScale<Self::Tensor>,
    ) -> Option<Vec<backend::Updated<Self::Tensor>>> {
        let items = items.into_iter().map(|item| item.typed(burn_dtype)).collect();
        zero_ops::fused_update::<B>(items, scale).ok()
    }

    #[cfg(feature = "cubecl")]
    fn sums_of_squares(tensors: &[Self::Tensor]) -> Option<Self::Tensor> {
        zero_ops::sums_of_squares::<B>(tensors)
    }

    #[cfg(feature = "cuda")]
    fn cuda_ordinal(device: &B::Device) -> Option<usize> {
        zero_ops::devices::cuda_ordinal::<B>(device)
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(held: &Self::Held) -> Option<backend::CudaSpan> {
        held.on_cuda()
    }

    #[cfg(feature = "cuda")]
    fn uninit_on_cuda(
        device: &B::Device,
        shape: &[usize],
        dtype: EngineDType,
    ) -> Option<(Self::Held, backend::CudaSpan)> {
        zero_ops::Shared::<B>::uninit_on_cuda(device, burn_shape(shape), burn_dtype(dtype))
    }

    #[cfg(feature = "cuda")]
    fn begin_on_cuda(
        name: &'static str,
        inputs: Vec<Self::Tensor>,
        outputs: Vec<(backend::Shape, EngineDType)>,
        begin: impl Fn(&[backend::CudaSpan], &[backend::CudaSpan]) -> Option<backend::End> + Send + Sync + 'static,
    ) -> Result<(Vec<Self::Tensor>, Self::Operation), Vec<Self::Tensor>> {
        let outputs = outputs.into_iter().map(|(shape, dtype)| (burn_shape(&shape), burn_dtype(dtype))).collect();
        zero_ops::begin_on_cuda::<B>(name, inputs, outputs, begin)
    }

    #[cfg(feature = "cuda")]
    fn end_on_cuda(operation: Self::Operation, made: Vec<Self::Tensor>) -> Vec<Self::Tensor> {
        operation.end::<B>(made)
    }
}

/// Page-locked memory as the allocation of a tensor's data.
#[cfg(feature = "cuda")]
struct PageLocked(Pinned);

#[cfg(feature = "cuda")]
impl AllocationController for PageLocked {
    fn alloc_align(&self) -> usize {
        // The driver's are pages; copies of the bytes, which ask for the same, know no more than this.
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Pinned
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes: &mut [u8] = &mut self.0;
        // SAFETY: the same bytes; the caller writes only bytes that have values.
        unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let bytes: &[u8] = &self.0;
        // SAFETY: the same bytes, which have values.
        unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) }
    }
}
