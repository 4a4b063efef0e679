//! Layers that are applied by fused operations; the modules keep their parameters, names and records.
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

/// Token ids, or another integer per token: `[b, t]`.
pub type Ids<B> = Tensor<B, 2, Int>;

/// Checks that a model with this many positions, the configuration's `field`, can read rows of `t` tokens.
///
/// # Panics
/// If it cannot.
pub(crate) fn check_positions(t: usize, positions: usize, field: &str) {
    assert!(
        t <= positions,
        "rows of {t} tokens, but the model has {positions} positions: shorten the rows or raise {field}"
    );
}

/// Reshapes rows of `b` sequences, one after the other, to `[b, t, width]`.
pub(crate) fn by_sequence<B: Backend>(x_nd: Tensor<B, 2>, [b, t]: [usize; 2]) -> Tensor<B, 3> {
    let [_, d] = x_nd.dims();
    x_nd.reshape([b, t, d])
}

fn bias<B: Backend>(layer: &Linear<B>) -> Option<Tensor<B, 1>> {
    layer.bias.as_ref().map(|bias| bias.val())
}

/// Applies `layer` to rows.
pub(crate) fn dense<B: FusedBackend>(layer: &Linear<B>, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    layer.product(x_nd, bias(layer), None)
}

/// Applies `layer` to rows, then dropout, and adds the result to `residual_nf`.
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

/// Applies `layer`, then `activation`, to rows. The bias is added together with the activation.
pub(crate) fn dense_activated<B: FusedBackend>(
    layer: &Linear<B>,
    activation: Activation,
    x_nd: Tensor<B, 2>,
) -> Tensor<B, 2> {
    let product_nf = layer.product(x_nd, None, None);
    activation.forward_with_bias(product_nf, bias(layer))
}

/// Divides rows by their root mean square and multiplies them by `gamma_d + offset`.
pub(crate) fn scaled<B: FusedBackend>(
    gamma_d: &Param<Tensor<B, 1>>,
    offset: f64,
    epsilon: f64,
    x_nd: Tensor<B, 2>,
) -> Tensor<B, 2> {
    let gamma_d = gamma_d.val();
    zero_ops::rms_norm(x_nd, if offset == 0.0 { gamma_d } else { gamma_d + offset }, epsilon)
}

/// Applies `norm` to rows. Its epsilon is private in Burn's module, and hence an argument.
pub(crate) fn normed<B: FusedBackend>(norm: &LayerNorm<B>, epsilon: f64, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    let beta = norm.beta.as_ref().map(|beta| beta.val());
    zero_ops::layer_norm(x_nd, norm.gamma.val(), beta, epsilon)
}
