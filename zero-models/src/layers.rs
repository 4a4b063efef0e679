//! Layers, applied with fused operations: the modules keep their parameters, names and records.
//!
//! Shape suffixes: `n` rows, `d` and `f` widths.

use burn::module::Param;
use burn::nn::{Dropout, LayerNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use zero_ops::FusedBackend;

use crate::Activation;
use crate::attention::is_active;
use crate::linear::Linear;

/// Token ids, or what there is a number of for each: `[b, t]`.
pub type Ids<B> = Tensor<B, 2, Int>;

/// Whether a model with so many positions, which its configuration has as `field`, reads rows of `t` tokens.
///
/// # Panics
/// If it does not.
pub(crate) fn check_positions(t: usize, positions: usize, field: &str) {
    assert!(
        t <= positions,
        "rows of {t} tokens, but the model has {positions} positions: shorten the rows or raise {field}"
    );
}

/// Rows of `b` sequences, one after the other, as `[b, t, width]`.
pub(crate) fn by_sequence<B: Backend>(x_nd: Tensor<B, 2>, [b, t]: [usize; 2]) -> Tensor<B, 3> {
    let [_, d] = x_nd.dims();
    x_nd.reshape([b, t, d])
}

fn bias<B: Backend>(layer: &Linear<B>) -> Option<Tensor<B, 1>> {
    layer.bias.as_ref().map(|bias| bias.val())
}

/// `layer` of rows.
pub(crate) fn dense<B: FusedBackend>(layer: &Linear<B>, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    layer.product(x_nd, bias(layer), None)
}

/// `layer` of rows, dropped out, added to `residual_nf`.
pub(crate) fn dense_onto<B: FusedBackend>(
    layer: &Linear<B>,
    x_nd: Tensor<B, 2>,
    dropout: &Dropout,
    residual_nf: Tensor<B, 2>,
) -> Tensor<B, 2> {
    if is_active(dropout, &x_nd) {
        residual_nf + dropout.forward(dense(layer, x_nd))
    } else {
        layer.product(x_nd, bias(layer), Some(residual_nf))
    }
}

/// `activation` of `layer` of rows; the bias is added where the activation reads.
pub(crate) fn dense_activated<B: FusedBackend>(
    layer: &Linear<B>,
    activation: Activation,
    x_nd: Tensor<B, 2>,
) -> Tensor<B, 2> {
    let product_nf = layer.product(x_nd, None, None);
    activation.forward_with_bias(product_nf, bias(layer))
}

/// Rows divided by their root mean square, times `gamma_d` and `offset` together.
pub(crate) fn scaled<B: FusedBackend>(
    gamma_d: &Param<Tensor<B, 1>>,
    offset: f64,
    epsilon: f64,
    x_nd: Tensor<B, 2>,
) -> Tensor<B, 2> {
    let gamma_d = gamma_d.val();
    zero_ops::rms_norm(x_nd, if offset == 0.0 { gamma_d } else { gamma_d + offset }, epsilon)
}

/// `norm` of rows. Its epsilon is private to Burn's module.
pub(crate) fn normed<B: FusedBackend>(norm: &LayerNorm<B>, epsilon: f64, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    let beta = norm.beta.as_ref().map(|beta| beta.val());
    zero_ops::layer_norm(x_nd, norm.gamma.val(), beta, epsilon)
}
