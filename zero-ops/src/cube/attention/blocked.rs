//! Attention by blocks of scores, with Burn's matrix products.
//!
//! A block holds the scores of some queries of some pairs of sequence and head, for the keys that these queries see. Tensor cores determine
//! the time of the products. The other cost is moving scores to memory and back, so a block should fit in the device's L2 cache.

use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Metadata};

use super::kernels::{Part, accumulate, gathered, scatter};
use super::softmax::{Block, gradients, probabilities};
use super::{Inputs, Rows, Saved, Sizes, scratch};
use crate::cube::product::product;
use crate::cube::rows::zeros;

/// Size of a block's scores in bytes: about the L2 cache of an H200 (50 MB). Smaller blocks need more launches, larger ones go through
/// memory.
const BUDGET_BYTES: usize = 64 << 20;

/// Minimum rows of a product: fewer leave tensor cores idle.
const LEAST_QUERIES: usize = 64;

/// Maximum batches of a product: devices allow 65535 cubes along an axis.
const MOST_PAIRS: usize = 32768;

/// The blocked algorithm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    /// Maximum size of a block's scores, in bytes.
    pub budget_bytes: usize,
}

impl Default for Blocked {
    fn default() -> Self {
        Self { budget_bytes: BUDGET_BYTES }
    }
}

/// The sizes of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub pairs: usize,
    pub queries: usize,
}

impl Plan {
    /// Plans blocks of at most `bytes` at `bytes_per_score`, or of one pair and [`LEAST_QUERIES`] if that is more.
    ///
    /// Causal queries see only earlier keys, so blocks of a part of the queries save products. Blocks of a quarter save three eighths of
    /// them (the maximum is half), and smaller ones save little more.
    pub fn new(sizes: Sizes, bytes: usize, bytes_per_score: usize) -> Self {
        let Sizes { pairs, t, s, causal, .. } = sizes;
        let wanted = if causal { t.div_ceil(4).next_multiple_of(LEAST_QUERIES) } else { t };
        let scores = bytes / bytes_per_score;
        let queries = wanted.min(scores / s / LEAST_QUERIES * LEAST_QUERIES).max(LEAST_QUERIES).min(t);
        Self { pairs: (scores / (queries * s)).clamp(1, pairs.min(MOST_PAIRS)), queries }
    }

    /// Returns the blocks' pairs, and for each of these the blocks of queries, those with the most keys first.
    fn blocks(self, sizes: Sizes) -> impl Iterator<Item = (std::ops::Range<usize>, Vec<Block>)> {
        (0..sizes.pairs).step_by(self.pairs).map(move |first| {
            let pairs = first..(first + self.pairs).min(sizes.pairs);
            let of_pairs = pairs.clone();
            let blocks = (0..sizes.t).step_by(self.queries).rev().map(move |first| {
                let queries = first..(first + self.queries).min(sizes.t);
                let end = if sizes.causal { queries.end } else { sizes.s };
                // Views of keys start at a multiple of the alignment of bindings.
                let unseen = sizes.window.map_or(0, |window| (queries.start + 1).saturating_sub(window));
                Block { pairs: of_pairs.clone(), queries, keys: unseen / LEAST_QUERIES * LEAST_QUERIES..end }
            });
            (pairs, blocks.collect())
        })
    }
}

impl Blocked {
    /// Plans for the bytes of a score: fp32 for each product that computes one, and its rounded copy in 16 bit.
    fn plan(self, sizes: Sizes, products: usize, dtype: DType) -> Plan {
        let rounded = if dtype == DType::F32 { 0 } else { dtype.size() };
        Plan::new(sizes, self.budget_bytes, products * (DType::F32.size() + rounded))
    }

    pub fn forward<R: CubeRuntime>(self, inputs: &Inputs<R>, out: &CubeTensor<R>, lse: &CubeTensor<R>) {
        let sizes = inputs.sizes;
        let out = Rows::new(out.clone(), sizes.t);
        for (pairs, blocks) in self.plan(sizes, 1, inputs.dtype()).blocks(sizes) {
            let part = |positions| Part { sizes, pairs: pairs.clone(), positions };
            let [k, v] = [&inputs.k, &inputs.v].map(|rows| gathered(&part(0..sizes.s), rows));
            for block in blocks {
                let queries = part(block.queries.clone());
                let q = gathered(&queries, &inputs.q);
                let products = product_of(q, transposed(some_rows(&k, &block.keys)));
                let probabilities = probabilities(inputs, &block, products, lse);
                let of_block = product_of(probabilities, some_rows(&v, &block.keys));
                scatter(&queries, of_block, &out);
            }
        }
    }

    pub fn backward<R: CubeRuntime>(self, inputs: &Inputs<R>, saved: &Saved<R>, [dq, dk, dv]: &[Rows<R>; 3]) {
        let sizes = inputs.sizes;
        for (pairs, blocks) in self.plan(sizes, 2, inputs.dtype()).blocks(sizes) {
            let part = |positions| Part { sizes, pairs: pairs.clone(), positions };
            let [k, v] = [&inputs.k, &inputs.v].map(|rows| gathered(&part(0..sizes.s), rows));
            let mut sums: Option<[CubeTensor<R>; 2]> = None;
            for block in blocks {
                let queries = part(block.queries.clone());
                let [q, grad] = [&inputs.q, &saved.grad].map(|rows| gathered(&queries, rows));
                let products = product_of(q.clone(), transposed(some_rows(&k, &block.keys)));
                let d_probabilities = product_of(grad.clone(), transposed(some_rows(&v, &block.keys)));
                let [probabilities, d_products] = gradients(inputs, &block, [products, d_probabilities], saved);
                let of_q = product_of(d_products.clone(), some_rows(&k, &block.keys));
                scatter(&queries, of_q, dq);
                let parts = [product_of(transposed(d_products), q), product_of(transposed(probabilities), grad)];
                match &sums {
                    // The first block has all keys, unless there is a window.
                    None if block.keys == (0..sizes.s) => sums = Some(parts),
                    None => {
                        let all = [(); 2].map(|()| zeros(&parts[0], [pairs.len(), sizes.s, sizes.e], DType::F32));
                        all.iter().zip(parts).for_each(|(sum, part)| accumulate(sum, part, block.keys.start));
                        sums = Some(all);
                    }
                    Some(sums) => {
                        sums.iter().zip(parts).for_each(|(sum, part)| accumulate(sum, part, block.keys.start));
                    }
                }
            }
            for (sum, rows) in sums.into_iter().flatten().zip([dk, dv]) {
                scatter(&part(0..sizes.s), sum, rows);
            }
        }
    }
}

/// Multiplies each pair's matrices, in fp32 whatever their type.
fn product_of<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>) -> CubeTensor<R> {
    let [pairs, rows, _] = lhs.shape().dims();
    let [_, _, columns] = rhs.shape().dims();
    let out = scratch(&lhs, &[pairs, rows, columns], DType::F32);
    product(lhs, rhs, out)
}

/// Returns a view of some rows of each matrix.
fn some_rows<R: CubeRuntime>(x: &CubeTensor<R>, rows: &std::ops::Range<usize>) -> CubeTensor<R> {
    let [pairs, _, columns] = x.shape().dims();
    let mut x = x.clone();
    x.handle = x.handle.offset_start((rows.start * columns * x.dtype.size()) as u64);
    *x.meta = Metadata::new([pairs, rows.len(), columns], x.meta.strides().clone());
    x
}

/// Returns a view of each matrix transposed.
fn transposed<R: CubeRuntime>(mut x: CubeTensor<R>) -> CubeTensor<R> {
    x.meta.swap(1, 2);
    x
}
