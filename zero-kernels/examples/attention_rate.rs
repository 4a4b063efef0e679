//! `cargo run --release -p zero-kernels --example attention_rate -- [TOKENS [BATCH [THREADS [ROUNDS [BITS]]]]]`
//!
//! Measures the forward and the backward pass of causal attention on the CPU, in fp32, or in bf16 if BITS is 16, 12 heads of 64: the
//! median milliseconds of both together, after a warm-up. `bench/attention.py` alternates it with PyTorch's.

mod shared;

use half::bf16;
use shared::{arguments, median, numbers, pool};
use zero_kernels::cpu::Operand;
use zero_kernels::cpu::attention::{Inputs, Results, Rows, RowsMut, Shape, backward, forward};
use zero_kernels::cpu::half::narrowed;

const HEADS: usize = 12;
const WIDTH: usize = 64;

fn main() {
    let or = arguments();
    let (tokens, batch) = (or(0, 1024), or(1, 4));
    let count = batch * tokens * HEADS * WIDTH;
    let (qkv, grad) = (numbers(3 * count, 1), numbers(count, 2));
    let (threads, rounds) = (or(2, 2), or(3, 9));
    let seconds = match or(4, 32) {
        16 => measure::<bf16>(tokens, batch, threads, rounds, &narrowed(&qkv), &narrowed(&grad)),
        _ => measure::<f32>(tokens, batch, threads, rounds, &qkv, &grad),
    };
    println!("{}", seconds * 1e3);
}

fn measure<T: Operand>(tokens: usize, batch: usize, threads: usize, rounds: usize, qkv: &[T], grad: &[T]) -> f64 {
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
        cap: None,
    };
    let [q, k, v] = [0, 1, 2].map(|part| Rows { data: &qkv[part * d..], stride: 3 * d });
    let (mut out, mut lse) = (vec![T::ZERO; rows * d], vec![0.0; batch * HEADS * tokens]);
    let mut dqkv = vec![T::ZERO; 3 * rows * d];
    median(&pool(threads), rounds, &mut || {
        let inputs = Inputs { shape, q, k, v, key_mask: None };
        forward(inputs, &mut out, &mut lse);
        backward(inputs, Results { out: &out, lse: &lse, g: grad }, RowsMut::split_qkv(&mut dqkv, d));
    })
}
