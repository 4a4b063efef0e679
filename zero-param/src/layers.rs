//! Layers that, unlike Burn's, keep no full parameter from the forward pass to the backward pass.
//!
//! Burn's `Embedding` saves its weight, and a head tied to it by `weight.transpose()` saves that view. Both are correct, but the full
//! parameter stays in memory. The same holds for `Linear` on sequences; use [`linear`](crate::linear) instead. Burn's layers of vectors
//! (norms, biases) need no replacement: vectors are replicated on every rank.

use burn::module::Param;
use burn::tensor::{Int, Tensor};

use crate::backend;
use crate::fused::{numbers, rows};
use crate::shard::Gathered;

/// Looks up rows of an embedding: `weight` `[vocabulary, width]` at `ids` `[batch, length]` gives `[batch, length, width]`.
pub fn embedding(weight: &Param<Tensor<2>>, ids: Tensor<2, Int>) -> Tensor<3> {
    let [batch, length] = ids.dims();
    let ids = ids.reshape([batch * length]);
    let rows = match weight.reparameterization::<Gathered>() {
        Some(Gathered { parameter, .. }) => backend::gather(weight.base(), parameter, Some(numbers(ids))),
        None => rows(weight.val(), ids),
    };
    let [_, width] = rows.dims();
    rows.reshape([batch, length, width])
}

/// Multiplies `x` `[batch, length, width]` by each row of `weight` `[vocabulary, width]`, giving `[batch, length, vocabulary]`: the head of
/// a language model tied to its embedding.
pub fn tied_head(x: Tensor<3>, weight: &Param<Tensor<2>>) -> Tensor<3> {
    let [batch, length, width] = x.dims();
    // (w xᵀ)ᵀ: the transposed operand is saved, and x is the smaller.
    let logits = weight.val().matmul(x.reshape([batch * length, width]).transpose()).transpose();
    let [_, vocabulary] = logits.dims();
    logits.reshape([batch, length, vocabulary])
}
