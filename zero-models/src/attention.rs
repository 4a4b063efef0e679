//! Scaled dot-product attention over heads, <https://arxiv.org/abs/1706.03762>.
//!
//! In go queries, keys and values as rows, and a mask that all layers of one forward pass share; out come rows.
//! Masks are added to the scores: unlike filling, an addition costs nothing in the backward pass.
//!
//! Shape suffixes: `b` batch, `h` heads, `t` positions, `e` width of a head, `d` = `h * e` width of the model,
//! `n` = `b * t` rows, `r` = `b * h` or 1, `s` = `t * t` scores.

use burn::nn::Dropout;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, activation};

/// What is added to a masked score: its probability is then exactly zero in 32 bits. It is finite also in 16 bits, so
/// that a row with nothing but masked positions gives no NaN.
const MASKED: f64 = -3.0e4;

/// Hides the positions that come after the one that looks. Returns `[1, t * t]`.
pub(crate) fn causal_mask<B: Backend>(t: usize, device: &B::Device) -> Tensor<B, 2> {
    let future_tt = Tensor::<B, 2, Bool>::tril_mask([t, t], 0, device);
    Tensor::zeros([t, t], device).mask_fill(future_tt, MASKED).reshape([1, t * t])
}

/// Hides the positions where `attention_mask_bt` is 0. Returns `[b * heads, t * t]`.
///
/// It is written out in full, once per forward pass, so that each layer adds tensors of one shape.
pub(crate) fn padding_mask<B: Backend>(attention_mask_bt: Tensor<B, 2, Int>, heads: usize) -> Tensor<B, 2> {
    let [b, t] = attention_mask_bt.dims();
    let hidden_bt = (attention_mask_bt.float() - 1.0) * -MASKED;
    hidden_bt.reshape([b, 1, 1, t]).expand([b, heads, t, t]).reshape([b * heads, t * t])
}

/// A mask in the type of the activations that it will meet.
pub(crate) fn in_type_of<B: Backend>(mask_rs: Tensor<B, 2>, x_nd: &Tensor<B, 2>) -> Tensor<B, 2> {
    if mask_rs.dtype() == x_nd.dtype() { mask_rs } else { mask_rs.cast(x_nd.dtype()) }
}

/// Rows `[n, d]` to heads `[b, h, t, e]`.
pub(crate) fn split_heads<B: Backend>(x_nd: Tensor<B, 2>, b: usize, heads: usize) -> Tensor<B, 4> {
    let [n, d] = x_nd.dims();
    x_nd.reshape([b, n / b, heads, d / heads]).swap_dims(1, 2)
}

/// As [`split_heads`], and scaled. The reshape leaves a tensor of its own, which is scaled in place.
pub(crate) fn split_heads_scaled<B: Backend>(x_nd: Tensor<B, 2>, b: usize, heads: usize, scale: f64) -> Tensor<B, 4> {
    let [n, d] = x_nd.dims();
    (x_nd.reshape([b, n / b, heads, d / heads]) * scale).swap_dims(1, 2)
}

/// Mixes the values by the probabilities that queries and keys give. Queries are scaled already.
///
/// # Shapes
/// - `q_bhte`, `k_bhte`, `v_bhte`: `[b, h, t, e]`
/// - `mask_rs`: `[1, t * t]` or `[b * h, t * t]`, added to the scores
/// - returns rows `[b * t, h * e]`
pub(crate) fn attend<B: Backend>(
    q_bhte: Tensor<B, 4>,
    k_bhte: Tensor<B, 4>,
    v_bhte: Tensor<B, 4>,
    mask_rs: Option<&Tensor<B, 2>>,
    dropout: &Dropout,
) -> Tensor<B, 2> {
    let [b, h, t, e] = q_bhte.dims();
    let mut scores_bhtt = q_bhte.matmul(k_bhte.transpose());
    if let Some(mask_rs) = mask_rs {
        let scores_rs = scores_bhtt.reshape([b * h, t * t]) + mask_rs.clone();
        scores_bhtt = scores_rs.reshape([b, h, t, t]);
    }
    let probabilities_bhtt = dropout.forward(activation::softmax(scores_bhtt, 3));
    probabilities_bhtt.matmul(v_bhte).swap_dims(1, 2).reshape([b * t, h * e])
}
