//! Values on their way between a backend, host memory and other ranks.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use zero_core::Buffer;
use zero_kernels::update::Elements;

use crate::backend::{Backend, DType, HostData};

/// Returns `x` on `device`.
pub fn here<B: Backend>(x: B::Tensor, device: &B::Device) -> B::Tensor {
    if B::device(&x) == *device { x } else { B::to_device(x, device) }
}

/// Returns `x` in type `dtype`.
pub fn of_type<B: Backend>(x: B::Tensor, dtype: DType) -> B::Tensor {
    if B::dtype(&x) == dtype { x } else { B::cast(x, dtype) }
}

/// Returns elements `range` of a flat tensor.
pub fn part<B: Backend>(flat: B::Tensor, range: Range<usize>) -> B::Tensor {
    match range.len() == B::numel(&flat) {
        true => flat,
        false => B::slice(flat, range),
    }
}

/// Converts data to f32, unless it is in 16 bits.
pub fn narrow_or_f32<D: HostData>(data: D) -> D {
    match data.dtype() {
        DType::F16 | DType::Bf16 => data,
        _ => data.cast(DType::F32),
    }
}

/// Returns a flat tensor of `values` on `device`.
pub fn flat_tensor<B: Backend>(values: Buffer, device: &B::Device) -> B::Tensor {
    B::from_data(B::Data::flat_of(values), device)
}

/// Returns the sum of squares of elements `range` of data in host memory.
pub fn sum_of_squares_on_host<D: HostData>(data: &D, range: Range<usize>) -> f64 {
    match elements_of(data) {
        Some(elements) => elements.slice(range).sum_of_squares(),
        None => numbers_of(data).skip(range.start).take(range.len()).map(|x| x * x).sum(),
    }
}

/// Returns the elements of 32-bit or 16-bit data.
pub fn elements_of<D: HostData>(data: &D) -> Option<Elements<'_>> {
    Some(match data.dtype() {
        DType::F32 => Elements::F32(data.as_slice()),
        DType::F16 => Elements::F16(data.as_slice()),
        DType::Bf16 => Elements::Bf16(data.as_slice()),
        _ => return None,
    })
}

/// Returns the elements of floats in f64.
pub fn numbers_of<D: HostData>(data: &D) -> impl Iterator<Item = f64> {
    let numbers: Vec<f64> = match data.dtype() {
        DType::F32 => data.as_slice::<f32>().iter().map(|&x| f64::from(x)).collect(),
        DType::F64 => data.as_slice::<f64>().to_vec(),
        DType::F16 => data.as_slice::<half::f16>().to_f64_vec(),
        DType::Bf16 => data.as_slice::<half::bf16>().to_f64_vec(),
        DType::U8 => data.bytes().iter().map(|&x| f64::from(x)).collect(),
    };
    numbers.into_iter()
}
