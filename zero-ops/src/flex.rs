//! burn-flex: the kernels of [`crate::cpu`] on its tensors.
//!
//! Tensors in 16 bit are computed in fp32 and rounded once, at the end of an operation; products of bfloat16 are made as
//! they are (`bf16`). Tensors of other types take the default bodies.

mod bf16;
mod lent;

use std::any::Any;

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Element, TensorMetadata};
use burn_flex::{Flex, FlexTensor, Layout};
use burn_std::{Bytes, FloatDType, IntDType, Shape};
use bytemuck::Pod;

use crate::backend::FusedBackend;
use crate::cpu::attention::{Rows, RowsMut};
use crate::cpu::half::{Half, narrowed, widened};
use crate::cpu::{Matrix, attention, cross_entropy, embedding, gelu, layer_norm, linear, norm};
use crate::fallback;
use crate::options::{AttentionOptions, Gelu};

pub use lent::Lent;

/// Whether the kernels can take these tensors.
fn are_f32<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> bool {
    tensors.into_iter().all(|tensor| tensor.dtype() == DType::F32)
}

/// The tensor in row-major order without gaps; a copy only if it is not.
fn packed(x: FlexTensor) -> FlexTensor {
    if x.as_slice::<f32>().is_some() { x } else { x.to_contiguous() }
}

/// The elements of a [`packed`] tensor.
fn values(x: &FlexTensor) -> &[f32] {
    x.as_slice().expect("a packed fp32 tensor is a slice")
}

/// The sum of the squares of a tensor of any backend, in one pass over it and without a copy, if it is burn-flex's, of 32 or
/// 16 bit, and without gaps.
pub fn sum_of_squares<B: Backend>(x: &FloatTensor<B>) -> Option<f64> {
    elements::<B>(x).map(Elements::sum_of_squares)
}

/// Elements of a tensor where they lie.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [half::f16]),
    /// bfloat16.
    Bf16(&'a [half::bf16]),
}

impl Elements<'_> {
    /// The elements `range`.
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Elements::F32(x) => Elements::F32(&x[range]),
            Elements::F16(x) => Elements::F16(&x[range]),
            Elements::Bf16(x) => Elements::Bf16(&x[range]),
        }
    }

    /// The sum of their squares, in one pass.
    pub fn sum_of_squares(self) -> f64 {
        match self {
            Elements::F32(x) => norm::sum_of_squares(x),
            Elements::F16(x) => norm::sum_of_squares_of(x),
            Elements::Bf16(x) => norm::sum_of_squares_of(x),
        }
    }
}

/// Whether tensors of this backend lie in the host's memory as slices that this crate can read and write: burn-flex's do.
pub fn is_host<B: Backend>() -> bool {
    std::any::TypeId::of::<B::FloatTensorPrimitive>() == std::any::TypeId::of::<FlexTensor>()
}

/// The elements of a tensor of any backend, without a copy, if it is burn-flex's, of 32 or 16 bit, and without gaps.
pub fn elements<B: Backend>(x: &FloatTensor<B>) -> Option<Elements<'_>> {
    let x = (x as &dyn Any).downcast_ref::<FlexTensor>()?;
    match x.dtype() {
        DType::F32 => x.as_slice().map(Elements::F32),
        DType::BF16 => x.as_slice().map(Elements::Bf16),
        DType::F16 => x.as_slice().map(Elements::F16),
        _ => None,
    }
}

/// A buffer that a kernel writes whole before it reads any of it: its numbers are what the memory happens to hold. Clearing it
/// first would cost a pass over memory for each result of a step.
fn buffer(len: usize) -> Vec<f32> {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut buffer = Vec::<f32>::with_capacity(len);
        // SAFETY: the assembly is empty and may be taken to have written any bits to the memory it is shown, which is this
        // buffer's `len` elements: to the compiler they are initialised from here on, with what is there. Any bits are an f32.
        unsafe {
            core::arch::asm!("/* {} */", in(reg) buffer.as_mut_ptr(), options(nostack, preserves_flags));
            buffer.set_len(len);
        }
        buffer
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    vec![0.0; len]
}

fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(Shape::from(shape)), DType::F32)
}

/// The type of a tensor in 16 bit.
fn sixteen_bit(x: &FlexTensor) -> Option<DType> {
    matches!(x.dtype(), DType::F16 | DType::BF16).then(|| x.dtype())
}

/// The tensor in fp32, from 16 bit or as it is.
fn widen(x: FlexTensor) -> FlexTensor {
    fn converted<H: Half + Element + Pod>(x: FlexTensor) -> FlexTensor {
        let x = if x.as_slice::<H>().is_some() { x } else { x.to_contiguous() };
        let data = widened(x.as_slice::<H>().expect("a packed tensor is a slice"));
        FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(x.shape()), DType::F32)
    }
    match x.dtype() {
        DType::BF16 => converted::<half::bf16>(x),
        DType::F16 => converted::<half::f16>(x),
        _ => x,
    }
}

/// An fp32 tensor, rounded to 16 bit.
fn narrow(x: FlexTensor, dtype: DType) -> FlexTensor {
    let x = packed(x);
    let bytes = match dtype {
        DType::BF16 => Bytes::from_elems(narrowed::<half::bf16>(values(&x))),
        _ => Bytes::from_elems(narrowed::<half::f16>(values(&x))),
    };
    FlexTensor::new(bytes, Layout::contiguous(x.shape()), dtype)
}

/// A matrix as it lies, transposed or not. `None` if it runs backwards.
fn matrix(x: &FlexTensor) -> Option<Matrix<'_>> {
    let layout = x.layout();
    let [rows, columns] = dims(x);
    let [row_stride, column_stride] = [layout.strides()[0], layout.strides()[1]];
    let (row_stride, column_stride) = (usize::try_from(row_stride).ok()?, usize::try_from(column_stride).ok()?);
    // An empty view may begin beyond the end.
    let data = x.storage().get(layout.start_offset()..).unwrap_or_default();
    Some(Matrix::strided(data, rows, columns, row_stride, column_stride))
}

/// Rows of a wider matrix, as a slice of columns leaves them; a copy only if a row has gaps.
fn with_whole_rows(x: FlexTensor) -> FlexTensor {
    let strides = x.layout().strides();
    let whole = strides[1] == 1 && strides[0] >= dims::<2>(&x)[1] as isize;
    if whole { x } else { packed(x) }
}

fn rows(x: &FlexTensor) -> Rows<'_> {
    let layout = x.layout();
    let stride = usize::try_from(layout.strides()[0]).expect("rows run forwards");
    Rows { data: x.storage().get(layout.start_offset()..).unwrap_or_default(), stride }
}

fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    x.shape().dims()
}

fn ids(x: FlexTensor) -> Vec<i64> {
    let x = Flex::int_cast(x, IntDType::I64);
    let x = if x.as_slice::<i64>().is_some() { x } else { x.to_contiguous() };
    x.as_slice::<i64>().expect("a packed tensor of i64 is a slice").to_vec()
}

fn attention_shape(n: usize, d: usize, options: AttentionOptions) -> attention::Shape {
    let AttentionOptions { batch, heads, causal, scale } = options;
    let positions = n / batch;
    let head_width = d / heads;
    attention::Shape { batch, heads, head_width, queries: positions, keys: positions, causal, scale: scale as f32 }
}

impl FusedBackend for Flex {
    fn fused_linear(
        x: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        residual: Option<FlexTensor>,
    ) -> FlexTensor {
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
            return fallback::linear::<Self>(x, weight, bias, residual);
        };
        let (x, bias, residual) = (packed(x), bias.map(packed), residual.map(packed));
        let ([n, _], m) = (dims(&x), w.columns());
        let mut out = buffer(n * m);
        linear::forward(values(&x), w, bias.as_ref().map(values), residual.as_ref().map(values), &mut out);
        tensor(out, [n, m])
    }

    fn fused_linear_x_backward(weight: FlexTensor, grad: FlexTensor) -> FlexTensor {
        let _span = tracing::trace_span!("linear: gradient of x").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return bf16::linear_x_backward(&weight, &grad)
                .unwrap_or_else(|| narrow(Self::fused_linear_x_backward(widen(weight), widen(grad)), dtype));
        }
        let all_f32 = are_f32([&weight, &grad]);
        let Some(w) = all_f32.then(|| matrix(&weight)).flatten() else {
            return fallback::linear_x_backward::<Self>(weight, grad);
        };
        let grad = packed(grad);
        let ([n, _], k) = (dims(&grad), w.rows());
        let mut dx = buffer(n * k);
        linear::backward_x(values(&grad), w, &mut dx);
        tensor(dx, [n, k])
    }

    fn fused_linear_weight_backward(x: FlexTensor, grad: FlexTensor) -> FlexTensor {
        let _span = tracing::trace_span!("linear: gradient of weight").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return bf16::linear_weight_backward(&x, &grad)
                .unwrap_or_else(|| narrow(Self::fused_linear_weight_backward(widen(x), widen(grad)), dtype));
        }
        if !are_f32([&x, &grad]) {
            return fallback::linear_weight_backward::<Self>(x, grad);
        }
        let (x, grad) = (packed(x), packed(grad));
        let ([_, k], [_, m]) = (dims(&x), dims(&grad));
        let mut dw = buffer(k * m);
        linear::backward_w(values(&x), values(&grad), k, &mut dw);
        tensor(dw, [k, m])
    }

    fn fused_linear_bias_backward(grad: FlexTensor) -> FlexTensor {
        let _span = tracing::trace_span!("linear: gradient of bias").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            return narrow(Self::fused_linear_bias_backward(widen(grad)), dtype);
        }
        if !are_f32([&grad]) {
            return fallback::linear_bias_backward::<Self>(grad);
        }
        let grad = packed(grad);
        let [_, m] = dims(&grad);
        let mut db = buffer(m);
        linear::backward_bias(values(&grad), &mut db);
        tensor(db, [m])
    }

    fn layer_norm_forward(
        x: FlexTensor,
        gamma: FlexTensor,
        beta: Option<FlexTensor>,
        epsilon: f64,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let _span = tracing::trace_span!("layer norm").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            let (out, mean, rstd) = Self::layer_norm_forward(widen(x), widen(gamma), beta.map(widen), epsilon);
            // What is saved stays in fp32: it is small, and all gradients depend on it.
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

    fn layer_norm_backward(
        x: FlexTensor,
        gamma: FlexTensor,
        mean: FlexTensor,
        rstd: FlexTensor,
        grad: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
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

    fn fused_gelu(kind: Gelu, x: FlexTensor, bias: Option<FlexTensor>) -> FlexTensor {
        let _span = tracing::trace_span!("gelu").entered();
        if let Some(dtype) = sixteen_bit(&x) {
            return narrow(Self::fused_gelu(kind, widen(x), bias.map(widen)), dtype);
        }
        if !are_f32([&x].into_iter().chain(&bias)) {
            return fallback::gelu::<Self>(kind, x, bias);
        }
        let (x, bias) = (packed(x), bias.map(packed));
        let [n, f] = dims(&x);
        let mut out = buffer(n * f);
        gelu::forward(kind, values(&x), bias.as_ref().map(values), &mut out);
        tensor(out, [n, f])
    }

    fn gelu_backward_fused(
        kind: Gelu,
        x: FlexTensor,
        bias: Option<FlexTensor>,
        grad: FlexTensor,
    ) -> (FlexTensor, Option<FlexTensor>) {
        let _span = tracing::trace_span!("gelu: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let (dx, d_bias) = Self::gelu_backward_fused(kind, widen(x), bias.map(widen), widen(grad));
            return (narrow(dx, dtype), d_bias.map(|d_bias| narrow(d_bias, dtype)));
        }
        if !are_f32([&x, &grad].into_iter().chain(&bias)) {
            return fallback::gelu_backward::<Self>(kind, x, bias, grad);
        }
        let (x, bias, grad) = (packed(x), bias.map(packed), packed(grad));
        let [n, f] = dims(&x);
        let mut dx = buffer(n * f);
        let mut d_bias = bias.as_ref().map(|_| buffer(f));
        gelu::backward(kind, values(&x), bias.as_ref().map(values), values(&grad), &mut dx, d_bias.as_deref_mut());
        (tensor(dx, [n, f]), d_bias.map(|d_bias| tensor(d_bias, [f])))
    }

    fn attention_forward(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        mask: Option<FlexTensor>,
        options: AttentionOptions,
    ) -> (FlexTensor, FlexTensor) {
        let _span = tracing::trace_span!("attention").entered();
        if let Some(dtype) = sixteen_bit(&q) {
            let [q, k, v] = [q, k, v].map(widen);
            let (out, lse) = Self::attention_forward(q, k, v, mask.map(widen), options);
            return (narrow(out, dtype), lse);
        }
        if !are_f32([&q, &k, &v].into_iter().chain(&mask)) {
            return fallback::attention_forward::<Self>(q, k, v, mask, options);
        }
        let [q, k, v] = [q, k, v].map(with_whole_rows);
        let [n, d] = dims(&q);
        forward_of_rows([&q, &k, &v].map(rows), n, d, mask, options)
    }

    fn attention_backward(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        mask: Option<FlexTensor>,
        out: FlexTensor,
        lse: FlexTensor,
        grad: FlexTensor,
        options: AttentionOptions,
    ) -> [FlexTensor; 3] {
        let _span = tracing::trace_span!("attention: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let [q, k, v, out, grad] = [q, k, v, out, grad].map(widen);
            let parts = Self::attention_backward(q, k, v, mask.map(widen), out, lse, grad, options);
            return parts.map(|part| narrow(part, dtype));
        }
        if !are_f32([&q, &k, &v, &out, &lse, &grad].into_iter().chain(&mask)) {
            return fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
        }
        let [q, k, v] = [q, k, v].map(with_whole_rows);
        let [n, d] = dims(&q);
        let mut parts = [(); 3].map(|()| buffer(n * d));
        let into = parts.each_mut().map(|part| RowsMut::new(part, d));
        backward_of_rows([&q, &k, &v].map(rows), [n, d], mask, [out, lse, grad], into, options);
        parts.map(|part| tensor(part, [n, d]))
    }

    fn packed_attention_forward(
        qkv: FlexTensor,
        mask: Option<FlexTensor>,
        options: AttentionOptions,
    ) -> (FlexTensor, FlexTensor) {
        let _span = tracing::trace_span!("attention").entered();
        if let Some(dtype) = sixteen_bit(&qkv) {
            let (out, lse) = Self::packed_attention_forward(widen(qkv), mask.map(widen), options);
            return (narrow(out, dtype), lse);
        }
        if !are_f32([&qkv].into_iter().chain(&mask)) {
            let [q, k, v] = fallback::unpack::<Self>(qkv);
            return fallback::attention_forward::<Self>(q, k, v, mask, options);
        }
        let qkv = packed(qkv);
        let [n, width] = dims(&qkv);
        let d = width / 3;
        forward_of_rows(thirds(values(&qkv), d), n, d, mask, options)
    }

    fn packed_attention_backward(
        qkv: FlexTensor,
        mask: Option<FlexTensor>,
        out: FlexTensor,
        lse: FlexTensor,
        grad: FlexTensor,
        options: AttentionOptions,
    ) -> FlexTensor {
        let _span = tracing::trace_span!("attention: gradient").entered();
        if let Some(dtype) = sixteen_bit(&grad) {
            let [qkv, out, grad] = [qkv, out, grad].map(widen);
            return narrow(Self::packed_attention_backward(qkv, mask.map(widen), out, lse, grad, options), dtype);
        }
        if !are_f32([&qkv, &out, &lse, &grad].into_iter().chain(&mask)) {
            let [q, k, v] = fallback::unpack::<Self>(qkv);
            let parts = fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
            return Self::float_cat(parts.to_vec(), 1);
        }
        let qkv = packed(qkv);
        let [n, width] = dims(&qkv);
        let d = width / 3;
        let mut d_qkv = buffer(n * width);
        let into = RowsMut::split_qkv(&mut d_qkv, d);
        backward_of_rows(thirds(values(&qkv), d), [n, d], mask, [out, lse, grad], into, options);
        tensor(d_qkv, [n, width])
    }

    fn fused_embedding(table: FlexTensor, indices: FlexTensor) -> FlexTensor {
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

    fn fused_embedding_backward(indices: FlexTensor, grad: FlexTensor, table_rows: usize) -> FlexTensor {
        let _span = tracing::trace_span!("embedding: gradient").entered();
        match grad.dtype() {
            DType::BF16 => return embedding_backward_of::<half::bf16>(indices, grad, table_rows),
            DType::F16 => return embedding_backward_of::<half::f16>(indices, grad, table_rows),
            _ => {}
        }
        if !are_f32([&grad]) {
            return fallback::embedding_backward::<Self>(indices, grad, table_rows);
        }
        let (grad, indices) = (packed(grad), ids(indices));
        let [_, d] = dims(&grad);
        let mut table = vec![0.0; table_rows * d];
        embedding::backward(&indices, values(&grad), d, &mut table);
        tensor(table, [table_rows, d])
    }

    fn fused_linear_cross_entropy(
        x: FlexTensor,
        weight: FlexTensor,
        targets: FlexTensor,
        ignored: Option<i64>,
    ) -> FlexTensor {
        let _span = tracing::trace_span!("cross-entropy").entered();
        if sixteen_bit(&x).is_some() {
            return bf16::linear_cross_entropy(&x, &weight, targets.clone(), ignored)
                .unwrap_or_else(|| Self::fused_linear_cross_entropy(widen(x), widen(weight), targets, ignored));
        }
        if !are_f32([&x, &weight]) {
            return fallback::linear_cross_entropy::<Self>(x, weight, targets, ignored);
        }
        let (x, weight) = (packed(x), packed(weight));
        let shape = classification(&x, &weight);
        let loss = cross_entropy::forward_backward(shape, values(&x), values(&weight), &ids(targets), ignored, None);
        tensor(vec![loss], [1])
    }

    fn linear_cross_entropy_with_gradients(
        x: FlexTensor,
        weight: FlexTensor,
        targets: FlexTensor,
        ignored: Option<i64>,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let _span = tracing::trace_span!("cross-entropy with gradients").entered();
        if sixteen_bit(&x).is_some() {
            return bf16::linear_cross_entropy_with_gradients(&x, &weight, targets.clone(), ignored).unwrap_or_else(
                || Self::linear_cross_entropy_with_gradients(widen(x), widen(weight), targets, ignored),
            );
        }
        if !are_f32([&x, &weight]) {
            return fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, ignored);
        }
        let (x, weight) = (packed(x), packed(weight));
        let shape = classification(&x, &weight);
        let (n, d, v) = (shape.rows, shape.width, shape.vocabulary);
        let (mut dx, mut d_weight) = (buffer(n * d), buffer(v * d));
        let gradients = Some((dx.as_mut_slice(), d_weight.as_mut_slice()));
        let (x, weight, targets) = (values(&x), values(&weight), ids(targets));
        let loss = cross_entropy::forward_backward(shape, x, weight, &targets, ignored, gradients);
        (tensor(vec![loss], [1]), tensor(dx, [n, d]), tensor(d_weight, [v, d]))
    }

    fn scaled_by(x: FlexTensor, factor: FlexTensor, dtype: FloatDType) -> FlexTensor {
        let _span = tracing::trace_span!("scale").entered();
        // The usual factor: nothing was done to the loss.
        let unscaled = are_f32([&factor]) && factor.to_contiguous().as_slice::<f32>() == Some(&[1.0]);
        let own = x.dtype().into();
        let x = if unscaled { x } else { fallback::scaled_by::<Self>(x, factor, own) };
        match dtype {
            _ if dtype == own => x,
            FloatDType::BF16 | FloatDType::F16 if are_f32([&x]) => narrow(x, dtype.into()),
            _ => Self::float_cast(x, dtype),
        }
    }
}

/// The gradient of a table in 16 bit.
fn embedding_backward_of<H: Half + Element + Pod>(
    indices: FlexTensor,
    grad: FlexTensor,
    table_rows: usize,
) -> FlexTensor {
    let [_, d] = dims(&grad);
    let dtype = grad.dtype();
    let (grad, indices) = (widen(grad), ids(indices));
    let mut table = vec![H::ZERO; table_rows * d];
    embedding::backward_of(&indices, values(&grad), d, &mut table);
    FlexTensor::new(Bytes::from_elems(table), Layout::contiguous(Shape::from([table_rows, d])), dtype)
}

/// Query, key and value of packed rows.
fn thirds(qkv: &[f32], d: usize) -> [Rows<'_>; 3] {
    [0, 1, 2].map(|third| Rows { data: qkv.get(third * d..).unwrap_or_default(), stride: 3 * d })
}

fn forward_of_rows(
    [q, k, v]: [Rows<'_>; 3],
    n: usize,
    d: usize,
    mask: Option<FlexTensor>,
    options: AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let mask = mask.map(packed);
    let (batch, heads) = (options.batch, options.heads);
    let (mut out, mut lse) = (buffer(n * d), buffer(n * heads));
    let shape = attention_shape(n, d, options);
    attention::forward(shape, q, k, v, mask.as_ref().map(values), &mut out, &mut lse);
    (tensor(out, [n, d]), tensor(lse, [batch, heads, n / batch]))
}

fn backward_of_rows(
    [q, k, v]: [Rows<'_>; 3],
    [n, d]: [usize; 2],
    mask: Option<FlexTensor>,
    saved: [FlexTensor; 3],
    [dq, dk, dv]: [RowsMut<'_>; 3],
    options: AttentionOptions,
) {
    let mask = mask.map(packed);
    let [out, lse, grad] = saved.map(packed);
    let shape = attention_shape(n, d, options);
    let mask = mask.as_ref().map(values);
    attention::backward(shape, q, k, v, mask, values(&out), values(&lse), values(&grad), dq, dk, dv);
}

fn classification(x: &FlexTensor, weight: &FlexTensor) -> cross_entropy::Shape {
    let ([rows, width], [vocabulary, _]) = (dims(x), dims(weight));
    cross_entropy::Shape { rows, width, vocabulary }
}
