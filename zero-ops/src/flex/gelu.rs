//! GELU of fp32 or bfloat16 tensors, by one kernel.

use burn_backend::Element;
use burn_flex::FlexTensor;
use bytemuck::Pod;

use super::{dims, packed, packed_of, tensor, values};
use crate::cpu::buffer_of;
use crate::cpu::gelu as cpu;
use crate::cpu::half::Number;
use crate::options::Gelu;

/// Computes GELU of `x + bias`, with `bias` in fp32.
pub(super) fn forward<T: Number + Element + Pod>(kind: Gelu, x: FlexTensor, bias: Option<FlexTensor>) -> FlexTensor {
    let (x, bias) = (packed_of::<T>(x), bias.map(packed));
    let [n, f] = dims(&x);
    let mut out = buffer_of::<T>(n * f);
    cpu::forward(kind, values::<T>(&x), bias.as_ref().map(values), &mut out);
    tensor(out, [n, f])
}

/// Returns the gradients for `x` and `bias`, with `bias` and its gradient in fp32.
pub(super) fn backward<T: Number + Element + Pod>(
    kind: Gelu,
    x: FlexTensor,
    bias: Option<FlexTensor>,
    grad: FlexTensor,
) -> (FlexTensor, Option<FlexTensor>) {
    let (x, bias, grad) = (packed_of::<T>(x), bias.map(packed), packed_of::<T>(grad));
    let [n, f] = dims(&x);
    let mut dx = buffer_of::<T>(n * f);
    let mut d_bias = bias.as_ref().map(|_| buffer_of::<f32>(f));
    let bias = bias.as_ref().map(values);
    cpu::backward(kind, values::<T>(&x), bias, values(&grad), &mut dx, d_bias.as_deref_mut());
    (tensor(dx, [n, f]), d_bias.map(|d_bias| tensor(d_bias, [f])))
}
