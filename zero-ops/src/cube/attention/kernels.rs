//! Kernels that move elements: between rows and the heads that Burn's products take, and into sums.

use std::ops::Range;

use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::{Rows, Sizes, address_type, scratch};

/// The sums of `out * grad` over each head's columns, `[pairs, t]`.
///
/// A gradient of a softmax needs them: the sum over keys of `P * dP` is that of `out * grad` over columns.
pub(super) fn along<R: CubeRuntime>(sizes: Sizes, out: &Rows<R>, grad: &Rows<R>) -> CubeTensor<R> {
    let like = &out.tensor;
    let sums = scratch(like, &[sizes.pairs, sizes.t], DType::F32);
    let total = sizes.pairs * sizes.t;
    let dim = CubeDim::new(&like.client, total);
    // SAFETY: units beyond `total` stop; the others read head `i % heads` of row `i / heads` and write one sum.
    unsafe {
        along_kernel::launch_unchecked(
            &like.client,
            calculate_cube_count_elemwise(&like.client, total, dim),
            dim,
            address_type([like, &grad.tensor, &sums]),
            out.tensor.clone().into_tensor_arg(),
            grad.tensor.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            total,
            sizes.t,
            sizes.heads,
            sizes.e,
            like.dtype.into(),
        );
    }
    sums
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn along_kernel<E: Float>(
    out: &Tensor<E>,
    grad: &Tensor<E>,
    sums: &mut Tensor<f32>,
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
    // Neighbours take neighbouring heads, which lie side by side.
    let row = i / heads;
    let head = i % heads;
    let of_out = row * out.stride(0) + head * e;
    let of_grad = row * grad.stride(0) + head * e;
    let mut sum = f32::new(0.0);
    for c in 0..e {
        sum += f32::cast_from(out[of_out + c]) * f32::cast_from(grad[of_grad + c]);
    }
    sums[(row / t * heads + head) * t + row % t] = sum;
}

/// Copies heads of rows to where they lie side by side, `[pairs, positions, e]`.
///
/// Burn's products copy a matrix whose heads are nearer to each other than its rows, each time that they meet it; one copy
/// of a block for all its products is the least, and rows may begin at any column.
pub(super) fn gathered<R: CubeRuntime>(
    sizes: Sizes,
    pairs: Range<usize>,
    positions: Range<usize>,
    rows: &Rows<R>,
) -> CubeTensor<R> {
    let like = &rows.tensor;
    let heads = scratch(like, &[pairs.len(), positions.len(), sizes.e], like.dtype);
    let total = pairs.len() * positions.len() * sizes.e;
    let dim = CubeDim::new(&like.client, total);
    // SAFETY: units beyond `total` stop; the others write element `i` of `heads` and read one of a row of these pairs.
    unsafe {
        gather_kernel::launch_unchecked(
            &like.client,
            calculate_cube_count_elemwise(&like.client, total, dim),
            dim,
            address_type([like, &heads]),
            like.clone().into_tensor_arg(),
            heads.clone().into_tensor_arg(),
            total,
            rows.column,
            pairs.start,
            positions.start,
            positions.len(),
            sizes.t,
            sizes.heads,
            sizes.e,
            like.dtype.into(),
        );
    }
    heads
}

/// Stores fp32 heads `[pairs, positions, e]` to their rows: what [`gathered`] does, back.
pub(super) fn scatter<R: CubeRuntime>(
    sizes: Sizes,
    pairs: Range<usize>,
    positions: Range<usize>,
    heads: CubeTensor<R>,
    rows: &Rows<R>,
) {
    let into = &rows.tensor;
    let total = pairs.len() * positions.len() * sizes.e;
    let dim = CubeDim::new(&into.client, total);
    // SAFETY: units beyond `total` stop; the others read element `i` of `heads` and write one of a row of these pairs.
    unsafe {
        scatter_kernel::launch_unchecked(
            &into.client,
            calculate_cube_count_elemwise(&into.client, total, dim),
            dim,
            address_type([into, &heads]),
            heads.into_tensor_arg(),
            into.clone().into_tensor_arg(),
            total,
            rows.column,
            pairs.start,
            positions.start,
            positions.len(),
            sizes.t,
            sizes.heads,
            sizes.e,
            into.dtype.into(),
        );
    }
}

/// Where element `i` of heads `[pairs, count, e]` lies among rows.
#[cube]
#[allow(clippy::too_many_arguments)]
fn place(
    i: usize,
    stride: usize,
    column: usize,
    first_pair: usize,
    first: usize,
    count: usize,
    t: usize,
    heads: usize,
    #[comptime] e: usize,
) -> usize {
    let line = i / e;
    let pair = first_pair + line / count;
    let row = pair / heads * t + first + line % count;
    row * stride + column + pair % heads * e + i % e
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<E: Float>(
    rows: &Tensor<E>,
    into: &mut Tensor<E>,
    total: usize,
    column: usize,
    first_pair: usize,
    first: usize,
    count: usize,
    t: usize,
    heads: usize,
    #[comptime] e: usize,
    #[define(E)] _dtype: StorageType,
) {
    let i = ABSOLUTE_POS;
    if i >= total {
        terminate!();
    }
    into[i] = rows[place(i, rows.stride(0), column, first_pair, first, count, t, heads, e)];
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scatter_kernel<E: Float>(
    from: &Tensor<f32>,
    rows: &mut Tensor<E>,
    total: usize,
    column: usize,
    first_pair: usize,
    first: usize,
    count: usize,
    t: usize,
    heads: usize,
    #[comptime] e: usize,
    #[define(E)] _dtype: StorageType,
) {
    let i = ABSOLUTE_POS;
    if i >= total {
        terminate!();
    }
    let at = place(i, rows.stride(0), column, first_pair, first, count, t, heads, e);
    rows[at] = E::cast_from(from[i]);
}

/// `sums[p, i, c] += heads[p, i, c]` of `heads` `[pairs, count, e]` and `sums` `[pairs, t, e]`, both fp32.
pub(super) fn accumulate<R: CubeRuntime>(sums: &CubeTensor<R>, heads: CubeTensor<R>) {
    let [pairs, count, e] = heads.shape().dims();
    let [_, t, _] = sums.shape().dims();
    let total = pairs * count * e;
    let dim = CubeDim::new(&sums.client, total);
    // SAFETY: units beyond `total` stop; `count` is at most `t`.
    unsafe {
        accumulate_kernel::launch_unchecked(
            &sums.client,
            calculate_cube_count_elemwise(&sums.client, total, dim),
            dim,
            address_type([sums, &heads]),
            heads.into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            total,
            count * e,
            t * e,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn accumulate_kernel(from: &Tensor<f32>, sums: &mut Tensor<f32>, total: usize, of_pair: usize, of_sums: usize) {
    let i = ABSOLUTE_POS;
    if i >= total {
        terminate!();
    }
    sums[i / of_pair * of_sums + i % of_pair] += from[i];
}
