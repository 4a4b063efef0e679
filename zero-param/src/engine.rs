//! burn-flex as the engine's tensor library, and the engine's types over it. All shards are in host memory or on a disk.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Weak;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, TensorMetadata};
use burn::module::ParamId;
use burn::tensor::{Bytes, DType, FloatDType, Shape, Slice, TensorData};
use zero_core::{Buffer, CommError};
use zero_engine::abort::stop;
use zero_engine::backend::{self, Backend, DType as EngineDType, HostData};
use zero_kernels::update::Elements;

use crate::tensors::{Raw, narrow, packed, widen};

/// burn-flex.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host;

pub(crate) type Cell = zero_engine::cell::Cell<Host>;
pub(crate) type Slot = zero_engine::cell::slot::Slot<Host>;
pub(crate) type Runtime = zero_engine::runtime::Runtime<Host>;
pub(crate) type ParamState = zero_engine::update::plan::ParamState<Host>;
pub(crate) type Step = zero_engine::update::step::Step<Host>;

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
        if self.dtype == dtype { self } else { Host::read(Host::cast(Host::from_data(self, &()), dtype)) }
    }
}

impl Backend for Host {
    type Tensor = Raw;
    type Device = ();
    type Data = Data;
    type Held = Raw;
    type Loan = Loan;
    type Operation = ();
    type ParamId = ParamId;
    type Draw = ();
    type Stream = ();

    fn device(_: &Raw) {}

    fn dtype(x: &Raw) -> EngineDType {
        engine_dtype(x.dtype())
    }

    fn numel(x: &Raw) -> usize {
        x.shape().num_elements()
    }

    fn from_data(Data { bytes, shape, dtype }: Data, (): &()) -> Raw {
        FlexTensor::new(bytes, Layout::contiguous(burn_shape(&shape)), burn_dtype(dtype))
    }

    fn read(x: Raw) -> Data {
        Data::from_tensor_data(x.into_data())
    }

    fn zeros(shape: &[usize], (): &(), dtype: EngineDType) -> Raw {
        FlexTensor::zeros(burn_shape(shape), burn_dtype(dtype))
    }

    fn reshape(x: Raw, shape: &[usize]) -> Raw {
        x.reshape(burn_shape(shape))
    }

    fn slice(x: Raw, range: Range<usize>) -> Raw {
        Flex::float_slice(x, &[Slice::from(range)])
    }

    fn cat(parts: Vec<Raw>) -> Raw {
        Flex::float_cat(parts, 0)
    }

    fn cast(x: Raw, dtype: EngineDType) -> Raw {
        match (engine_dtype(x.dtype()), dtype) {
            (from, to) if from == to => x,
            (EngineDType::F32, EngineDType::F16 | EngineDType::Bf16) => narrow(packed(x), burn_dtype(dtype)),
            (EngineDType::F16 | EngineDType::Bf16, EngineDType::F32) => widen(x),
            _ => Flex::float_cast(x, FloatDType::from(burn_dtype(dtype))),
        }
    }

    fn to_device(x: Raw, (): &()) -> Raw {
        x
    }

    fn add(a: Raw, b: Raw) -> Raw {
        Flex::float_add(a, b)
    }

    fn sub(a: Raw, b: Raw) -> Raw {
        Flex::float_sub(a, b)
    }

    fn mul_scalar(x: Raw, factor: f64) -> Raw {
        Flex::float_mul_scalar(x, factor.into())
    }

    fn sum_of_squares(x: Raw) -> f64 {
        let x = if Self::elements(&x).is_some() { x } else { x.to_contiguous() };
        Self::elements(&x).map_or_else(|| stop("expected gradients in 16 or 32 bit".into()), Elements::sum_of_squares)
    }

    fn elements(x: &Raw) -> Option<Elements<'_>> {
        match x.dtype() {
            DType::F32 => x.as_slice().map(Elements::F32),
            DType::BF16 => x.as_slice().map(Elements::Bf16),
            DType::F16 => x.as_slice().map(Elements::F16),
            _ => None,
        }
    }

    fn is_host() -> bool {
        true
    }

    fn lend(x: &Raw) -> Option<Loan> {
        Some(Loan { bytes: std::sync::Arc::downgrade(&x.data_arc()), layout: x.layout().clone(), dtype: x.dtype() })
    }

    /// Nobody writes to it meanwhile: Flex computes in place only if it holds the sole strong handle, and then moves the memory away from
    /// weak ones (`Arc::make_mut`), which ends the loan.
    fn borrow(Loan { bytes, layout, dtype }: &Loan) -> Option<Raw> {
        Some(FlexTensor::from_arc(bytes.upgrade()?, layout.clone(), *dtype))
    }

    fn stream() {}

    fn in_stream<R>((): (), f: impl FnOnce() -> R) -> R {
        f()
    }

    fn share(tensors: Vec<Raw>) -> Vec<Raw> {
        tensors
    }

    fn unshared(x: Raw) -> Raw {
        x
    }

    fn held(held: &Raw) -> Raw {
        held.clone()
    }

    fn into_held(held: Raw) -> Raw {
        held
    }
}
