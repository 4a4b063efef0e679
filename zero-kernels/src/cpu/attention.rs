//! Exact attention that never holds a matrix of all queries against all keys (FlashAttention-2,
//! <https://arxiv.org/abs/2307.08691>), forward and backward.
//!
//! Queries and keys are taken in blocks whose scores fit a core's second-level cache. Forward keeps, for each query,
//! the running maximum and the running sum of the softmax and rescales what the query has gathered when the maximum
//! rises; backward recomputes a block's softmax from its scores and the log-sum-exp that forward left. Heads of queries,
//! keys and values are read, and their gradients written, where they lie. A thread's blocks are in a buffer that it
//! keeps for the next call.

mod backward;
mod forward;
mod rows;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use super::check;
use super::product::Matrix;
use backward::backward_in;
use forward::forward_in;

pub use rows::{Rows, RowsMut};

/// Sizes of an attention over `batch` sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Heads of each's queries.
    pub heads: usize,
    /// Heads of its keys and values, which divide those of the queries: neighbouring ones share one.
    pub kv_heads: usize,
    /// Features of a head; d is `heads * head_width`, c is `kv_heads * head_width`.
    pub head_width: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys, and values, of a sequence.
    pub keys: usize,
    /// Whether query i attends to keys 0 to i only; then there are as many keys as queries.
    pub causal: bool,
    /// With `causal`, the most keys that a query attends to: those up to its own.
    pub window: Option<usize>,
    /// What a query's product with a key is multiplied by.
    pub scale: f32,
}

/// Attention of `q` over `k` and `v`.
///
/// The scores are `scale * q k^T`, plus `key_mask` if given, which is finite: a query whose every key is masked by
/// the same number gets what it would get without a mask. `lse` receives the log-sum-exp of each query's scores.
///
/// # Shapes
///
/// `out`: `[batch * queries, d]`; `lse`: `[batch, heads, queries]`.
///
/// # Panics
///
/// When the lengths do not fit together, there are no keys, or `causal` with `queries` other than `keys`.
pub fn forward(inputs: Inputs<'_>, out: &mut [f32], lse: &mut [f32]) {
    forward_in(BLOCKS, inputs, out, lse);
}

/// The gradients of [`forward`] for `q`, `k` and `v`, of their shapes but with strides of their own. They are overwritten.
///
/// # Panics
///
/// As of [`forward`].
pub fn backward(inputs: Inputs<'_>, results: Results<'_>, grads: [RowsMut<'_>; 3]) {
    backward_in(BLOCKS, inputs, results, grads);
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
pub struct Inputs<'a> {
    /// Sizes.
    pub shape: Shape,
    /// `[batch * queries, d]`, strided.
    pub q: Rows<'a>,
    /// `[batch * keys, c]`, strided.
    pub k: Rows<'a>,
    /// `[batch * keys, c]`, strided.
    pub v: Rows<'a>,
    /// `[batch, keys]`.
    pub key_mask: Option<&'a [f32]>,
}

impl<'a> Inputs<'a> {
    fn check(&self) {
        let Shape { batch, heads, kv_heads, queries, keys, causal, window, .. } = self.shape;
        assert!(
            kv_heads == heads || kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "attention: {heads} heads of queries cannot share {kv_heads} of keys"
        );
        assert!(
            window.is_none_or(|window| causal && window > 0),
            "attention: a window of {window:?} keys, expected a causal one of one at least"
        );
        assert!(queries > 0 && keys > 0, "attention: {queries} queries and {keys} keys, expected one at least of each");
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

    /// Heads of queries that share one of keys.
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads.max(1)
    }

    /// Some rows of a head of number `index`, of which sequences have `t`.
    fn head(&self, rows: Rows<'a>, t: usize, head: Head, index: usize, range: &Range<usize>) -> Matrix<'a> {
        let width = self.shape.head_width;
        let first = (head.sequence * t + range.start) * rows.stride + index * width;
        Matrix::strided(&rows.data[first..], range.len(), width, rows.stride, 1)
    }

    fn queries(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.q, self.shape.queries, head, head.index, range)
    }

    fn keys(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.k, self.shape.keys, head, head.index / self.group(), range)
    }

    fn values(&self, head: Head, range: &Range<usize>) -> Matrix<'a> {
        self.head(self.v, self.shape.keys, head, head.index / self.group(), range)
    }

    fn mask(&self, head: Head, keys: &Range<usize>) -> Option<&'a [f32]> {
        let first = head.sequence * self.shape.keys;
        self.key_mask.map(|mask| &mask[first + keys.start..first + keys.end])
    }

    /// The blocks of keys that some of `queries` attends to, in order.
    fn blocks_of_keys(&self, queries: &Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = if self.shape.causal { queries.end } else { self.shape.keys };
        (self.first_block(queries.start, block)..end).step_by(block).map(move |first| first..end.min(first + block))
    }

    /// The first key of the first block that the query of number `query`, or one after it, attends to.
    fn first_block(&self, query: usize, block: usize) -> usize {
        self.shape.window.map_or(0, |window| (query + 1).saturating_sub(window) / block * block)
    }

    /// Where the block of `queries` and `keys` lies.
    fn horizon(&self, queries: &Range<usize>, keys: &Range<usize>) -> Horizon {
        Horizon { causal: self.shape.causal, window: self.shape.window, query: queries.start, key: keys.start }
    }

    /// Multiplications of one of the products.
    fn work(&self) -> usize {
        let Shape { batch, queries, keys, .. } = self.shape;
        batch * queries * keys * self.d()
    }
}

/// What backward reads besides.
#[derive(Clone, Copy)]
pub struct Results<'a> {
    /// As [`forward`] wrote it.
    pub out: &'a [f32],
    /// As [`forward`] wrote it.
    pub lse: &'a [f32],
    /// The gradient of `out`, of its shape.
    pub g: &'a [f32],
}

/// Panics unless `rows` rows of `d` elements lie within `len`, `stride` apart, and beside each other in `width`.
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

/// A head of a sequence's queries.
#[derive(Clone, Copy)]
struct Head {
    sequence: usize,
    index: usize,
}

/// Where a block of scores lies against the diagonal.
#[derive(Clone, Copy)]
struct Horizon {
    causal: bool,
    window: Option<usize>,
    query: usize,
    key: usize,
}

impl Horizon {
    /// Which of the block's `keys` its query of number `row` attends to.
    #[inline(always)]
    fn seen(self, row: usize, keys: usize) -> Range<usize> {
        let until = |end: usize| keys.min(end.saturating_sub(self.key));
        let end = self.query + row + 1;
        until(self.window.map_or(0, |window| end.saturating_sub(window)))..if self.causal { until(end) } else { keys }
    }
}
