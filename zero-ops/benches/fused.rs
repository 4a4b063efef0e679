//! `cargo bench -p zero-ops --bench fused`
//!
//! The kernels of `zero_ops::cpu` at the sizes of GPT-2 124M: [`N`] rows (one sequence), [`D`] features, [`F`] in the middle of the MLP,
//! [`HEADS`] heads, [`V`] tokens. There are two tables, for a rayon pool of 1 thread and one of 2. The measuring loop runs on a worker of
//! that pool, as a rank does, so times include no hand-over between threads.
//!
//! If other programs are running, `fastest` is the column to trust, above all with 2 threads.
//!
//! - `items/s` are FLOP/s: multiplications and additions of the products that define an operation (for attention, those with keys that a
//!   query may see). Bias, softmax and work wasted by causal masking are not counted.
//! - `B/s` are bytes of activations, with each array read or written counted once. These arrays (0.75 MiB to 3 MiB) stay in the caches
//!   between iterations, so the number is not a memory bandwidth.
//!
//! `codec` uses arrays larger than any cache, 64 MiB of fp32, and compares with a copy of the same size: its `B/s` are memory traffic, of
//! fp32 and codes.
//!
//! Buffers are allocated and touched before the loop. Times include only a kernel's own allocations (the logits chunk of `cross_entropy`,
//! partial sums, task lists). For one group: `... --bench fused -- attention`.

#[path = "../../zero-kernels/tests/shared/mod.rs"]
mod shared;

use core::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use zero_ops::cpu;
use zero_ops::cpu::Matrix;

use shared::numbers;

/// Number of rows: one sequence.
const N: usize = 256;
/// Number of features of a row.
const D: usize = 768;
/// Number of features between the two linear layers of an MLP.
const F: usize = 4 * D;
/// Number of attention heads.
const HEADS: usize = 12;
/// Size of the vocabulary.
const V: usize = 50257;

fn main() {
    for threads in [1, 2] {
        println!("threads: {threads}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the system gives two threads");
        pool.install(divan::main);
    }
}

/// Returns tokens far apart in the vocabulary, one for each row.
fn tokens() -> Vec<i64> {
    (0..N).map(|row| (row * 7919 % V) as i64).collect()
}

/// Returns the bytes of `arrays` arrays of `[N, width]`.
fn bytes(arrays: usize, width: usize) -> BytesCount {
    BytesCount::of_many::<f32>(arrays * N * width)
}

/// Returns the floating-point operations of `products` products with `multiplications` each.
fn flop(products: usize, multiplications: usize) -> ItemsCount {
    ItemsCount::new(2 * products * multiplications)
}

#[divan::bench_group(min_time = 0.2, max_time = 1)]
mod linear {
    use super::*;

    /// Input and output features of a layer.
    struct Widths(usize, usize);

    impl fmt::Display for Widths {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{} to {}", self.0, self.1)
        }
    }

    /// The layers of an MLP.
    const LAYERS: [Widths; 2] = [Widths(D, F), Widths(F, D)];

    /// Has bias and, for the last layer of an MLP, the residual.
    #[divan::bench(args = LAYERS)]
    fn forward(bencher: Bencher, &Widths(k, m): &Widths) {
        let (x, w, bias, residual) = (numbers(N * k, 1), numbers(k * m, 2), numbers(m, 3), numbers(N * m, 4));
        let residual = (k > m).then_some(&residual[..]);
        let mut out = vec![0.0; N * m];
        bencher
            .counter(flop(1, N * k * m))
            .bench_local(|| cpu::linear::forward(&x, Matrix::new(&w, k, m), Some(&bias), residual, &mut out));
    }

    #[divan::bench(args = LAYERS)]
    fn backward_x(bencher: Bencher, &Widths(k, m): &Widths) {
        let (g, w, mut dx) = (numbers(N * m, 1), numbers(k * m, 2), vec![0.0; N * k]);
        bencher.counter(flop(1, N * k * m)).bench_local(|| cpu::linear::backward_x(&g, Matrix::new(&w, k, m), &mut dx));
    }

    #[divan::bench(args = LAYERS)]
    fn backward_w(bencher: Bencher, &Widths(k, m): &Widths) {
        let (x, g, mut dw) = (numbers(N * k, 1), numbers(N * m, 2), vec![0.0; k * m]);
        bencher.counter(flop(1, N * k * m)).bench_local(|| cpu::linear::backward_w(&x, &g, k, &mut dw));
    }

    #[divan::bench(args = LAYERS)]
    fn backward_bias(bencher: Bencher, &Widths(_, m): &Widths) {
        let (g, mut db) = (numbers(N * m, 1), vec![0.0; m]);
        bencher.counter(bytes(1, m)).bench_local(|| cpu::linear::backward_bias(&g, &mut db));
    }
}

#[divan::bench_group(min_time = 0.2, max_time = 1)]
mod layer_norm {
    use super::*;

    const EPSILON: f32 = 1e-5;

    #[divan::bench]
    fn forward(bencher: Bencher) {
        let (x, gamma, beta) = (numbers(N * D, 1), numbers(D, 2), numbers(D, 3));
        let (mut out, mut mean, mut rstd) = (vec![0.0; N * D], vec![0.0; N], vec![0.0; N]);
        bencher.counter(bytes(2, D)).bench_local(|| {
            cpu::layer_norm::forward(&x, &gamma, Some(&beta), EPSILON, &mut out, &mut mean, &mut rstd);
        });
    }

    #[divan::bench]
    fn backward(bencher: Bencher) {
        let (x, gamma, g) = (numbers(N * D, 1), numbers(D, 2), numbers(N * D, 3));
        let (mut dx, mut mean, mut rstd) = (vec![0.0; N * D], vec![0.0; N], vec![0.0; N]);
        let (mut dgamma, mut dbeta) = (vec![0.0; D], vec![0.0; D]);
        cpu::layer_norm::forward(&x, &gamma, None, EPSILON, &mut dx, &mut mean, &mut rstd);
        bencher.counter(bytes(3, D)).bench_local(|| {
            cpu::layer_norm::backward(&x, &gamma, &mean, &rstd, &g, &mut dx, &mut dgamma, Some(&mut dbeta));
        });
    }
}

#[divan::bench_group(min_time = 0.2, max_time = 1)]
mod gelu {
    use zero_ops::Gelu;

    use super::*;

    const KINDS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];

    /// Returns inputs `[N, F]` in `[-4, 4)`, where the formulas are neither 0 nor the identity.
    fn inputs() -> Vec<f32> {
        numbers(N * F, 1).into_iter().map(|x| 4.0 * x).collect()
    }

    #[divan::bench(args = KINDS)]
    fn forward(bencher: Bencher, kind: Gelu) {
        let (x, bias, mut out) = (inputs(), numbers(F, 2), vec![0.0; N * F]);
        bencher.counter(bytes(2, F)).bench_local(|| cpu::gelu::forward(kind, &x, Some(&bias), &mut out));
    }

    #[divan::bench(args = KINDS)]
    fn backward(bencher: Bencher, kind: Gelu) {
        let (x, bias, g) = (inputs(), numbers(F, 2), numbers(N * F, 3));
        let (mut dx, mut dbias) = (vec![0.0; N * F], vec![0.0; F]);
        bencher
            .counter(bytes(3, F))
            .bench_local(|| cpu::gelu::backward(kind, &x, Some(&bias), &g, &mut dx, Some(&mut dbias)));
    }
}

/// Causal attention, over queries, keys and values packed in one buffer, as in a GPT-2 block.
#[divan::bench_group(min_time = 0.2, max_time = 1)]
mod attention {
    use zero_ops::cpu::attention::{Inputs, Results, Rows, RowsMut, Shape};

    use super::*;

    fn shape() -> Shape {
        let head_width = D / HEADS;
        let scale = (head_width as f32).sqrt().recip();
        let heads = HEADS;
        let (causal, window, cap) = (true, None, None);
        Shape { batch: 1, heads, kv_heads: heads, head_width, queries: N, keys: N, causal, window, scale, cap }
    }

    fn inputs(qkv: &[f32]) -> Inputs<'_> {
        let [q, k, v] = [0, 1, 2].map(|part| Rows { data: &qkv[part * D..], stride: 3 * D });
        Inputs { shape: shape(), q, k, v, key_mask: None }
    }

    /// Number of multiplications of queries with the keys that they see, over all heads.
    const MULTIPLICATIONS: usize = N * (N + 1) / 2 * D;

    /// Two products: scores, and the weighted sum of values.
    #[divan::bench]
    fn forward(bencher: Bencher) {
        let qkv = numbers(3 * N * D, 1);
        let (mut out, mut lse) = (vec![0.0; N * D], vec![0.0; HEADS * N]);
        bencher
            .counter(flop(2, MULTIPLICATIONS))
            .bench_local(|| cpu::attention::forward(inputs(&qkv), &mut out, &mut lse));
    }

    /// Five products: recomputed scores, their gradients, and the gradients of queries, keys and values.
    #[divan::bench]
    fn backward(bencher: Bencher) {
        let (qkv, g) = (numbers(3 * N * D, 1), numbers(N * D, 2));
        let (mut out, mut lse, mut dqkv) = (vec![0.0; N * D], vec![0.0; HEADS * N], vec![0.0; 3 * N * D]);
        cpu::attention::forward(inputs(&qkv), &mut out, &mut lse);
        let results = Results { out: &out, lse: &lse, g: &g };
        bencher.counter(flop(5, MULTIPLICATIONS)).bench_local(|| {
            cpu::attention::backward(inputs(&qkv), results, RowsMut::split_qkv(&mut dqkv, D));
        });
    }
}

#[divan::bench_group(max_time = 3)]
mod cross_entropy {
    use zero_ops::cpu::cross_entropy::{Shape, WeightGradient, forward_backward};

    use super::*;

    const SHAPE: Shape = Shape { rows: N, width: D, vocabulary: V };

    /// One product: logits.
    #[divan::bench]
    fn loss(bencher: Bencher) {
        let (x, w, targets) = (numbers(N * D, 1), numbers(V * D, 2), tokens());
        bencher
            .counter(flop(1, N * D * V))
            .bench_local(|| forward_backward(SHAPE, &x, &w, &targets, None.into(), None));
    }

    /// Three products: logits, and the gradients of both factors.
    #[divan::bench]
    fn loss_and_gradients(bencher: Bencher) {
        let (x, w, targets) = (numbers(N * D, 1), numbers(V * D, 2), tokens());
        let (mut dx, mut dw) = (vec![0.0; N * D], numbers(V * D, 3));
        bencher.counter(flop(3, N * D * V)).bench_local(|| {
            forward_backward(SHAPE, &x, &w, &targets, None.into(), Some((&mut dx, WeightGradient::Sums(&mut dw))))
        });
    }
}

#[divan::bench_group(min_time = 0.2, max_time = 1)]
mod embedding {
    use super::*;

    #[divan::bench]
    fn forward(bencher: Bencher) {
        let (table, ids, mut out) = (numbers(V * D, 1), tokens(), vec![0.0; N * D]);
        bencher.counter(bytes(2, D)).bench_local(|| cpu::embedding::forward(&table, &ids, &mut out));
    }

    /// Reads the gradient; reads and writes rows of the table's gradient.
    #[divan::bench]
    fn backward(bencher: Bencher) {
        let (ids, g, mut dtable) = (tokens(), numbers(N * D, 1), numbers(V * D, 2));
        bencher.counter(bytes(3, D)).bench_local(|| cpu::embedding::backward(&ids, &g, D, &mut dtable));
    }
}

/// Encoding of data that ranks exchange in 8 or 4 bit ([`zero_ops::quantized`]).
#[divan::bench_group]
mod codec {
    use super::*;
    use zero_ops::quantized::Format;

    /// Number of elements.
    const LARGE: usize = 16 << 20;

    #[divan::bench]
    fn copy(bencher: Bencher) {
        let (from, mut to) = (numbers(LARGE, 1), vec![0f32; LARGE]);
        bencher.counter(BytesCount::of_many::<f32>(2 * LARGE)).bench_local(|| to.copy_from_slice(&from));
    }

    #[divan::bench(args = [Format::Int8, Format::Int4, Format::Nf4])]
    fn encode(bencher: Bencher, how: Format) {
        let (from, mut to) = (numbers(LARGE, 1), Vec::with_capacity(how.bytes(LARGE)));
        let bytes = BytesCount::new(4 * LARGE + how.bytes(LARGE));
        bencher.counter(bytes).bench_local(|| {
            to.clear();
            how.encode_row(&from, &mut to);
        });
    }

    #[divan::bench(args = [Format::Int8, Format::Int4, Format::Nf4])]
    fn decode(bencher: Bencher, how: Format) {
        let (mut codes, mut to) = (Vec::new(), vec![0f32; LARGE]);
        how.encode_row(&numbers(LARGE, 1), &mut codes);
        let bytes = BytesCount::new(4 * LARGE + how.bytes(LARGE));
        bencher.counter(bytes).bench_local(|| how.decode_row(&codes, &mut to));
    }
}
