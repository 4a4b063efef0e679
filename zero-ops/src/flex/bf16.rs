//! Products of bfloat16 tensors. `None` if an operand has another type or a negative stride: callers then widen.

use burn_backend::DType;
use burn_flex::FlexTensor;
use half::bf16;

use super::{are, matrix, packed_of, tensor, values};
use crate::cpu::buffer_of;
use crate::cpu::parallel::gemm_threads;
use crate::cpu::product_bf16::{Begin, MatrixBf16, Out, multiply};

fn product(a: MatrixBf16<'_>, b: MatrixBf16<'_>, begin: Option<Begin<'_>>) -> FlexTensor {
    let shape = [a.rows(), b.columns()];
    let mut out = buffer_of::<bf16>(shape[0] * shape[1]);
    multiply(Out::Bf16 { data: &mut out, begin }, a, b, gemm_threads());
    tensor(out, shape)
}

pub(super) fn linear(
    x: &FlexTensor,
    weight: &FlexTensor,
    bias: Option<&FlexTensor>,
    residual: Option<&FlexTensor>,
) -> Option<FlexTensor> {
    if !are(DType::BF16, [x, weight].into_iter().chain(bias).chain(residual)) {
        return None;
    }
    let [bias, residual] = [bias, residual].map(|x| x.cloned().map(packed_of::<bf16>));
    let begin = Begin { bias: bias.as_ref().map(values), residual: residual.as_ref().map(values) };
    Some(product(matrix(x)?, matrix(weight)?, Some(begin)))
}

pub(super) fn linear_x_backward(weight: &FlexTensor, grad: &FlexTensor) -> Option<FlexTensor> {
    if !are(DType::BF16, [weight, grad]) {
        return None;
    }
    Some(product(matrix(grad)?, matrix(weight)?.transposed(), None))
}

pub(super) fn linear_weight_backward(x: &FlexTensor, grad: &FlexTensor) -> Option<FlexTensor> {
    if !are(DType::BF16, [x, grad]) {
        return None;
    }
    Some(product(matrix(x)?.transposed(), matrix(grad)?, None))
}
