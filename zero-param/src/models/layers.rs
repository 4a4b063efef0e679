//! Layers of fused operations, and the loss of language models.

use burn::module::Param;
use burn::tensor::{Int, Tensor};
use burn_nn::{LayerNorm, Linear};

use crate::fused::{dropout, layer_norm, linear_cross_entropy};
use crate::layers;

/// Label of a position that is ignored.
const IGNORED: i64 = -100;

/// Applies layer norm to rows. Its epsilon is private in Burn's module, and hence an argument.
pub(super) fn norm(norm: &LayerNorm, epsilon: f64, x_nd: Tensor<2>) -> Tensor<2> {
    layer_norm(x_nd, norm.gamma.val(), norm.beta.as_ref().map(Param::val), epsilon)
}

/// Applies `layer` to rows, and adds `residual_nf` if there is one.
pub(super) fn dense(layer: &Linear, x_nd: Tensor<2>, residual_nf: Option<Tensor<2>>) -> Tensor<2> {
    layers::dense(x_nd, &layer.weight, layer.bias.as_ref(), residual_nf)
}

/// Applies `layer` to rows, then dropout with `probability`, and adds `residual_nf`.
pub(super) fn dense_onto(layer: &Linear, x_nd: Tensor<2>, probability: f64, residual_nf: Tensor<2>) -> Tensor<2> {
    match probability {
        0.0 => dense(layer, x_nd, Some(residual_nf)),
        _ => residual_nf + dropout(dense(layer, x_nd, None), probability),
    }
}

/// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the rows `[b * t, d]` before it, with a head `[v, d]`.
pub(super) fn next_token_loss(x_nd: Tensor<2>, head_vd: &Param<Tensor<2>>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
    let ([b, t], device) = (labels_bt.dims(), labels_bt.device());
    // A row's last position predicts nothing: ignoring it costs less than copying all others.
    let nothing_b1 = Tensor::full([b, 1], IGNORED, &device);
    let next_n = Tensor::cat(vec![labels_bt.slice([0..b, 1..t]), nothing_b1], 1).reshape([b * t]);
    linear_cross_entropy(x_nd, layers::without_adapter(head_vd), next_n, Some(IGNORED))
}
