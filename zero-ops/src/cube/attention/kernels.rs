//! Kernels that move elements between rows and the heads that Burn's products take, and into sums.

use std::ops::Range;

use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::{Rows, Sizes, scratch};
use crate::cube::rows::{address_type, stride};
use crate::cube::tensor::launch;

/// Lays out a launch with one unit per element.
fn each<R: CubeRuntime>(like: &CubeTensor<R>, total: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(&like.client, total);
    (calculate_cube_count_elemwise(&like.client, total, dim), dim)
}

/// Sums `out * grad` over each head's columns, `[pairs, t]`.
///
/// The gradient of a softmax needs them: the sum of `P * dP` over keys equals that of `out * grad` over columns.
pub(super) fn along<R: CubeRuntime>(sizes: Sizes, out: &Rows<R>, grad: &Rows<R>) -> CubeTensor<R> {
    let like = &out.tensor;
    let sums = scratch(like, &[sizes.pairs, sizes.t], DType::F32);
    let total = sizes.pairs * sizes.t;
    let (count, dim) = each(like, total);
    // SAFETY: units beyond `total` stop; the others read head `i % heads` of row `i / heads` and write one sum.
    unsafe {
        launch! {
            along_kernel on like.client, (count, dim, address_type(&[like, &grad.tensor, &sums])),
            [out.tensor.clone(), grad.tensor.clone(), sums.clone()],
            stride(like, 1), stride(&grad.tensor, 1), total, sizes.t, sizes.heads, sizes.e, like.dtype.into()
        }
    }
    sums
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn along_kernel<E: Float>(
    out: &Array<E>,
    grad: &Array<E>,
    sums: &mut Array<f32>,
    out_stride: usize,
    grad_stride: usize,
    total: usize,
    t: usize,
    heads: usize,
    #[comptime] e: usize,
    #[define(E)] _dtype: StorageType,
) {
    let i = ABSOLUTE_POS;
    if i >= total {
        terminate!();
    }
    // Neighbouring units take neighbouring heads, which are adjacent in memory.
    let row = i / heads;
    let head = i % heads;
    let of_out = row * out_stride + head * e;
    let of_grad = row * grad_stride + head * e;
    let mut sum = f32::new(0.0);
    for c in 0..e {
        sum += f32::cast_from(out[of_out + c]) * f32::cast_from(grad[of_grad + c]);
    }
    sums[(row / t * heads + head) * t + row % t] = sum;
}

/// Copies heads of rows to contiguous memory, `[pairs, positions, e]`.
///
/// Burn's products copy a matrix whose heads are closer together than its rows, each time that they read it. One copy of a block for all
/// its products is the minimum, and rows may begin at any column.
pub(super) fn gathered<R: CubeRuntime>(part: &Part, rows: &Rows<R>) -> CubeTensor<R> {
    let like = &rows.tensor;
    let heads = scratch(like, &[part.pairs.len(), part.positions.len(), part.sizes.e], like.dtype);
    let total = heads.meta.num_elements();
    let (count, dim) = each(like, total);
    // SAFETY: units beyond `total` stop; the others write element `i` of `heads` and read one of a row of these pairs.
    unsafe {
        launch! {
            gather_kernel on like.client, (count, dim, address_type(&[like, &heads])),
            [like.clone(), heads.clone()],
            part.place(total, rows), like.dtype.into()
        }
    }
    heads
}

/// Stores fp32 heads `[pairs, positions, e]` to their rows: the inverse of [`gathered`].
pub(super) fn scatter<R: CubeRuntime>(part: &Part, heads: CubeTensor<R>, rows: &Rows<R>) {
    let into = &rows.tensor;
    let total = heads.meta.num_elements();
    let (count, dim) = each(into, total);
    // SAFETY: units beyond `total` stop; the others read element `i` of `heads` and write one of a row of these pairs.
    unsafe {
        launch! {
            scatter_kernel on into.client, (count, dim, address_type(&[into, &heads])),
            [heads, into.clone()],
            part.place(total, rows), into.dtype.into()
        }
    }
}

/// Some positions of some pairs.
pub(super) struct Part {
    pub sizes: Sizes,
    pub pairs: Range<usize>,
    pub positions: Range<usize>,
}

impl Part {
    fn place<R: CubeRuntime>(&self, total: usize, rows: &Rows<R>) -> PlaceLaunch<R> {
        let Self { sizes, pairs, positions } = self;
        let (stride, first) = (stride(&rows.tensor, 1), positions.start);
        PlaceLaunch::new(total, stride, rows.column, pairs.start, first, positions.len(), rows.t, sizes.heads, sizes.e)
    }
}

/// Position of heads `[pairs, count, e]` among rows.
#[derive(CubeType, CubeLaunch)]
struct Place {
    /// Number of elements of the heads.
    total: usize,
    stride: usize,
    column: usize,
    first_pair: usize,
    /// First position.
    first: usize,
    count: usize,
    t: usize,
    heads: usize,
    #[cube(comptime)]
    e: usize,
}

/// Returns the index, among the rows, of element `i` of the heads.
#[cube]
fn at(place: &Place, i: usize) -> usize {
    let e = comptime!(place.e);
    let line = i / e;
    let pair = place.first_pair + line / place.count;
    let row = pair / place.heads * place.t + place.first + line % place.count;
    row * place.stride + place.column + pair % place.heads * e + i % e
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<E: Float>(rows: &Array<E>, into: &mut Array<E>, place: Place, #[define(E)] _dtype: StorageType) {
    let i = ABSOLUTE_POS;
    if i >= place.total {
        terminate!();
    }
    into[i] = rows[at(&place, i)];
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scatter_kernel<E: Float>(from: &Array<f32>, rows: &mut Array<E>, place: Place, #[define(E)] _dtype: StorageType) {
    let i = ABSOLUTE_POS;
    if i >= place.total {
        terminate!();
    }
    let to = at(&place, i);
    rows[to] = E::cast_from(from[i]);
}

/// Adds heads to sums: `sums[p, first + i, c] += heads[p, i, c]`, with `heads` `[pairs, count, e]` and `sums` `[pairs, s, e]`, both fp32.
pub(super) fn accumulate<R: CubeRuntime>(sums: &CubeTensor<R>, heads: CubeTensor<R>, first: usize) {
    let [pairs, count, e] = heads.shape().dims();
    let [_, s, _] = sums.shape().dims();
    let (cubes, dim) = each(sums, pairs * count * e);
    // SAFETY: units beyond the heads' elements stop; `first + count` is at most `s`.
    unsafe {
        launch! {
            accumulate_kernel on sums.client, (cubes, dim, address_type(&[sums, &heads])),
            [heads, sums.clone()],
            count * e, s * e, first * e
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn accumulate_kernel(from: &Array<f32>, sums: &mut Array<f32>, of_pair: usize, of_sums: usize, first: usize) {
    let i = ABSOLUTE_POS;
    if i >= from.len() {
        terminate!();
    }
    sums[i / of_pair * of_sums + first + i % of_pair] += from[i];
}
