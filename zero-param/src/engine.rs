//! Burn as the engine's tensor library, and the engine's types over it. Tensors are in host memory (burn-flex) or on a device.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Weak;

use burn::backend::flex::{FlexDevice, FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensorKind, TensorMetadata};
use burn::module::ParamId;
use burn::tensor::{Bytes, DType, FloatDType, Shape, Slice, TensorData};
use burn_std::stream::StreamId;
use zero_core::{Buffer, CommError};
use zero_engine::abort::stop;
use zero_engine::backend::{self, Backend, DType as EngineDType, GradScale, HostData, UpdateItem, Updated};
use zero_kernels::Rule;
use zero_kernels::update::Elements;

use crate::rules;
use crate::tensors::{Floats, Raw, as_host, floats, host, narrow, packed, widen};

/// Burn's tensors without autodiff, on any device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Burn;

pub(crate) type Cell = zero_engine::cell::Cell<Burn>;
pub(crate) type Slot = zero_engine::cell::slot::Slot<Burn>;
pub(crate) type Runtime = zero_engine::runtime::Runtime<Burn>;
pub(crate) type ParamState = zero_engine::update::plan::ParamState<Burn>;
pub(crate) type Step = zero_engine::update::step::Step<Burn>;

/// Where tensors are. Takes no memory in a build without devices.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Place {
    Host,
    #[cfg(feature = "cube")]
    Device(DispatchDevice),
}

impl Place {
    /// Returns where tensors of `device`, which has no autodiff, are.
    pub(crate) fn of(device: &DispatchDevice) -> Self {
        match device {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) => Self::Device(device.clone()),
            _ => Self::Host,
        }
    }

    fn device(&self) -> DispatchDevice {
        match self {
            Self::Host => DispatchDevice::Flex(FlexDevice),
            #[cfg(feature = "cube")]
            Self::Device(device) => device.clone(),
        }
    }
}

/// Returns whether threads may share tensors on devices. With burn-fusion 0.22.1 they may not: on streams of their own, they get wrong values,
/// and on one stream tensors are missing.
pub(crate) fn threads_share_tensors() -> bool {
    #[cfg(feature = "cube")]
    return !std::any::type_name::<burn::backend::Cube>().contains("Fusion");
    #[cfg(not(feature = "cube"))]
    true
}

/// A tensor that a cell holds.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    Host(Raw),
    #[cfg(feature = "cube")]
    Device(Box<Floats>),
}

/// A tensor's elements in host memory.
#[derive(Debug, Clone)]
pub(crate) struct Data {
    bytes: Bytes,
    shape: backend::Shape,
    dtype: EngineDType,
}

/// A tensor that its owner may drop at any time.
pub(crate) struct Loan {
    bytes: Weak<Bytes>,
    layout: Layout,
    dtype: DType,
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

/// Runs `f`, from which the engine unwinds with the error of a collective.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, CommError> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| match payload.downcast::<CommError>() {
        Ok(error) => *error,
        Err(other) => resume_unwind(other),
    })
}

fn engine_dtype(dtype: DType) -> EngineDType {
    match dtype {
        DType::F32 => EngineDType::F32,
        DType::F64 => EngineDType::F64,
        DType::F16 => EngineDType::F16,
        DType::BF16 => EngineDType::Bf16,
        // Blocks of 8 bits.
        DType::U8 => EngineDType::U8,
        other => stop(format!("a tensor of type {other:?} cannot be sharded: expected floats")),
    }
}

pub(crate) fn burn_shape(shape: &[usize]) -> Shape {
    Shape::from(shape.to_vec())
}

impl Data {
    /// Wraps data of Burn's.
    pub(crate) fn from_tensor_data(data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Self { bytes, shape: shape.as_slice().into(), dtype: engine_dtype(dtype) }
    }
}

impl HostData for Data {
    fn from_buffer(values: Buffer, shape: &[usize]) -> Self {
        let dtype = values.dtype();
        let bytes = match values {
            Buffer::F32(values) => Bytes::from_elems(values),
            Buffer::F64(values) => Bytes::from_elems(values),
            Buffer::F16(values) => Bytes::from_elems(values),
            Buffer::Bf16(values) => Bytes::from_elems(values),
            Buffer::U8(values) => Bytes::from_elems(values),
        };
        Self { bytes, shape: shape.into(), dtype }
    }

    fn into_buffer(self) -> Buffer {
        fn of<E: bytemuck::Pod>(bytes: Bytes) -> Vec<E> {
            bytes.try_into_vec().unwrap_or_else(|bytes| bytemuck::cast_slice(&bytes).to_vec())
        }
        match self.dtype {
            EngineDType::F32 => Buffer::F32(of(self.bytes)),
            EngineDType::F64 => Buffer::F64(of(self.bytes)),
            EngineDType::F16 => Buffer::F16(of(self.bytes)),
            EngineDType::Bf16 => Buffer::Bf16(of(self.bytes)),
            EngineDType::U8 => Buffer::U8(of(self.bytes)),
        }
    }

    fn dtype(&self) -> EngineDType {
        self.dtype
    }

    fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    fn reshaped(self, shape: &[usize]) -> Self {
        Self { shape: shape.into(), ..self }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn cast(self, dtype: EngineDType) -> Self {
        if self.dtype == dtype { self } else { Burn::read(Burn::cast(Burn::from_data(self, &Place::Host), dtype)) }
    }
}

/// Returns `x` with one dimension.
pub(crate) fn flat(x: Floats) -> Floats {
    let len = Burn::numel(&x);
    Burn::reshape(x, &[len])
}

impl Backend for Burn {
    type Tensor = Floats;
    type Device = Place;
    type Data = Data;
    type Held = Held;
    type Loan = Loan;
    type Operation = ();
    type ParamId = ParamId;
    type Draw = ();
    type Stream = StreamId;

    fn device(x: &Floats) -> Place {
        Place::of(&x.device())
    }

    fn dtype(x: &Floats) -> EngineDType {
        engine_dtype(x.dtype())
    }

    fn numel(x: &Floats) -> usize {
        x.shape().num_elements()
    }

    fn from_data(Data { bytes, shape, dtype }: Data, place: &Place) -> Floats {
        let (shape, dtype) = (burn_shape(&shape), burn_dtype(dtype));
        match place {
            Place::Host => floats(FlexTensor::new(bytes, Layout::contiguous(shape), dtype)),
            #[cfg(feature = "cube")]
            Place::Device(device) => Dispatch::float_from_data(TensorData::from_bytes(bytes, shape, dtype), device),
        }
    }

    fn read(x: Floats) -> Data {
        Data::from_tensor_data(host(x).into_data())
    }

    fn zeros(shape: &[usize], place: &Place, dtype: EngineDType) -> Floats {
        Dispatch::float_zeros(burn_shape(shape), &place.device(), FloatDType::from(burn_dtype(dtype)))
    }

    fn reshape(x: Floats, shape: &[usize]) -> Floats {
        Dispatch::float_reshape(x, burn_shape(shape))
    }

    fn slice(x: Floats, range: Range<usize>) -> Floats {
        Dispatch::float_slice(x, &[Slice::from(range)])
    }

    fn cat(parts: Vec<Floats>) -> Floats {
        Dispatch::float_cat(parts, 0)
    }

    fn cast(x: Floats, dtype: EngineDType) -> Floats {
        match (engine_dtype(x.dtype()), dtype, as_host(&x).is_some()) {
            (from, to, _) if from == to => x,
            (EngineDType::F32, EngineDType::F16 | EngineDType::Bf16, true) => {
                floats(narrow(packed(host(x)), burn_dtype(dtype)))
            }
            (EngineDType::F16 | EngineDType::Bf16, EngineDType::F32, true) => floats(widen(host(x))),
            _ => Dispatch::float_cast(x, FloatDType::from(burn_dtype(dtype))),
        }
    }

    fn to_device(x: Floats, place: &Place) -> Floats {
        if *place == Place::Host {
            return floats(host(x));
        }
        Dispatch::float_to_device(x, &place.device())
    }

    fn add(a: Floats, b: Floats) -> Floats {
        Dispatch::float_add(a, b)
    }

    fn sub(a: Floats, b: Floats) -> Floats {
        Dispatch::float_sub(a, b)
    }

    fn mul_scalar(x: Floats, factor: f64) -> Floats {
        Dispatch::float_mul_scalar(x, factor.into())
    }

    fn sum_of_squares(x: Floats) -> f64 {
        let x = if Self::elements(&x).is_some() { x } else { floats(host(x).to_contiguous()) };
        Self::elements(&x).map_or_else(|| stop("expected gradients in 16 or 32 bit".into()), Elements::sum_of_squares)
    }

    fn elements(x: &Floats) -> Option<Elements<'_>> {
        let x = as_host(x)?;
        match x.dtype() {
            DType::F32 => x.as_slice().map(Elements::F32),
            DType::BF16 => x.as_slice().map(Elements::Bf16),
            DType::F16 => x.as_slice().map(Elements::F16),
            _ => None,
        }
    }

    fn is_host(place: &Place) -> bool {
        *place == Place::Host
    }

    fn lend(x: &Floats) -> Option<Loan> {
        let x = as_host(x)?;
        Some(Loan { bytes: std::sync::Arc::downgrade(&x.data_arc()), layout: x.layout().clone(), dtype: x.dtype() })
    }

    /// Nobody writes to it meanwhile: Flex computes in place only if it holds the sole strong handle, and then moves the memory away from
    /// weak ones (`Arc::make_mut`), which ends the loan.
    fn borrow(Loan { bytes, layout, dtype }: &Loan) -> Option<Floats> {
        Some(floats(FlexTensor::from_arc(bytes.upgrade()?, layout.clone(), *dtype)))
    }

    fn updates(place: &Place, rule: &Rule, state_dtype: EngineDType) -> bool {
        !Self::is_host(place) && !matches!(rule, Rule::Muon { .. }) && state_dtype == EngineDType::F32
    }

    fn fused_update(
        items: Vec<UpdateItem<Floats, EngineDType>>,
        scale: GradScale<Floats>,
    ) -> Option<Vec<Updated<Floats>>> {
        let GradScale::Number(scale) = scale else { return None };
        Some(items.into_iter().map(|item| rules::updated(item, scale)).collect())
    }

    fn sums_of_squares(tensors: &[Floats]) -> Option<Floats> {
        let are_there = !tensors.is_empty() && tensors.iter().all(|x| as_host(x).is_none());
        are_there.then(|| rules::sums_of_squares(tensors))
    }

    fn stream() -> StreamId {
        StreamId::current()
    }

    fn in_stream<R>(stream: StreamId, f: impl FnOnce() -> R) -> R {
        stream.executes(f)
    }

    /// CubeCL 0.11 counts a handle only until a kernel's launch begins. So another thread may find itself the only holder, and launch a kernel
    /// that writes in place, before this thread's kernel that reads is in the queue.
    fn unaliased(x: Floats) -> Floats {
        match as_host(&x) {
            Some(_) => x,
            None => Dispatch::float_mul_scalar(x, 1.0.into()),
        }
    }

    fn share(tensors: Vec<Floats>) -> Vec<Held> {
        tensors.into_iter().map(Self::unshared).collect()
    }

    fn unshared(x: Floats) -> Held {
        match x.kind {
            DispatchTensorKind::Flex(x) => Held::Host(x.float()),
            #[cfg(feature = "cube")]
            _ => Held::Device(Box::new(x)),
            #[cfg(not(feature = "cube"))]
            _ => unreachable!("tensors are in host memory"),
        }
    }

    fn held(held: &Held) -> Floats {
        match held {
            Held::Host(x) => floats(x.clone()),
            #[cfg(feature = "cube")]
            Held::Device(x) => Floats::clone(x),
        }
    }

    fn into_held(held: Held) -> Floats {
        match held {
            Held::Host(x) => floats(x),
            #[cfg(feature = "cube")]
            Held::Device(x) => *x,
        }
    }
}
