//! `cargo run --release -p zero-kernels --example attention_rate -- [TOKENS [BATCH [THREADS [ROUNDS]]]]`
//!
//! Measures the forward and the backward pass of causal attention on the CPU, fp32, 12 heads of 64: the median milliseconds
//! of both together, after a warm-up. `bench/attention.py` alternates it with PyTorch's.

mod shared;

use shared::{arguments, median, numbers, pool};
use zero_kernels::cpu::attention::{Inputs, Results, Rows, RowsMut, Shape, backward, forward};

const HEADS: usize = 12;
const WIDTH: usize = 64;

fn main() {
    let or = arguments();
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
    let seconds = median(&pool(threads), rounds, &mut || {
        let inputs = Inputs { shape, q, k, v, key_mask: None };
        forward(inputs, &mut out, &mut lse);
        backward(inputs, Results { out: &out, lse: &lse, g: &grad }, RowsMut::split_qkv(&mut dqkv, d));
    });
    println!("{}", seconds * 1e3);
}
