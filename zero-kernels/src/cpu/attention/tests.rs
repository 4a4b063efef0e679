use half::bf16;

use super::*;
use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

/// Returns the result, the log-sum-exp, and the gradients for `g`, from contiguous rows.
fn reference(shape: Shape, qkv: [&[f64]; 3], mask: Option<&[f32]>, g: &[f64]) -> [Vec<f64>; 5] {
    let Shape { batch, heads, kv_heads, head_width: w, queries, keys, causal, window, scale, cap } = shape;
    let (d, c, scale, [q, k, v]) = (heads * w, kv_heads * w, f64::from(scale), qkv);
    let mut out = vec![0.0; batch * queries * d];
    let mut lse = vec![];
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for i in 0..queries {
            let qi = (b * queries + i) * d + h * w;
            let kj = |j: usize| (b * keys + j) * c + h * kv_heads / heads * w;
            let first = window.map_or(0, |window| (i + 1).saturating_sub(window));
            let seen = if causal { i + 1 } else { keys };
            // Scores without the mask, and the derivatives of their soft caps.
            let (mut s, slopes): (Vec<f64>, Vec<f64>) = (first..seen)
                .map(|j| {
                    let product = (0..w).map(|e| q[qi + e] * k[kj(j) + e]).sum::<f64>() * scale;
                    cap.map_or((product, 1.0), |cap| {
                        let tanh = (product / f64::from(cap)).tanh();
                        (f64::from(cap) * tanh, 1.0 - tanh * tanh)
                    })
                })
                .unzip();
            for (j, s) in (first..seen).zip(&mut s) {
                *s += mask.map_or(0.0, |mask| f64::from(mask[b * keys + j]));
            }
            let max = s.iter().copied().fold(f64::MIN, f64::max);
            let total = max + s.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            lse.push(total);
            let p: Vec<f64> = s.iter().map(|s| (s - total).exp()).collect();
            for j in first..seen {
                (0..w).for_each(|e| out[qi + e] += p[j - first] * v[kj(j) + e]);
            }
            let delta: f64 = (0..w).map(|e| out[qi + e] * g[qi + e]).sum();
            for j in first..seen {
                let dp: f64 = (0..w).map(|e| g[qi + e] * v[kj(j) + e]).sum();
                let ds = p[j - first] * (dp - delta) * slopes[j - first] * scale;
                for e in 0..w {
                    dv[kj(j) + e] += p[j - first] * g[qi + e];
                    dq[qi + e] += ds * k[kj(j) + e];
                    dk[kj(j) + e] += ds * q[qi + e];
                }
            }
        }
    }
    [out, lse, dq, dk, dv]
}

fn inputs<'a, T>(shape: Shape, rows: [(&'a [T], usize); 3], key_mask: Option<&'a [f32]>) -> Inputs<'a, T> {
    let [q, k, v] = rows.map(|(data, stride)| Rows { data, stride });
    Inputs { shape, q, k, v, key_mask }
}

/// Computes the same as `reference`, from contiguous rows.
fn run<T: Operand>(blocks: Blocks, shape: Shape, qkv: [&[T]; 3], mask: Option<&[f32]>, g: &[T]) -> [Vec<f32>; 5] {
    let [d, c] = [shape.heads, shape.kv_heads].map(|heads| heads * shape.head_width);
    let [q, k, v] = qkv;
    let inputs = inputs(shape, [(q, d), (k, c), (v, c)], mask);
    let nothing = T::store(f32::NAN);
    let mut out = vec![nothing; g.len()];
    let mut lse = vec![f32::NAN; shape.batch * shape.heads * shape.queries];
    forward_in(blocks, inputs, &mut out, &mut lse);
    let mut grads = qkv.map(|data| vec![nothing; data.len()]);
    let results = Results { out: &out, lse: &lse, g };
    let [dq, dk, dv] = &mut grads;
    backward_in(blocks, inputs, results, [RowsMut::new(dq, d), RowsMut::new(dk, c), RowsMut::new(dv, c)]);
    let [dq, dk, dv] = grads;
    let [out, dq, dk, dv] = [out, dq, dk, dv].map(|values| values.into_iter().map(T::load).collect());
    [out, lse, dq, dk, dv]
}

/// Sums are f32; the softmax, its gradient and the results are rounded to 8 bits.
#[test]
fn in_bfloat16_it_agrees_with_f64_up_to_the_rounding() {
    for (batch, heads, kv_heads, head_width, t) in
        [(1, 1, 1, 1, 1usize), (2, 3, 3, 5, 17), (1, 4, 2, 64, 150), (1, 2, 2, 80, 70)]
    {
        for (causal, window, keys, masked) in
            [(true, None, t, false), (false, None, t, true), (false, None, 2 * t + 1, false), (true, Some(6), t, true)]
        {
            // No power of two, so that it is no exact factor of a bfloat16.
            let (scale, cap) = (0.3, (masked || keys > t).then_some(0.8));
            let shape = Shape { batch, heads, kv_heads, head_width, queries: t, keys, causal, window, scale, cap };
            let (d, c) = (heads * head_width, kv_heads * head_width);
            let made =
                |count: usize, seed: u64| numbers(count, seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
            let (q, k, v) = (made(batch * t * d, 1), made(batch * keys * c, 2), made(batch * keys * c, 3));
            let g = made(batch * t * d, 4);
            let mask: Vec<f32> =
                (0..batch * keys).map(|i| if i % keys > 0 && i % 3 == 1 { -3e4 } else { 0.0 }).collect();
            let mask = masked.then_some(&mask[..]);
            let [q64, k64, v64, g64] =
                [&q, &k, &v, &g].map(|values| values.iter().map(|value| value.to_f64()).collect::<Vec<f64>>());
            let expected = reference(shape, [&q64, &k64, &v64], mask, &g64);
            for blocks in [BLOCKS, Blocks { queries: 7, keys: 5 }] {
                let got = run(blocks, shape, [&q, &k, &v], mask, &g);
                for (name, (got, expected)) in
                    ["out", "lse", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&expected))
                {
                    assert_close(name, got, expected, if name == "lse" { 1e-5 } else { 2e-2 });
                }
            }
        }
    }
    let shape = Shape {
        batch: 2,
        heads: 3,
        kv_heads: 3,
        window: None,
        head_width: 33,
        queries: 131,
        keys: 131,
        causal: true,
        scale: 0.2,
        cap: None,
    };
    let [q, k, v, g] =
        [1, 2, 3, 4].map(|seed| -> Vec<bf16> { numbers(2 * 131 * 99, seed).into_iter().map(bf16::from_f32).collect() });
    same_bits(|| run(Blocks { queries: 64, keys: 50 }, shape, [&q, &k, &v], None, &g).concat());
}

#[test]
fn agrees_with_f64_for_odd_sizes_blocks_and_masks() {
    let sizes = [
        (1, 1, 1, 1, 1usize),
        (1, 2, 2, 7, 3),
        (2, 3, 3, 5, 17),
        (2, 2, 2, 64, 33),
        (1, 1, 1, 100, 17),
        (1, 2, 2, 64, 150),
        (2, 6, 2, 5, 17),
        (1, 4, 1, 16, 90),
    ];
    for (batch, heads, kv_heads, head_width, t) in sizes {
        for (causal, window, keys, masked, cap) in [
            (true, None, t, false, None),
            (false, None, t, true, None),
            (false, None, 2 * t + 1, false, None),
            (false, None, t.div_ceil(2), true, None),
            (true, None, t, true, None),
            (true, Some(1), t, false, None),
            (true, Some(6), t, false, None),
            (true, Some(40), t, true, None),
            (true, None, t, false, Some(1.5)),
            (false, None, 2 * t + 1, true, Some(0.3)),
            (true, Some(6), t, true, Some(50.0)),
        ] {
            let scale = 1.0 / (head_width as f32).sqrt();
            let shape = Shape { batch, heads, kv_heads, head_width, queries: t, keys, causal, window, scale, cap };
            let (d, c) = (heads * head_width, kv_heads * head_width);
            let (q, g) = (numbers(batch * t * d, 1), numbers(batch * t * d, 4));
            let (k, v) = (numbers(batch * keys * c, 2), numbers(batch * keys * c, 3));
            let q: Vec<f32> = q.into_iter().map(|q| 3.0 * q).collect();
            let mask: Vec<f32> =
                (0..batch * keys).map(|i| if i % keys > 0 && i % 3 == 1 { -3e4 } else { 0.0 }).collect();
            let mask = masked.then_some(&mask[..]);
            let [q64, k64, v64, g64] = [&q, &k, &v, &g].map(|values| wide(values));
            let expected = reference(shape, [&q64, &k64, &v64], mask, &g64);
            for (queries, keys) in [(64, 512), (5, 7), (7, 3), (1, 1), (32, 16)] {
                let got = run(Blocks { queries, keys }, shape, [&q, &k, &v], mask, &g);
                for (name, (got, expected)) in
                    ["out", "lse", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&expected))
                {
                    assert_close(name, got, expected, 1e-5);
                }
            }
            if t <= 17 {
                let [_, _, dq, dk, dv] = run(BLOCKS, shape, [&q, &k, &v], mask, &g);
                let loss = |qkv: [&[f64]; 3]| -> f64 {
                    reference(shape, qkv, mask, &g64)[0].iter().zip(&g64).map(|(y, g)| y * g).sum()
                };
                assert_differences("q", &q, &dq, |q| loss([q, &k64, &v64]));
                assert_differences("k", &k, &dk, |k| loss([&q64, k, &v64]));
                assert_differences("v", &v, &dv, |v| loss([&q64, &k64, v]));
            }
        }
    }
}

#[test]
fn interleaved_rows_are_read_and_written_in_place() {
    let shape = Shape {
        batch: 2,
        heads: 3,
        kv_heads: 3,
        window: None,
        head_width: 8,
        queries: 19,
        keys: 19,
        causal: true,
        scale: 0.3,
        cap: None,
    };
    let (n, d) = (38, 24);
    let (qkv, g) = (numbers(n * 3 * d, 1), numbers(n * d, 2));
    let [q, k, v] = [0, 1, 2].map(|part| Rows { data: &qkv[part * d..], stride: 3 * d });
    let (mut out, mut lse, mut grad) = (vec![f32::NAN; n * d], vec![f32::NAN; n * 3], vec![f32::NAN; n * 3 * d]);
    let inputs = Inputs { shape, q, k, v, key_mask: None };
    forward(inputs, &mut out, &mut lse);
    backward(inputs, Results { out: &out, lse: &lse, g: &g }, RowsMut::split_qkv(&mut grad, d));
    let apart = |all: &[f32], part: usize| -> Vec<f32> {
        all.chunks(3 * d).flat_map(|row| row[part * d..(part + 1) * d].to_vec()).collect()
    };
    let [q, k, v] = [0, 1, 2].map(|part| apart(&qkv, part));
    let [out2, lse2, dq, dk, dv] = run(BLOCKS, shape, [&q, &k, &v], None, &g);
    assert_close("out", &out, &wide(&out2), 1e-6);
    assert_close("lse", &lse, &wide(&lse2), 1e-6);
    for (part, expected) in [dq, dk, dv].iter().enumerate() {
        assert_close("grad", &apart(&grad, part), &wide(expected), 1e-6);
    }
}

#[test]
fn queries_with_all_keys_masked_get_numbers() {
    for mask in [-3e4, f32::NEG_INFINITY] {
        let shape = Shape {
            batch: 2,
            heads: 1,
            kv_heads: 1,
            window: None,
            head_width: 4,
            queries: 9,
            keys: 9,
            causal: false,
            scale: 0.5,
            cap: None,
        };
        let [q, k, v, g] = [1, 2, 3, 4].map(|seed| numbers(72, seed));
        let mask = [[0.0; 9], [mask; 9]].concat();
        let got = run(Blocks { queries: 4, keys: 3 }, shape, [&q, &k, &v], Some(&mask), &g);
        assert!(got.iter().flatten().all(|value| value.is_finite()), "{got:?}");
        let [q, k, v, g] = [q, k, v, g].map(|values| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
        let got = run(Blocks { queries: 4, keys: 3 }, shape, [&q, &k, &v], Some(&mask), &g);
        assert!(got.iter().flatten().all(|value| value.is_finite()), "{got:?}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let shape = Shape {
        batch: 2,
        heads: 3,
        kv_heads: 3,
        window: None,
        head_width: 33,
        queries: 131,
        keys: 131,
        causal: true,
        scale: 0.2,
        cap: None,
    };
    let [q, k, v, g] = [1, 2, 3, 4].map(|seed| numbers(2 * 131 * 99, seed));
    same_bits(|| run(Blocks { queries: 64, keys: 50 }, shape, [&q, &k, &v], None, &g).concat());
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let shape = Shape {
        batch: 1,
        heads: 1,
        kv_heads: 1,
        window: None,
        head_width: 2,
        queries: 2,
        keys: 2,
        causal: true,
        scale: 1.0,
        cap: None,
    };
    let run = |shape: Shape, k: usize, stride: usize, mask: usize, lse: usize| {
        let (k, mask) = (vec![0.0; k], vec![0.0; mask]);
        let (q, k) = (Rows { data: &[0.0; 4], stride: 2 }, Rows { data: &k, stride });
        forward(Inputs { shape, q, k, v: k, key_mask: Some(&mask) }, &mut [0.0; 4], &mut vec![0.0; lse]);
    };
    assert_panics(&["causal with 2 queries and 3 keys"], || run(Shape { keys: 3, ..shape }, 6, 2, 3, 2));
    assert_panics(&["`k` has 3 elements, expected 2 rows of stride 2"], || run(shape, 3, 2, 2, 2));
    assert_panics(&["rows of `k` have 1 elements, expected at least 2"], || run(shape, 4, 1, 2, 2));
    assert_panics(&["`key_mask` has 1 elements, expected 2"], || run(shape, 4, 2, 1, 2));
    assert_panics(&["`lse` has 3 elements, expected 2"], || run(shape, 4, 2, 2, 3));
    assert_panics(&["2 query heads cannot share 3 key heads"], || {
        run(Shape { heads: 2, kv_heads: 3, ..shape }, 4, 2, 2, 2);
    });
    assert_panics(&["a window of Some(0) keys"], || run(Shape { window: Some(0), ..shape }, 4, 2, 2, 2));
    assert_panics(&["a soft cap must be positive"], || run(Shape { cap: Some(0.0), ..shape }, 4, 2, 2, 2));
    assert_panics(&["0 keys"], || run(Shape { keys: 0, causal: false, ..shape }, 0, 2, 0, 2));
    assert_panics(&["7 elements", "rows of 3 x 2"], || {
        RowsMut::split_qkv(&mut [0.0; 7], 2);
    });
    let [a, b] = [0.0; 2].map(|x| [x; 4]);
    let short = |dk: &mut [f32]| {
        let rows = Rows { data: &a, stride: 2 };
        let (mut dq, mut dv) = ([0.0; 4], [0.0; 4]);
        let [dq, dv] = [&mut dq, &mut dv].map(|grad| RowsMut::new(grad, 2));
        let inputs = Inputs { shape, q: rows, k: rows, v: rows, key_mask: None };
        backward(inputs, Results { out: &b, lse: &[0.0; 2], g: &b }, [dq, RowsMut::new(dk, 2), dv]);
    };
    assert_panics(&["`dk` has 3 elements"], || short(&mut [0.0; 3]));
}
