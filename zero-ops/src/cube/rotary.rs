//! Rotary position embedding, <https://arxiv.org/abs/2104.09864>, in one pass.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::many::array;
use super::rows::{
    Blocks, Extent, HEIGHT, Strided, address_type, dims, own, read, strided, vector_size, with_whole_rows,
};
use super::tensor::{OnCube, empty, launch, packed, run};

/// `x`, `out`: `[n, d]`; `cos`, `sin`: `[t, e / 2]`. A unit rotates vectors of a head's first half with those of its second.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rotary_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    cos: &Array<Vector<E, N>>,
    sin: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    extent: Extent,
    half: usize,
    positions: usize,
    #[comptime] back: bool,
    #[define(E)] _dtype: StorageType,
) {
    let (pair, first, end) = own(&extent);
    if pair < extent.vectors {
        let within = pair % half;
        let column = pair / half * (half + half) + within;
        let mut row = first;
        while row < end {
            let a = read::<E, N>(x, row, column);
            let b = read::<E, N>(x, row, column + half);
            let angle = row % positions * half + within;
            let cos = Vector::<f32, N>::cast_from(cos[angle]);
            let mut sin = Vector::<f32, N>::cast_from(sin[angle]);
            if comptime!(back) {
                sin = Vector::new(0.0f32) - sin;
            }
            let at = row * (extent.vectors + extent.vectors) + column;
            out[at] = Vector::cast_from(a * cos - b * sin);
            out[at + half] = Vector::cast_from(b * cos + a * sin);
            row += HEIGHT.comptime();
        }
    }
}

fn turned<R: CubeRuntime>([x, cos, sin]: [CubeTensor<R>; 3], back: bool) -> CubeTensor<R> {
    let ([n, d], [positions, half]) = (dims(&x), dims(&cos));
    let out = empty(&x, [n, d], x.dtype);
    if n * d == 0 {
        return out;
    }
    let x = with_whole_rows(x);
    let [cos, sin] = [cos, sin].map(packed);
    let operands = [&x, &cos, &sin, &out];
    let (size, address) = (vector_size(&operands), address_type(&operands));
    let (blocks, dtype) = (Blocks::new(n, d / 2), x.dtype.into());
    let [pairs, half] = [d / 2, half].map(|elements| elements / size);
    // SAFETY: units read and write rows below `n` and vectors below `d / size`, by pairs; angles have `positions` rows of `half`
    // vectors.
    unsafe {
        launch! {
            rotary_kernel on x.client, (blocks.count(pairs), Blocks::dim(), address, size), [],
            strided(x, size), array(&cos), array(&sin), array(&out), blocks.extent(pairs), half, positions, back, dtype
        }
    }
    out
}

/// Implements [`fused_rotary`](crate::FusedBackend::fused_rotary).
pub(crate) fn rotary<T: OnCube>(x: T, cos: T, sin: T, back: bool) -> T {
    let outputs = [(x.shape(), x.dtype())];
    let [out] = run("rotary", [x, cos, sin], None, outputs, move |operands, _| [turned(operands, back)]);
    out
}

compiled! {
    for (dtype, half) in TYPES.into_iter().flat_map(|dtype| [1, 2, 64].map(|half| (dtype, half))) {
        let angles = || tensor([64, half], dtype);
        for back in [false, true] {
            turned([tensor([4096, 8 * half], dtype), angles(), angles()], back);
        }
    }
}
