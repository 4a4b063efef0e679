//! The backend extension: what a backend may do better than a chain of elementary operations.
//!
//! Shape suffixes of this crate: `n` rows, `d` width, `f` wider width, `v` vocabulary, `b` sequences of `t` rows each
//! (`n = b * t`), `h` heads.

use std::ops::Range;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData};
use burn_std::{FloatDType, Shape};

use crate::fallback;
use crate::options::{AttentionOptions, Gelu};

/// A backend with fused operations.
///
/// Methods that are called by [the functions](crate#functions) come as `fused_x`, with what their backward pass needs as
/// `x_forward` and `x_backward`. The default bodies are made of Burn's operations. A backend that overrides a forward
/// must override its backward too when what is saved between them differs.
///
/// # Panics
///
/// All of them, when shapes do not fit; [the functions](crate#functions) check and name them.
pub trait FusedBackend: Backend {
    /// `x weight + bias + residual`.
    ///
    /// `x`: `[n, d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[n, f]`; returns `[n, f]`.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        residual: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        fallback::linear::<Self>(x, weight, bias, residual)
    }

    /// The gradient for `x` of [`fused_linear`](Self::fused_linear), `[n, d]`.
    fn fused_linear_x_backward(weight: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::linear_x_backward::<Self>(weight, grad)
    }

    /// The gradient for `weight` of [`fused_linear`](Self::fused_linear), `[d, f]`.
    fn fused_linear_weight_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::linear_weight_backward::<Self>(x, grad)
    }

    /// The gradient for `bias` of [`fused_linear`](Self::fused_linear), `[f]`.
    fn fused_linear_bias_backward(grad: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::linear_bias_backward::<Self>(grad)
    }

    /// Layer norm of rows `[n, d]` with `gamma` and `beta` `[d]`, <https://arxiv.org/abs/1607.06450>.
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        Self::layer_norm_forward(x, gamma, beta, epsilon).0
    }

    /// As [`fused_layer_norm`](Self::fused_layer_norm), with the mean and the reciprocal standard deviation of each row, `[n]`.
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon)
    }

    /// The gradients for `x`, `gamma` and `beta`.
    fn layer_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad)
    }

    /// `gelu(x + bias)` of rows `[n, f]` with `bias` `[f]`.
    fn fused_gelu(kind: Gelu, x: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        fallback::gelu::<Self>(kind, x, bias)
    }

    /// The gradients for `x`, and for `bias` if there is one.
    fn gelu_backward_fused(
        kind: Gelu,
        x: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        fallback::gelu_backward::<Self>(kind, x, bias, grad)
    }

    /// Attention of rows `q`, `k`, `v`, each `[n, d]`; `mask` `[b, t]` is added to the scores of each key.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        Self::attention_forward(q, k, v, mask, options).0
    }

    /// As [`fused_attention`](Self::fused_attention), with the logarithm of each row's sum of exponentials, `[b, h, t]`.
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        fallback::attention_forward::<Self>(q, k, v, mask, options)
    }

    /// The gradients for `q`, `k` and `v`, from the output and the logarithms of sums.
    #[allow(clippy::too_many_arguments)] // What the backward pass reads; a struct would be built and taken apart once.
    fn attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> [FloatTensor<Self>; 3] {
        fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options)
    }

    /// As [`fused_attention`](Self::fused_attention) of rows `[n, 3 d]` that hold query, key and value side by side.
    fn fused_packed_attention(
        qkv: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        Self::packed_attention_forward(qkv, mask, options).0
    }

    /// As [`attention_forward`](Self::attention_forward) of packed rows.
    fn packed_attention_forward(
        qkv: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        Self::attention_forward(q, k, v, mask, options)
    }

    /// The gradient of packed rows, `[n, 3 d]`.
    fn packed_attention_backward(
        qkv: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        let parts = Self::attention_backward(q, k, v, mask, out, lse, grad, options);
        Self::float_cat(parts.to_vec(), 1)
    }

    /// Rows of `table` `[v, d]` by `ids` `[n]`; returns `[n, d]`.
    fn fused_embedding(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        Self::float_select(table, 0, ids)
    }

    /// The gradient of a table of `rows` rows.
    fn fused_embedding_backward(ids: IntTensor<Self>, grad: FloatTensor<Self>, rows: usize) -> FloatTensor<Self> {
        fallback::embedding_backward::<Self>(ids, grad, rows)
    }

    /// The mean cross-entropy in nats of predicting `targets` `[n]` by `softmax(x weight^T)`, over the rows whose target is
    /// not `ignored`; 0 if there are none. `x`: `[n, d]`, `weight`: `[v, d]`; returns `[1]`.
    fn fused_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        ignored: Option<i64>,
    ) -> FloatTensor<Self> {
        fallback::linear_cross_entropy::<Self>(x, weight, targets, ignored)
    }

    /// As [`fused_linear_cross_entropy`](Self::fused_linear_cross_entropy), with the gradients of the mean for `x` and for
    /// `weight`: they are made from logits that are at hand only now, and never are all at hand. Of operands in 16 bit they
    /// are in fp32: a loss scale, without which they vanish in fp16, multiplies them only in the backward pass.
    fn linear_cross_entropy_with_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        ignored: Option<i64>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, ignored)
    }

    /// `x` `[_, _]` times the one number in `factor`, rounded once to `dtype`.
    fn scaled_by(x: FloatTensor<Self>, factor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        fallback::scaled_by::<Self>(x, factor, dtype)
    }

    /// A parameter of `shape` with elements from `elements`, which gives those of a flat range, row-major.
    ///
    /// `elements` is asked for what is kept here and for nothing else: for everything by this body, for a piece by a backend
    /// that shards parameters, and perhaps not at all.
    fn parameter_from(
        shape: Shape,
        device: &Device<Self>,
        dtype: FloatDType,
        elements: &mut dyn FnMut(Range<usize>) -> Vec<f32>,
    ) -> FloatTensor<Self> {
        let values = elements(0..shape.num_elements());
        let data = TensorData::new(values, shape).convert_dtype(dtype.into());
        Self::memory_persistent_allocations(device, data, |data| Self::float_from_data(data, device))
    }
}

#[cfg(feature = "ndarray")]
impl FusedBackend for burn_ndarray::NdArray {}
