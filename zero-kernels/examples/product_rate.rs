//! `cargo run --release -p zero-kernels --example product_rate -- N K M [THREADS [ROUNDS]]`
//!
//! The three products of a linear layer on the CPU, x `[N, K]` and w `[K, M]`: its result, the gradient of x and that of w; in
//! fp32, then in bf16. GFLOP/s of each, of the median time after a warm-up. `bench/products.py` runs it in turn with PyTorch.

use std::time::Instant;

use half::bf16;
use zero_kernels::cpu::half::narrowed;
use zero_kernels::cpu::product_bf16::{MatrixBf16, Out, multiply};
use zero_kernels::cpu::{Matrix, linear, parallel::gemm_threads};

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn product(data: &mut [bf16], a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    multiply(Out::Bf16 { data, begin: None }, a, b, gemm_threads());
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("numbers")).collect();
    let or = |at: usize, default: usize| given.get(at).copied().unwrap_or(default);
    let (n, k, m, threads, rounds) = (or(0, 256), or(1, 768), or(2, 2304), or(3, 2), or(4, 21));
    let [x, w, g] = [(n * k, 1), (k * m, 2), (n * m, 3)].map(|(count, seed)| numbers(count, seed));
    let [x16, w16, g16] = [&x, &w, &g].map(|numbers| narrowed::<bf16>(numbers));
    let [mut y, mut dx, mut dw] = [n * m, n * k, k * m].map(|count| vec![0f32; count]);
    let [mut y16, mut dx16, mut dw16] = [n * m, n * k, k * m].map(|count| vec![bf16::ZERO; count]);
    let [x16, w16, g16] = [(&x16, n, k), (&w16, k, m), (&g16, n, m)].map(|(data, n, m)| MatrixBf16::new(data, n, m));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the system gives threads");
    let rate = |name: &str, work: &mut (dyn FnMut() + Send)| {
        let mut times: Vec<f64> = (0..rounds + 2)
            .map(|_| {
                let begin = Instant::now();
                pool.install(&mut *work);
                begin.elapsed().as_secs_f64()
            })
            .skip(2)
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{name} {}", 2e-9 * (n * k * m) as f64 / times[times.len() / 2]);
    };
    rate("fp32 y", &mut || linear::forward(&x, Matrix::new(&w, k, m), None, None, &mut y));
    rate("fp32 dx", &mut || linear::backward_x(&g, Matrix::new(&w, k, m), &mut dx));
    rate("fp32 dw", &mut || linear::backward_w(&x, &g, k, &mut dw));
    rate("bf16 y", &mut || product(&mut y16, x16, w16));
    rate("bf16 dx", &mut || product(&mut dx16, g16, w16.transposed()));
    rate("bf16 dw", &mut || product(&mut dw16, x16.transposed(), g16));
}
