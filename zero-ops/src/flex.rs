//! Implementation for burn-flex: the kernels of [`crate::cpu`] on its tensors.
//!
//! Tensors in 16 bit are computed in fp32 and rounded once, at the end of an operation; products of bfloat16 are computed directly
//! (`bf16`), and so is attention where the CPU has instructions for such products. Tensors of other types use the default bodies.

mod bf16;
mod elements;
mod gelu;
mod lent;
mod quantized;

use burn_backend::ops::{FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, Element, TensorMetadata};
use burn_flex::{Flex, FlexTensor, Layout};
use burn_std::{Bytes, FloatDType, IntDType, Shape};
use bytemuck::Pod;

use crate::backend::{FusedBackend, implement, ty};
use crate::cpu::attention::{Inputs, Results, Rows, RowsMut};
use crate::cpu::half::{Half, narrowed, widened};
use crate::cpu::{
    Matrix, Operand, attention, buffer, buffer_of, cross_entropy, cross_entropy::WeightGradient, embedding, layer_norm,
    linear, product_bf16, rms_norm, rotary, swiglu,
};
use crate::fallback;
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu};
use crate::quantized::Quantized;

pub use elements::{cast, elements, is_host, sum_of_squares};
pub use lent::Lent;

/// Returns whether all tensors have type `dtype`.
fn are<'a>(dtype: DType, tensors: impl IntoIterator<Item = &'a FlexTensor>) -> bool {
    tensors.into_iter().all(|tensor| tensor.dtype() == dtype)
}

/// Returns whether the fp32 kernels can take these tensors.
fn are_f32<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> bool {
    are(DType::F32, tensors)
}

/// Returns a tensor of elements `E` in row-major order without gaps; copies only if it is not so already.
fn packed_of<E: Element + Pod>(x: FlexTensor) -> FlexTensor {
    if x.as_slice::<E>().is_some() { x } else { x.to_contiguous() }
}

fn packed(x: FlexTensor) -> FlexTensor {
    packed_of::<f32>(x)
}

/// Returns the elements of a packed tensor.
fn values<E: Element + Pod>(x: &FlexTensor) -> &[E] {
    x.as_slice().expect("a packed tensor is a slice of its elements")
}

fn tensor<E: Element + Pod, const D: usize>(data: Vec<E>, shape: [usize; D]) -> FlexTensor {
    tensor_of(data, Shape::from(shape))
}

fn tensor_of<E: Element + Pod>(data: Vec<E>, shape: Shape) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape), E::dtype())
}

/// Returns the type of a 16-bit tensor.
fn sixteen_bit(x: &FlexTensor) -> Option<DType> {
    matches!(x.dtype(), DType::F16 | DType::BF16).then(|| x.dtype())
}

/// Widens a 16-bit tensor to fp32, and returns any other unchanged.
fn widen(x: FlexTensor) -> FlexTensor {
    fn converted<H: Half + Element + Pod>(x: FlexTensor) -> FlexTensor {
        let x = packed_of::<H>(x);
        tensor_of(widened(values::<H>(&x)), x.shape())
    }
    match x.dtype() {
        DType::BF16 => converted::<half::bf16>(x),
        DType::F16 => converted::<half::f16>(x),
        _ => x,
    }
}

/// Rounds an fp32 tensor to 16 bit.
fn narrow(x: FlexTensor, dtype: DType) -> FlexTensor {
    let x = packed(x);
    match dtype {
        DType::BF16 => tensor_of(narrowed::<half::bf16>(values(&x)), x.shape()),
        _ => tensor_of(narrowed::<half::f16>(values(&x)), x.shape()),
    }
}

/// Returns a matrix in place, transposed or not. `None` if a stride is negative.
fn matrix<E: Element + Pod>(x: &FlexTensor) -> Option<Matrix<'_, E>> {
    let layout = x.layout();
    let [rows, columns] = dims(x);
    let [row_stride, column_stride] = [layout.strides()[0], layout.strides()[1]];
    let (row_stride, column_stride) = (usize::try_from(row_stride).ok()?, usize::try_from(column_stride).ok()?);
    // An empty view may begin beyond the end.
    let data = x.storage().get(layout.start_offset()..).unwrap_or_default();
    Some(Matrix::strided(data, rows, columns, row_stride, column_stride))
}

/// Returns rows of a wider matrix, such as a slice of columns; copies only if a row has gaps.
fn with_whole_rows<E: Element + Pod>(x: FlexTensor) -> FlexTensor {
    let strides = x.layout().strides();
    let whole = strides[1] == 1 && strides[0] >= dims::<2>(&x)[1] as isize;
    if whole { x } else { packed_of::<E>(x) }
}

fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    x.shape().dims()
}

fn ids(x: FlexTensor) -> Vec<i64> {
    values(&packed_of::<i64>(Flex::int_cast(x, IntDType::I64))).to_vec()
}

implement! {
    [] Flex;

    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        let _span = tracing::trace_span!("linear").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            if let Some(out) = bf16::linear(&x, &weight, bias.as_ref(), residual.as_ref()) {
                return out;
            }
            let (bias, residual) = (bias.map(widen), residual.map(widen));
            return narrow(Self::fused_linear(widen(x), widen(weight), bias, residual), dtype);
        }
        let all_f32 = are_f32([&x, &weight].into_iter().chain(&bias).chain(&residual));
        let Some(w) = all_f32.then(|| matrix(&weight)).flatten() else {
            return fallback::fused_linear::<Self>(x, weight, bias, residual);
        };
        let (x, bias, residual) = (packed(x), bias.map(packed), residual.map(packed));
        let ([n, _], m) = (dims(&x), w.columns());
        let mut out = buffer(n * m);
        linear::forward(values(&x), w, bias.as_ref().map(values), residual.as_ref().map(values), &mut out);
        tensor(out, [n, m])
    }

    fn fused_linear_x_backward(weight: float, grad: float) -> float {
        let _span = tracing::trace_span!("linear: gradient of x").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return bf16::linear_x_backward(&weight, &grad)
                .unwrap_or_else(|| narrow(Self::fused_linear_x_backward(widen(weight), widen(grad)), dtype));
        }
        let all_f32 = are_f32([&weight, &grad]);
        let Some(w) = all_f32.then(|| matrix(&weight)).flatten() else {
            return Self::linear_x_backward(weight, grad);
        };
        let grad = packed(grad);
        let ([n, _], k) = (dims(&grad), w.rows());
        let mut dx = buffer(n * k);
        linear::backward_x(values(&grad), w, &mut dx);
        tensor(dx, [n, k])
    }

    fn fused_linear_weight_backward(x: float, grad: float) -> float {
        let _span = tracing::trace_span!("linear: gradient of weight").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return bf16::linear_weight_backward(&x, &grad)
                .unwrap_or_else(|| narrow(Self::fused_linear_weight_backward(widen(x), widen(grad)), dtype));
        }
        if !are_f32([&x, &grad]) {
            return Self::linear_weight_backward(x, grad);
        }
        let (x, grad) = (packed(x), packed(grad));
        let ([_, k], [_, m]) = (dims(&x), dims(&grad));
        let mut dw = buffer(k * m);
        linear::backward_w(values(&x), values(&grad), k, &mut dw);
        tensor(dw, [k, m])
    }

    fn fused_linear_bias_backward(grad: float) -> float {
        let _span = tracing::trace_span!("linear: gradient of bias").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return narrow(Self::fused_linear_bias_backward(widen(grad)), dtype);
        }
        if !are_f32([&grad]) {
            return Self::linear_bias_backward(grad);
        }
        let grad = packed(grad);
        let [_, m] = dims(&grad);
        let mut db = buffer(m);
        linear::backward_bias(values(&grad), &mut db);
        tensor(db, [m])
    }

    fn quantized_linear(x: float, weight: float, bias: opt_float, residual: opt_float, how: (Quantized)) -> float {
        quantized::linear(x, weight, bias, residual, how)
    }

    fn dequantized(weight: float, how: (Quantized), dtype: (FloatDType)) -> float {
        quantized::dequantized(weight, how, dtype)
    }

    fn layer_norm_forward(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float_float_float {
        let _span = tracing::trace_span!("layer norm").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            let (out, mean, rstd) = Self::layer_norm_forward(widen(x), widen(gamma), beta.map(widen), epsilon);
            // Saved values stay in fp32: they are small, and all gradients depend on them.
            return (narrow(out, dtype), mean, rstd);
        }
        if !are_f32([&x, &gamma].into_iter().chain(&beta)) {
            return fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon);
        }
        let (x, gamma, beta) = (packed(x), packed(gamma), beta.map(packed));
        let [n, d] = dims(&x);
        let (mut out, mut mean, mut rstd) = (buffer(n * d), buffer(n), buffer(n));
        let beta = beta.as_ref().map(values);
        layer_norm::forward(values(&x), values(&gamma), beta, epsilon as f32, &mut out, &mut mean, &mut rstd);
        (tensor(out, [n, d]), tensor(mean, [n]), tensor(rstd, [n]))
    }

    fn layer_norm_backward(x: float, gamma: float, mean: float, rstd: float, grad: float) -> float_float_float {
        let _span = tracing::trace_span!("layer norm: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let [x, gamma, grad] = [x, gamma, grad].map(widen);
            let (dx, d_gamma, d_beta) = Self::layer_norm_backward(x, gamma, mean, rstd, grad);
            return (narrow(dx, dtype), narrow(d_gamma, dtype), narrow(d_beta, dtype));
        }
        if !are_f32([&x, &gamma, &mean, &rstd, &grad]) {
            return fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad);
        }
        let [x, gamma, mean, rstd, grad] = [x, gamma, mean, rstd, grad].map(packed);
        let [n, d] = dims(&x);
        let (mut dx, mut d_gamma, mut d_beta) = (buffer(n * d), buffer(d), buffer(d));
        let [x, gamma, mean, rstd, grad] = [&x, &gamma, &mean, &rstd, &grad].map(values);
        layer_norm::backward(x, gamma, mean, rstd, grad, &mut dx, &mut d_gamma, Some(&mut d_beta));
        (tensor(dx, [n, d]), tensor(d_gamma, [d]), tensor(d_beta, [d]))
    }

    fn rms_norm_forward(x: float, gamma: float, epsilon: (f64)) -> float_float {
        let _span = tracing::trace_span!("rms norm").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            let (out, rrms) = Self::rms_norm_forward(widen(x), widen(gamma), epsilon);
            return (narrow(out, dtype), rrms);
        }
        if !are_f32([&x, &gamma]) {
            return fallback::rms_norm_forward::<Self>(x, gamma, epsilon);
        }
        let (x, gamma) = (packed(x), packed(gamma));
        let [n, d] = dims(&x);
        let (mut out, mut rrms) = (buffer(n * d), buffer(n));
        rms_norm::forward(values(&x), values(&gamma), epsilon as f32, &mut out, &mut rrms);
        (tensor(out, [n, d]), tensor(rrms, [n]))
    }

    fn rms_norm_backward(x: float, gamma: float, rrms: float, grad: float) -> float_float {
        let _span = tracing::trace_span!("rms norm: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let (dx, d_gamma) = Self::rms_norm_backward(widen(x), widen(gamma), rrms, widen(grad));
            return (narrow(dx, dtype), narrow(d_gamma, dtype));
        }
        if !are_f32([&x, &gamma, &rrms, &grad]) {
            return fallback::rms_norm_backward::<Self>(x, gamma, rrms, grad);
        }
        let [x, gamma, rrms, grad] = [x, gamma, rrms, grad].map(packed);
        let [n, d] = dims(&x);
        let (mut dx, mut d_gamma) = (buffer(n * d), buffer(d));
        let [x, gamma, rrms, grad] = [&x, &gamma, &rrms, &grad].map(values);
        rms_norm::backward(x, gamma, rrms, grad, &mut dx, &mut d_gamma);
        (tensor(dx, [n, d]), tensor(d_gamma, [d]))
    }

    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        let _span = tracing::trace_span!("rotary positions").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            return narrow(Self::fused_rotary(widen(x), widen(cos), widen(sin), back), dtype);
        }
        if !are_f32([&x, &cos, &sin]) {
            return fallback::fused_rotary::<Self>(x, cos, sin, back);
        }
        let [x, cos, sin] = [x, cos, sin].map(packed);
        let ([n, d], [_, half]) = (dims(&x), dims(&cos));
        let mut out = buffer(n * d);
        rotary::turn(values(&x), [&cos, &sin].map(values), half, d, back, &mut out);
        tensor(out, [n, d])
    }

    fn fused_swiglu(gate: float, up: float) -> float {
        let _span = tracing::trace_span!("swiglu").entered();
        if let Some(dtype) = sixteen_bit(&gate) {
            return narrow(Self::fused_swiglu(widen(gate), widen(up)), dtype);
        }
        if !are_f32([&gate, &up]) {
            return fallback::fused_swiglu::<Self>(gate, up);
        }
        let [gate, up] = [gate, up].map(packed);
        let [n, f] = dims(&gate);
        let mut out = buffer(n * f);
        swiglu::forward(values(&gate), values(&up), &mut out);
        tensor(out, [n, f])
    }

    fn swiglu_backward(gate: float, up: float, grad: float) -> float_float {
        let _span = tracing::trace_span!("swiglu: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let (d_gate, d_up) = Self::swiglu_backward(widen(gate), widen(up), widen(grad));
            return (narrow(d_gate, dtype), narrow(d_up, dtype));
        }
        if !are_f32([&gate, &up, &grad]) {
            return fallback::swiglu_backward::<Self>(gate, up, grad);
        }
        let [gate, up, grad] = [gate, up, grad].map(packed);
        let [n, f] = dims(&gate);
        let (mut d_gate, mut d_up) = (buffer(n * f), buffer(n * f));
        swiglu::backward(values(&gate), values(&up), values(&grad), &mut d_gate, &mut d_up);
        (tensor(d_gate, [n, f]), tensor(d_up, [n, f]))
    }

    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        let _span = tracing::trace_span!("gelu").entered();
        match x.dtype() {
            DType::F16 => narrow(Self::fused_gelu(kind, widen(x), bias.map(widen)), DType::F16),
            DType::BF16 => gelu::forward::<half::bf16>(kind, x, bias.map(widen)),
            _ if are_f32([&x].into_iter().chain(&bias)) => gelu::forward::<f32>(kind, x, bias),
            _ => fallback::fused_gelu::<Self>(kind, x, bias),
        }
    }

    fn gelu_backward_fused(kind: (Gelu), x: float, bias: opt_float, grad: float) -> float_opt_float {
        let _span = tracing::trace_span!("gelu: gradient").entered();
        match grad.dtype() {
            DType::BF16 if are(DType::BF16, [&x]) => {
                let (dx, d_bias) = gelu::backward::<half::bf16>(kind, x, bias.map(widen), grad);
                (dx, d_bias.map(|d_bias| narrow(d_bias, DType::BF16)))
            }
            dtype @ (DType::BF16 | DType::F16) => {
                let (dx, d_bias) = Self::gelu_backward_fused(kind, widen(x), bias.map(widen), widen(grad));
                (narrow(dx, dtype), d_bias.map(|d_bias| narrow(d_bias, dtype)))
            }
            _ if are_f32([&x, &grad].into_iter().chain(&bias)) => gelu::backward::<f32>(kind, x, bias, grad),
            _ => fallback::gelu_backward_fused::<Self>(kind, x, bias, grad),
        }
    }

    fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        attention_forward([q, k, v], mask, options)
    }

    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        attention_backward([q, k, v], mask, [out, lse, grad], options)
    }

    fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        attention_forward([qkv], mask, options)
    }

    fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float,
                                 options: (AttentionOptions)) -> float {
        let [gradient] = attention_backward([qkv], mask, [out, lse, grad], options);
        gradient
    }

    fn fused_embedding(table: float, indices: int) -> float {
        let _span = tracing::trace_span!("embedding").entered();
        if !are_f32([&table]) {
            return Self::float_select(table, 0, indices);
        }
        let (table, indices) = (packed(table), ids(indices));
        let [_, d] = dims(&table);
        let n = indices.len();
        let mut out = buffer(n * d);
        embedding::forward(values(&table), &indices, &mut out);
        tensor(out, [n, d])
    }

    fn fused_embedding_backward(indices: int, grad: float, table_rows: (usize)) -> float {
        let _span = tracing::trace_span!("embedding: gradient").entered();
        match grad.dtype() {
            DType::BF16 => return embedding_backward_of::<half::bf16>(indices, grad, table_rows),
            DType::F16 => return embedding_backward_of::<half::f16>(indices, grad, table_rows),
            _ => {}
        }
        if !are_f32([&grad]) {
            return fallback::fused_embedding_backward::<Self>(indices, grad, table_rows);
        }
        let (grad, indices) = (packed(grad), ids(indices));
        let [_, d] = dims(&grad);
        let mut table = vec![0.0; table_rows * d];
        embedding::backward(&indices, values(&grad), d, &mut table);
        tensor(table, [table_rows, d])
    }

    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float {
        let _span = tracing::trace_span!("cross-entropy").entered();
        if sixteen_bit(&x).is_some() && !are(DType::BF16, [&x, &weight]) {
            return Self::fused_linear_cross_entropy(widen(x), widen(weight), targets, options);
        }
        match x.dtype() {
            DType::BF16 => cross_entropy_of::<half::bf16>(x, weight, targets, options, None),
            DType::F32 if are_f32([&weight]) => cross_entropy_of::<f32>(x, weight, targets, options, None),
            _ => fallback::fused_linear_cross_entropy::<Self>(x, weight, targets, options),
        }
    }

    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int,
                                           options: (CrossEntropyOptions)) -> float_float_float {
        match cross_entropy_with(&x, &weight, &targets, options, true) {
            Some((loss, dx, d_weight)) => (loss, dx, d_weight),
            None => fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, options),
        }
    }

    fn linear_cross_entropy_with_x_gradient(x: float, weight: float, targets: int,
                                            options: (CrossEntropyOptions)) -> float_float {
        let (loss, dx, _) = match cross_entropy_with(&x, &weight, &targets, options, false) {
            Some(made) => made,
            None => fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, options),
        };
        (loss, dx)
    }

    fn scaled_by(x: float, factor: float, dtype: (FloatDType)) -> float {
        let _span = tracing::trace_span!("scale").entered();
        // Usually 1: the loss was not scaled.
        let unscaled = widen(factor.clone()).to_contiguous().as_slice::<f32>() == Some(&[1.0]);
        let x = match unscaled {
            true => x,
            false => {
                let x = widen(x);
                let own = x.dtype().into();
                fallback::scaled_by::<Self>(x, widen(factor), own)
            }
        };
        match dtype {
            _ if dtype == x.dtype().into() => x,
            FloatDType::BF16 | FloatDType::F16 if are_f32([&x]) => narrow(x, dtype.into()),
            _ => Self::float_cast(x, dtype),
        }
    }
}

/// Returns the gradient of a table in 16 bit.
fn embedding_backward_of<H: Half + Element + Pod>(
    indices: FlexTensor,
    grad: FlexTensor,
    table_rows: usize,
) -> FlexTensor {
    let [_, d] = dims(&grad);
    let (grad, indices) = (widen(grad), ids(indices));
    let mut table = vec![H::ZERO; table_rows * d];
    embedding::backward_of(&indices, values(&grad), d, &mut table);
    tensor(table, [table_rows, d])
}

/// Returns the loss, and computes its gradients if there are buffers for them.
fn cross_entropy_of<T: Operand + Element + Pod>(
    x: FlexTensor,
    weight: FlexTensor,
    targets: FlexTensor,
    options: CrossEntropyOptions,
    gradients: Option<(&mut [f32], WeightGradient<'_, T>)>,
) -> FlexTensor {
    let ([rows, width], [vocabulary, _]) = (dims(&x), dims(&weight));
    let shape = cross_entropy::Shape { rows, width, vocabulary };
    let (x, weight) = (packed_of::<T>(x), packed_of::<T>(weight));
    let targets = ids(targets);
    let loss = cross_entropy::forward_backward::<T>(shape, values(&x), values(&weight), &targets, options, gradients);
    tensor(vec![loss], [1])
}

/// Returns the loss with the gradients of `x` and, with `of_weight`, of `weight` (else an empty tensor), if a kernel supports these types.
fn cross_entropy_with(
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: &FlexTensor,
    options: CrossEntropyOptions,
    of_weight: bool,
) -> Option<(FlexTensor, FlexTensor, FlexTensor)> {
    let _span = tracing::trace_span!("cross-entropy with gradients").entered();
    let (x, weight, targets) = (x.clone(), weight.clone(), targets.clone());
    if sixteen_bit(&x).is_some() && !are(DType::BF16, [&x, &weight]) {
        return cross_entropy_with(&widen(x), &widen(weight), &targets, options, of_weight);
    }
    Some(match x.dtype() {
        DType::BF16 => gradients_of::<half::bf16>(x, weight, targets, options, of_weight),
        DType::F32 if are_f32([&weight]) => gradients_of::<f32>(x, weight, targets, options, of_weight),
        _ => return None,
    })
}

/// Returns the loss with its gradients. That of the weight has the weight's type if the rows are one chunk, and otherwise is in fp32.
fn gradients_of<T: Operand + Element + Pod>(
    x: FlexTensor,
    weight: FlexTensor,
    targets: FlexTensor,
    options: CrossEntropyOptions,
    of_weight: bool,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    let ([rows, width], [vocabulary, _]) = (dims(&x), dims(&weight));
    let shape = cross_entropy::Shape { rows, width, vocabulary };
    let mut dx = buffer(rows * width);
    if of_weight && cross_entropy::is_one_chunk::<T>(shape) {
        let mut d_weight = buffer_of::<T>(vocabulary * width);
        let gradients = (&mut dx[..], WeightGradient::Rounded(&mut d_weight));
        let loss = cross_entropy_of::<T>(x, weight, targets, options, Some(gradients));
        return (loss, tensor(dx, [rows, width]), tensor(d_weight, [vocabulary, width]));
    }
    let vocabulary = if of_weight { vocabulary } else { 0 };
    let mut d_weight = buffer(vocabulary * width);
    let gradients = (&mut dx[..], WeightGradient::Sums(&mut d_weight));
    let loss = cross_entropy_of::<T>(x, weight, targets, options, Some(gradients));
    (loss, tensor(dx, [rows, width]), tensor(d_weight, [vocabulary, width]))
}

/// Computes attention of query, key and value, or of all three in packed rows.
fn attention_forward<const N: usize>(
    parts: [FlexTensor; N],
    mask: Option<FlexTensor>,
    options: AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let _span = tracing::trace_span!("attention").entered();
    if is_in_bf16(&parts, options) {
        return attention_forward_of::<half::bf16, N>(parts, mask.map(widen), options);
    }
    if let Some(dtype) = sixteen_bit(&parts[0]) {
        let (out, lse) = attention_forward(parts.map(widen), mask.map(widen), options);
        return (narrow(out, dtype), lse);
    }
    if options.dropout.is_some() || !are_f32(parts.iter().chain(&mask)) {
        let [q, k, v] = apart(parts);
        return fallback::attention_forward::<Flex>(q, k, v, mask, options);
    }
    attention_forward_of::<f32, N>(parts, mask, options)
}

/// Returns whether a kernel computes attention of these parts in bfloat16.
fn is_in_bf16(parts: &[FlexTensor], options: AttentionOptions) -> bool {
    options.dropout.is_none() && are(DType::BF16, parts) && product_bf16::is_native()
}

fn attention_forward_of<T: Operand + Element + Pod, const N: usize>(
    parts: [FlexTensor; N],
    mask: Option<FlexTensor>,
    options: AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let (parts, mask) = (parts.map(with_heads::<T, N>()), mask.map(packed));
    let inputs = inputs::<T, N>(&parts, mask.as_ref().map(values), options);
    let shape = inputs.shape;
    let (n, d) = (shape.batch * shape.queries, shape.heads * shape.head_width);
    let (mut out, mut lse) = (buffer_of::<T>(n * d), buffer(n * shape.heads));
    attention::forward(inputs, &mut out, &mut lse);
    (tensor(out, [n, d]), tensor(lse, [shape.batch, shape.heads, shape.queries]))
}

/// Returns the gradients of the `parts` of [`attention_forward`]. `saved`: the output, the logarithms of sums and the output's gradient.
fn attention_backward<const N: usize>(
    parts: [FlexTensor; N],
    mask: Option<FlexTensor>,
    saved: [FlexTensor; 3],
    options: AttentionOptions,
) -> [FlexTensor; N] {
    let _span = tracing::trace_span!("attention: gradient").entered();
    if is_in_bf16(&parts, options) && are(DType::BF16, [&saved[0], &saved[2]]) {
        return attention_backward_of::<half::bf16, N>(parts, mask.map(widen), saved, options);
    }
    if let Some(dtype) = sixteen_bit(&saved[2]) {
        let gradients = attention_backward(parts.map(widen), mask.map(widen), saved.map(widen), options);
        return gradients.map(|gradient| narrow(gradient, dtype));
    }
    if options.dropout.is_some() || !are_f32(parts.iter().chain(&saved).chain(&mask)) {
        let ([q, k, v], [out, lse, grad]) = (apart(parts), saved);
        let gradients = fallback::attention_backward::<Flex>(q, k, v, mask, out, lse, grad, options).to_vec();
        let gradients = if N == 1 { vec![Flex::float_cat(gradients, 1)] } else { gradients };
        return gradients.try_into().unwrap_or_else(|_| unreachable!("packed rows are one part, others three"));
    }
    attention_backward_of::<f32, N>(parts, mask, saved, options)
}

fn attention_backward_of<T: Operand + Element + Pod, const N: usize>(
    parts: [FlexTensor; N],
    mask: Option<FlexTensor>,
    saved: [FlexTensor; 3],
    options: AttentionOptions,
) -> [FlexTensor; N] {
    let (parts, mask) = (parts.map(with_heads::<T, N>()), mask.map(packed));
    let [out, lse, g] = saved;
    let (out, lse, g) = (packed_of::<T>(out), packed(lse), packed_of::<T>(g));
    let inputs = inputs::<T, N>(&parts, mask.as_ref().map(values), options);
    let sizes = parts.each_ref().map(dims::<2>);
    let [d, c] = [inputs.shape.heads, inputs.shape.kv_heads].map(|heads| heads * inputs.shape.head_width);
    let mut gradients = sizes.map(|[rows, width]| buffer_of::<T>(rows * width));
    let grads = match &mut gradients[..] {
        [packed] => RowsMut::split_qkv(packed, d),
        [dq, dk, dv] => [RowsMut::new(dq, d), RowsMut::new(dk, c), RowsMut::new(dv, c)],
        _ => unreachable!("packed rows are one part, others three"),
    };
    let results = Results { out: values(&out), lse: values(&lse), g: values(&g) };
    attention::backward(inputs, results, grads);
    let mut sizes = sizes.into_iter();
    gradients.map(|gradient| tensor(gradient, sizes.next().expect("each part has a gradient")))
}

fn apart<const N: usize>(parts: [FlexTensor; N]) -> [FlexTensor; 3] {
    let parts = Vec::from(parts).try_into();
    parts.unwrap_or_else(|packed: Vec<FlexTensor>| fallback::unpack::<Flex>(packed[0].clone()))
}

/// Returns the function that gives a part a layout that [`inputs`] can take.
fn with_heads<E: Element + Pod, const N: usize>() -> fn(FlexTensor) -> FlexTensor {
    if N == 1 { packed_of::<E> } else { with_whole_rows::<E> }
}

/// Returns the sizes, and where queries, keys and values are in memory.
fn inputs<'a, T: Element + Pod, const N: usize>(
    parts: &'a [FlexTensor; N],
    key_mask: Option<&'a [f32]>,
    options: AttentionOptions,
) -> Inputs<'a, T> {
    let AttentionOptions { batch, heads, causal, window, scale, cap, .. } = options;
    let [n, width] = dims(&parts[0]);
    let d = if N == 1 { width / 3 } else { width };
    // In packed rows there are as many keys as queries, of the same width.
    let [m, c] = parts.get(1).map_or([n, d], dims);
    let head_width = d / heads;
    let shape = attention::Shape {
        batch,
        heads,
        kv_heads: if c == d { heads } else { c / head_width },
        head_width,
        queries: n / batch,
        keys: m / batch,
        causal,
        window,
        scale: scale as f32,
        cap: cap.map(|cap| cap as f32),
    };
    let [q, k, v] = [0, 1, 2].map(|i| {
        if N == 1 {
            return Rows { data: values::<T>(&parts[0]).get(i * d..).unwrap_or_default(), stride: width };
        }
        let layout = parts[i].layout();
        let stride = usize::try_from(layout.strides()[0]).expect("rows run forwards");
        Rows { data: parts[i].storage().get(layout.start_offset()..).unwrap_or_default(), stride }
    });
    Inputs { shape, q, k, v, key_mask }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `values` as a vector of type `E`, scaled by `factor` to the same type.
    fn scaled<E: Element + Pod>(values: &[E], factor: f32) -> Vec<E> {
        let x = tensor(values.to_vec(), [1, values.len()]);
        let dtype = x.dtype().into();
        Flex::scaled_by(x, tensor(vec![factor], [1]), dtype).into_data().into_vec().unwrap()
    }

    #[test]
    fn a_gradient_is_scaled_in_fp32_or_wider_and_keeps_its_type() {
        let third = 1.0 / 3.0_f32;
        assert_eq!(scaled(&[1.0 + 1e-12_f64, 3.0], 1.0), [1.0 + 1e-12, 3.0]);
        assert_eq!(scaled(&[1.0 + 1e-12_f64, 3.0], third), [(1.0 + 1e-12) * f64::from(third), 3.0 * f64::from(third)]);
        let values = [1.5_f32, -0.7, 1e-3].map(half::bf16::from_f32);
        let expected = values.map(|value| half::bf16::from_f32(value.to_f32() * third));
        assert_eq!(scaled(&values, third), expected);
        assert_eq!(scaled(&values, 1.0), values);
    }
}
