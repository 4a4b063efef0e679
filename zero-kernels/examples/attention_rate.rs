//! `cargo run --release -p zero-kernels --example attention_rate -- [TOKENS [BATCH [THREADS [ROUNDS]]]]`
//!
//! The forward and the backward pass of causal attention on the CPU, fp32, 12 heads of 64: the median milliseconds of both together,
//! after a warm-up. `bench/attention.py` runs it in turn with PyTorch's.

use std::time::Instant;

use zero_kernels::cpu::attention::{Rows, RowsMut, Shape, backward, forward};

const HEADS: usize = 12;
const WIDTH: usize = 64;

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("numbers")).collect();
    let or = |at: usize, default: usize| given.get(at).copied().unwrap_or(default);
    let (tokens, batch, threads, rounds) = (or(0, 1024), or(1, 4), or(2, 2), or(3, 9));
    let d = HEADS * WIDTH;
    let rows = batch * tokens;
    let shape = Shape {
        batch,
        heads: HEADS,
        kv_heads: HEADS,
        head_width: WIDTH,
        queries: tokens,
        keys: tokens,
        causal: true,
        window: None,
        scale: (WIDTH as f32).sqrt().recip(),
    };
    let (qkv, grad) = (numbers(3 * rows * d, 1), numbers(rows * d, 2));
    let [q, k, v] = [0, 1, 2].map(|part| Rows { data: &qkv[part * d..], stride: 3 * d });
    let (mut out, mut lse) = (vec![0.0; rows * d], vec![0.0; batch * HEADS * tokens]);
    let mut dqkv = vec![0.0; 3 * rows * d];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the system gives threads");
    let mut times: Vec<f64> = (0..rounds + 2)
        .map(|_| {
            let begin = Instant::now();
            pool.install(|| {
                forward(shape, q, k, v, None, &mut out, &mut lse);
                let [dq, dk, dv] = RowsMut::split_qkv(&mut dqkv, d);
                backward(shape, q, k, v, None, &out, &lse, &grad, dq, dk, dv);
            });
            begin.elapsed().as_secs_f64() * 1e3
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{}", times[times.len() / 2]);
}
