//! `cargo run --release -p zero-kernels --example product_rate -- N K M [THREADS [ROUNDS]]`
//!
//! Measures the three products of a linear layer on the CPU, x `[N, K]` and w `[K, M]`: its result, the gradient of x and
//! that of w, in fp32, then in bf16. Prints the GFLOP/s of each, from the median time after a warm-up. `bench/products.py`
//! alternates it with PyTorch.

mod shared;

use half::bf16;
use shared::{arguments, median, numbers, pool};
use zero_kernels::cpu::half::narrowed;
use zero_kernels::cpu::product_bf16::{MatrixBf16, Out, multiply};
use zero_kernels::cpu::{Matrix, linear, parallel::gemm_threads};

fn product(data: &mut [bf16], a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    multiply(Out::Bf16 { data, begin: None }, a, b, gemm_threads());
}

fn main() {
    let or = arguments();
    let (n, k, m, threads, rounds) = (or(0, 256), or(1, 768), or(2, 2304), or(3, 2), or(4, 21));
    let [x, w, g] = [(n * k, 1), (k * m, 2), (n * m, 3)].map(|(count, seed)| numbers(count, seed));
    let [x16, w16, g16] = [&x, &w, &g].map(|numbers| narrowed::<bf16>(numbers));
    let [mut y, mut dx, mut dw] = [n * m, n * k, k * m].map(|count| vec![0f32; count]);
    let [mut y16, mut dx16, mut dw16] = [n * m, n * k, k * m].map(|count| vec![bf16::ZERO; count]);
    let [x16, w16, g16] = [(&x16, n, k), (&w16, k, m), (&g16, n, m)].map(|(data, n, m)| MatrixBf16::new(data, n, m));
    let pool = pool(threads);
    let rate = |name: &str, work: &mut (dyn FnMut() + Send)| {
        println!("{name} {}", 2e-9 * (n * k * m) as f64 / median(&pool, rounds, work));
    };
    rate("fp32 y", &mut || linear::forward(&x, Matrix::new(&w, k, m), None, None, &mut y));
    rate("fp32 dx", &mut || linear::backward_x(&g, Matrix::new(&w, k, m), &mut dx));
    rate("fp32 dw", &mut || linear::backward_w(&x, &g, k, &mut dw));
    rate("bf16 y", &mut || product(&mut y16, x16, w16));
    rate("bf16 dx", &mut || product(&mut dx16, g16, w16.transposed()));
    rate("bf16 dw", &mut || product(&mut dw16, x16.transposed(), g16));
}
