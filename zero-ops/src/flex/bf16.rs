//! Products of bfloat16 tensors. `None` where an operand has another type, or runs backwards: callers then widen.

use burn_backend::DType;
use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, Shape};
use half::bf16;

use super::{classification, dims, ids, tensor};
use crate::cpu::cross_entropy::forward_backward;
use crate::cpu::parallel::gemm_threads;
use crate::cpu::product_bf16::{Begin, MatrixBf16, Out, multiply};

fn are_bf16<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> bool {
    tensors.into_iter().all(|tensor| tensor.dtype() == DType::BF16)
}

fn matrix(x: &FlexTensor) -> Option<MatrixBf16<'_>> {
    let layout = x.layout();
    let [rows, columns] = dims(x);
    let row_stride = usize::try_from(layout.strides()[0]).ok()?;
    let column_stride = usize::try_from(layout.strides()[1]).ok()?;
    let data = x.storage().get(layout.start_offset()..).unwrap_or_default();
    Some(MatrixBf16::strided(data, rows, columns, row_stride, column_stride))
}

/// The elements in row-major order without gaps; a copy only if they do not lie so.
fn packed(x: &FlexTensor) -> FlexTensor {
    if x.as_slice::<bf16>().is_some() { x.clone() } else { x.to_contiguous() }
}

fn values(x: &FlexTensor) -> &[bf16] {
    x.as_slice().expect("a packed bfloat16 tensor is a slice")
}

fn product(a: MatrixBf16<'_>, b: MatrixBf16<'_>, begin: Option<Begin<'_>>) -> FlexTensor {
    let shape = [a.rows(), b.columns()];
    let mut out = vec![bf16::ZERO; shape[0] * shape[1]];
    multiply(Out::Bf16 { data: &mut out, begin }, a, b, gemm_threads());
    FlexTensor::new(Bytes::from_elems(out), Layout::contiguous(Shape::from(shape)), DType::BF16)
}

pub(super) fn linear(
    x: &FlexTensor,
    weight: &FlexTensor,
    bias: Option<&FlexTensor>,
    residual: Option<&FlexTensor>,
) -> Option<FlexTensor> {
    if !are_bf16([x, weight].into_iter().chain(bias).chain(residual)) {
        return None;
    }
    let (bias, residual) = (bias.map(packed), residual.map(packed));
    let begin = Begin { bias: bias.as_ref().map(values), residual: residual.as_ref().map(values) };
    Some(product(matrix(x)?, matrix(weight)?, Some(begin)))
}

pub(super) fn linear_x_backward(weight: &FlexTensor, grad: &FlexTensor) -> Option<FlexTensor> {
    if !are_bf16([weight, grad]) {
        return None;
    }
    Some(product(matrix(grad)?, matrix(weight)?.transposed(), None))
}

pub(super) fn linear_weight_backward(x: &FlexTensor, grad: &FlexTensor) -> Option<FlexTensor> {
    if !are_bf16([x, grad]) {
        return None;
    }
    Some(product(matrix(x)?.transposed(), matrix(grad)?, None))
}

pub(super) fn linear_cross_entropy(
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: FlexTensor,
    ignored: Option<i64>,
) -> Option<FlexTensor> {
    if !are_bf16([x, weight]) {
        return None;
    }
    let shape = classification(x, weight);
    let (x, weight) = (packed(x), packed(weight));
    let loss = forward_backward(shape, values(&x), values(&weight), &ids(targets), ignored, None);
    Some(tensor(vec![loss], [1]))
}

/// The gradients are in fp32.
pub(super) fn linear_cross_entropy_with_gradients(
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: FlexTensor,
    ignored: Option<i64>,
) -> Option<(FlexTensor, FlexTensor, FlexTensor)> {
    if !are_bf16([x, weight]) {
        return None;
    }
    let shape = classification(x, weight);
    let (n, d, v) = (shape.rows, shape.width, shape.vocabulary);
    let (x, weight) = (packed(x), packed(weight));
    let (mut dx, mut d_weight) = (super::buffer(n * d), super::buffer(v * d));
    let gradients = Some((dx.as_mut_slice(), d_weight.as_mut_slice()));
    let loss = forward_backward(shape, values(&x), values(&weight), &ids(targets), ignored, gradients);
    Some((tensor(vec![loss], [1]), tensor(dx, [n, d]), tensor(d_weight, [v, d])))
}
