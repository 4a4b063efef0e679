//! Exact attention that never holds the full matrix of queries against keys (FlashAttention-2,
//! <https://arxiv.org/abs/2307.08691>), forward and backward.
//!
//! Queries and keys are processed in blocks whose scores fit a core's second-level cache. Forward keeps, for each query, the
//! running maximum and the running sum of the softmax, and rescales the query's partial result when the maximum rises.
//! Backward recomputes a block's softmax from its scores and forward's log-sum-exp. Heads of queries, keys and values are
//! read, and their gradients written, in place. Each thread reuses the buffer of its blocks in the next call.
//!
//! In bfloat16, products are of bfloat16 with sums in f32; the softmax and its gradient are computed in f32 and rounded before they are
//! multiplied, as in PyTorch. The scale is applied to f32 sums.

mod backward;
mod forward;
mod rows;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use super::check;
use super::operand::Operand;
use super::product::Matrix;
use super::rows::SharedRows;
use crate::options::check_cap;
use backward::backward_in;
use forward::forward_in;

pub use rows::{Rows, RowsMut};

/// Sizes of an attention over `batch` sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of heads of the keys and values, a divisor of `heads`: neighbouring query heads share one.
    pub kv_heads: usize,
    /// Features per head; d is `heads * head_width`, c is `kv_heads * head_width`.
    pub head_width: usize,
    /// Queries per sequence.
    pub queries: usize,
    /// Keys, and values, per sequence.
    pub keys: usize,
    /// If set, query i attends only to keys 0 to i; there must be as many keys as queries.
    pub causal: bool,
    /// If `causal`, the most keys that a query attends to, the last of which is its own.
    pub window: Option<usize>,
    /// Factor of the product of a query and a key.
    pub scale: f32,
    /// Soft cap of the scores, if any.
    pub cap: Option<f32>,
}

/// Computes attention of `q` over `k` and `v`.
///
/// The scores are `x = scale * q k^T`, or `cap * tanh(x / cap)` if there is a `cap`, plus `key_mask` if given. The mask must be finite: a
/// query whose keys are all masked by the same number gets the same result as without a mask. `lse` receives the log-sum-exp of each
/// query's scores.
///
/// # Shapes
///
/// `out`: `[batch * queries, d]`; `lse`: `[batch, heads, queries]`.
///
/// # Panics
///
/// If the lengths do not match, there are no keys, `causal` is set with `queries` other than `keys`, or the cap is not positive and finite.
pub fn forward<T: Operand>(inputs: Inputs<'_, T>, out: &mut [T], lse: &mut [f32]) {
    forward_in(BLOCKS, inputs, out, lse);
}

/// Computes the gradients of [`forward`] for `q`, `k` and `v`. They have the inputs' shapes and their own strides, and are overwritten.
///
/// # Panics
///
/// Same as [`forward`].
pub fn backward<T: Operand>(inputs: Inputs<'_, T>, results: Results<'_, T>, grads: [RowsMut<'_, T>; 3]) {
    backward_in(BLOCKS, inputs, results, grads);
}

/// Queries and keys per block.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    queries: usize,
    keys: usize,
}

/// The fastest of the sizes measured at 256 and 1024 causal queries of 64 features, for both directions. Long blocks of keys
/// save rescaling and rereading a query's result; short blocks of queries save scores that a causal mask clears.
const BLOCKS: Blocks = Blocks { queries: 128, keys: 512 };

thread_local! {
    /// A thread's blocks of scores. While it is borrowed, the thread does nothing that could run another task.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with `len` elements of scratch memory, whose contents are arbitrary.
fn with_scratch(len: usize, work: impl FnOnce(&mut [f32])) {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        work(&mut scratch[..len]);
    });
}

/// Writes rows of `width` sums, multiplied by `factor`, to a head's part of the rows from the first of `to` on.
///
/// # Safety
///
/// The elements lie in their buffer, and nothing else reads or writes them during the call.
unsafe fn store<T: Operand>(sums: &[f32], width: usize, factor: f32, to: SharedRows<'_, T>) {
    for (row, sums) in sums.chunks_exact(width).enumerate() {
        // SAFETY: guaranteed by the caller.
        store_row(sums, factor, unsafe { to.slice(row, 0, width) });
    }
}

vectorised! {
    fn store_row<'a, T: Operand>(sums: &'a [f32], factor: f32, to: &'a mut [T]) {
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::store(sum * factor));
    }
}

/// Adds a mask, if there is one, to scores multiplied by `factor`. Returns the positive factor by which the result is still to be
/// multiplied: with 1, which changes no bit, or without a mask.
#[inline(always)]
fn masked(scores: &mut [f32], factor: f32, mask: Option<&[f32]>) -> f32 {
    match mask {
        Some(mask) => scores.iter_mut().zip(mask).for_each(|(score, mask)| *score = score.mul_add(factor, *mask)),
        None if factor > 0.0 => return factor,
        None => scores.iter_mut().for_each(|score| *score *= factor),
    }
    1.0
}

/// Returns elements `seen` of a row, and clears the others.
#[inline(always)]
fn only<'a>(row: &'a mut [f32], seen: &Range<usize>) -> &'a mut [f32] {
    let (row, hidden) = row.split_at_mut(seen.end);
    hidden.fill(0.0);
    let (hidden, row) = row.split_at_mut(seen.start);
    hidden.fill(0.0);
    row
}

/// Inputs of both directions.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T = f32> {
    /// Sizes.
    pub shape: Shape,
    /// `[batch * queries, d]`, strided.
    pub q: Rows<'a, T>,
    /// `[batch * keys, c]`, strided.
    pub k: Rows<'a, T>,
    /// `[batch * keys, c]`, strided.
    pub v: Rows<'a, T>,
    /// `[batch, keys]`.
    pub key_mask: Option<&'a [f32]>,
}

impl<'a, T: Copy> Inputs<'a, T> {
    fn check(&self) {
        let Shape { batch, heads, kv_heads, queries, keys, causal, window, cap, .. } = self.shape;
        check_cap("attention", cap.map(f64::from));
        assert!(
            kv_heads == heads || kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "attention: {heads} query heads cannot share {kv_heads} key heads"
        );
        assert!(
            window.is_none_or(|window| causal && window > 0),
            "attention: a window of {window:?} keys, expected causal attention and at least one key"
        );
        assert!(queries > 0 && keys > 0, "attention: {queries} queries and {keys} keys, expected at least one of each");
        assert!(!causal || queries == keys, "attention: causal with {queries} queries and {keys} keys");
        let (d, c) = (self.d(), self.c());
        for (name, rows, d, t) in [("q", self.q, d, queries), ("k", self.k, c, keys), ("v", self.v, c, keys)] {
            check_rows(name, rows.data.len(), [d, rows.stride, rows.stride], batch * t);
        }
        if let Some(mask) = self.key_mask {
            check("attention", "key_mask", mask.len(), batch * keys);
        }
    }

    fn d(&self) -> usize {
        self.shape.heads * self.shape.head_width
    }

    fn c(&self) -> usize {
        self.shape.kv_heads * self.shape.head_width
    }

    /// Returns the number of query heads that share a key head.
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads.max(1)
    }

    /// Returns rows `range` of head `index` of a sequence; sequences have `t` rows.
    fn head(&self, rows: Rows<'a, T>, t: usize, head: Head, index: usize, range: &Range<usize>) -> Matrix<'a, T> {
        let width = self.shape.head_width;
        let first = (head.sequence * t + range.start) * rows.stride + index * width;
        Matrix::strided(&rows.data[first..], range.len(), width, rows.stride, 1)
    }

    fn queries(&self, head: Head, range: &Range<usize>) -> Matrix<'a, T> {
        self.head(self.q, self.shape.queries, head, head.index, range)
    }

    fn keys(&self, head: Head, range: &Range<usize>) -> Matrix<'a, T> {
        self.head(self.k, self.shape.keys, head, head.index / self.group(), range)
    }

    fn values(&self, head: Head, range: &Range<usize>) -> Matrix<'a, T> {
        self.head(self.v, self.shape.keys, head, head.index / self.group(), range)
    }

    fn mask(&self, head: Head, keys: &Range<usize>) -> Option<&'a [f32]> {
        let first = head.sequence * self.shape.keys;
        self.key_mask.map(|mask| &mask[first + keys.start..first + keys.end])
    }

    /// Returns the blocks of keys that any of `queries` attends to, in order.
    fn blocks_of_keys(&self, queries: &Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> + use<T> {
        let end = if self.shape.causal { queries.end } else { self.shape.keys };
        (self.first_block(queries.start, block)..end).step_by(block).map(move |first| first..end.min(first + block))
    }

    /// Returns the first key of the first block that query `query`, or a later one, attends to.
    fn first_block(&self, query: usize, block: usize) -> usize {
        self.shape.window.map_or(0, |window| (query + 1).saturating_sub(window) / block * block)
    }

    /// Returns the position of the block of `queries` and `keys`.
    fn horizon(&self, queries: &Range<usize>, keys: &Range<usize>) -> Horizon {
        Horizon { causal: self.shape.causal, window: self.shape.window, query: queries.start, key: keys.start }
    }

    /// Returns the number of multiplications of one of the products.
    fn work(&self) -> usize {
        let Shape { batch, queries, keys, .. } = self.shape;
        batch * queries * keys * self.d()
    }
}

/// Additional inputs of backward.
#[derive(Clone, Copy)]
pub struct Results<'a, T = f32> {
    /// The result of [`forward`].
    pub out: &'a [T],
    /// The log-sum-exp that [`forward`] wrote.
    pub lse: &'a [f32],
    /// The gradient of `out`, with the same shape.
    pub g: &'a [T],
}

/// Panics unless `rows` rows of `d` elements, `stride` apart, lie within `len`, and `d` is at most `width`.
fn check_rows(name: &str, len: usize, [d, width, stride]: [usize; 3], rows: usize) {
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

/// A query head of a sequence.
#[derive(Clone, Copy)]
struct Head {
    sequence: usize,
    index: usize,
}

/// The way from a block's products to its scores.
#[derive(Clone, Copy)]
struct Scoring<'a> {
    /// Multiplied by the products.
    factor: f32,
    /// Soft cap of the scores, if any.
    cap: Option<f32>,
    /// Added to each row, if there is one.
    mask: Option<&'a [f32]>,
    horizon: Horizon,
}

/// The position of a block of scores relative to the causal diagonal.
#[derive(Clone, Copy)]
struct Horizon {
    causal: bool,
    window: Option<usize>,
    query: usize,
    key: usize,
}

impl Horizon {
    /// Returns which of the block's `keys` the query in its row `row` attends to.
    #[inline(always)]
    fn seen(self, row: usize, keys: usize) -> Range<usize> {
        let until = |end: usize| keys.min(end.saturating_sub(self.key));
        let end = self.query + row + 1;
        until(self.window.map_or(0, |window| end.saturating_sub(window)))..if self.causal { until(end) } else { keys }
    }
}
