//! Fused operations of transformers: the kernels of `zero-kernels` as autodiff operations, where a chain of Burn's operations costs more.
//! Names and shapes are those of `zero-ops`.
//!
//! Activations are rows `[n, d]`: only attention distinguishes sequence and batch. 16-bit operands are accumulated in fp32 and rounded
//! once, at the end. On devices other than the host these are Burn's own operations (`plain.rs`).

mod backend;
mod flex;
pub(crate) mod plain;

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, Int, Tensor};
use half::{bf16, f16};
use zero_kernels::options::{AttentionOptions, CrossEntropyOptions, Gelu, check_cap};

use crate::device::is_host;
use crate::random::draw_dropout;

use backend::{FusedBackend, Operands};
pub(crate) use flex::{Frozen, Op};

type Any = FloatTensor<Dispatch>;

/// Runs an operation of up to four operands.
fn run<const D: usize>(op: Op, operands: Vec<Any>) -> Tensor<D> {
    let dtype = operands[0].dtype();
    let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    assert!(known, "{}: an operand is {dtype:?}; cast it to fp32, bf16 or fp16", op.name());
    for other in &operands {
        assert_eq!(other.dtype(), dtype, "{}: operands have different types; cast one of them", op.name());
    }
    // The host's kernel has no dropout of attention probabilities.
    let has_kernel = !matches!(&op, Op::Attention { options, .. } if options.dropout.is_some());
    if !(has_kernel && is_host(&operands[0])) {
        return Tensor::from_dispatch(plain::run(op, operands));
    }
    let mut operands = operands.into_iter();
    let operands = match std::array::from_fn(|_| operands.next()) {
        [Some(a), None, None, None] => Operands::One(a),
        [Some(a), Some(b), None, None] => Operands::Two(a, b),
        [Some(a), Some(b), Some(c), None] => Operands::Three(a, b, c),
        [Some(a), Some(b), Some(c), Some(d)] => Operands::Four(a, b, c, d),
        _ => unreachable!("operations have one to four operands"),
    };
    Tensor::from_dispatch(<Dispatch as FusedBackend>::fused(operands, op))
}

/// Computes `x weight + bias + residual`: the residual connection is fused into the product.
///
/// On sequences `[b, t, d]` it keeps no weight from the forward pass to the backward pass. Burn's `linear` keeps it on a GPU, as it multiplies
/// by a view of the weight.
///
/// # Shapes
/// - `x`: `[.., d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[.., f]`
/// - returns `[.., f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
) -> Tensor<D> {
    let [_, columns] = weight.dims();
    product(x, Weight::Operand(weight), columns, bias, residual)
}

/// The weight of a product.
#[derive(Clone)]
pub(crate) enum Weight {
    Operand(Tensor<2>),
    Frozen(Frozen),
}

impl Weight {
    fn parts(self) -> (Option<Any>, Option<Frozen>) {
        match self {
            Self::Operand(weight) => (Some(weight.into_dispatch()), None),
            Self::Frozen(frozen) => (None, Some(frozen)),
        }
    }
}

/// Computes [`linear`] with a weight of `columns` columns.
pub(crate) fn product<const D: usize>(
    x: Tensor<D>,
    weight: Weight,
    columns: usize,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
) -> Tensor<D> {
    let mut shape = x.dims();
    shape[D - 1] = columns;
    let (weight, frozen) = weight.parts();
    let op = Op::Linear { bias: bias.is_some(), frozen };
    let operands = [as_rows(x)].into_iter().chain(weight);
    let operands = operands.chain(bias.map(Tensor::into_dispatch)).chain(residual.map(as_rows)).collect();
    let out: Tensor<2> = run(op, operands);
    if D == 2 { Tensor::from_dispatch(out.into_dispatch()) } else { out.reshape(shape) }
}

/// Reshapes `[.., d]` to `[n, d]`.
fn as_rows<const D: usize>(x: Tensor<D>) -> Any {
    let shape = x.dims();
    let n = shape[..D - 1].iter().product();
    if D == 2 { x.into_dispatch() } else { x.reshape([n, shape[D - 1]]).into_dispatch() }
}

/// Applies layer norm to rows, <https://arxiv.org/abs/1607.06450>: `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with the biased
/// variance.
///
/// # Shapes
/// - `x`: `[n, d]`, `gamma`, `beta`: `[d]`
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn layer_norm(x: Tensor<2>, gamma: Tensor<1>, beta: Option<Tensor<1>>, epsilon: f64) -> Tensor<2> {
    let mut operands = vec![x.into_dispatch(), gamma.into_dispatch()];
    operands.extend(beta.map(Tensor::into_dispatch));
    run(Op::LayerNorm { epsilon: epsilon as f32 }, operands)
}

/// Divides rows by their root mean square and multiplies them by `gamma`, <https://arxiv.org/abs/1910.07467>:
/// `x / sqrt(mean(x^2) + epsilon) * gamma`.
///
/// # Shapes
/// - `x`: `[n, d]`, `gamma`: `[d]`
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn rms_norm(x: Tensor<2>, gamma: Tensor<1>, epsilon: f64) -> Tensor<2> {
    run(Op::RmsNorm { epsilon: epsilon as f32 }, vec![x.into_dispatch(), gamma.into_dispatch()])
}

/// Computes `silu(gate) * up`, <https://arxiv.org/abs/2002.05202>.
///
/// # Shapes
/// - `gate`, `up`: `[n, f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    assert_eq!(gate.dims(), up.dims(), "swiglu: gate and up must have one shape");
    run(Op::SwiGlu, vec![gate.into_dispatch(), up.into_dispatch()])
}

/// Cosines and sines of the angles by which [`rotary`] rotates the rows of a sequence.
#[derive(Debug, Clone)]
pub struct Angles {
    angles: [Arc<[f32]>; 2],
    pairs: usize,
}

impl Angles {
    /// Takes cosines and sines `[t, pairs]`.
    ///
    /// # Panics
    /// If the lengths differ, or are no multiple of `pairs`.
    pub fn new(cos: Vec<f32>, sin: Vec<f32>, pairs: usize) -> Self {
        assert_eq!(cos.len(), sin.len(), "rotary: there must be as many sines as cosines");
        assert!(pairs > 0 && cos.len().is_multiple_of(pairs), "rotary: {} angles are no rows of {pairs}", cos.len());
        Self { angles: [cos.into(), sin.into()], pairs }
    }

    /// Returns the number of pairs of elements that are rotated in each head.
    pub fn pairs(&self) -> usize {
        self.pairs
    }
}

/// Rotates pairs of elements, half a head apart, by the angles of their row (rotary position embedding),
/// <https://arxiv.org/abs/2104.09864>. Row `r` has the angles of row `r % t`. Heads have `2 * pairs` elements.
///
/// # Shapes
/// - `x`: `[n, d]`, sequence after sequence
/// - returns `[n, d]`
///
/// # Panics
/// If `t` does not divide `n`, or `2 * pairs` does not divide `d`.
pub fn rotary(x: Tensor<2>, angles: &Angles) -> Tensor<2> {
    let [n, d] = x.dims();
    let Angles { angles, pairs } = angles;
    let t = angles[0].len() / pairs;
    assert!(n.is_multiple_of(t.max(1)), "rotary: angles of {t} rows do not divide {n} rows");
    assert!(d.is_multiple_of(2 * pairs), "rotary: {pairs} pairs do not divide a width of {d}");
    // In the type of x, as every operand.
    let round: fn(f32) -> f32 = match x.dtype() {
        DType::BF16 => |angle| bf16::from_f32(angle).to_f32(),
        DType::F16 => |angle| f16::from_f32(angle).to_f32(),
        _ => |angle| angle,
    };
    let angles = angles.each_ref().map(|values| values.iter().map(|&value| round(value)).collect());
    run(Op::Rotary { angles, pairs: *pairs }, vec![x.into_dispatch()])
}

/// Computes `gelu(x + bias)`, <https://arxiv.org/abs/1606.08415>.
///
/// # Shapes
/// - `x`: `[n, f]`, `bias`: `[f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn gelu(kind: Gelu, x: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let mut operands = vec![x.into_dispatch()];
    operands.extend(bias.map(Tensor::into_dispatch));
    run(Op::Gelu(kind), operands)
}

/// Computes scaled dot-product attention over heads, <https://arxiv.org/abs/1706.03762>, without storing the scores of all pairs,
/// <https://arxiv.org/abs/2307.08691>. With dropout of probabilities ([`draw_dropout`]) it runs Burn's own operations, which store them.
///
/// # Shapes
/// - `q`: `[n, d]`, sequence after sequence; head `i` is columns `i * d / heads ..`
/// - `k`, `v`: `[m, c]`, sequence after sequence: as many heads of that width as there are columns. Neighbouring query heads share one,
///   <https://arxiv.org/abs/2305.13245>. `m` is `n` if attention is causal.
/// - `mask`: `[batch, m / batch]`, added to the scores of each key: 0, or a large negative number such as -3e4. No gradient flows
///   into it.
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, or the soft cap is not positive and finite.
pub fn attention(
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    mask: Option<Tensor<2>>,
    options: AttentionOptions,
) -> Tensor<2> {
    let (sizes, keys) = (q.dims(), k.dims());
    assert_eq!(v.dims(), keys, "attention: keys and values must have the same shape");
    let ([n, d], [m, c], heads) = (sizes, keys, options.heads);
    let op = attention_of(sizes, m, mask, options);
    assert!(
        (m == n || !options.causal) && c > 0 && c.is_multiple_of(d / heads) && d.is_multiple_of(c),
        "attention: keys {keys:?} do not fit queries {sizes:?} of {heads} heads: expected heads that divide {heads}, and as many rows if causal"
    );
    run(op, [q, k, v].map(Tensor::into_dispatch).into())
}

/// Computes [`attention`] of rows that hold query, key and value one after the other.
///
/// # Shapes
/// - `qkv`: `[n, 3 d]`
/// - returns `[n, d]`
///
/// # Panics
/// Same as [`attention`].
pub fn packed_attention(qkv: Tensor<2>, mask: Option<Tensor<2>>, options: AttentionOptions) -> Tensor<2> {
    let [n, width] = qkv.dims();
    assert!(width.is_multiple_of(3), "attention: rows of {width} columns are not divisible into query, key and value");
    run(attention_of([n, width / 3], n, mask, options), vec![qkv.into_dispatch()])
}

fn attention_of([n, d]: [usize; 2], keys: usize, mask: Option<Tensor<2>>, options: AttentionOptions) -> Op {
    let AttentionOptions { batch, heads, cap, .. } = options;
    check_cap("attention", cap);
    assert!(
        batch > 0 && n.is_multiple_of(batch) && keys.is_multiple_of(batch),
        "attention: {n} rows, or {keys} of keys, are not divisible into {batch} sequences of equal length"
    );
    assert!(
        heads > 0 && d.is_multiple_of(heads),
        "attention: {d} columns are not divisible into {heads} heads of equal width"
    );
    if let Some(mask) = &mask {
        assert_eq!(mask.dims(), [batch, keys / batch], "attention: the mask must be [batch, positions]");
    }
    Op::Attention { options, mask: mask.map(|mask| mask.into_data().iter::<f32>().collect()) }
}

/// Drops elements with a probability in training, and divides the others by the probability of being kept,
/// <https://jmlr.org/papers/v15/srivastava14a.html>. The mask depends on [`ZeroConfig::seed`](crate::ZeroConfig::seed), the rank and the
/// number of the rank's draws so far, which checkpoints hold. So losses have the same bits at all stages, and a resumed run has those of an
/// uninterrupted one. (Burn's `Dropout` draws from one generator of the process, in whatever order ranks arrive.)
///
/// # Panics
/// Same as [`draw_dropout`].
pub fn dropout<const D: usize>(x: Tensor<D>, probability: f64) -> Tensor<D> {
    let Some(drawn) = draw_dropout(probability, &x.device()) else { return x };
    let shape = x.dims();
    run::<2>(Op::Dropout(drawn), vec![as_rows(x)]).reshape(shape)
}

/// Returns the rows `ids` of a table.
///
/// # Shapes
/// - `table`: `[v, d]`, `ids`: `[n]`, each in `0..v`
/// - returns `[n, d]`
///
/// # Panics
/// If an id is out of range.
pub(crate) fn rows(table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let [rows, _] = table.dims();
    run(Op::Embedding { ids: numbers(ids), rows }, vec![table.into_dispatch()])
}

/// Returns the mean cross-entropy in nats of predicting `targets` by `softmax(x weight^T)`, over the rows whose target is not `ignored`; 0
/// if there are none. `options` are [`CrossEntropyOptions`], or the ignored target alone: `Some(-100)` or `None`. A soft cap applies to `x
/// weight^T`.
///
/// Logits are computed for some rows at a time and never stored for all. Under autodiff the gradients are computed along with them in the
/// forward pass, and only scaled in the backward pass: a sharded weight is gathered once.
///
/// # Shapes
/// - `x`: `[n, d]`, `weight`: `[v, d]`, `targets`: `[n]`, each in `0..v` or `ignored`
/// - returns `[1]`, in fp32
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, a target is out of range, or the soft cap is not positive and finite.
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: impl Into<CrossEntropyOptions>,
) -> Tensor<1> {
    cross_entropy(x, Weight::Operand(weight), targets, options.into())
}

/// Computes [`linear_cross_entropy`].
pub(crate) fn cross_entropy(
    x: Tensor<2>,
    weight: Weight,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Tensor<1> {
    check_cap("cross-entropy", options.cap);
    let (weight, frozen) = weight.parts();
    let operands = [x.into_dispatch()].into_iter().chain(weight).collect();
    run(Op::CrossEntropy { targets: numbers(targets), options, frozen }, operands)
}

pub(crate) fn numbers(ids: Tensor<1, Int>) -> Arc<[i64]> {
    ids.into_data().iter::<i64>().collect()
}
