//! Layers in place of Burn's, which keep no whole parameter from a forward pass to its backward pass.
//!
//! Burn's `Embedding` saves its weight, and a head that is tied to one by `weight.transpose()` saves that view: right, but the
//! whole stays in memory. So it is with `Linear` on sequences, in whose place there is [`linear`](crate::linear). Layers that Burn
//! builds of vectors (norms, biases) need nothing: vectors are whole on every rank.

use burn::module::Param;
use burn::tensor::{Int, Tensor};

use crate::backend;
use crate::fused::{numbers, rows};
use crate::shard::Gathered;

/// Rows of an embedding: `weight` `[vocabulary, width]` at `ids` `[batch, length]` gives `[batch, length, width]`.
pub fn embedding(weight: &Param<Tensor<2>>, ids: Tensor<2, Int>) -> Tensor<3> {
    let [batch, length] = ids.dims();
    let ids = ids.reshape([batch * length]);
    let rows = match weight.reparameterization::<Gathered>() {
        Some(Gathered { slot, .. }) => backend::gather(weight.base(), slot, Some(numbers(ids))),
        None => rows(weight.val(), ids),
    };
    let [_, width] = rows.dims();
    rows.reshape([batch, length, width])
}

/// Products of `x` `[batch, length, width]` with each row of `weight` `[vocabulary, width]`: `[batch, length, vocabulary]`. The head
/// of a language model that is tied to its embedding.
pub fn tied_head(x: Tensor<3>, weight: &Param<Tensor<2>>) -> Tensor<3> {
    let [batch, length, width] = x.dims();
    // As (w xᵀ)ᵀ: what is turned is saved, and that is the smaller.
    let logits = weight.val().matmul(x.reshape([batch * length, width]).transpose()).transpose();
    let [_, vocabulary] = logits.dims();
    logits.reshape([batch, length, vocabulary])
}
