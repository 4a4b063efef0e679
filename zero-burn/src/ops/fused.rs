//! The fused operations of [`zero_ops`]: parameters are gathered, and `B`'s kernels run.

use std::ops::Range;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_std::{FloatDType, Shape};
use zero_ops::{AttentionOptions, FusedBackend, Gelu};

use crate::birth::{Fill, parameter};

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: FusedBackend> FusedBackend for Zero<B> {
    forward! {
        fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float;
        fn fused_linear_x_backward(weight: float, grad: float) -> float;
        fn fused_linear_weight_backward(x: float, grad: float) -> float;
        fn fused_linear_bias_backward(grad: float) -> float;
        fn fused_layer_norm(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float;
        fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float;
        fn fused_attention(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float;
        fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float;
        fn fused_packed_attention(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float;
        fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float;
        fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float, options: (AttentionOptions)) -> float;
        fn fused_embedding(table: float, ids: int) -> float;
        fn fused_embedding_backward(ids: int, grad: float, rows: (usize)) -> float;
        fn fused_linear_cross_entropy(x: float, weight: float, targets: int, ignored: (Option<i64>)) -> float;
        fn scaled_by(x: float, factor: float, dtype: (FloatDType)) -> float;
    }

    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (out, mean, rstd) = B::layer_norm_forward(x.load(), gamma.load(), beta.map(ZeroTensor::load), epsilon);
        (ZeroTensor::Dense(out), ZeroTensor::Dense(mean), ZeroTensor::Dense(rstd))
    }

    fn layer_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (dx, d_gamma, d_beta) =
            B::layer_norm_backward(x.load(), gamma.load(), mean.load(), rstd.load(), grad.load());
        (ZeroTensor::Dense(dx), ZeroTensor::Dense(d_gamma), ZeroTensor::Dense(d_beta))
    }

    fn gelu_backward_fused(
        kind: Gelu,
        x: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let (dx, d_bias) = B::gelu_backward_fused(kind, x.load(), bias.map(ZeroTensor::load), grad.load());
        (ZeroTensor::Dense(dx), d_bias.map(ZeroTensor::Dense))
    }

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
        let mask = mask.map(ZeroTensor::load);
        B::attention_backward(q.load(), k.load(), v.load(), mask, out.load(), lse.load(), grad.load(), options)
            .map(ZeroTensor::Dense)
    }

    fn linear_cross_entropy_with_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        ignored: Option<i64>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (loss, dx, d_weight) = B::linear_cross_entropy_with_gradients(x.load(), weight.load(), targets, ignored);
        (ZeroTensor::Dense(loss), ZeroTensor::Dense(dx), ZeroTensor::Dense(d_weight))
    }

    /// At stage 3 only the elements of this rank's piece are asked for.
    fn parameter_from(
        shape: Shape,
        device: &Device<Self>,
        dtype: FloatDType,
        elements: &mut dyn FnMut(Range<usize>) -> Vec<f32>,
    ) -> FloatTensor<Self> {
        parameter(Fill::Elements(elements), shape, device.inner(), dtype.into())
    }
}
