//! burn-flex tensors as slices, and conversions between their types.

use burn::backend::TensorMetadata;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Element, Shape};
use bytemuck::Pod;
use half::{bf16, f16};
use zero_kernels::cpu::half::{Half, narrowed, widened};

/// A tensor in host memory.
pub(crate) type Raw = FlexTensor;

/// Returns `x` in row-major order without gaps; copies only if it is not so already.
pub(crate) fn packed_of<E: Element + Pod>(x: FlexTensor) -> FlexTensor {
    if x.as_slice::<E>().is_some() { x } else { x.to_contiguous() }
}

pub(crate) fn packed(x: FlexTensor) -> FlexTensor {
    packed_of::<f32>(x)
}

pub(crate) fn values<E: Element + Pod>(x: &FlexTensor) -> &[E] {
    x.as_slice().expect("it was packed")
}

pub(crate) fn tensor<E: Element + Pod>(data: Vec<E>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape.into()), E::dtype())
}

pub(crate) fn widen(x: FlexTensor) -> FlexTensor {
    fn of<H: Half + Element + Pod>(x: FlexTensor) -> FlexTensor {
        let x = packed_of::<H>(x);
        tensor(widened(values::<H>(&x)), x.shape())
    }
    match x.dtype() {
        DType::BF16 => of::<bf16>(x),
        DType::F16 => of::<f16>(x),
        _ => packed(x),
    }
}

/// Rounds a tensor in fp32 to `dtype`.
pub(crate) fn narrow(x: FlexTensor, dtype: DType) -> FlexTensor {
    match dtype {
        DType::BF16 => tensor(narrowed::<bf16>(values(&x)), x.shape()),
        DType::F16 => tensor(narrowed::<f16>(values(&x)), x.shape()),
        _ => x,
    }
}
