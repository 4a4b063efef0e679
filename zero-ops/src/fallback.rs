//! The fused operations in terms of Burn's own: the implementation for backends without kernels, and the reference in tests of kernels.

use burn::tensor::{Bool, FloatDType, Int, Tensor, TensorPrimitive, activation, s};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::reader::try_read_sync;

use crate::kinds::ty;
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu};
use crate::quantized::Quantized;

/// Score of a key after its query: far below those that a mask hides, and finite in 16 bit too.
const FUTURE: f64 = -6.5e4;

/// Defines operations of any backend, written as in the trait.
macro_rules! bodies {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $body:block)*) => {
        $($(#[$meta])* pub(crate) fn $name<B: Backend>($($arg: ty!($kind, B)),*) -> ty!($ret, B) $body)*
    };
}

bodies! {
    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        let out = B::linear(x, weight, bias);
        match residual {
            Some(residual) => B::float_add(out, residual),
            None => out,
        }
    }

    fn dequantized(weight: float, how: (Quantized), dtype: (FloatDType)) -> float {
        // Through the host: there is no operation on the bits of a float.
        let (device, [d, _]) = (B::float_device(&weight), weight.shape().dims());
        let data = try_read_sync(B::float_into_data(weight)).expect("the backend reads synchronously");
        let data = data.unwrap_or_else(|error| panic!("reading a quantized weight failed: {error}"));
        let elements = TensorData::new(how.decode(data.as_bytes()), [d, how.width]);
        B::float_from_data(elements.convert_dtype(dtype.into()), &device)
    }

    fn layer_norm_forward(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float_float_float {
        let (centred, mean, rstd) = normed::<B>(wrap(x), epsilon);
        let mut out = centred * rstd.clone() * row::<B>(gamma);
        if let Some(beta) = beta {
            out = out + row::<B>(beta);
        }
        let [n, _] = mean.dims();
        (unwrap(out), unwrap(mean.reshape([n])), unwrap(rstd.reshape([n])))
    }

    fn layer_norm_backward(x: float, gamma: float, mean: float, rstd: float, grad: float) -> float_float_float {
        let x: Tensor<B, 2> = wrap(x);
        let grad: Tensor<B, 2> = wrap(grad);
        let [n, d] = x.dims();
        let rstd: Tensor<B, 2> = wrap::<B, 1>(rstd).reshape([n, 1]);
        let normed = (x - wrap::<B, 1>(mean).reshape([n, 1])) * rstd.clone();
        let d_beta = grad.clone().sum_dim(0).reshape([d]);
        let d_gamma = (grad.clone() * normed.clone()).sum_dim(0).reshape([d]);
        let g = grad * row::<B>(gamma);
        let along = (g.clone() * normed.clone()).mean_dim(1);
        let dx = (g.clone() - g.mean_dim(1) - normed * along) * rstd;
        (unwrap(dx), unwrap(d_gamma), unwrap(d_beta))
    }

    fn rms_norm_forward(x: float, gamma: float, epsilon: (f64)) -> float_float {
        let x: Tensor<B, 2> = wrap(x);
        let [n, _] = x.dims();
        let rrms = ((x.clone() * x.clone()).mean_dim(1) + epsilon).sqrt().recip();
        (unwrap(x * rrms.clone() * row::<B>(gamma)), unwrap(rrms.reshape([n])))
    }

    fn rms_norm_backward(x: float, gamma: float, rrms: float, grad: float) -> float_float {
        let (x, grad): (Tensor<B, 2>, Tensor<B, 2>) = (wrap(x), wrap(grad));
        let [n, d] = x.dims();
        let rrms: Tensor<B, 2> = wrap::<B, 1>(rrms).reshape([n, 1]);
        let normed = x * rrms.clone();
        let d_gamma = (grad.clone() * normed.clone()).sum_dim(0).reshape([d]);
        let g = grad * row::<B>(gamma);
        let along = (g.clone() * normed.clone()).mean_dim(1);
        (unwrap((g - normed * along) * rrms), unwrap(d_gamma))
    }

    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        let (x, cos, sin): (Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 2>) = (wrap(x), wrap(cos), wrap(sin));
        let ([n, d], [t, half]) = (x.dims(), cos.dims());
        let sin = if back { sin.neg() } else { sin };
        let [cos, sin] = [cos, sin].map(|angles| angles.reshape([1, t, 1, half]));
        let x = x.reshape([n / t, t, d / (2 * half), 2 * half]);
        let [a, b] = [0, half].map(|first| x.clone().slice(s![.., .., .., first..first + half]));
        let turned = vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin];
        unwrap::<B, 2>(Tensor::cat(turned, 3).reshape([n, d]))
    }

    fn fused_swiglu(gate: float, up: float) -> float {
        unwrap(activation::silu(wrap::<B, 2>(gate)) * wrap(up))
    }

    fn swiglu_backward(gate: float, up: float, grad: float) -> float_float {
        let (gate, up, grad): (Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 2>) = (wrap(gate), wrap(up), wrap(grad));
        let share = activation::sigmoid(gate.clone());
        let silu = gate * share.clone();
        let slope = share.clone() + silu.clone() - silu.clone() * share;
        (unwrap(grad.clone() * up * slope), unwrap(grad * silu))
    }

    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        let x = biased::<B>(x, bias);
        unwrap(match kind {
            Gelu::Erf => activation::gelu(x),
            Gelu::Tanh => {
                let gate = gate(x.clone());
                x * gate
            }
        })
    }

    fn gelu_backward_fused(kind: (Gelu), x: float, bias: opt_float, grad: float) -> float_opt_float {
        let has_bias = bias.is_some();
        let x = biased::<B>(x, bias);
        let dx = match kind {
            Gelu::Erf => {
                let density = (x.clone() * x.clone() * -0.5).exp() * (0.5 * SQRT_2_OVER_PI);
                let below = (x.clone() * std::f64::consts::FRAC_1_SQRT_2).erf() * 0.5 + 0.5;
                below + x * density
            }
            Gelu::Tanh => {
                let gate = gate(x.clone());
                let slope = (x.clone() * x.clone()) * (6.0 * CUBIC * SQRT_2_OVER_PI) + 2.0 * SQRT_2_OVER_PI;
                gate.clone() + x * slope * (gate.clone() - gate.clone() * gate)
            }
        };
        let dx = dx * wrap(grad);
        let [_, f] = dx.dims();
        let d_bias = has_bias.then(|| unwrap::<B, 1>(dx.clone().sum_dim(0).reshape([f])));
        (unwrap(dx), d_bias)
    }

    fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        let e = head_width::<B>(&q, options);
        let (scores, _) = scores(split::<B>(q, e, options), split::<B>(k, e, options), mask, options);
        let largest = scores.clone().max_dim(3);
        let exponentials = (scores - largest.clone()).exp();
        let sums = exponentials.clone().sum_dim(3);
        let [b, h, t, _] = sums.dims();
        let lse = (sums.clone().log() + largest).reshape([b, h, t]);
        let v = split::<B>(v, e, options);
        let probabilities = dropped(exponentials / sums, options);
        let out = by_query(by_key(probabilities, v.dims()[1]).matmul(v), h);
        (join(out), unwrap(lse))
    }

    #[allow(clippy::too_many_arguments)] // As the method that this is the body of.
    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        let e = head_width::<B>(&q, options);
        let [q, k, v, out, grad] = [q, k, v, out, grad].map(|x| split::<B>(x, e, options));
        let ([_, h, ..], [_, kv, ..]) = (q.dims(), k.dims());
        let lse = wrap::<B, 3>(lse).unsqueeze_dim::<4>(3);
        let (scores, tanh) = scores(q.clone(), k.clone(), mask, options);
        let probabilities = (scores - lse).exp();
        let dv = by_key(dropped(probabilities.clone(), options), kv).transpose().matmul(by_key(grad.clone(), kv));
        let along = (grad.clone() * out).sum_dim(3);
        let d_probabilities = dropped(by_query(by_key(grad, kv).matmul(v.transpose()), h), options);
        let d_scores = before_cap(probabilities * (d_probabilities - along) * options.scale, tanh);
        let d_scores = by_key(d_scores, kv);
        let dq = by_query(d_scores.clone().matmul(k), h);
        let dk = d_scores.transpose().matmul(by_key(q, kv));
        [dq, dk, dv].map(join)
    }

    fn fused_embedding_backward(ids: int, grad: float, rows: (usize)) -> float {
        let grad: Tensor<B, 2> = wrap(grad);
        let [_, d] = grad.dims();
        let table = Tensor::<B, 2>::zeros([rows, d], (&grad.device(), grad.dtype()));
        B::float_select_add(unwrap(table), 0, ids, unwrap(grad))
    }

    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float {
        let predictions = predictions::<B>(x, weight, targets, options);
        let counted = predictions.counts.clone().sum().clamp_min(1.0);
        unwrap(mean_loss(&predictions, counted))
    }

    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int,
                                           options: (CrossEntropyOptions)) -> float_float_float {
        let (of_x, of_weight): (Tensor<B, 2>, Tensor<B, 2>) = (wrap(x.clone()), wrap(weight.clone()));
        let predictions = predictions::<B>(x, weight, targets, options);
        let counted = predictions.counts.clone().sum().clamp_min(1.0);
        let loss = mean_loss(&predictions, counted.clone());
        let Predictions { logits, tanh, lse, targets, counts } = predictions;
        let shares = counts / counted.reshape([1, 1]);
        let d_logits = (logits - lse).exp() * shares.clone();
        let d_logits = d_logits.scatter(1, targets, shares.neg(), burn::tensor::IndexingUpdateOp::Add);
        let d_logits = before_cap(d_logits, tanh);
        let full: FloatDType = d_logits.dtype().into();
        let dx = d_logits.clone().matmul(of_weight.cast(full));
        let d_weight = d_logits.transpose().matmul(of_x.cast(full));
        (unwrap(loss), unwrap(dx), unwrap(d_weight))
    }

    fn scaled_by(x: float, factor: float, dtype: (FloatDType)) -> float {
        let x: Tensor<B, 2> = wrap(x);
        let factor = wrap::<B, 1>(factor).reshape([1, 1]).cast(FloatDType::from(x.dtype()));
        unwrap((x * factor).cast(dtype))
    }
}

pub(crate) fn wrap<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

pub(crate) fn unwrap<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn row<B: Backend>(x: FloatTensor<B>) -> Tensor<B, 2> {
    wrap::<B, 1>(x).unsqueeze::<2>()
}

/// Returns `x - mean`, and mean and reciprocal standard deviation as columns.
fn normed<B: Backend>(x: Tensor<B, 2>, epsilon: f64) -> (Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 2>) {
    let mean = x.clone().mean_dim(1);
    let centred = x - mean.clone();
    let variance = (centred.clone() * centred.clone()).mean_dim(1);
    (centred, mean, (variance + epsilon).sqrt().recip())
}

/// `sqrt(2 / pi)`
const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
const CUBIC: f64 = 0.044715;

fn biased<B: Backend>(x: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> Tensor<B, 2> {
    let x = wrap(x);
    match bias {
        Some(bias) => x + row::<B>(bias),
        None => x,
    }
}

/// Returns `0.5 (1 + tanh(y)) = sigmoid(2 y)` of the tanh formula.
fn gate<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let slope = (x.clone() * x.clone()) * (2.0 * CUBIC * SQRT_2_OVER_PI) + 2.0 * SQRT_2_OVER_PI;
    activation::sigmoid(x * slope)
}

/// Splits rows `[n, 3 d]` into three of `[n, d]`.
pub(crate) fn unpack<B: Backend>(qkv: FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let qkv: Tensor<B, 2> = wrap(qkv);
    let [_, width] = qkv.dims();
    let d = width / 3;
    [0, 1, 2].map(|i| unwrap(qkv.clone().slice(s![.., i * d..(i + 1) * d])))
}

/// Splits rows `[n, h e]` into heads `[b, h, t, e]` of width `e`.
fn split<B: Backend>(x: FloatTensor<B>, e: usize, options: AttentionOptions) -> Tensor<B, 4> {
    let x: Tensor<B, 2> = wrap(x);
    let [n, width] = x.dims();
    x.reshape([options.batch, n / options.batch, width / e, e]).swap_dims(1, 2)
}

/// Joins heads `[b, h, t, e]` to rows `[n, d]`.
fn join<B: Backend>(x: Tensor<B, 4>) -> FloatTensor<B> {
    let [b, h, t, e] = x.dims();
    unwrap(x.swap_dims(1, 2).reshape([b * t, h * e]))
}

/// Concatenates those of the queries' heads `[b, h, t, _]` that share one of `kv` heads of keys.
fn by_key<B: Backend>(x: Tensor<B, 4>, kv: usize) -> Tensor<B, 4> {
    let [b, h, t, width] = x.dims();
    if h == kv { x } else { x.reshape([b, kv, h / kv * t, width]) }
}

/// Inverts [`by_key`] for `h` heads.
fn by_query<B: Backend>(x: Tensor<B, 4>, h: usize) -> Tensor<B, 4> {
    let [b, kv, rows, width] = x.dims();
    if h == kv { x } else { x.reshape([b, h, rows * kv / h, width]) }
}

/// Applies a soft cap if there is one. Returns also `tanh(x / cap)`, for [`before_cap`].
fn capped<B: Backend, const D: usize>(x: Tensor<B, D>, cap: Option<f64>) -> (Tensor<B, D>, Option<Tensor<B, D>>) {
    let Some(cap) = cap else { return (x, None) };
    let tanh = (x / cap).tanh();
    (tanh.clone() * cap, Some(tanh))
}

/// Returns the gradient before the soft cap, given that after it.
fn before_cap<B: Backend, const D: usize>(grad: Tensor<B, D>, tanh: Option<Tensor<B, D>>) -> Tensor<B, D> {
    match tanh {
        None => grad,
        Some(tanh) => grad.clone() - grad * (tanh.clone() * tanh),
    }
}

/// Returns the scores, and what [`before_cap`] needs of them.
fn scores<B: Backend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    mask: Option<FloatTensor<B>>,
    options: AttentionOptions,
) -> (Tensor<B, 4>, Option<Tensor<B, 4>>) {
    let [b, h, t, _] = q.dims();
    let [_, kv, keys, _] = k.dims();
    let device = q.device();
    let products = by_query(by_key(q * options.scale, kv).matmul(k.transpose()), h);
    let (mut scores, tanh) = capped(products, options.cap);
    if let Some(mask) = mask {
        scores = scores + wrap::<B, 2>(mask).reshape([b, 1, 1, keys]);
    }
    if options.causal {
        let future = Tensor::<B, 2, Bool>::tril_mask([t, t], 0, &device).reshape([1, 1, t, t]);
        scores = scores.mask_fill(future.expand([b, h, t, t]), FUTURE);
    }
    if let Some(window) = options.window {
        let past = Tensor::<B, 2, Bool>::triu_mask([t, t], 1 - window.min(t) as i64, &device).reshape([1, 1, t, t]);
        scores = scores.mask_fill(past.expand([b, h, t, t]), FUTURE);
    }
    (scores, tanh)
}

/// Repeats shared heads of width `e` in rows `[m, c]` so that each query head has its own, `[m, d]`.
#[cfg(feature = "cubecl")]
pub(crate) fn with_all_heads<B: Backend>(x: FloatTensor<B>, d: usize, e: usize) -> FloatTensor<B> {
    let x: Tensor<B, 2> = wrap(x);
    let [m, c] = x.dims();
    unwrap::<B, 2>(x.reshape([m, c / e, 1, e]).repeat_dim(2, d / c).reshape([m, d]))
}

/// Returns the gradient of [`with_all_heads`]: the sum over the copies of a shared head.
#[cfg(feature = "cubecl")]
pub(crate) fn of_shared_heads<B: Backend>(grad: FloatTensor<B>, c: usize, e: usize) -> FloatTensor<B> {
    let grad: Tensor<B, 2> = wrap(grad);
    let [m, d] = grad.dims();
    unwrap::<B, 2>(grad.reshape([m, c / e, d / c, e]).sum_dim(2).reshape([m, c]))
}

/// Applies dropout to probabilities, or to their gradients.
fn dropped<B: Backend>(x: Tensor<B, 4>, options: AttentionOptions) -> Tensor<B, 4> {
    let Some(dropout) = options.dropout else { return x };
    let shape = x.dims();
    let shares = (0..shape.iter().product::<usize>() as u64).map(|place| dropout.share(place)).collect::<Vec<f32>>();
    let shares = Tensor::<B, 4>::from_data(TensorData::new(shares, shape), &x.device());
    let dtype = FloatDType::from(x.dtype());
    x * shares.cast(dtype)
}

/// Returns the width of a head of these rows of queries.
pub(crate) fn head_width<B: Backend>(q: &FloatTensor<B>, options: AttentionOptions) -> usize {
    q.shape()[1] / options.heads
}

/// Intermediate results for the rows' losses and their gradients.
struct Predictions<B: Backend> {
    /// Logits in fp32: a mean over thousands of rows needs more digits than 16 bit have.
    logits: Tensor<B, 2>,
    /// As from [`capped`].
    tanh: Option<Tensor<B, 2>>,
    lse: Tensor<B, 2>,
    /// Targets `[n, 1]`, 0 where ignored.
    targets: Tensor<B, 2, Int>,
    /// 1 if a row counts, otherwise 0, `[n, 1]`.
    counts: Tensor<B, 2>,
}

fn predictions<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: IntTensor<B>,
    options: CrossEntropyOptions,
) -> Predictions<B> {
    let weight: Tensor<B, 2> = wrap(weight);
    let x: Tensor<B, 2> = wrap(x);
    let [n, _] = x.dims();
    let logits = x.matmul(weight.transpose());
    let logits = if logits.dtype().size() < 4 { logits.cast(FloatDType::F32) } else { logits };
    let (logits, tanh) = capped(logits, options.cap);
    let targets = Tensor::<B, 1, Int>::from_primitive(targets).reshape([n, 1]);
    let (targets, counts) = match options.ignored {
        Some(ignored) => {
            let ignored = targets.clone().equal_elem(ignored);
            (targets.mask_fill(ignored.clone(), 0), ignored.bool_not().float())
        }
        None => (targets, Tensor::ones([n, 1], &logits.device())),
    };
    let largest = logits.clone().max_dim(1);
    let lse = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
    let counts = counts.cast(logits.dtype());
    Predictions { logits, tanh, lse, targets, counts }
}

fn mean_loss<B: Backend>(predictions: &Predictions<B>, counted: Tensor<B, 1>) -> Tensor<B, 1> {
    let Predictions { logits, lse, targets, counts, .. } = predictions;
    let losses = (lse.clone() - logits.clone().gather(1, targets.clone())) * counts.clone();
    losses.sum() / counted
}
