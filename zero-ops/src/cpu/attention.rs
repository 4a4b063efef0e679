//! Exact attention that never holds a matrix of all queries against all keys (FlashAttention-2,
//! <https://arxiv.org/abs/2307.08691>), forward and backward.
//!
//! Queries and keys are taken in blocks whose scores fit a core's second-level cache. Forward keeps, for each query,
//! the running maximum and the running sum of the softmax and rescales what the query has gathered when the maximum
//! rises; backward recomputes a block's softmax from its scores and the log-sum-exp that forward left. Heads of queries,
//! keys and values are read, and their gradients written, where they lie. A thread's blocks are in a buffer that it
//! keeps for the next call.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use gemm::Parallelism;

use super::math::exp;
use super::parallel::spread;
use super::product::{Matrix, Write, multiply, multiply_into};
use super::reduce::{larger, largest, replace_and_sum, sum_over};

/// Sizes of an attention over `batch` sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Heads of each.
    pub heads: usize,
    /// Features of a head; d is `heads * head_width`.
    pub head_width: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys, and values, of a sequence.
    pub keys: usize,
    /// Whether query i attends to keys 0 to i only; then there are as many keys as queries.
    pub causal: bool,
    /// What a query's product with a key is multiplied by.
    pub scale: f32,
}

/// Rows of heads: row i of sequence b begins at `data[(b * t + i) * stride]`, for t rows a sequence, with head 0.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// From the first row on; it may end with the last row's d-th element.
    pub data: &'a [f32],
    /// Elements from a row to the next.
    pub stride: usize,
}

/// [`Rows`] that are written; several may take turns in each row of one buffer.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// Element 0 of row 0.
    first: *mut f32,
    /// Elements from there to the buffer's end.
    len: usize,
    /// Elements of a row that are this one's.
    width: usize,
    stride: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow of elements that no other value reaches, as `&mut [f32]` does.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: a shared reference gives out a pointer, and whoever uses that vouches that no two threads use an element.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Rows that begin `stride` elements apart in a buffer of their own.
    pub fn new(buffer: &'a mut [f32], stride: usize) -> Self {
        Self { first: buffer.as_mut_ptr(), len: buffer.len(), width: stride, stride, buffer: PhantomData }
    }

    /// The three parts of rows that hold queries, keys and values of `d` elements each.
    ///
    /// # Panics
    ///
    /// When `buffer` is not whole rows of `3 * d`.
    pub fn split_qkv(buffer: &'a mut [f32], d: usize) -> [Self; 3] {
        let (len, stride) = (buffer.len(), 3 * d);
        assert!(
            if d == 0 { len == 0 } else { len.is_multiple_of(stride) },
            "attention: a buffer of {len} elements is not whole rows of 3 x {d}"
        );
        let first = buffer.as_mut_ptr();
        [0, 1, 2].map(|part| {
            let offset = (part * d).min(len);
            // Columns `part * d..(part + 1) * d` of a row are reached through this part only. `wrapping_add` stays
            // inside the buffer by the line above.
            Self { first: first.wrapping_add(offset), len: len - offset, width: d, stride, buffer: PhantomData }
        })
    }

    /// A pointer to `column` of `row`, which `check_rows` has found inside.
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        self.first.wrapping_add(row * self.stride + column)
    }
}

/// Attention of `q` over `k` and `v`.
///
/// The scores are `scale * q k^T`, plus `key_mask` if given, which is finite: a query whose every key is masked by
/// the same number gets what it would get without a mask. `lse` receives the log-sum-exp of each query's scores.
///
/// # Shapes
///
/// `q`: `[batch * queries, d]`, `k`, `v`: `[batch * keys, d]`, strided; `key_mask`: `[batch, keys]`; `out`:
/// `[batch * queries, d]`; `lse`: `[batch, heads, queries]`.
///
/// # Panics
///
/// When the lengths do not fit together, there are no keys, or `causal` with `queries` other than `keys`.
pub fn forward(
    shape: Shape,
    q: Rows<'_>,
    k: Rows<'_>,
    v: Rows<'_>,
    key_mask: Option<&[f32]>,
    out: &mut [f32],
    lse: &mut [f32],
) {
    forward_in(BLOCKS, Inputs { shape, q, k, v, key_mask }, out, lse);
}

/// The gradients of [`forward`] for the gradient `g` of its result.
///
/// # Shapes
///
/// As of [`forward`], which wrote `out` and `lse`; `g` is as `out`, `dq`, `dk` and `dv` are as `q`, `k` and `v` but may
/// have other strides. They are overwritten.
///
/// # Panics
///
/// When the lengths do not fit together, there are no keys, or `causal` with `queries` other than `keys`.
#[allow(clippy::too_many_arguments)] // What the operation reads and writes, each once.
pub fn backward(
    shape: Shape,
    q: Rows<'_>,
    k: Rows<'_>,
    v: Rows<'_>,
    key_mask: Option<&[f32]>,
    out: &[f32],
    lse: &[f32],
    g: &[f32],
    dq: RowsMut<'_>,
    dk: RowsMut<'_>,
    dv: RowsMut<'_>,
) {
    backward_in(BLOCKS, Inputs { shape, q, k, v, key_mask }, Results { out, lse, g }, [dq, dk, dv]);
}

/// Queries and keys that are taken at a time.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    queries: usize,
    keys: usize,
}

/// The fastest of those measured at 256 and 1024 causal queries of 64 features, for both directions: long blocks of
/// keys spare rescaling and reading a query's result again, short ones of queries spare scores that a causal mask clears.
const BLOCKS: Blocks = Blocks { queries: 128, keys: 512 };

thread_local! {
    /// A thread's blocks of scores. No work that another task could run inside of is done while it is borrowed.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with `len` elements of scratch, whose content is arbitrary.
fn with_scratch(len: usize, work: impl FnOnce(&mut [f32])) {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        work(&mut scratch[..len]);
    });
}

/// What both directions read.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    shape: Shape,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    key_mask: Option<&'a [f32]>,
}

impl<'a> Inputs<'a> {
    fn check(&self) {
        let Shape { batch, queries, keys, causal, .. } = self.shape;
        assert!(queries > 0 && keys > 0, "attention: {queries} queries and {keys} keys, expected one at least of each");
        assert!(!causal || queries == keys, "attention: causal with {queries} queries and {keys} keys");
        for (name, rows, t) in [("q", self.q, queries), ("k", self.k, keys), ("v", self.v, keys)] {
            self.check_rows(name, rows.data.len(), rows.stride, rows.stride, batch * t);
        }
        if let Some(mask) = self.key_mask {
            check("key_mask", mask.len(), batch * keys);
        }
    }

    /// Panics unless `rows` rows of d elements lie within `len`, and beside each other.
    fn check_rows(&self, name: &str, len: usize, width: usize, stride: usize, rows: usize) {
        let d = self.d();
        assert!(width >= d, "attention: rows of `{name}` have {width} elements, expected at least {d}");
        let needed = match rows.checked_sub(1) {
            None => Some(0),
            Some(last) => last.checked_mul(stride).and_then(|begin| begin.checked_add(d)),
        };
        assert!(
            needed.is_some_and(|needed| len >= needed),
            "attention: `{name}` has {len} elements, expected {rows} rows of stride {stride}"
        );
    }

    fn d(&self) -> usize {
        self.shape.heads * self.shape.head_width
    }

    /// Some rows of a head, of which sequences have `t`.
    fn head(&self, rows: Rows<'a>, t: usize, head: Head, range: &Range<usize>) -> Matrix<'a> {
        let width = self.shape.head_width;
        let first = (head.sequence * t + range.start) * rows.stride + head.index * width;
        Matrix::strided(&rows.data[first..], range.len(), width, rows.stride, 1)
    }

    fn queries(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.q, self.shape.queries, head, range)
    }

    fn keys(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.k, self.shape.keys, head, range)
    }

    fn values(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.v, self.shape.keys, head, range)
    }

    fn mask(&self, head: Head, keys: &Range<usize>) -> Option<&'a [f32]> {
        let first = head.sequence * self.shape.keys;
        self.key_mask.map(|mask| &mask[first + keys.start..first + keys.end])
    }

    /// The blocks of keys that some of `queries` attends to, in order.
    fn blocks_of_keys(&self, queries: &Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = if self.shape.causal { queries.end } else { self.shape.keys };
        (0..end).step_by(block).map(move |first| first..end.min(first + block))
    }

    /// Where the block of `queries` and `keys` lies.
    fn horizon(&self, queries: &Range<usize>, keys: &Range<usize>) -> Horizon {
        Horizon { causal: self.shape.causal, query: queries.start, key: keys.start }
    }

    /// Multiplications of one of the products.
    fn work(&self) -> usize {
        let Shape { batch, queries, keys, .. } = self.shape;
        batch * queries * keys * self.d()
    }
}

fn check(name: &str, got: usize, expected: usize) {
    assert_eq!(got, expected, "attention: `{name}` has {got} elements, expected {expected}");
}

/// What backward reads besides.
#[derive(Clone, Copy)]
struct Results<'a> {
    out: &'a [f32],
    lse: &'a [f32],
    g: &'a [f32],
}

/// A head of a sequence.
#[derive(Clone, Copy)]
struct Head {
    sequence: usize,
    index: usize,
}

/// Where a block of scores lies against the diagonal.
#[derive(Clone, Copy)]
struct Horizon {
    causal: bool,
    query: usize,
    key: usize,
}

impl Horizon {
    /// How many of the block's `keys` its query of number `row` attends to.
    #[inline(always)]
    fn seen(self, row: usize, keys: usize) -> usize {
        if self.causal { keys.min((self.query + row + 1).saturating_sub(self.key)) } else { keys }
    }
}

fn forward_in(blocks: Blocks, inputs: Inputs<'_>, out: &mut [f32], lse: &mut [f32]) {
    inputs.check();
    let Shape { batch, heads, head_width, queries, keys, scale, .. } = inputs.shape;
    let d = inputs.d();
    check("out", out.len(), batch * queries * d);
    check("lse", lse.len(), batch * heads * queries);
    if d == 0 {
        return;
    }
    let out = RowsMut::new(out, d);
    let mut tasks = vec![];
    for (head, lse) in lse.chunks_mut(queries).enumerate() {
        let head = Head { sequence: head / heads, index: head % heads };
        for (block, lse) in lse.chunks_mut(blocks.queries).enumerate() {
            let first = block * blocks.queries;
            tasks.push((head, first..first + lse.len(), lse));
        }
    }
    let arch = pulp::Arch::new();
    spread(inputs.work(), tasks, |(head, queries, lse)| {
        let rows = queries.len();
        let out = out.at(head.sequence * inputs.shape.queries + queries.start, head.index * head_width);
        with_scratch(rows * (blocks.keys.min(keys) + 2), |scratch| {
            let (max, scratch) = scratch.split_at_mut(rows);
            let (sum, scratch) = scratch.split_at_mut(rows);
            max.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
            for keys in inputs.blocks_of_keys(&queries, blocks.keys) {
                let scores = &mut scratch[..rows * keys.len()];
                let (q, k) = (inputs.queries(head, &queries), inputs.keys(head, &keys).transposed());
                multiply(scores, Write::Over, q, k, scale, Parallelism::None);
                let begun = keys.start > 0;
                arch.dispatch(Fold {
                    scores,
                    width: keys.len(),
                    mask: inputs.mask(head, &keys),
                    horizon: inputs.horizon(&queries, &keys),
                    max,
                    sum,
                    out: begun.then_some(OutRows { first: out, stride: d, width: head_width }),
                });
                let p = Matrix::new(scores, rows, keys.len());
                let v = inputs.values(head, &keys);
                // SAFETY: these rows' part of the head is inside `out`, whose length was checked, and this task's.
                unsafe { multiply_into(out, d, Write::first(!begun), p, v, 1.0, Parallelism::None) };
            }
            arch.dispatch(Finish { max, sum, lse, out: OutRows { first: out, stride: d, width: head_width } });
        });
    });
}

/// A head's part of some rows of the result, which the task that holds it alone reads and writes.
#[derive(Clone, Copy)]
struct OutRows {
    first: *mut f32,
    stride: usize,
    width: usize,
}

impl OutRows {
    /// Multiplies a row.
    ///
    /// # Safety
    ///
    /// The row is inside of the result, initialised, and of the calling task.
    #[inline(always)]
    unsafe fn scale(self, row: usize, factor: f32) {
        // SAFETY: as the caller says.
        let row = unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) };
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

/// A block of scores, to become its share of the softmax: `max` and `sum` are brought up to date, and so is what was
/// gathered into `out` from blocks before, if any.
struct Fold<'a> {
    scores: &'a mut [f32],
    width: usize,
    mask: Option<&'a [f32]>,
    horizon: Horizon,
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: Option<OutRows>,
}

impl pulp::NullaryFnOnce for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { scores, width, mask, horizon, max, sum, out } = self;
        let rows = scores.chunks_exact_mut(width).zip(max.iter_mut().zip(sum)).enumerate();
        for (row, (scores, (max, sum))) in rows {
            let (scores, hidden) = scores.split_at_mut(horizon.seen(row, width));
            hidden.fill(0.0);
            if let Some(mask) = mask {
                scores.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask);
            }
            let before = *max;
            *max = larger(before, largest(scores));
            // Were the mask infinite after all, exp must not see the difference of two infinities.
            let shift = if *max == f32::NEG_INFINITY { 0.0 } else { *max };
            let rescale = exp(before - shift);
            let part = replace_and_sum(scores, |score| exp(score - shift));
            *sum = sum.mul_add(rescale, part);
            if let Some(out) = out
                && rescale != 1.0
            {
                // SAFETY: one row of `max` for each of the task's rows of the result, which earlier blocks wrote.
                unsafe { out.scale(row, rescale) };
            }
        }
    }
}

/// Divides what was gathered by the softmax's sum, and leaves the log-sum-exp.
struct Finish<'a> {
    max: &'a [f32],
    sum: &'a [f32],
    lse: &'a mut [f32],
    out: OutRows,
}

impl pulp::NullaryFnOnce for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (row, ((max, sum), lse)) in self.max.iter().zip(self.sum).zip(self.lse).enumerate() {
            let any = *sum > 0.0;
            *lse = if any { max + sum.ln() } else { 0.0 };
            // SAFETY: one row of `max` for each of the task's rows of the result, which every block has written.
            unsafe { self.out.scale(row, if any { 1.0 / sum } else { 0.0 }) };
        }
    }
}

fn backward_in(blocks: Blocks, inputs: Inputs<'_>, results: Results<'_>, grads: [RowsMut<'_>; 3]) {
    inputs.check();
    let Shape { batch, heads, head_width, queries, keys, scale, .. } = inputs.shape;
    let d = inputs.d();
    check("out", results.out.len(), batch * queries * d);
    check("g", results.g.len(), batch * queries * d);
    check("lse", results.lse.len(), batch * heads * queries);
    for ((name, t), rows) in [("dq", queries), ("dk", keys), ("dv", keys)].into_iter().zip(&grads) {
        inputs.check_rows(name, rows.len, rows.width, rows.stride, batch * t);
    }
    if d == 0 {
        return;
    }
    let [dq, dk, dv] = grads;
    let arch = pulp::Arch::new();
    let gradient = Rows { data: results.g, stride: d };
    let tasks: Vec<_> = (0..batch * heads).collect();
    spread(inputs.work(), tasks, |task| {
        let head = Head { sequence: task / heads, index: task % heads };
        let lse = &results.lse[task * queries..(task + 1) * queries];
        let column = head.index * head_width;
        let (block, wide) = (blocks.queries.min(queries), blocks.keys.min(keys));
        with_scratch(block * (2 * wide + 1), |scratch| {
            let (delta, scratch) = scratch.split_at_mut(block);
            let (scores, slopes) = scratch.split_at_mut(block * wide);
            // From the last block, which reaches every key: it overwrites what the others add to.
            for first in (0..queries).step_by(block).rev() {
                let rows = first..queries.min(first + block);
                let last = rows.end == queries;
                let n = rows.len();
                let first_row = head.sequence * queries + first;
                let delta = &mut delta[..n];
                let (out, g) = (&results.out[first_row * d + column..], &results.g[first_row * d + column..]);
                arch.dispatch(Delta { out, g, stride: d, width: head_width, delta });
                let q = inputs.queries(head, &rows);
                let g = inputs.head(gradient, queries, head, &rows);
                for range in inputs.blocks_of_keys(&rows, wide) {
                    let width = range.len();
                    let (scores, slopes) = (&mut scores[..n * width], &mut slopes[..n * width]);
                    let (k, v) = (inputs.keys(head, &range), inputs.values(head, &range));
                    multiply(scores, Write::Over, q, k.transposed(), scale, Parallelism::None);
                    multiply(slopes, Write::Over, g, v.transposed(), 1.0, Parallelism::None);
                    arch.dispatch(Slopes {
                        scores,
                        slopes,
                        width,
                        mask: inputs.mask(head, &range),
                        horizon: inputs.horizon(&rows, &range),
                        lse: &lse[rows.clone()],
                        delta,
                    });
                    let (p, ds) = (Matrix::new(scores, n, width), Matrix::new(slopes, n, width));
                    let row_k = head.sequence * keys + range.start;
                    let [to_q, to_k, to_v] = [(&dq, first_row), (&dk, row_k), (&dv, row_k)]
                        .map(|(rows, row)| (rows.at(row, column), rows.stride));
                    let (write_q, write_kv) = (Write::first(range.start == 0), Write::first(last));
                    // SAFETY: `check_rows` found these rows inside of their buffers; the columns of a head of a
                    // sequence are this task's, and those of the three are apart even where they share a buffer.
                    unsafe {
                        multiply_into(to_v.0, to_v.1, write_kv, p.transposed(), g, 1.0, Parallelism::None);
                        multiply_into(to_k.0, to_k.1, write_kv, ds.transposed(), q, scale, Parallelism::None);
                        multiply_into(to_q.0, to_q.1, write_q, ds, k, scale, Parallelism::None);
                    }
                }
            }
        });
    });
}

/// `out . g` for each of some rows of a head.
struct Delta<'a> {
    out: &'a [f32],
    g: &'a [f32],
    stride: usize,
    width: usize,
    delta: &'a mut [f32],
}

impl pulp::NullaryFnOnce for Delta<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (row, delta) in self.delta.iter_mut().enumerate() {
            let part = row * self.stride..row * self.stride + self.width;
            let (out, g) = (&self.out[part.clone()], &self.g[part]);
            *delta = sum_over([out, g], |[out, g], sum| out.mul_add(g, sum));
        }
    }
}

/// A block of scores, to become the softmax, and of the softmax's gradients, to become those of the scores.
struct Slopes<'a> {
    scores: &'a mut [f32],
    slopes: &'a mut [f32],
    width: usize,
    mask: Option<&'a [f32]>,
    horizon: Horizon,
    lse: &'a [f32],
    delta: &'a [f32],
}

impl pulp::NullaryFnOnce for Slopes<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { scores, slopes, width, mask, horizon, lse, delta } = self;
        let blocks = scores.chunks_exact_mut(width).zip(slopes.chunks_exact_mut(width));
        for (row, ((scores, slopes), (lse, delta))) in blocks.zip(lse.iter().zip(delta)).enumerate() {
            let seen = horizon.seen(row, width);
            let (scores, hidden) = scores.split_at_mut(seen);
            hidden.fill(0.0);
            let (slopes, hidden) = slopes.split_at_mut(seen);
            hidden.fill(0.0);
            if let Some(mask) = mask {
                scores.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask);
            }
            for (score, slope) in scores.iter_mut().zip(slopes) {
                let p = exp(*score - lse);
                *score = p;
                *slope = p * (*slope - delta);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    /// Result, log-sum-exp, and the gradients for `g`, from contiguous rows.
    fn reference(shape: Shape, qkv: [&[f64]; 3], mask: Option<&[f32]>, g: &[f64]) -> [Vec<f64>; 5] {
        let Shape { batch, heads, head_width: w, queries, keys, causal, scale } = shape;
        let (d, scale, [q, k, v]) = (heads * w, f64::from(scale), qkv);
        let mut out = vec![0.0; batch * queries * d];
        let mut lse = vec![];
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for i in 0..queries {
                let qi = (b * queries + i) * d + h * w;
                let kj = |j: usize| (b * keys + j) * d + h * w;
                let seen = if causal { i + 1 } else { keys };
                let s: Vec<f64> = (0..seen)
                    .map(|j| {
                        let mask = mask.map_or(0.0, |mask| f64::from(mask[b * keys + j]));
                        (0..w).map(|c| q[qi + c] * k[kj(j) + c]).sum::<f64>() * scale + mask
                    })
                    .collect();
                let max = s.iter().copied().fold(f64::MIN, f64::max);
                let total = max + s.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                lse.push(total);
                let p: Vec<f64> = s.iter().map(|s| (s - total).exp()).collect();
                for j in 0..seen {
                    (0..w).for_each(|c| out[qi + c] += p[j] * v[kj(j) + c]);
                }
                let delta: f64 = (0..w).map(|c| out[qi + c] * g[qi + c]).sum();
                for j in 0..seen {
                    let dp: f64 = (0..w).map(|c| g[qi + c] * v[kj(j) + c]).sum();
                    let ds = p[j] * (dp - delta) * scale;
                    for c in 0..w {
                        dv[kj(j) + c] += p[j] * g[qi + c];
                        dq[qi + c] += ds * k[kj(j) + c];
                        dk[kj(j) + c] += ds * q[qi + c];
                    }
                }
            }
        }
        [out, lse, dq, dk, dv]
    }

    fn inputs<'a>(shape: Shape, rows: [(&'a [f32], usize); 3], key_mask: Option<&'a [f32]>) -> Inputs<'a> {
        let [q, k, v] = rows.map(|(data, stride)| Rows { data, stride });
        Inputs { shape, q, k, v, key_mask }
    }

    /// The same as of `reference`, from contiguous rows.
    fn run(blocks: Blocks, shape: Shape, qkv: [&[f32]; 3], mask: Option<&[f32]>, g: &[f32]) -> [Vec<f32>; 5] {
        let d = shape.heads * shape.head_width;
        let inputs = inputs(shape, qkv.map(|data| (data, d)), mask);
        let mut out = vec![f32::NAN; g.len()];
        let mut lse = vec![f32::NAN; shape.batch * shape.heads * shape.queries];
        forward_in(blocks, inputs, &mut out, &mut lse);
        let mut grads = qkv.map(|data| vec![f32::NAN; data.len()]);
        let results = Results { out: &out, lse: &lse, g };
        backward_in(blocks, inputs, results, grads.each_mut().map(|grad| RowsMut::new(grad, d)));
        let [dq, dk, dv] = grads;
        [out, lse, dq, dk, dv]
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes_blocks_and_masks() {
        let sizes = [(1, 1, 1, 1usize), (1, 2, 7, 3), (2, 3, 5, 17), (2, 2, 64, 33), (1, 1, 100, 17), (1, 2, 64, 150)];
        for (batch, heads, head_width, t) in sizes {
            for (causal, keys, masked) in [
                (true, t, false),
                (false, t, true),
                (false, 2 * t + 1, false),
                (false, t.div_ceil(2), true),
                (true, t, true),
            ] {
                let scale = 1.0 / (head_width as f32).sqrt();
                let shape = Shape { batch, heads, head_width, queries: t, keys, causal, scale };
                let d = heads * head_width;
                let (q, g) = (numbers(batch * t * d, 1), numbers(batch * t * d, 4));
                let (k, v) = (numbers(batch * keys * d, 2), numbers(batch * keys * d, 3));
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
        let shape = Shape { batch: 2, heads: 3, head_width: 8, queries: 19, keys: 19, causal: true, scale: 0.3 };
        let (n, d) = (38, 24);
        let (qkv, g) = (numbers(n * 3 * d, 1), numbers(n * d, 2));
        let [q, k, v] = [0, 1, 2].map(|part| Rows { data: &qkv[part * d..], stride: 3 * d });
        let (mut out, mut lse, mut grad) = (vec![f32::NAN; n * d], vec![f32::NAN; n * 3], vec![f32::NAN; n * 3 * d]);
        forward(shape, q, k, v, None, &mut out, &mut lse);
        let [dq, dk, dv] = RowsMut::split_qkv(&mut grad, d);
        backward(shape, q, k, v, None, &out, &lse, &g, dq, dk, dv);
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
            let shape = Shape { batch: 2, heads: 1, head_width: 4, queries: 9, keys: 9, causal: false, scale: 0.5 };
            let [q, k, v, g] = [1, 2, 3, 4].map(|seed| numbers(72, seed));
            let mask = [[0.0; 9], [mask; 9]].concat();
            let got = run(Blocks { queries: 4, keys: 3 }, shape, [&q, &k, &v], Some(&mask), &g);
            assert!(got.iter().flatten().all(|value| value.is_finite()), "{got:?}");
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let shape = Shape { batch: 2, heads: 3, head_width: 33, queries: 131, keys: 131, causal: true, scale: 0.2 };
        let [q, k, v, g] = [1, 2, 3, 4].map(|seed| numbers(2 * 131 * 99, seed));
        same_bits(|| run(Blocks { queries: 64, keys: 50 }, shape, [&q, &k, &v], None, &g).concat());
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let shape = Shape { batch: 1, heads: 1, head_width: 2, queries: 2, keys: 2, causal: true, scale: 1.0 };
        let run = |shape: Shape, k: usize, stride: usize, mask: usize, lse: usize| {
            let (k, mask) = (vec![0.0; k], vec![0.0; mask]);
            let (q, k) = (Rows { data: &[0.0; 4], stride: 2 }, Rows { data: &k, stride });
            forward(shape, q, k, k, Some(&mask), &mut [0.0; 4], &mut vec![0.0; lse]);
        };
        assert_panics(&["causal with 2 queries and 3 keys"], || run(Shape { keys: 3, ..shape }, 6, 2, 3, 2));
        assert_panics(&["`k` has 3 elements, expected 2 rows of stride 2"], || run(shape, 3, 2, 2, 2));
        assert_panics(&["rows of `k` have 1 elements, expected at least 2"], || run(shape, 4, 1, 2, 2));
        assert_panics(&["`key_mask` has 1 elements, expected 2"], || run(shape, 4, 2, 1, 2));
        assert_panics(&["`lse` has 3 elements, expected 2"], || run(shape, 4, 2, 2, 3));
        assert_panics(&["0 keys"], || run(Shape { keys: 0, causal: false, ..shape }, 0, 2, 0, 2));
        assert_panics(&["7 elements", "rows of 3 x 2"], || {
            RowsMut::split_qkv(&mut [0.0; 7], 2);
        });
        let [a, b] = [0.0; 2].map(|x| [x; 4]);
        let short = |dk: &mut [f32]| {
            let rows = Rows { data: &a, stride: 2 };
            let (mut dq, mut dv) = ([0.0; 4], [0.0; 4]);
            let [dq, dv] = [&mut dq, &mut dv].map(|grad| RowsMut::new(grad, 2));
            backward(shape, rows, rows, rows, None, &b, &[0.0; 2], &b, dq, RowsMut::new(dk, 2), dv);
        };
        assert_panics(&["`dk` has 3 elements"], || short(&mut [0.0; 3]));
    }
}
