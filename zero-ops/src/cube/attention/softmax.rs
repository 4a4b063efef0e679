//! Kernels between Burn's products: from scores to probabilities, and to the gradients of scores.

use std::ops::Range;

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::prelude::*;

use super::dropped::{Dropped, dropped, share};
use super::{Inputs, Saved, Sizes, Variant, grid, scratch};
use crate::cube::many::array;
use crate::cube::rows::{address_type, share_of_cap};
use crate::cube::tensor::launch;

/// A block of scores: its pairs, queries and keys.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub pairs: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

impl Block {
    /// Returns the shape of its scores, `[pairs, queries, keys]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.pairs.len(), self.queries.len(), self.keys.len()]
    }

    fn lines(&self) -> usize {
        self.pairs.len() * self.queries.len()
    }

    /// Returns the units of a cube, which takes a line of scores: a power of two, as the tree sum needs.
    fn units(&self) -> usize {
        self.keys.len().next_power_of_two().clamp(32, 256)
    }

    fn lines_arg<R: CubeRuntime>(&self, sizes: Sizes) -> LinesLaunch<R> {
        let [_, queries, keys] = self.shape();
        let Sizes { t, s, heads, window, scale, cap, .. } = sizes;
        // A window that hides nothing represents none. Without a cap the kernels do not read it.
        let (window, cap) = (window.unwrap_or(s), cap.unwrap_or(1.0));
        LinesLaunch::new(
            self.lines(),
            queries,
            keys,
            self.pairs.start,
            self.queries.start,
            self.keys.start,
            t,
            s,
            heads,
            window,
            scale,
            cap,
        )
    }
}

/// A [`Block`] in a kernel.
#[derive(CubeLaunch, CubeType)]
struct Lines {
    /// Number of pairs times queries of the block.
    lines: usize,
    queries: usize,
    keys: usize,
    first_pair: usize,
    first_query: usize,
    first_key: usize,
    t: usize,
    s: usize,
    heads: usize,
    window: usize,
    scale: f32,
    cap: f32,
}

/// Returns the probabilities of a block's products `q k^T`, in the inputs' type, and writes the logarithms of sums.
///
/// `products`: `[pairs, queries, keys]` in fp32, overwritten by the probabilities if these are fp32 too. `lse`: that of all rows,
/// `[b, h, t]`, of which the block's part is written.
pub(super) fn probabilities<R: CubeRuntime>(
    inputs: &Inputs<R>,
    block: &Block,
    products: CubeTensor<R>,
    lse: &CubeTensor<R>,
) -> CubeTensor<R> {
    let (sizes, units) = (inputs.sizes, block.units());
    let mask = inputs.mask.clone();
    let (out, out_arg) = in_place_of(&products, 0, inputs.dtype());
    // SAFETY: a cube takes one line of `products` and `out`, which have one shape; cubes beyond them stop.
    unsafe {
        launch! {
            probabilities_kernel on lse.client,
            (grid(block.lines()), CubeDim::new_1d(units as u32), address_type(&[&products, lse, &mask])),
            [products],
            out_arg, array(lse), array(&mask), block.lines_arg(sizes),
            dropped(inputs.dropout), units, inputs.variant(), inputs.dtype().into()
        }
    }
    out
}

/// Returns probabilities and gradients of the products `q k^T`, in the inputs' type. If that is fp32, they overwrite `products` and
/// `gradients` (those of probabilities, `dO v^T`): both `[pairs, queries, keys]` in fp32.
pub(super) fn gradients<R: CubeRuntime>(
    inputs: &Inputs<R>,
    block: &Block,
    [products, gradients]: [CubeTensor<R>; 2],
    Saved { lse, along, .. }: &Saved<R>,
) -> [CubeTensor<R>; 2] {
    let (sizes, units) = (inputs.sizes, block.units());
    let mask = inputs.mask.clone();
    let (probabilities, probabilities_arg) = in_place_of(&products, 0, inputs.dtype());
    let (d_products, d_products_arg) = in_place_of(&gradients, 1, inputs.dtype());
    // SAFETY: a cube takes one line of the four, which have one shape; cubes beyond them stop.
    unsafe {
        launch! {
            gradients_kernel on lse.client,
            (grid(block.lines()), CubeDim::new_1d(units as u32), address_type(&[&products, lse, &mask])),
            [products, gradients],
            probabilities_arg, d_products_arg, array(lse), array(along),
            array(&mask), block.lines_arg(sizes), dropped(inputs.dropout), units, inputs.variant(),
            inputs.dtype().into()
        }
    }
    [probabilities, d_products]
}

/// Returns an alias of the input at `position` if its type is right, else a new tensor of its shape.
fn in_place_of<R: CubeRuntime>(x: &CubeTensor<R>, position: usize, dtype: DType) -> (CubeTensor<R>, ArrayArg<R>) {
    if x.dtype == dtype {
        (x.clone(), x.as_tensor_alias(position).into_array_arg())
    } else {
        let new = scratch(x, x.meta.shape(), dtype);
        (new.clone(), array(&new))
    }
}

/// A line of scores in a kernel.
#[derive(CubeType)]
struct Line {
    pair: usize,
    query: usize,
    /// First of the block's keys that the query sees.
    first: usize,
    /// One past the last of them.
    seen: usize,
    /// Index at which its scores begin.
    from: usize,
    /// Index at which its keys' mask begins.
    of_mask: usize,
}

#[cube]
fn line(block: &Lines, #[comptime] causal: bool) -> Line {
    let pair = block.first_pair + CUBE_POS / block.queries;
    let query = block.first_query + CUBE_POS % block.queries;
    let mut seen = block.keys;
    if causal && query + 1 < block.first_key + seen {
        seen = query + 1 - block.first_key;
    }
    let mut first = 0;
    if causal && query + 1 > block.first_key + block.window {
        first = query + 1 - block.first_key - block.window;
    }
    let of_mask = pair / block.heads * block.s + block.first_key;
    Line { pair, query, first, seen, from: CUBE_POS * block.keys, of_mask }
}

/// Returns the score of a line's `key`, and its derivative by the product.
#[cube]
fn score(
    products: &Array<f32>,
    mask: &Array<f32>,
    block: &Lines,
    line: &Line,
    key: usize,
    #[comptime] variant: Variant,
) -> (f32, f32) {
    let mut score = products[line.from + key] * block.scale;
    let mut slope = block.scale;
    if comptime!(variant.capped) {
        let share = share_of_cap(score, block.cap);
        score = share * block.cap;
        slope *= 1.0f32 - share * share;
    }
    if comptime!(variant.masked) {
        score += mask[line.of_mask + key];
    }
    (score, slope)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn probabilities_kernel<E: Float>(
    products: &Array<f32>,
    probabilities: &mut Array<E>,
    lse: &mut Array<f32>,
    mask: &Array<f32>,
    block: Lines,
    of_dropout: Dropped,
    #[comptime] units: usize,
    #[comptime] variant: Variant,
    #[define(E)] _dtype: StorageType,
) {
    if CUBE_POS >= block.lines {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let line = line(&block, comptime!(variant.causal));

    // One pass for the largest score and the sum of exponentials below it, https://arxiv.org/abs/1805.02867.
    let mut largest = f32::new(comptime!(f32::MIN));
    let mut sum = f32::new(0.0);
    let mut key = line.first + UNIT_POS as usize;
    while key < line.seen {
        let (score, _) = score(products, mask, &block, &line, key, variant);
        if score > largest {
            sum = sum * (largest - score).exp() + 1.0;
            largest = score;
        } else {
            sum += (score - largest).exp();
        }
        key += units;
    }
    let mut all_largest = SharedMemory::<f32>::new(units);
    let mut sums = SharedMemory::<f32>::new(units);
    all_largest[unit] = largest;
    sums[unit] = sum;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            let other = all_largest[unit + half];
            let both = max(all_largest[unit], other);
            sums[unit] = sums[unit] * (all_largest[unit] - both).exp() + sums[unit + half] * (other - both).exp();
            all_largest[unit] = both;
        }
        sync_cube();
        half /= 2;
    }
    let largest = all_largest[0];
    let sum = sums[0];
    if unit == 0 {
        lse[line.pair * block.t + line.query] = sum.ln() + largest;
    }

    let mut key = UNIT_POS as usize;
    while key < block.keys {
        let mut probability = f32::new(0.0);
        if key >= line.first && key < line.seen {
            let (score, _) = score(products, mask, &block, &line, key, variant);
            probability = (score - largest).exp() / sum;
            if comptime!(variant.drops) {
                probability *= share(&of_dropout, line.pair, line.query, block.first_key + key, block.t);
            }
        }
        probabilities[line.from + key] = E::cast_from(probability);
        key += units;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradients_kernel<E: Float>(
    products: &Array<f32>,
    gradients: &Array<f32>,
    probabilities: &mut Array<E>,
    d_products: &mut Array<E>,
    lse: &Array<f32>,
    along: &Array<f32>,
    mask: &Array<f32>,
    block: Lines,
    of_dropout: Dropped,
    #[comptime] units: usize,
    #[comptime] variant: Variant,
    #[define(E)] _dtype: StorageType,
) {
    if CUBE_POS >= block.lines {
        terminate!();
    }
    let line = line(&block, comptime!(variant.causal));
    let lse = lse[line.pair * block.t + line.query];
    let along = along[line.pair * block.t + line.query];

    let mut key = UNIT_POS as usize;
    while key < block.keys {
        let mut probability = f32::new(0.0);
        let mut gradient = f32::new(0.0);
        if key >= line.first && key < line.seen {
            let (score, slope) = score(products, mask, &block, &line, key, variant);
            probability = (score - lse).exp();
            let of_probability = gradients[line.from + key];
            if comptime!(variant.drops) {
                let share = share(&of_dropout, line.pair, line.query, block.first_key + key, block.t);
                gradient = probability * (of_probability * share - along) * slope;
                probability *= share;
            } else {
                gradient = probability * (of_probability - along) * slope;
            }
        }
        probabilities[line.from + key] = E::cast_from(probability);
        d_products[line.from + key] = E::cast_from(gradient);
        key += units;
    }
}
