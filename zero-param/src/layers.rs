//! Layers that keep no full parameter from the forward pass to the backward pass, on any device.
//!
//! On a GPU, Burn's `Embedding` saves its weight, and a head tied to it by `weight.transpose()` saves that view. Both are correct, but the full
//! parameter stays on the device. The same holds for `Linear` on sequences; use [`linear`](crate::linear) instead. Burn's layers of vectors
//! (norms, biases) need no replacement: vectors are replicated on every rank.

use std::sync::atomic::Ordering;

use burn::module::Param;
use burn::tensor::{Int, Tensor};
use zero_kernels::options::CrossEntropyOptions;

use crate::backend;
use crate::device::held;
use crate::fused::{Frozen, Weight, cross_entropy, dropout, linear, numbers, product, rows};
use crate::shard::Gathered;

/// Computes `x weight + bias + residual` like [`linear`], with a parameter as the weight. If the weight has a LoRA adapter, its output
/// `scale * (dropout(x) a) b` is added, without a dense sum of weight and adapter ([`Zero::set_adapter_dropout`](crate::Zero::set_adapter_dropout)). A weight that is not trained is gathered for each pass, and no
/// gradient of it is computed.
///
/// # Shapes
/// - `x`: `[.., d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[.., f]`
/// - returns `[.., f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn dense<const D: usize>(
    x: Tensor<D>,
    weight: &Param<Tensor<2>>,
    bias: Option<&Param<Tensor<1>>>,
    residual: Option<Tensor<D>>,
) -> Tensor<D> {
    let bias = bias.map(Param::val);
    let Some(gathered) = weight.reparameterization::<Gathered>() else {
        return linear(x, weight.val(), bias, residual);
    };
    let parameter = &gathered.parameter;
    let out = product(x.clone(), of(weight), parameter.shape[1], bias, residual);
    match gathered.adapter() {
        None => out,
        Some(adapter) => {
            let dropped = f64::from_bits(parameter.shared.adapter_dropout.load(Ordering::Relaxed));
            let low = linear(dropout(x, dropped), adapter.a.val(), None, None) * adapter.scale;
            linear(low, adapter.b.val(), None, Some(out))
        }
    }
}

/// Returns a weight without its adapter, as an operand unless it is sharded and not trained.
fn of(weight: &Param<Tensor<2>>) -> Weight {
    let Some(gathered) = weight.reparameterization::<Gathered>() else { return Weight::Operand(weight.val()) };
    let (base, parameter) = (weight.base(), &gathered.parameter);
    let is_operand = !parameter.is_frozen() || !parameter.is_on_host() || parameter.slot.partition.is_empty();
    match is_operand {
        true => Weight::Operand(backend::gather(base, parameter, None)),
        false => Weight::Frozen(Frozen { parameter: parameter.clone(), base: held(base) }),
    }
}

/// Computes [`linear_cross_entropy`](crate::linear_cross_entropy) with a parameter as the weight `[v, d]`, without its LoRA adapter. A
/// weight that is not trained is gathered for the pass, and no gradient of it is computed.
///
/// # Shapes
/// - `x`: `[n, d]`, `targets`: `[n]`, each in `0..v` or `ignored`
/// - returns `[1]`, in fp32
///
/// # Panics
/// Same as [`linear_cross_entropy`](crate::linear_cross_entropy).
pub fn head_cross_entropy(
    x: Tensor<2>,
    weight: &Param<Tensor<2>>,
    targets: Tensor<1, Int>,
    options: impl Into<CrossEntropyOptions>,
) -> Tensor<1> {
    cross_entropy(x, of(weight), targets, options.into())
}

/// Computes [`head_cross_entropy`] of each of `b` groups of as many consecutive rows: `[b]`.
#[cfg(feature = "models")]
pub(crate) fn head_cross_entropies(
    x: Tensor<2>,
    weight: &Param<Tensor<2>>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
    b: usize,
) -> Tensor<1> {
    let weight = of(weight);
    let groups = x.chunk(b, 0).into_iter().zip(targets.chunk(b, 0));
    Tensor::cat(groups.map(|(x, targets)| cross_entropy(x, weight.clone(), targets, options)).collect(), 0)
}

/// Looks up rows of an embedding: `weight` `[vocabulary, width]` at `ids` `[batch, length]` gives `[batch, length, width]`, with the output
/// of its LoRA adapter, if it has one.
pub fn embedding(weight: &Param<Tensor<2>>, ids: Tensor<2, Int>) -> Tensor<3> {
    let [batch, length] = ids.dims();
    let ids = ids.reshape([batch * length]);
    let rows = match weight.reparameterization::<Gathered>() {
        Some(gathered) => {
            let base = backend::gather(weight.base(), &gathered.parameter, Some(numbers(ids.clone())));
            match gathered.adapter() {
                None => base,
                Some(adapter) => {
                    let low = rows(adapter.a.val(), ids) * adapter.scale;
                    linear(low, adapter.b.val(), None, Some(base))
                }
            }
        }
        None => rows(weight.val(), ids),
    };
    let [_, width] = rows.dims();
    rows.reshape([batch, length, width])
}

/// Returns the full value of a parameter without its LoRA adapter. A head that is tied to an embedding uses the table in this way: as in
/// PEFT, an adapter of the table changes only what is looked up.
pub fn without_adapter<const D: usize>(weight: &Param<Tensor<D>>) -> Tensor<D> {
    match weight.reparameterization::<Gathered>() {
        Some(gathered) => backend::gather(weight.base(), &gathered.parameter, None),
        None => weight.val(),
    }
}

/// Multiplies `x` `[batch, length, width]` by each row of `weight` `[vocabulary, width]`, giving `[batch, length, vocabulary]`: the head of
/// a language model tied to its embedding.
pub fn tied_head(x: Tensor<3>, weight: &Param<Tensor<2>>) -> Tensor<3> {
    let [batch, length, width] = x.dims();
    // (w xᵀ)ᵀ: the transposed operand is saved, and x is the smaller.
    let logits = without_adapter(weight).matmul(x.reshape([batch * length, width]).transpose()).transpose();
    let [_, vocabulary] = logits.dims();
    logits.reshape([batch, length, vocabulary])
}
