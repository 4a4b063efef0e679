//! Sums of columns, in two stages of fixed order: over blocks of rows, then over the blocks.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::many::{array, shaped};
use super::rows::{
    Blocks, Extent, HEIGHT, STRIP, Strided, address_type, dims, over_height, own, read, strided, vector_size,
    with_whole_rows, zeros,
};
use super::tensor::{OnCube, empty, launch, run};

/// Sums blocks of rows; `x`: `[n, d]`, `out`: `[blocks, d]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn column_sums_kernel<E: Float, O: Float, N: Size>(
    x: &Strided<E, N>,
    out: &mut Array<Vector<O, N>>,
    extent: Extent,
    #[define(E, O)] _dtypes: [StorageType; 2],
) {
    let mut shared = SharedMemory::<Vector<f32, N>>::new(STRIP * HEIGHT);
    let (column, first, end) = own(&extent);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < extent.vectors {
        let mut row = first;
        while row < end {
            sum += read::<E, N>(x, row, column);
            row += HEIGHT.comptime();
        }
    }
    let sum = over_height::<N>(&mut shared, sum);
    if UNIT_POS_Y == 0 && column < extent.vectors {
        out[CUBE_POS_Y as usize * extent.vectors + column] = Vector::cast_from(sum);
    }
}

fn launch<R: CubeRuntime>(x: CubeTensor<R>, blocks: Blocks, dtype: DType) -> CubeTensor<R> {
    let out = empty(&x, [blocks.blocks, dims(&x)[1]], dtype);
    launch_into(x, blocks, out)
}

fn launch_into<R: CubeRuntime>(x: CubeTensor<R>, blocks: Blocks, out: CubeTensor<R>) -> CubeTensor<R> {
    let (d, size) = (dims(&x)[1], vector_size(&[&x, &out]));
    assert!(out.is_contiguous() && dims(&out) == [blocks.blocks, d]);
    let (address, types) = (address_type(&[&x, &out]), [x.dtype.into(), out.dtype.into()]);
    // SAFETY: units read the rows of `blocks` and vectors below `d / size` of `x`, and write those of `blocks` rows.
    unsafe {
        launch! {
            column_sums_kernel on x.client, (blocks.count(d / size), Blocks::dim(), address, size), [],
            strided(x, size), array(&out), blocks.extent(d / size), types
        }
    }
    out
}

/// Runs the second stage, which sums rows of partial sums `[blocks, d]` in fp32 to `[d]`.
pub(super) fn total<R: CubeRuntime>(partial: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    let out = empty(&partial, [1, dims(&partial)[1]], dtype);
    total_into(partial, out)
}

/// Runs the second stage into `out`, `[1, d]` without gaps.
pub(super) fn total_into<R: CubeRuntime>(partial: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let [rows, d] = dims(&partial);
    shaped(launch_into(partial, Blocks::one(rows), out), Shape::from([d]))
}

/// Returns the sums `[d]` of the columns of `x` `[n, d]`, added in fp32 and rounded once.
pub(super) fn column_sums<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let ([n, d], dtype) = (dims(&x), x.dtype);
    if n * d == 0 {
        return zeros(&x, [d], dtype);
    }
    let x = with_whole_rows(x);
    let blocks = Blocks::new(n, d);
    if blocks.blocks == 1 {
        return shaped(launch(x, blocks, dtype), Shape::from([d]));
    }
    total(launch(x, blocks, DType::F32), dtype)
}

/// Implements [`fused_linear_bias_backward`](crate::FusedBackend::fused_linear_bias_backward).
pub(crate) fn bias_backward<T: OnCube>(grad: T) -> T {
    let outputs = [(Shape::from([grad.shape()[1]]), grad.dtype())];
    let [sums] = run("linear: gradient of bias", [grad], None, outputs, |[grad], _| [column_sums(grad)]);
    sums
}

compiled! {
    for (dtype, d) in cases() {
        // In one stage, and in two.
        for n in [8, 4096] {
            column_sums(tensor([n, d], dtype));
        }
    }
}
