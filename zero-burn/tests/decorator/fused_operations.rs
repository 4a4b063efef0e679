//! The fused operations, compared with the same mathematics from Burn's own operations, in values and gradients: burn-flex's kernels
//! through the hand-written backward passes, and the default bodies. The reference is differentiated by Burn's autodiff alone. Here, not in
//! zero-ops: with burn's `distributed` feature, which Cargo unifies over the workspace, a bare `Autodiff<Flex>` is not an `AutodiffBackend`
//! (ADR 3).

use std::cell::RefCell;

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Bool, FloatDType, Int, Tensor, TensorData, TensorPrimitive, activation};
use burn_flex::Flex;
use zero_burn::Zero;
use zero_core::random::Draws;
use zero_ops::quantized::{Format, Quantized};
use zero_ops::{AttentionOptions, CrossEntropyOptions, FusedBackend, Gelu};

type A = Autodiff<I>;
type I = Zero<Flex>;

/// Largest difference allowed, relative to the largest value of the reference.
const TOLERANCE: f32 = 1e-5;

thread_local! {
    /// Each test has its own thread, so its numbers are the same in every run. (The backend's numbers are shared by the tests of a process;
    /// in rare runs a gradient of one element is nearly zero, and consists of rounding errors only.)
    static DRAWS: RefCell<Draws> = RefCell::new(Draws::new(1));
}

fn drawn<const D: usize>(shape: [usize; D], number: impl Fn(&mut Draws) -> f64) -> Tensor<I, D> {
    let numbers: Vec<f32> =
        DRAWS.with_borrow_mut(|draws| (0..shape.iter().product()).map(|_| number(draws) as f32).collect());
    Tensor::from_data(TensorData::new(numbers, shape), &Default::default())
}

/// Between 0 and 1.
fn uniform<const D: usize>(shape: [usize; D]) -> Tensor<I, D> {
    drawn(shape, Draws::unit)
}

/// Nearly normal: a sum of twelve has a variance of 1.
fn normal<const D: usize>(shape: [usize; D]) -> Tensor<I, D> {
    drawn(shape, |draws| (0..12).map(|_| draws.unit()).sum::<f64>() - 6.0)
}

fn random<const D: usize>(shape: [usize; D]) -> Tensor<A, D> {
    Tensor::from_inner(normal(shape)).require_grad()
}

fn values<const D: usize>(x: Tensor<I, D>) -> Vec<f32> {
    x.cast(FloatDType::F32).into_data().to_vec().expect("fp32")
}

fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-6f32, |largest, x| largest.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / scale;
        assert!(error <= tolerance, "{what}, element {i}: {got}, expected {expected} ({error:e} of the largest)");
    }
}

/// A tensor of any rank for which gradients are computed.
trait Leaf {
    fn gradient(&self, grads: &<A as AutodiffBackend>::Gradients) -> Vec<f32>;
}

impl<const D: usize> Leaf for Tensor<A, D> {
    fn gradient(&self, grads: &<A as AutodiffBackend>::Gradients) -> Vec<f32> {
        values(self.grad(grads).expect("a leaf that takes part has a gradient"))
    }
}

/// Compares values and gradients of two computations of the same function. Results are multiplied by random weights, so that gradients
/// differ from element to element.
fn same<const D: usize>(what: &str, got: Tensor<A, D>, expected: Tensor<A, D>, leaves: &[(&str, &dyn Leaf)]) {
    same_within(TOLERANCE, what, got, expected, leaves);
}

fn same_within<const D: usize>(
    tolerance: f32,
    what: &str,
    got: Tensor<A, D>,
    expected: Tensor<A, D>,
    leaves: &[(&str, &dyn Leaf)],
) {
    close(what, &values(got.clone().inner()), &values(expected.clone().inner()), tolerance);
    let weights = Tensor::<A, D>::from_inner(normal(got.dims()));
    let got = (got * weights.clone()).sum().backward();
    let expected = (expected * weights).sum().backward();
    for (name, leaf) in leaves {
        close(&format!("{what}, gradient of {name}"), &leaf.gradient(&got), &leaf.gradient(&expected), tolerance);
    }
}

/// Returns the same values in a graph of their own: Burn forgets a leaf if one of several graphs has been differentiated.
fn again<const D: usize>(x: &Tensor<A, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone().inner()).require_grad()
}

#[test]
fn linear() {
    for (n, d, f) in [(1, 1, 1), (3, 7, 5), (33, 64, 100)] {
        for (with_bias, with_residual) in [(true, true), (true, false), (false, true), (false, false)] {
            for transposed in [false, true] {
                let (x, b, r) = (random([n, d]), random([f]), random([n, f]));
                let w = if transposed { random([f, d]) } else { random([d, f]) };
                // As a tied head's weight lies.
                let weight = || if transposed { w.clone().transpose() } else { w.clone() };
                let bias = with_bias.then(|| b.clone());
                let residual = with_residual.then(|| r.clone());
                let got = zero_ops::linear(x.clone(), weight(), bias.clone(), residual.clone());

                let mut expected = x.clone().matmul(weight());
                let mut leaves: Vec<(&str, &dyn Leaf)> = vec![("x", &x), ("weight", &w)];
                if with_bias {
                    expected = expected + b.clone().unsqueeze::<2>();
                    leaves.push(("bias", &b));
                }
                if with_residual {
                    expected = expected + r.clone();
                    leaves.push(("residual", &r));
                }
                let what =
                    format!("{n}, {d}, {f}, bias {with_bias}, residual {with_residual}, transposed {transposed}");
                same(&what, got, expected, &leaves);
            }
        }
    }
}

#[test]
fn linear_gives_gradients_only_to_those_who_want_them() {
    let (x, w, b) = (random([4, 3]), random([3, 2]), random([2]));
    let frozen = Tensor::<A, 2>::from_inner(w.clone().inner());
    let grads = zero_ops::linear(x.clone(), frozen.clone(), Some(b.clone()), None).sum().backward();
    assert!(frozen.grad(&grads).is_none());
    close("x", &x.gradient(&grads), &values(w.inner().sum_dim(1).transpose().repeat_dim(0, 4)), TOLERANCE);
    assert_eq!(b.gradient(&grads), [4.0, 4.0]);
}

#[test]
fn layer_norm() {
    for (n, d) in [(1, 5), (3, 7), (40, 64), (5, 768)] {
        let (x, gamma, beta) = (random([n, d]), random([d]), random([d]));
        let plain = || {
            let mean = x.clone().mean_dim(1);
            let centred = x.clone() - mean;
            let variance = (centred.clone() * centred.clone()).mean_dim(1);
            centred / (variance + 1e-5).sqrt() * gamma.clone().unsqueeze()
        };
        let got = zero_ops::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5);
        let leaves: [(&str, &dyn Leaf); 3] = [("x", &x), ("gamma", &gamma), ("beta", &beta)];
        same("with beta", got, plain() + beta.clone().unsqueeze(), &leaves);
        same("without", zero_ops::layer_norm(x.clone(), gamma.clone(), None, 1e-5), plain(), &leaves[..2]);
    }
}

#[test]
fn gelu() {
    for (n, f) in [(1, 1), (3, 7), (40, 100)] {
        let (x, bias) = (random([n, f]), random([f]));
        for kind in [Gelu::Tanh, Gelu::Erf] {
            let plain = |x: Tensor<A, 2>| match kind {
                Gelu::Erf => x.clone() * 0.5 * ((x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0),
                Gelu::Tanh => {
                    let inner = (x.clone() + x.clone() * x.clone() * x.clone() * 0.044715) * 0.7978845608028654;
                    x * 0.5 * (inner.tanh() + 1.0)
                }
            };
            let got = zero_ops::gelu(kind, x.clone(), Some(bias.clone()));
            let leaves: [(&str, &dyn Leaf); 2] = [("x", &x), ("bias", &bias)];
            same("with bias", got, plain(x.clone() + bias.clone().unsqueeze()), &leaves);
            same("without", zero_ops::gelu(kind, x.clone(), None), plain(x.clone()), &leaves[..1]);
        }
    }
}

/// Attention with all scores, by Burn's operations.
fn plain_attention(
    [q, k, v]: [Tensor<A, 2>; 3],
    mask: Option<Tensor<A, 2>>,
    options: AttentionOptions,
) -> Tensor<A, 2> {
    let [n, d] = q.dims();
    let (b, h) = (options.batch, options.heads);
    let (t, e) = (n / b, d / h);
    let [m, _] = k.dims();
    // Heads of keys and values, repeated for those of the queries that share them.
    let heads = |x: Tensor<A, 2>| {
        let [rows, width] = x.dims();
        let (kv, g) = (width / e, d / width);
        let x = x.reshape([b, rows / b, kv, 1, e]).expand([b, rows / b, kv, g, e]);
        x.reshape([b, rows / b, kv * g, e]).swap_dims(1, 2)
    };
    let mut scores = heads(q).matmul(heads(k).transpose()) * options.scale;
    if let Some(cap) = options.cap {
        scores = (scores / cap).tanh() * cap;
    }
    if options.causal {
        let future =
            Tensor::<A, 2, Bool>::tril_mask([t, t], 0, &Default::default()).reshape([1, 1, t, t]).expand([b, h, t, t]);
        scores = scores.mask_fill(future, -3e4);
    }
    if let Some(window) = options.window {
        let at = |axis| Tensor::<A, 1, Int>::arange(0..t as i64, &Default::default()).unsqueeze_dim::<2>(axis);
        let past = (at(1) - at(0)).greater_equal_elem(window as i64).reshape([1, 1, t, t]).expand([b, h, t, t]);
        scores = scores.mask_fill(past, -3e4);
    }
    if let Some(mask) = mask {
        scores = scores + mask.reshape([b, 1, 1, m / b]);
    }
    activation::softmax(scores, 3).matmul(heads(v)).swap_dims(1, 2).reshape([n, d])
}

#[test]
fn attention() {
    for (batch, t, heads, e) in [(1, 1, 1, 1), (2, 5, 3, 4), (1, 33, 2, 8), (2, 130, 2, 16), (1, 200, 1, 64)] {
        let (n, d) = (batch * t, heads * e);
        let mask = uniform([batch, t]);
        // Of a row that sees nothing, the two say different things: keep the first key visible.
        let mask = mask.slice_fill([0..batch, 0..1], 1.0);
        let mask = Tensor::<A, 2>::from_inner(mask.lower_elem(0.3).float() * -3e4);
        for causal in [true, false] {
            for mask in [None, Some(mask.clone())] {
                let options =
                    AttentionOptions { batch, heads, causal, window: None, scale: 0.3, dropout: None, cap: None };
                let what = format!("{batch} x {t}, {heads} heads of {e}, causal {causal}, mask {}", mask.is_some());
                let parts = [(); 3].map(|()| random([n, d]));
                let [q, k, v] = parts.clone();
                let got = zero_ops::attention(q.clone(), k.clone(), v.clone(), mask.clone(), options);
                let expected = plain_attention(parts, mask.clone(), options);
                same(&what, got, expected, &[("q", &q), ("k", &k), ("v", &v)]);

                let qkv = random([n, 3 * d]);
                let parts = qkv.clone().chunk(3, 1).try_into().expect("three thirds");
                let got = zero_ops::packed_attention(qkv.clone(), mask.clone(), options);
                same(&format!("packed {what}"), got, plain_attention(parts, mask, options), &[("qkv", &qkv)]);
            }
        }
    }
}

#[test]
fn attention_over_other_keys_than_the_queries_own() {
    for (batch, heads, kv, e) in [(1, 1, 1, 1), (2, 4, 2, 6), (1, 6, 1, 8), (2, 6, 3, 16)] {
        for (t, keys, causal, window, cap) in [
            (5, 5, true, None, None),
            (9, 9, true, Some(2), None),
            (150, 150, true, Some(40), None),
            (7, 20, false, None, None),
            (20, 3, false, None, None),
            (5, 5, true, None, Some(0.4)),
            (150, 150, true, Some(40), Some(1.5)),
            (7, 20, false, None, Some(50.0)),
        ] {
            // Two keys are left at least: of one alone the gradient of the queries is zero, and rounding all of it.
            let mask = uniform([batch, keys]);
            let mask =
                Tensor::<A, 2>::from_inner(mask.slice_fill([0..batch, 0..2], 1.0).lower_elem(0.3).float() * -3e4);
            // Within a window a row may see hidden keys alone, of which the two say different things.
            for mask in [None, Some(mask).filter(|_| window.is_none())] {
                let options = AttentionOptions { batch, heads, causal, window, scale: 0.3, dropout: None, cap };
                let what = format!(
                    "{batch} x {t} over {keys}, {heads} heads over {kv} of {e}, window {window:?}, cap {cap:?}"
                );
                let (q, k, v) =
                    (random([batch * t, heads * e]), random([batch * keys, kv * e]), random([batch * keys, kv * e]));
                let got = zero_ops::attention(q.clone(), k.clone(), v.clone(), mask.clone(), options);
                let expected = plain_attention([q.clone(), k.clone(), v.clone()], mask, options);
                same(&what, got, expected, &[("q", &q), ("k", &k), ("v", &v)]);
            }
        }
    }
}

#[test]
fn rms_norm() {
    for (n, d) in [(1, 5), (3, 7), (40, 64), (5, 768)] {
        let (x, gamma) = (random([n, d]), random([d]));
        let square = (x.clone() * x.clone()).mean_dim(1);
        let expected = x.clone() / (square + 1e-5).sqrt() * gamma.clone().unsqueeze();
        same("rms norm", zero_ops::rms_norm(x.clone(), gamma.clone(), 1e-5), expected, &[("x", &x), ("gamma", &gamma)]);
    }
}

#[test]
fn quantized_linear() {
    // Few rows, which the kernel takes as they are, and many.
    for (n, d, f) in [(1, 5, 3), (16, 70, 130), (40, 33, 64)] {
        for (name, format) in Format::NAMES {
            let how = Quantized { format, width: f };
            let device = Default::default();
            let elements: Vec<f32> = values(random([d, f]).inner());
            let weight = zero_ops::quantized_parameter::<A>([d, f], format, &device, |range| elements[range].to_vec());
            let weight = weight.set_require_grad(false);
            let plain = <I as FusedBackend>::dequantized(
                weight.clone().inner().into_primitive().tensor(),
                how,
                FloatDType::F32,
            );
            let plain = Tensor::<A, 2>::from_inner(Tensor::from_primitive(TensorPrimitive::Float(plain)));
            for given in 0..4 {
                let (x, bias, residual) = (random([n, d]), random([f]), random([n, f]));
                let what = format!("{n} rows of {d} by {f} in {name}");
                let leaves: [(&str, &dyn Leaf); 3] = [("x", &x), ("bias", &bias), ("residual", &residual)];
                let bias = Some(bias.clone()).filter(|_| given % 2 == 1);
                let residual = Some(residual.clone()).filter(|_| given >= 2);
                let got = zero_ops::quantized_linear(x.clone(), weight.clone(), bias.clone(), residual.clone(), how);
                let mut expected = x.clone().matmul(plain.clone());
                let there = [true, bias.is_some(), residual.is_some()];
                expected = bias.map_or(expected.clone(), |bias| expected + bias.unsqueeze());
                expected = residual.map_or(expected.clone(), |residual| expected + residual);
                let leaves: Vec<_> =
                    leaves.iter().zip(there).filter(|(_, there)| *there).map(|(leaf, _)| *leaf).collect();
                same(&what, got, expected, &leaves);
            }
        }
    }
}

#[test]
fn swiglu() {
    for (n, f) in [(1, 1), (3, 7), (40, 100)] {
        let (gate, up) = (random([n, f]), random([n, f]));
        let expected = gate.clone() / (gate.clone().neg().exp() + 1.0) * up.clone();
        same("swiglu", zero_ops::swiglu(gate.clone(), up.clone()), expected, &[("gate", &gate), ("up", &up)]);
    }
}

/// Returns cosines and sines of angles that are all different.
fn angles(t: usize, half: usize) -> [Tensor<A, 2>; 2] {
    let angles = Tensor::<I, 1, Int>::arange(0..(t * half) as i64, &Default::default()).float().reshape([t, half]);
    [angles.clone().cos(), angles.sin()].map(Tensor::from_inner)
}

#[test]
fn rotary() {
    for (b, t, heads, half) in [(1, 1, 1, 1), (2, 5, 3, 4), (3, 33, 2, 16)] {
        let x = random([b * t, heads * 2 * half]);
        let [cos, sin] = angles(t, half);
        let wide = |x: &Tensor<A, 2>| x.clone().repeat(&[b, 2 * heads]);
        let by_half = x.clone().reshape([b * t, heads, 2, half]);
        let [first, second] = [0, 1].map(|part| by_half.clone().narrow(2, part, 1));
        let crossed = Tensor::cat(vec![second.neg(), first], 2).reshape([b * t, heads * 2 * half]);
        let expected = x.clone() * wide(&cos) + crossed * wide(&sin);
        same("rotary", zero_ops::rotary(x.clone(), cos, sin), expected, &[("x", &x)]);
    }
}

#[test]
fn embedding() {
    let table = random([11, 6]);
    let ids = Tensor::<A, 1, Int>::from_ints([3, 0, 10, 3, 3, 7], &Default::default());
    let got = zero_ops::embedding(table.clone(), ids.clone());
    same("rows", got, table.clone().select(0, ids), &[("table", &table)]);
}

#[test]
fn linear_cross_entropy() {
    // More rows than a chunk has, at the last size.
    for (n, d, v, cap) in [(1, 3, 2, None), (9, 7, 33, None), (9, 7, 33, Some(0.8)), (150, 16, 70_000, Some(3.0))] {
        let options = CrossEntropyOptions { ignored: Some(-100), cap };
        let (x, w) = (random([n, d]), random([v, d]));
        let targets: Vec<i32> = (0..n).map(|i| if i % 3 == 1 { -100 } else { (i * 7919 % v) as i32 }).collect();
        let counted: Vec<i32> = (0..n as i32).filter(|i| i % 3 != 1).collect();
        let targets = Tensor::<A, 1, Int>::from_ints(targets.as_slice(), &Default::default());
        let counted = Tensor::<A, 1, Int>::from_ints(counted.as_slice(), &Default::default());
        let plain = || {
            let logits = x.clone().matmul(w.clone().transpose()).select(0, counted.clone());
            let logits = cap.into_iter().fold(logits, |logits, cap| (logits / cap).tanh() * cap);
            let [m, _] = logits.dims();
            let picked = targets.clone().select(0, counted.clone()).reshape([m, 1]);
            activation::log_softmax(logits, 1).gather(1, picked).mean().neg()
        };
        let got = zero_ops::linear_cross_entropy(x.clone(), w.clone(), targets.clone(), options);
        same("loss", got, plain(), &[("x", &x), ("weight", &w)]);
        let got =
            zero_ops::linear_cross_entropy(x.clone().inner(), w.clone().inner(), targets.clone().inner(), options);
        close("evaluation", &values(got), &values(plain().inner()), TOLERANCE);
    }
}

#[test]
fn a_loss_of_no_rows_is_zero() {
    let (x, w) = (random([2, 3]), random([4, 3]));
    let targets = Tensor::<A, 1, Int>::from_ints([-100, -100], &Default::default());
    let loss = zero_ops::linear_cross_entropy(x.clone(), w.clone(), targets, Some(-100));
    assert_eq!(loss.clone().into_scalar(), 0.0);
    let grads = loss.backward();
    assert!(x.gradient(&grads).iter().chain(&w.gradient(&grads)).all(|g| *g == 0.0));
}

/// Every operation with its operands cast to another type, against fp32.
/// Random values that are exact in `dtype`: an error is the operation's own.
fn rounded<const D: usize>(dtype: FloatDType, shape: [usize; D]) -> Tensor<A, D> {
    Tensor::from_inner(normal(shape).cast(dtype).cast(FloatDType::F32)).require_grad()
}

fn agrees_with_fp32(dtype: FloatDType, tolerance: f32) {
    let to = |x: &Tensor<A, 2>| x.clone().cast(dtype);
    let to_row = |x: &Tensor<A, 1>| x.clone().cast(dtype);
    let back = |x: Tensor<A, 2>| x.cast(FloatDType::F32);

    let (x, w, b, r) = (rounded(dtype, [6, 12]), rounded(dtype, [12, 4]), rounded(dtype, [4]), rounded(dtype, [6, 4]));
    let got = back(zero_ops::linear(to(&x), to(&w), Some(to_row(&b)), Some(to(&r))));
    let expected = zero_ops::linear(x.clone(), w.clone(), Some(b.clone()), Some(r.clone()));
    same_within(tolerance, "linear", got, expected, &[("x", &x), ("weight", &w), ("bias", &b), ("residual", &r)]);

    let (x, gamma, beta) = (again(&x), rounded(dtype, [12]), rounded(dtype, [12]));
    let got = back(zero_ops::layer_norm(to(&x), to_row(&gamma), Some(to_row(&beta)), 1e-5));
    let expected = zero_ops::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5);
    same_within(tolerance, "layer norm", got, expected, &[("x", &x), ("gamma", &gamma), ("beta", &beta)]);

    for kind in [Gelu::Tanh, Gelu::Erf] {
        let (x, bias) = (again(&x), again(&beta));
        let got = back(zero_ops::gelu(kind, to(&x), Some(to_row(&bias))));
        let expected = zero_ops::gelu(kind, x.clone(), Some(bias.clone()));
        same_within(tolerance, "gelu", got, expected, &[("x", &x), ("bias", &bias)]);
    }

    let options =
        AttentionOptions { batch: 2, heads: 2, causal: true, window: None, scale: 0.5, dropout: None, cap: None };
    let qkv = again(&x);
    let got = back(zero_ops::packed_attention(to(&qkv), None, options));
    let expected = zero_ops::packed_attention(qkv.clone(), None, options);
    same_within(tolerance, "packed attention", got, expected, &[("qkv", &qkv)]);

    let mask = Tensor::<A, 2>::from_floats([[0.0, -3e4, 0.0], [0.0, 0.0, -3e4]], &Default::default());
    let [q, k, v] = [(); 3].map(|()| rounded(dtype, [6, 8]));
    let options = AttentionOptions { causal: false, ..options };
    let got = back(zero_ops::attention(to(&q), to(&k), to(&v), Some(to(&mask)), options));
    let expected = zero_ops::attention(q.clone(), k.clone(), v.clone(), Some(mask), options);
    same_within(tolerance, "attention", got, expected, &[("q", &q), ("k", &k), ("v", &v)]);

    let (q, k, v) = (again(&q), rounded(dtype, [10, 4]), rounded(dtype, [10, 4]));
    let got = back(zero_ops::attention(to(&q), to(&k), to(&v), None, options));
    let expected = zero_ops::attention(q.clone(), k.clone(), v.clone(), None, options);
    same_within(tolerance, "attention over fewer heads", got, expected, &[("q", &q), ("k", &k), ("v", &v)]);

    let [q, k] = [(); 2].map(|()| rounded(dtype, [6, 8]));
    let options = AttentionOptions { causal: true, window: Some(2), cap: Some(1.5), ..options };
    let got = back(zero_ops::attention(to(&q), to(&k), to(&k), None, options));
    let expected = zero_ops::attention(q.clone(), k.clone(), k.clone(), None, options);
    same_within(tolerance, "capped attention in a window", got, expected, &[("q", &q), ("k and v", &k)]);

    let (x, gamma) = (again(&x), again(&gamma));
    let got = back(zero_ops::rms_norm(to(&x), to_row(&gamma), 1e-5));
    let expected = zero_ops::rms_norm(x.clone(), gamma.clone(), 1e-5);
    same_within(tolerance, "rms norm", got, expected, &[("x", &x), ("gamma", &gamma)]);

    let (x, up) = (again(&x), rounded(dtype, [6, 12]));
    let got = back(zero_ops::swiglu(to(&x), to(&up)));
    same_within(tolerance, "swiglu", got, zero_ops::swiglu(x.clone(), up.clone()), &[("gate", &x), ("up", &up)]);

    let (x, [cos, sin]) = (again(&x), angles(3, 2));
    let got = back(zero_ops::rotary(to(&x), to(&cos), to(&sin)));
    same_within(tolerance, "rotary", got, zero_ops::rotary(x.clone(), cos, sin), &[("x", &x)]);

    let (x, head) = (again(&x), rounded(dtype, [4, 12]));
    let targets = Tensor::<A, 1, Int>::from_ints([0, 3, -100, 2, 1, 1], &Default::default());
    for cap in [None, Some(2.5)] {
        let (x, head) = (again(&x), again(&head));
        let options = CrossEntropyOptions { ignored: Some(-100), cap };
        let got = zero_ops::linear_cross_entropy(to(&x), to(&head), targets.clone(), options).cast(FloatDType::F32);
        let expected = zero_ops::linear_cross_entropy(x.clone(), head.clone(), targets.clone(), options);
        let evaluated = |x: Tensor<A, 2>, head: Tensor<A, 2>| {
            values(zero_ops::linear_cross_entropy(x.inner(), head.inner(), targets.clone().inner(), options))
        };
        close("evaluation", &evaluated(to(&x), to(&head)), &evaluated(x.clone(), head.clone()), tolerance);
        // Scaled, as in training with a loss scale.
        same_within(tolerance, "cross-entropy", got * 64.0, expected * 64.0, &[("x", &x), ("weight", &head)]);
    }

    let table = rounded(dtype, [5, 3]);
    let ids = Tensor::<A, 1, Int>::from_ints([4, 4, 0], &Default::default());
    let got = back(zero_ops::embedding(to(&table), ids.clone()));
    same_within(tolerance, "embedding", got, zero_ops::embedding(table.clone(), ids), &[("table", &table)]);
}

#[test]
fn sixteen_bits_agree_with_fp32() {
    agrees_with_fp32(FloatDType::BF16, 2e-2);
    agrees_with_fp32(FloatDType::F16, 3e-3);
}

/// The gradient of a mean over a vocabulary is smaller than fp16 resolves; that of the scaled loss is not.
#[test]
fn a_loss_scale_keeps_small_gradients_in_fp16() {
    let (n, d, v, scale) = (64, 16, 4000, 65536.0);
    let [x, w] = [random([n, d]), random([v, d])].map(|x| Tensor::<A, 2>::from_inner(x.inner() * 0.25));
    let targets: Vec<i32> = (0..n as i32).collect();
    let targets = Tensor::<A, 1, Int>::from_ints(targets.as_slice(), &Default::default());
    let gradients = |dtype| {
        let (x, w) = (again(&x), again(&w));
        let loss = zero_ops::linear_cross_entropy(x.clone().cast(dtype), w.clone().cast(dtype), targets.clone(), None);
        let grads = (loss.cast(FloatDType::F32) * scale).backward();
        (x.gradient(&grads), w.gradient(&grads))
    };
    let (got, expected) = (gradients(FloatDType::F16), gradients(FloatDType::F32));
    close("x", &got.0, &expected.0, 1e-2);
    // Of tokens that are no target: a thousandth of the others'.
    let rest = n * d;
    let sum = |gradient: &[f32]| gradient[rest..].iter().map(|g| f64::from(g.abs())).sum::<f64>();
    let (got, expected) = (sum(&got.1), sum(&expected.1));
    assert!(expected / scale < 1e-5 * (v * d) as f64, "they are small without the scale: {expected}");
    assert!((got / expected - 1.0).abs() < 1e-2, "{got}, expected {expected}");
}

#[test]
fn causal_rows_never_see_the_future_even_if_their_own_key_is_hidden() {
    // Left padding: the first two keys of each sequence are hidden.
    let mask = Tensor::<I, 2>::from_floats([[-3e4, -3e4, 0.0, 0.0]], &Default::default());
    let options =
        AttentionOptions { batch: 1, heads: 1, causal: true, window: None, scale: 1.0, dropout: None, cap: None };
    let v = Tensor::<I, 2>::from_floats([[1.0], [2.0], [3.0], [4.0]], &Default::default());
    let same = v.zeros_like();
    for dtype in [FloatDType::F32, FloatDType::F64, FloatDType::F16] {
        let [q, k, v, mask] = [&same, &same, &v, &mask].map(|x| x.clone().cast(dtype));
        let got = values(zero_ops::attention(q, k, v, Some(mask), options));
        close("rows", &got, &[1.0, 1.5, 3.0, 3.5], 1e-3);
    }
}

#[test]
fn operands_of_different_types_are_refused() {
    let (x, w) = (random([2, 3]).cast(FloatDType::BF16), random([3, 5]));
    let work = std::panic::AssertUnwindSafe(|| zero_ops::linear(x, w, None, None));
    let panic = std::panic::catch_unwind(work).expect_err("it should panic");
    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(text.contains("linear: x is BF16 and weight is F32"), "{text}");
}

/// Our kernels on burn-flex do not cover f64, which therefore runs the default bodies.
#[test]
fn the_default_bodies_agree_with_the_kernels() {
    agrees_with_fp32(FloatDType::F64, 1e-5);
}

/// Views (slices, transposes) are not the kernels' preferred layout, but must give the same results.
#[test]
fn views_give_what_copies_give() {
    let wide = random([6, 20]);
    let view = wide.clone().narrow(1, 3, 12);
    let copy = Tensor::<A, 2>::from_inner(view.clone().inner() + 0.0);
    let gamma = random([12]);
    let norm = |x| values(zero_ops::layer_norm(x, gamma.clone(), None, 1e-5).inner());
    assert_eq!(norm(view.clone()), norm(copy.clone()));
    let gelu = |x| values(zero_ops::gelu(Gelu::Erf, x, None).inner());
    assert_eq!(gelu(view.clone()), gelu(copy.clone()));
    let options =
        AttentionOptions { batch: 1, heads: 3, causal: false, window: None, scale: 1.0, dropout: None, cap: None };
    let attended = |x: Tensor<A, 2>| values(zero_ops::attention(x.clone(), x.clone(), x, None, options).inner());
    assert_eq!(attended(view.clone()), attended(copy.clone()));
    assert_eq!(attended(view.clone().transpose().transpose()), attended(copy));
}

#[test]
fn wrong_shapes_are_named() {
    let panics = |work: Box<dyn FnOnce()>| -> String {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).expect_err("it should panic");
        panic.downcast_ref::<String>().cloned().unwrap_or_default()
    };
    let (x, w) = (random([2, 3]), random([4, 5]));
    let text = panics(Box::new(move || drop(zero_ops::linear(x, w, None, None))));
    assert!(text.contains("rows of 3 need a weight [3, _], got [4, 5]"), "{text}");
    let x = random([5, 6]);
    let options =
        AttentionOptions { batch: 2, heads: 2, causal: true, window: None, scale: 1.0, dropout: None, cap: None };
    let text = panics(Box::new(move || drop(zero_ops::packed_attention(x, None, options))));
    assert!(text.contains("5 rows do not divide into 2 sequences"), "{text}");
    for (q, k, causal, window, expected) in [
        (
            [4, 6],
            [4, 9],
            true,
            None,
            "keys of width 9 do not divide into heads that 2 query heads of width 3 can share",
        ),
        ([4, 6], [6, 6], true, None, "causal with 4 rows of queries and 6 rows of keys"),
        ([4, 6], [4, 6], false, Some(2), "a window of Some(2) rows needs causal attention"),
    ] {
        let options = AttentionOptions { causal, window, ..options };
        let (q, k) = (random(q), random(k));
        let text = panics(Box::new(move || drop(zero_ops::attention(q, k.clone(), k, None, options))));
        assert!(text.contains(expected), "{text}");
    }
    let (x, [cos, sin]) = (random([4, 6]), angles(3, 1));
    let text = panics(Box::new(move || drop(zero_ops::rotary(x, cos, sin))));
    assert!(text.contains("angles of 3 rows do not divide 4 rows"), "{text}");
}
