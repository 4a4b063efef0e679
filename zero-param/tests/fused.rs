//! Fused operations compared with Burn's own: `cargo test --test fused`.

mod common;

use burn::module::Param;
use burn::tensor::activation::{gelu as burns_gelu, gelu_approximate, log_softmax, softmax};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_optim::{AdamWConfig, ModuleOptimizer};
use common::{Gpt, device, numbers, train_plain};
use zero_param::{
    AttentionDropout, AttentionOptions, CrossEntropyOptions, Gelu, OptimizerConfig, attention, embedding, gelu,
    layer_norm, linear, linear_cross_entropy, packed_attention,
};

const N: usize = 6;
const D: usize = 8;
const F: usize = 12;

fn leaf<const R: usize>(seed: u64, shape: [usize; R]) -> Tensor<R> {
    let mut next = numbers(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::<R>::from_data(TensorData::new(values, shape), &device()).require_grad()
}

fn ids<const K: usize>(ids: [i32; K]) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(ids.to_vec(), [K]), &device())
}

fn floats<const R: usize>(x: Tensor<R>) -> Vec<f32> {
    x.into_data().try_into_vec().unwrap()
}

/// Returns the result, and the gradients of `x`, `w` and `b` for a gradient of the result that differs by element.
fn told(
    (x, w, b): (&Tensor<2>, &Tensor<2>, &Tensor<1>),
    out: impl FnOnce(Tensor<2>, Tensor<2>, Tensor<1>) -> Tensor<2>,
) -> Vec<Vec<f32>> {
    let out = out(x.clone(), w.clone(), b.clone());
    let [n, f] = out.dims();
    let grads = (out.clone() * leaf(9, [n, f]).detach()).sum().backward();
    let of = |gradient: Option<Vec<f32>>| gradient.unwrap_or_default();
    vec![
        floats(out.inner()),
        of(x.grad(&grads).map(floats)),
        of(w.grad(&grads).map(floats)),
        of(b.grad(&grads).map(floats)),
    ]
}

fn assert_close(what: &str, got: &[Vec<f32>], expected: &[Vec<f32>]) {
    for (part, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{what}, part {part}: what has a gradient");
        for (a, b) in got.iter().zip(expected) {
            assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{what}, part {part}: {a} and {b}");
        }
    }
}

#[test]
fn linear_is_burns() {
    let (x, w, b) = (leaf(1, [N, D]), leaf(2, [D, F]), leaf(3, [F]));
    let burns = |x: Tensor<2>, w: Tensor<2>, b: Option<Tensor<1>>| {
        let out = x.matmul(w);
        b.into_iter().fold(out, |out, b| out + b.unsqueeze())
    };
    let operands = (&x, &w, &b);
    let got = told(operands, |x, w, b| linear(x, w, Some(b), None));
    assert_close("with a bias", &got, &told(operands, |x, w, b| burns(x, w, Some(b))));
    let got = told(operands, |x, w, _| linear(x, w, None, None));
    assert_close("alone", &got, &told(operands, |x, w, _| burns(x, w, None)));
    // The residual is the input.
    let (w, b) = (leaf(4, [D, D]), leaf(5, [D]));
    let got = told((&x, &w, &b), |x, w, b| linear(x.clone(), w, Some(b), Some(x)));
    assert_close("with both", &got, &told((&x, &w, &b), |x, w, b| x.clone() + burns(x, w, Some(b))));
    let got = told((&x, &w, &b), |x, w, _| linear(x.clone(), w, None, Some(x)));
    assert_close("with a residual", &got, &told((&x, &w, &b), |x, w, _| x.clone() + burns(x, w, None)));
    // Sequences.
    let (w, long) = (leaf(2, [D, F]), |x: Tensor<2>, width: usize| x.reshape([2, N / 2, width]));
    let residual = || leaf(6, [N, F]).detach();
    let got = told((&x, &w, &leaf(3, [F])), |x, w, b| {
        linear(long(x, D), w, Some(b), Some(long(residual(), F))).reshape([N, F])
    });
    assert_close("sequences", &got, &told((&x, &w, &leaf(3, [F])), |x, w, b| residual() + burns(x, w, Some(b))));
    let w = leaf(4, [D, D]);
    // Frozen operands have no gradient; the other operands keep theirs.
    let got = told((&x, &w, &b), |x, w, b| linear(x, w.detach(), Some(b.detach()), None));
    assert_close("frozen weight", &got, &told((&x, &w, &b), |x, w, b| burns(x, w.detach(), Some(b.detach()))));
    let got = told((&x, &w, &b), |x, w, b| linear(x.detach(), w, Some(b), None));
    assert_close("frozen input", &got, &told((&x, &w, &b), |x, w, b| burns(x.detach(), w, Some(b))));
}

#[test]
fn layer_norm_and_gelu_are_burns() {
    let (x, gamma, b) = (leaf(1, [N, D]), leaf(2, [D, 1]), leaf(3, [D]));
    let gamma_of = |gamma: Tensor<2>| gamma.reshape([D]);
    let burns = |x: Tensor<2>, gamma: Tensor<1>| {
        let (variance, mean) = x.clone().var_mean_bias(1);
        (x - mean) / (variance + 1e-5).sqrt() * gamma.unsqueeze()
    };
    let operands = (&x, &gamma, &b);
    let got = told(operands, |x, gamma, b| layer_norm(x, gamma_of(gamma), Some(b), 1e-5));
    assert_close("layer norm", &got, &told(operands, |x, gamma, b| burns(x, gamma_of(gamma)) + b.unsqueeze()));
    let got = told(operands, |x, gamma, _| layer_norm(x, gamma_of(gamma), None, 1e-5));
    assert_close("without beta", &got, &told(operands, |x, gamma, _| burns(x, gamma_of(gamma))));
    for (kind, burns) in [(Gelu::Tanh, gelu_approximate as fn(Tensor<2>) -> Tensor<2>), (Gelu::Erf, burns_gelu)] {
        let got = told(operands, |x, _, b| gelu(kind, x, Some(b)));
        assert_close("gelu", &got, &told(operands, |x, _, b| burns(x + b.unsqueeze())));
        let got = told(operands, |x, _, _| gelu(kind, x, None));
        assert_close("without a bias", &got, &told(operands, |x, _, _| burns(x)));
    }
}

#[test]
fn attention_is_burns() {
    const HEADS: usize = 2;
    let (qkv, b) = (leaf(1, [N, 3 * D]), leaf(2, [1]));
    for causal in [true, false] {
        // Two sequences.
        let (t, width) = (N / 2, D / HEADS);
        let burns = |qkv: Tensor<2>, keys: Option<Tensor<2>>, dropout: Option<AttentionDropout>, cap: Option<f64>| {
            let part = |at: usize| {
                let part = qkv.clone().slice([0..N, at * D..(at + 1) * D]);
                part.reshape([2, t, HEADS, width]).swap_dims(1, 2)
            };
            let hidden = |at: usize| causal && at % t > at / t;
            let mask: Vec<f32> = (0..t * t).map(|at| if hidden(at) { f32::NEG_INFINITY } else { 0.0 }).collect();
            let mask = Tensor::<4>::from_data(TensorData::new(mask, [1, 1, t, t]), &device());
            let mask = keys.into_iter().fold(mask, |mask, keys| mask + keys.reshape([2, 1, 1, t]));
            let scores = capped(part(0).matmul(part(1).transpose()) / (width as f32).sqrt(), cap) + mask;
            let share = |place| dropout.map_or(1.0, |dropout| dropout.share(place as u64));
            let shares: Vec<f32> = (0..2 * HEADS * t * t).map(share).collect();
            let shares = Tensor::<4>::from_data(TensorData::new(shares, [2, HEADS, t, t]), &device());
            (softmax(scores, 3) * shares).matmul(part(2)).swap_dims(1, 2).reshape([N, D])
        };
        let scale = (width as f64).sqrt().recip();
        let options =
            AttentionOptions { batch: 2, heads: HEADS, causal, window: None, scale, dropout: None, cap: None };
        let drops = Some(AttentionDropout { probability: 0.3, key: 5 });
        for (hidden, dropout, cap) in
            [(None, None, None), (Some(1), None, None), (Some(1), drops, None), (Some(1), None, Some(0.3))]
        {
            let options = AttentionOptions { dropout, cap, ..options };
            // The second key of the second sequence.
            let mask = hidden.map(|key| {
                let mask: Vec<f32> = (0..N).map(|at| if at == t + key { -3e4 } else { 0.0 }).collect();
                Tensor::<2>::from_data(TensorData::new(mask, [2, t]), &device())
            });
            let expected = told((&qkv, &qkv, &b), |qkv, _, _| burns(qkv, mask.clone(), dropout, cap));
            let got = told((&qkv, &qkv, &b), |qkv, _, _| packed_attention(qkv, mask.clone(), options));
            assert_close("packed attention", &got, &expected);
            let got = told((&qkv, &qkv, &b), |qkv, _, _| {
                let [q, k, v] = [0, 1, 2].map(|at| qkv.clone().slice([0..N, at * D..(at + 1) * D]));
                attention(q, k, v, mask.clone(), options)
            });
            assert_close("attention", &got, &expected);
        }
    }
}

/// Applies a soft cap, if there is one.
fn capped<const D: usize>(x: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    cap.into_iter().fold(x, |x, cap| (x / cap).tanh() * cap)
}

#[test]
fn embedding_and_cross_entropy_are_burns() {
    const IGNORED: i64 = -100;
    let (x, table, b) = (leaf(1, [N, D]), leaf(2, [F, D]), leaf(3, [1]));
    let operands = (&x, &table, &b);
    let twice = [3, 0, 3, 11, 3, 0];
    let got = told(operands, |_, table, _| {
        let table = Param::from_mapped_value(Default::default(), table, Default::default());
        embedding(&table, ids(twice).reshape([2, N / 2])).reshape([N, D])
    });
    assert_close("embedding", &got, &told(operands, |_, table, _| table.select(0, ids(twice))));

    let burns = |x: Tensor<2>, w: Tensor<2>, cap: Option<f64>| {
        let rows = ids([0, 1, 3, 4, 5]);
        let next_n1 = ids([7, 0, 2, 11, 4]).reshape([5, 1]);
        let logs = log_softmax(capped(x.select(0, rows).matmul(w.transpose()), cap), 1);
        logs.gather(1, next_n1).mean().neg().reshape([1, 1])
    };
    let targets = || ids([7, 0, IGNORED as i32, 2, 11, 4]);
    let got = told(operands, |x, w, _| linear_cross_entropy(x, w, targets(), Some(IGNORED)).reshape([1, 1]) / 3.0);
    assert_close("cross-entropy", &got, &told(operands, |x, w, _| burns(x, w, None) / 3.0));
    let got = told(operands, |x, w, _| linear_cross_entropy(x, w.detach(), targets(), Some(IGNORED)).reshape([1, 1]));
    assert_close("frozen head", &got, &told(operands, |x, w, _| burns(x, w.detach(), None)));
    let options = CrossEntropyOptions { ignored: Some(IGNORED), cap: Some(0.7) };
    let got = told(operands, |x, w, _| linear_cross_entropy(x, w, targets(), options).reshape([1, 1]));
    assert_close("capped cross-entropy", &got, &told(operands, |x, w, _| burns(x, w, Some(0.7))));
}

#[test]
fn operands_in_16_bit_are_rounded_once() {
    let half = |x: Tensor<2>| x.cast(DType::BF16);
    let (x, w, b) = (leaf(1, [N, D]), leaf(2, [D, D]), leaf(3, [D]));
    let rounded = |out: Tensor<2>| out.cast(DType::BF16).cast(DType::F32);
    let bias = |b: Tensor<1>| b.cast(DType::BF16);
    let got = told((&x, &w, &b), |x, w, b| linear(half(x), half(w), Some(bias(b)), None).cast(DType::F32));
    let wide = |x: Tensor<2>| half(x).cast(DType::F32);
    let expected =
        told((&x, &w, &b), |x, w, b| rounded(linear(wide(x), wide(w), Some(bias(b).cast(DType::F32)), None)));
    assert_eq!(got, expected);
    let mixed = std::panic::catch_unwind(|| linear(half(x), w, None, None));
    assert!(mixed.unwrap_err().downcast_ref::<String>().unwrap().contains("linear: operands have different types"));
}

#[test]
fn adamw_has_burns_bits() {
    let config = AdamWConfig::new().with_weight_decay(0.02).with_epsilon(1e-7).with_beta_1(0.8).with_beta_2(0.99);
    let fused = config.elementwise().unwrap();
    assert!(train_plain::<Gpt<1>>(1, fused) == train_plain::<Gpt<1>>(1, config.init()), "the bits of Burn's AdamW");
    // Burn's AdamW runs the options that the fused one lacks.
    let odd = config.with_amsgrad(true);
    let burns: ModuleOptimizer = odd.elementwise().unwrap();
    assert!(train_plain::<Gpt<1>>(1, burns) == train_plain::<Gpt<1>>(1, odd.init()), "the bits of AMSGrad");
}
