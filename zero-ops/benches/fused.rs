//! `cargo bench -p zero-ops --bench fused`
//!
//! The kernels of `zero_ops::cpu` at the sizes of GPT-2 124M: [`N`] rows (one sequence), [`D`] features, [`F`] in the
//! middle of the MLP, [`HEADS`] heads, [`V`] tokens; each in a rayon pool of 1 thread and of 2. The measuring loop runs
//! on a worker of the pool, as a rank does, so no hand-over between threads is in a time.
//!
//! - `items/s` are FLOP/s: the multiplications and additions of the products that an operation is defined by (for
//!   attention those with keys that a query may see). Bias, softmax and what causality wastes count as nothing.
//! - `B/s` are bytes of activations, each array that is read or written counted once. These arrays (0.75 MiB to 3 MiB)
//!   stay in the caches from one iteration to the next: the number is no bandwidth of memory.
//!
//! Buffers are allocated and touched before the loop; only what a kernel allocates itself is in its time (the chunk of
//! logits of `cross_entropy`, partial sums, lists of tasks). A filter takes one group: `... --bench fused -- attention`.

use core::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use zero_ops::cpu;
use zero_ops::cpu::Matrix;

/// Rows: one sequence.
const N: usize = 256;
/// Features of a row.
const D: usize = 768;
/// Features between the two linear layers of an MLP.
const F: usize = 4 * D;
/// Heads of attention.
const HEADS: usize = 12;
/// Tokens.
const V: usize = 50257;

/// Threads of the pool.
const THREADS: [usize; 2] = [1, 2];

fn main() {
    divan::main();
}

/// Runs `work` on a worker of a pool of `threads`.
fn in_pool(threads: usize, work: impl FnOnce() + Send) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the system gives two threads");
    pool.install(work);
}

/// `len` numbers in `[-1, 1)`, the same for the same seed.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Tokens far apart in the vocabulary, one for each row.
fn tokens() -> Vec<i64> {
    (0..N).map(|row| (row * 7919 % V) as i64).collect()
}

/// Bytes of `arrays` arrays of `[N, width]`.
fn bytes(arrays: usize, width: usize) -> BytesCount {
    BytesCount::of_many::<f32>(arrays * N * width)
}

/// The floating-point operations of `products` products with `multiplications` each.
fn flop(products: usize, multiplications: usize) -> ItemsCount {
    ItemsCount::new(2 * products * multiplications)
}

#[divan::bench_group(max_time = 1)]
mod linear {
    use super::*;

    /// A layer of an MLP and the threads it runs on.
    struct Case {
        k: usize,
        m: usize,
        threads: usize,
    }

    impl fmt::Display for Case {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{} -> {}, threads: {}", self.k, self.m, self.threads)
        }
    }

    fn cases() -> impl Iterator<Item = Case> {
        [(D, F), (F, D)].into_iter().flat_map(|(k, m)| THREADS.map(|threads| Case { k, m, threads }))
    }

    /// With bias and, for the layer that ends an MLP, the residual.
    #[divan::bench(args = cases())]
    fn forward(bencher: Bencher, &Case { k, m, threads }: &Case) {
        let (x, w, bias, residual) = (numbers(N * k, 1), numbers(k * m, 2), numbers(m, 3), numbers(N * m, 4));
        let residual = (k > m).then_some(&residual[..]);
        let mut out = vec![0.0; N * m];
        in_pool(threads, || {
            bencher
                .counter(flop(1, N * k * m))
                .bench_local(|| cpu::linear::forward(&x, Matrix::new(&w, k, m), Some(&bias), residual, &mut out));
        });
    }

    #[divan::bench(args = cases())]
    fn backward_x(bencher: Bencher, &Case { k, m, threads }: &Case) {
        let (g, w, mut dx) = (numbers(N * m, 1), numbers(k * m, 2), vec![0.0; N * k]);
        in_pool(threads, || {
            bencher
                .counter(flop(1, N * k * m))
                .bench_local(|| cpu::linear::backward_x(&g, Matrix::new(&w, k, m), &mut dx));
        });
    }

    #[divan::bench(args = cases())]
    fn backward_w(bencher: Bencher, &Case { k, m, threads }: &Case) {
        let (x, g, mut dw) = (numbers(N * k, 1), numbers(N * m, 2), vec![0.0; k * m]);
        in_pool(threads, || {
            bencher.counter(flop(1, N * k * m)).bench_local(|| cpu::linear::backward_w(&x, &g, k, &mut dw));
        });
    }

    #[divan::bench(args = cases())]
    fn backward_bias(bencher: Bencher, &Case { m, threads, .. }: &Case) {
        let (g, mut db) = (numbers(N * m, 1), vec![0.0; m]);
        in_pool(threads, || {
            bencher.counter(bytes(1, m)).bench_local(|| cpu::linear::backward_bias(&g, &mut db));
        });
    }
}

#[divan::bench_group(max_time = 1)]
mod layer_norm {
    use super::*;

    const EPSILON: f32 = 1e-5;

    #[divan::bench(args = THREADS)]
    fn forward(bencher: Bencher, threads: usize) {
        let (x, gamma, beta) = (numbers(N * D, 1), numbers(D, 2), numbers(D, 3));
        let (mut out, mut mean, mut rstd) = (vec![0.0; N * D], vec![0.0; N], vec![0.0; N]);
        in_pool(threads, || {
            bencher.counter(bytes(2, D)).bench_local(|| {
                cpu::layer_norm::forward(&x, &gamma, Some(&beta), EPSILON, &mut out, &mut mean, &mut rstd);
            });
        });
    }

    #[divan::bench(args = THREADS)]
    fn backward(bencher: Bencher, threads: usize) {
        let (x, gamma, g) = (numbers(N * D, 1), numbers(D, 2), numbers(N * D, 3));
        let (mut dx, mut mean, mut rstd) = (vec![0.0; N * D], vec![0.0; N], vec![0.0; N]);
        let (mut dgamma, mut dbeta) = (vec![0.0; D], vec![0.0; D]);
        cpu::layer_norm::forward(&x, &gamma, None, EPSILON, &mut dx, &mut mean, &mut rstd);
        in_pool(threads, || {
            bencher.counter(bytes(3, D)).bench_local(|| {
                cpu::layer_norm::backward(&x, &gamma, &mean, &rstd, &g, &mut dx, &mut dgamma, Some(&mut dbeta));
            });
        });
    }
}

#[divan::bench_group(max_time = 1)]
mod gelu {
    use zero_ops::Gelu;

    use super::*;

    /// A formula and the threads that it runs on.
    struct Case {
        kind: Gelu,
        threads: usize,
    }

    impl fmt::Display for Case {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{:?}, threads: {}", self.kind, self.threads)
        }
    }

    fn cases() -> impl Iterator<Item = Case> {
        [Gelu::Tanh, Gelu::Erf].into_iter().flat_map(|kind| THREADS.map(|threads| Case { kind, threads }))
    }

    /// What goes in: `[N, F]` in `[-4, 4)`, where the formulas are neither 0 nor the identity.
    fn inputs() -> Vec<f32> {
        numbers(N * F, 1).into_iter().map(|x| 4.0 * x).collect()
    }

    #[divan::bench(args = cases())]
    fn forward(bencher: Bencher, &Case { kind, threads }: &Case) {
        let (x, bias, mut out) = (inputs(), numbers(F, 2), vec![0.0; N * F]);
        in_pool(threads, || {
            bencher.counter(bytes(2, F)).bench_local(|| cpu::gelu::forward(kind, &x, Some(&bias), &mut out));
        });
    }

    #[divan::bench(args = cases())]
    fn backward(bencher: Bencher, &Case { kind, threads }: &Case) {
        let (x, bias, g) = (inputs(), numbers(F, 2), numbers(N * F, 3));
        let (mut dx, mut dbias) = (vec![0.0; N * F], vec![0.0; F]);
        in_pool(threads, || {
            bencher
                .counter(bytes(3, F))
                .bench_local(|| cpu::gelu::backward(kind, &x, Some(&bias), &g, &mut dx, Some(&mut dbias)));
        });
    }
}

/// Causal, over queries, keys and values that lie side by side in one buffer, as a GPT-2 block leaves them.
#[divan::bench_group(max_time = 1)]
mod attention {
    use zero_ops::cpu::attention::{Rows, RowsMut, Shape};

    use super::*;

    fn shape() -> Shape {
        let head_width = D / HEADS;
        let scale = (head_width as f32).sqrt().recip();
        Shape { batch: 1, heads: HEADS, head_width, queries: N, keys: N, causal: true, scale }
    }

    fn split(qkv: &[f32]) -> [Rows<'_>; 3] {
        [0, 1, 2].map(|part| Rows { data: &qkv[part * D..], stride: 3 * D })
    }

    /// Multiplications of queries with the keys that they see, over all heads.
    const MULTIPLICATIONS: usize = N * (N + 1) / 2 * D;

    /// Two products: scores, and what they weigh.
    #[divan::bench(args = THREADS)]
    fn forward(bencher: Bencher, threads: usize) {
        let qkv = numbers(3 * N * D, 1);
        let [q, k, v] = split(&qkv);
        let (mut out, mut lse) = (vec![0.0; N * D], vec![0.0; HEADS * N]);
        in_pool(threads, || {
            bencher
                .counter(flop(2, MULTIPLICATIONS))
                .bench_local(|| cpu::attention::forward(shape(), q, k, v, None, &mut out, &mut lse));
        });
    }

    /// Five products: scores again, their gradients, and those of queries, keys and values.
    #[divan::bench(args = THREADS)]
    fn backward(bencher: Bencher, threads: usize) {
        let (qkv, g) = (numbers(3 * N * D, 1), numbers(N * D, 2));
        let [q, k, v] = split(&qkv);
        let (mut out, mut lse, mut dqkv) = (vec![0.0; N * D], vec![0.0; HEADS * N], vec![0.0; 3 * N * D]);
        cpu::attention::forward(shape(), q, k, v, None, &mut out, &mut lse);
        in_pool(threads, || {
            bencher.counter(flop(5, MULTIPLICATIONS)).bench_local(|| {
                let [dq, dk, dv] = RowsMut::split_qkv(&mut dqkv, D);
                cpu::attention::backward(shape(), q, k, v, None, &out, &lse, &g, dq, dk, dv);
            });
        });
    }
}

#[divan::bench_group(max_time = 3)]
mod cross_entropy {
    use zero_ops::cpu::cross_entropy::{Shape, forward_backward};

    use super::*;

    const SHAPE: Shape = Shape { rows: N, width: D, vocabulary: V };

    /// One product: logits.
    #[divan::bench(args = THREADS)]
    fn loss(bencher: Bencher, threads: usize) {
        let (x, w, targets) = (numbers(N * D, 1), numbers(V * D, 2), tokens());
        in_pool(threads, || {
            bencher.counter(flop(1, N * D * V)).bench_local(|| forward_backward(SHAPE, &x, &w, &targets, None, None));
        });
    }

    /// Three products: logits, and the gradients of both factors.
    #[divan::bench(args = THREADS)]
    fn loss_and_gradients(bencher: Bencher, threads: usize) {
        let (x, w, targets) = (numbers(N * D, 1), numbers(V * D, 2), tokens());
        let (mut dx, mut dw) = (vec![0.0; N * D], numbers(V * D, 3));
        in_pool(threads, || {
            bencher
                .counter(flop(3, N * D * V))
                .bench_local(|| forward_backward(SHAPE, &x, &w, &targets, None, Some((&mut dx, &mut dw))));
        });
    }
}

#[divan::bench_group(max_time = 1)]
mod embedding {
    use super::*;

    #[divan::bench(args = THREADS)]
    fn forward(bencher: Bencher, threads: usize) {
        let (table, ids, mut out) = (numbers(V * D, 1), tokens(), vec![0.0; N * D]);
        in_pool(threads, || {
            bencher.counter(bytes(2, D)).bench_local(|| cpu::embedding::forward(&table, &ids, &mut out));
        });
    }

    /// Reads the gradient, reads and writes rows of the table's.
    #[divan::bench(args = THREADS)]
    fn backward(bencher: Bencher, threads: usize) {
        let (ids, g, mut dtable) = (tokens(), numbers(N * D, 1), numbers(V * D, 2));
        in_pool(threads, || {
            bencher.counter(bytes(3, D)).bench_local(|| cpu::embedding::backward(&ids, &g, D, &mut dtable));
        });
    }
}
