//! Functions for models: the fused operations on Burn's tensors, with shape checks.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use burn_backend::{TensorData, get_device_settings};
use burn_std::{DType, Shape};

use crate::backend::FusedBackend;
use crate::fallback::{unwrap, wrap};
use crate::kinds::STORED_AS;
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu, check_cap};
use crate::quantized::{Format, Quantized};

/// Panics unless all operands, and those present of the ones after a semicolon, have the type of the first.
macro_rules! check_types {
    ($op:literal, $($x:ident),+ $(; $($some:ident),+)?) => {
        check_types($op, &[
            $((stringify!($x), Some($x.dtype())),)+
            $($((stringify!($some), $some.as_ref().map(Tensor::dtype))),+)?
        ])
    };
}

fn check_types(op: &str, operands: &[(&str, Option<DType>)]) {
    let (first, dtype) = operands[0];
    for &(name, other) in operands {
        assert!(
            other.is_none() || other == dtype,
            "{op}: {first} is {:?} and {name} is {:?}; cast one of them",
            dtype.expect("the first operand is given"),
            other.expect("an operand that differs is given"),
        );
    }
}

/// Computes `x weight + bias + residual`: the residual connection is fused into the product.
///
/// # Shapes
/// - `x`: `[n, d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[n, f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn linear<B: FusedBackend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    residual: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    check_types!("linear", x, weight; bias, residual);
    let ([n, d], [rows, f]) = (x.dims(), weight.dims());
    assert_eq!(d, rows, "linear: rows of {d} need a weight [{d}, _], got [{rows}, {f}]");
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [f], "linear: a weight [{d}, {f}] needs a bias [{f}]");
    }
    if let Some(residual) = &residual {
        assert_eq!(residual.dims(), [n, f], "linear: the residual must have the shape of the result");
    }
    wrap(B::fused_linear(unwrap(x), unwrap(weight), bias.map(unwrap), residual.map(unwrap)))
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
pub fn layer_norm<B: FusedBackend>(
    x: Tensor<B, 2>,
    gamma: Tensor<B, 1>,
    beta: Option<Tensor<B, 1>>,
    epsilon: f64,
) -> Tensor<B, 2> {
    check_types!("layer norm", x, gamma; beta);
    let [_, d] = x.dims();
    assert_eq!(gamma.dims(), [d], "layer norm: rows of {d} need a gamma [{d}]");
    if let Some(beta) = &beta {
        assert_eq!(beta.dims(), [d], "layer norm: rows of {d} need a beta [{d}]");
    }
    wrap(B::fused_layer_norm(unwrap(x), unwrap(gamma), beta.map(unwrap), epsilon))
}

/// Computes `gelu(x + bias)`, <https://arxiv.org/abs/1606.08415>.
///
/// # Shapes
/// - `x`: `[n, f]`, `bias`: `[f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn gelu<B: FusedBackend>(kind: Gelu, x: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    check_types!("gelu", x; bias);
    let [_, f] = x.dims();
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [f], "gelu: rows of {f} need a bias [{f}]");
    }
    wrap(B::fused_gelu(kind, unwrap(x), bias.map(unwrap)))
}

/// Checks the shapes of queries and keys `[rows, width]`. Returns the options without a window that hides nothing.
fn check_attention<B: FusedBackend>(
    [n, d]: [usize; 2],
    [keys, kv_width]: [usize; 2],
    mask: Option<&Tensor<B, 2>>,
    options: AttentionOptions,
) -> AttentionOptions {
    let AttentionOptions { batch, heads, causal, window, cap, .. } = options;
    check_cap("attention", cap);
    for rows in [n, keys] {
        assert!(
            batch > 0 && rows.is_multiple_of(batch),
            "attention: {rows} rows do not divide into {batch} sequences of equal length; change `batch`"
        );
    }
    assert!(heads > 0 && d.is_multiple_of(heads), "attention: {heads} heads do not divide a width of {d}");
    assert!(
        kv_width == d || kv_width > 0 && kv_width.is_multiple_of(d / heads) && d.is_multiple_of(kv_width),
        "attention: keys of width {kv_width} do not divide into heads that {heads} query heads of width {} can share",
        d / heads
    );
    assert!(!causal || n == keys, "attention: causal with {n} rows of queries and {keys} rows of keys");
    assert!(
        window.is_none_or(|window| causal && window > 0),
        "attention: a window of {window:?} rows needs causal attention and at least one row"
    );
    if let Some(mask) = mask {
        let expected = [batch, keys / batch];
        assert_eq!(mask.dims(), expected, "attention: the mask must be [batch, positions] = {expected:?}");
    }
    AttentionOptions { window: window.filter(|&window| window < keys / batch), ..options }
}

/// Computes scaled dot-product attention over heads, <https://arxiv.org/abs/1706.03762>, without storing the scores of all pairs,
/// <https://arxiv.org/abs/2307.08691>.
///
/// # Shapes
/// - `q`: `[n, d]`, sequence after sequence; head `i` is columns `i * d / heads ..`
/// - `k`, `v`: `[m, c]`, the same number of sequences. Without `causal` their length may differ from the queries'. With fewer heads,
///   `c = d / g`, head `i` of the queries sees head `i / g`
/// - `mask`: `[batch, m / batch]`, added to the scores of each key: 0, or a large negative number such as -3e4. Infinities give NaN if they
///   hide all keys of a row. No gradient flows into it.
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, or the soft cap is not positive and finite.
pub fn attention<B: FusedBackend>(
    q: Tensor<B, 2>,
    k: Tensor<B, 2>,
    v: Tensor<B, 2>,
    mask: Option<Tensor<B, 2>>,
    options: AttentionOptions,
) -> Tensor<B, 2> {
    check_types!("attention", q, k, v; mask);
    assert_eq!(v.dims(), k.dims(), "attention: values must have the shape of the keys");
    let options = check_attention(q.dims(), k.dims(), mask.as_ref(), options);
    wrap(B::fused_attention(unwrap(q), unwrap(k), unwrap(v), mask.map(unwrap), options))
}

/// Computes [`attention`] of rows that hold query, key and value one after the other, without splitting them.
///
/// # Shapes
/// - `qkv`: `[n, 3 d]`
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, or the soft cap is not positive and finite.
pub fn packed_attention<B: FusedBackend>(
    qkv: Tensor<B, 2>,
    mask: Option<Tensor<B, 2>>,
    options: AttentionOptions,
) -> Tensor<B, 2> {
    check_types!("packed attention", qkv; mask);
    let [n, width] = qkv.dims();
    assert!(width.is_multiple_of(3), "packed attention: rows hold three parts of one width, got {width} columns");
    let options = check_attention([n, width / 3], [n, width / 3], mask.as_ref(), options);
    wrap(B::fused_packed_attention(unwrap(qkv), mask.map(unwrap), options))
}

/// Divides rows by their root mean square, `x / sqrt(mean(x^2) + epsilon) * gamma`, <https://arxiv.org/abs/1910.07467>.
///
/// # Shapes
/// - `x`: `[n, d]`, `gamma`: `[d]`
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn rms_norm<B: FusedBackend>(x: Tensor<B, 2>, gamma: Tensor<B, 1>, epsilon: f64) -> Tensor<B, 2> {
    check_types!("rms norm", x, gamma);
    let [_, d] = x.dims();
    assert_eq!(gamma.dims(), [d], "rms norm: rows of {d} need a gamma [{d}]");
    wrap(B::fused_rms_norm(unwrap(x), unwrap(gamma), epsilon))
}

/// Applies rotary position embedding, <https://arxiv.org/abs/2104.09864>: rotates elements `i` and `i + e / 2` of each head, of width `e`,
/// as a pair by the angle with cosine `cos[.., i]` and sine `sin[.., i]`. No gradient flows into the angles.
///
/// # Shapes
/// - `x`: `[n, d]`, heads one after the other
/// - `cos`, `sin`: `[t, e / 2]`; row `r` of `x` is rotated by row `r % t`
/// - returns `[n, d]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn rotary<B: FusedBackend>(x: Tensor<B, 2>, cos: Tensor<B, 2>, sin: Tensor<B, 2>) -> Tensor<B, 2> {
    check_types!("rotary positions", x, cos, sin);
    let ([n, d], [t, half]) = (x.dims(), cos.dims());
    assert_eq!(sin.dims(), [t, half], "rotary positions: sines must have the shape of the cosines");
    assert!(t > 0 && n.is_multiple_of(t), "rotary positions: angles of {t} rows do not divide {n} rows");
    assert!(half > 0 && d.is_multiple_of(2 * half), "rotary positions: {half} pairs do not divide a width of {d}");
    wrap(B::fused_rotary(unwrap(x), unwrap(cos), unwrap(sin), false))
}

/// Computes `silu(gate) * up` with `silu(x) = x / (1 + exp(-x))`, the gated unit of <https://arxiv.org/abs/2002.05202>.
///
/// # Shapes
/// - `gate`, `up`: `[n, f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, or the operands differ in type.
pub fn swiglu<B: FusedBackend>(gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2> {
    check_types!("swiglu", gate, up);
    assert_eq!(up.dims(), gate.dims(), "swiglu: both halves must have one shape");
    wrap(B::fused_swiglu(unwrap(gate), unwrap(up)))
}

/// Returns the rows `ids` of a table.
///
/// # Shapes
/// - `table`: `[v, d]`, `ids`: `[n]`, each in `0..v`
/// - returns `[n, d]`
///
/// # Panics
/// If an id is out of range.
pub fn embedding<B: FusedBackend>(table: Tensor<B, 2>, ids: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    wrap(B::fused_embedding(unwrap(table), ids.into_primitive()))
}

/// Returns the mean cross-entropy in nats of predicting `targets` by `softmax(x weight^T)`, over the rows whose target is not `ignored`; 0
/// if there are none. `options` are [`CrossEntropyOptions`], or the ignored target alone: `Some(-100)` or `None`. A soft cap applies to `x
/// weight^T`.
///
/// Logits are computed for some rows at a time and never stored for all. Under autodiff the gradients are computed along with them in the
/// forward pass, and only scaled in the backward pass. A forward pass without a backward pass should run on the inner backend
/// (`model.valid()`), which computes no gradients.
///
/// # Shapes
/// - `x`: `[n, d]`, `weight`: `[v, d]`, `targets`: `[n]`, each in `0..v` or `ignored`
/// - returns `[1]`
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, a target is out of range, or the soft cap is not positive and finite.
pub fn linear_cross_entropy<B: FusedBackend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    options: impl Into<CrossEntropyOptions>,
) -> Tensor<B, 1> {
    check_types!("cross-entropy", x, weight);
    let options = options.into();
    check_cap("cross-entropy", options.cap);
    let ([n, d], [v, width]) = (x.dims(), weight.dims());
    assert_eq!(d, width, "cross-entropy: rows of {d} need a weight [_, {d}], got [{v}, {width}]");
    assert_eq!(targets.dims(), [n], "cross-entropy: {n} rows need {n} targets");
    wrap(B::fused_linear_cross_entropy(unwrap(x), unwrap(weight), targets.into_primitive(), options))
}

/// Creates a parameter of the device's float type. `elements` is called for the flat, row-major ranges that are stored here: once for the
/// full parameter or, if parameters are sharded, for this rank's shard. Every rank must call this function for the same parameters in the
/// same order.
///
/// # Panics
/// If `elements` returns a number of values other than the range's length.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_flex::Flex;
///
/// let x: Tensor<Flex, 2> = zero_ops::parameter_from([2, 3], &Default::default(), |range| range.map(|i| i as f32).collect());
/// assert_eq!(x.into_data().to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
/// ```
pub fn parameter_from<B: FusedBackend, const D: usize>(
    shape: [usize; D],
    device: &B::Device,
    mut elements: impl FnMut(Range<usize>) -> Vec<f32>,
) -> Tensor<B, D> {
    let dtype = get_device_settings::<B>(device).float_dtype;
    let mut checked = |range: Range<usize>| {
        let (expected, values) = (range.len(), elements(range.clone()));
        assert_eq!(
            values.len(),
            expected,
            "parameter_from: wrong number of values for elements {range:?} of {shape:?}"
        );
        TensorData::new(values, [expected])
    };
    wrap(B::parameter_from(Shape::new(shape), device, dtype, &mut checked))
}

/// Calls [`parameter_from`] for a weight `[d, f]` in 8 or 4 bit, whose elements are requested in the blocks that are stored here. It must
/// be frozen, and used by [`quantized_linear`].
pub fn quantized_parameter<B: FusedBackend>(
    [d, f]: [usize; 2],
    format: Format,
    device: &B::Device,
    mut elements: impl FnMut(Range<usize>) -> Vec<f32>,
) -> Tensor<B, 2> {
    let (how, shape) = (Quantized { format, width: f }, Shape::new([d, format.words(f)]));
    let mut rows = |words: Range<usize>| {
        let count = words.len();
        TensorData::from_bytes_vec(how.encode(words, &mut elements), Shape::new([count]), STORED_AS)
    };
    wrap(B::parameter_from(shape, device, STORED_AS.into(), &mut rows))
}

/// Computes [`linear`] with a weight in 8 or 4 bit ([`crate::quantized`]).
///
/// # Shapes
/// - `x`: `[n, d]`, `weight`: `[d, words]` for `[d, f]`, `bias`: `[f]`, `residual`: `[n, f]`
/// - returns `[n, f]`
///
/// # Panics
/// If the shapes do not fit, the operands differ in type, or the weight requires a gradient: it has none.
pub fn quantized_linear<B: FusedBackend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    residual: Option<Tensor<B, 2>>,
    how: Quantized,
) -> Tensor<B, 2> {
    check_types!("quantized linear", x; bias, residual);
    let ([n, d], f) = (x.dims(), how.width);
    assert_eq!(
        weight.dims(),
        [d, how.format.words(f)],
        "quantized linear: wrong shape of a weight [{d}, {f}] stored in {}",
        how.format
    );
    assert!(!weight.is_require_grad(), "quantized linear: a weight in {} cannot be trained; freeze it", how.format);
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [f], "quantized linear: a weight [{d}, {f}] needs a bias [{f}]");
    }
    if let Some(residual) = &residual {
        assert_eq!(residual.dims(), [n, f], "quantized linear: the residual must have the shape of the result");
    }
    wrap(B::quantized_linear(unwrap(x), unwrap(weight), bias.map(unwrap), residual.map(unwrap), how))
}
