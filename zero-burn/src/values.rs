//! Values on their way between a backend, host memory and other ranks.

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::reader::try_read_sync;
use burn_std::{DType, Shape};
use zero_core::Buffer;

use crate::abort::stop;

/// Returns `x` in type `dtype`.
pub(crate) fn of_type<B: Backend>(x: B::FloatTensorPrimitive, dtype: DType) -> B::FloatTensorPrimitive {
    if x.dtype() == dtype { x } else { zero_ops::cast::<B>(x, dtype.into()) }
}

/// Returns the data of a rank's shard; one filler element if the shard is empty.
pub(crate) fn piece(mut values: Vec<f32>) -> TensorData {
    values.resize(values.len().max(1), 0.0);
    let len = values.len();
    TensorData::new(values, [len])
}

/// Returns a tensor without elements. Created from data, because not every backend slices or reshapes to an empty shape.
pub(crate) fn empty<B: Backend>(shape: &Shape, dtype: DType, device: &B::Device) -> B::FloatTensorPrimitive {
    B::float_from_data(TensorData::from_bytes_vec(Vec::new(), shape.clone(), dtype), device)
}

/// Reads a tensor's data to the host and waits for it.
pub(crate) fn read<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    let data = try_read_sync(B::float_into_data(tensor)).expect("the inner backend reads synchronously");
    data.unwrap_or_else(|error| panic!("reading a tensor from the device failed: {error}"))
}

/// Returns values as data of `shape`: floats, or blocks of 8 bits.
pub(crate) fn data(buffer: Buffer, shape: Shape) -> TensorData {
    match buffer {
        Buffer::F32(values) => TensorData::new(values, shape),
        Buffer::F64(values) => TensorData::new(values, shape),
        Buffer::F16(values) => TensorData::new(values, shape),
        Buffer::Bf16(values) => TensorData::new(values, shape),
        Buffer::U8(values) => TensorData::new(values, shape),
    }
}

/// Returns data as a buffer to be sent.
pub(crate) fn buffer(data: TensorData) -> Buffer {
    const TYPES: &str = "a tensor's data has its declared type";
    match data.dtype {
        DType::F32 => Buffer::F32(data.into_vec().expect(TYPES)),
        DType::F64 => Buffer::F64(data.into_vec().expect(TYPES)),
        DType::F16 => Buffer::F16(data.into_vec().expect(TYPES)),
        DType::BF16 => Buffer::Bf16(data.into_vec().expect(TYPES)),
        other => stop(format!("a tensor of {other:?} cannot be sent: expected floats")),
    }
}
