//! burn-flex tensors as slices, and conversions between their types.

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, TensorMetadata, read_sync,
};
use burn::tensor::{Bytes, DType, Element, Shape};
use bytemuck::Pod;
use half::{bf16, f16};
use zero_engine::abort::stop;
use zero_kernels::cpu::half::{Half, narrowed, widened};

/// A tensor in host memory.
pub(crate) type Raw = FlexTensor;

/// A tensor on any device, without autodiff.
pub(crate) type Floats = FloatTensor<Dispatch>;

/// Returns a tensor in host memory as one of any device.
pub(crate) fn floats(x: Raw) -> Floats {
    DispatchTensor {
        kind: DispatchTensorKind::Flex(BackendTensor::Float(x)),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// Returns the tensor if it is in host memory.
pub(crate) fn as_host(x: &Floats) -> Option<&Raw> {
    match &x.kind {
        DispatchTensorKind::Flex(BackendTensor::Float(x)) => Some(x),
        _ => None,
    }
}

/// Returns the tensor in host memory; copies it there from a device, for which it waits.
pub(crate) fn host(x: Floats) -> Raw {
    match x.kind {
        DispatchTensorKind::Flex(x) => x.float(),
        #[allow(unreachable_patterns)]
        kind => {
            let read = read_sync(Dispatch::float_into_data(DispatchTensor { kind, autodiff: x.autodiff }));
            let data = read.unwrap_or_else(|error| stop(format!("cannot read a tensor from its device: {error}")));
            let (bytes, shape, dtype) = data.into_parts();
            // They are read from the device at their first access, and keep its memory.
            FlexTensor::new(Bytes::from_bytes_vec(bytes.to_vec()), Layout::contiguous(shape), dtype)
        }
    }
}

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
