//! The gradient of an embedding: each id's row is the sum of the rows at its positions, in order, added in fp32 and rounded once.
//!
//! Each cube has a position. It lists the positions of the same id and, if its own is the first of them, sums their rows. The positions of
//! a frequent id are split over [`HEIGHT`] rows of units, whose sums are added as a tree. Nothing is sorted in memory, and no two cubes
//! write the same row.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Shape;
use cubecl::prelude::*;

use super::rows::{HEIGHT, STRIP, address_type, cubes, dims, over_height, stride, vector_size, with_whole_rows, zeros};
use super::tensor::{OnCube, launch, packed, run};

/// Number of units of a cube.
const UNITS: usize = STRIP * HEIGHT;

/// Number of positions of an id that are listed at a time.
const LISTED: usize = 2048;

/// Lists the positions of `id` numbered `from..from + LISTED`, and returns the number of all.
///
/// Each unit scans adjacent positions, so that the list is in order.
#[cube]
fn list_places<I: Int>(
    ids: &Array<I>,
    id: I,
    n: usize,
    from: u32,
    listed: &mut SharedMemory<u32>,
    counts: &mut SharedMemory<u32>,
) -> u32 {
    let me = UNIT_POS as usize;
    let each = n.div_ceil(UNITS.comptime().runtime());
    let first = min(me * each, n);
    let end = min(first + each, n);
    let mut own = 0u32;
    for place in first..end {
        own += u32::cast_from(ids[place] == id);
    }
    // Wait until all units have read the previous counts.
    sync_cube();
    counts[me] = own;
    sync_cube();
    // Prefix sums over the units, with doubling steps.
    let mut step = 1usize;
    while step < UNITS.comptime() {
        let mut before = 0u32;
        if me >= step {
            before = counts[me - step];
        }
        sync_cube();
        counts[me] += before;
        sync_cube();
        step *= 2;
    }
    let mut at = counts[me] - own;
    for place in first..end {
        if ids[place] == id {
            if at >= from && at - from < comptime!(LISTED as u32) {
                listed[(at - from) as usize] = place as u32;
            }
            at += 1;
        }
    }
    let all = counts[comptime!(UNITS - 1)];
    sync_cube();
    all
}

/// `ids`: `[n]`, `grad`: `[n, d]`; `out`: `[v, d]`, of which the rows of existing ids are written.
#[cube(launch_unchecked, address_type = "dynamic")]
fn embedding_gradient_kernel<E: Float, I: Int, N: Size>(
    ids: &Array<I>,
    grad: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    stride: usize,
    places: usize,
    rows: usize,
    vectors: usize,
    #[define(E, I)] _dtypes: [StorageType; 2],
) {
    let mut listed = SharedMemory::<u32>::new(LISTED);
    let mut counts = SharedMemory::<u32>::new(UNITS);
    let mut shared = SharedMemory::<Vector<f32, N>>::new(UNITS);
    let mut place = CUBE_POS;
    while place < places {
        let id = ids[place];
        let all = list_places(ids, id, places, 0u32, &mut listed, &mut counts);
        // An id that is not a row has no gradient.
        if listed[0] as usize == place && id >= I::new(0) && usize::cast_from(id) < rows {
            let mut first = 0usize;
            while first < vectors {
                let column = first + UNIT_POS_X as usize;
                let mut sum = Vector::<f32, N>::new(0.0f32);
                let mut from = 0u32;
                while from < all {
                    if all > comptime!(LISTED as u32) {
                        list_places(ids, id, places, from, &mut listed, &mut counts);
                    }
                    let count = min(all - from, comptime!(LISTED as u32));
                    let mut i = UNIT_POS_Y;
                    if column < vectors {
                        while i < count {
                            sum += Vector::cast_from(grad[listed[i as usize] as usize * stride + column]);
                            i += comptime!(HEIGHT as u32);
                        }
                    }
                    from += comptime!(LISTED as u32);
                }
                let sum = over_height::<N>(&mut shared, sum);
                if UNIT_POS_Y == 0 && column < vectors {
                    out[usize::cast_from(id) * vectors + column] = Vector::cast_from(sum);
                }
                // Wait until all units have read these sums.
                sync_cube();
                first += STRIP.comptime();
            }
        }
        sync_cube();
        place += CUBE_COUNT;
    }
}

fn gradient<R: CubeRuntime>(ids: CubeTensor<R>, grad: CubeTensor<R>, rows: usize) -> CubeTensor<R> {
    let [n, d] = dims(&grad);
    let out = zeros(&grad, [rows, d], grad.dtype);
    if n * d * rows == 0 {
        return out;
    }
    let (ids, grad) = (packed(ids), with_whole_rows(grad));
    let size = vector_size(&[&grad, &out]);
    let (address, stride) = (address_type(&[&ids, &grad, &out]), stride(&grad, size));
    let types = [grad.dtype.into(), ids.dtype.into()];
    // SAFETY: cubes read places below `n` and vectors below `d / size`, and write rows of ids below `rows`, one cube each.
    unsafe {
        launch! {
            embedding_gradient_kernel on grad.client,
            (CubeCount::new_1d(cubes(n) as u32), CubeDim::new_2d(STRIP as u32, HEIGHT as u32), address, size),
            [ids, grad, out.clone()],
            stride, n, rows, d / size, types
        }
    }
    out
}

/// Implements [`fused_embedding_backward`](crate::FusedBackend::fused_embedding_backward).
pub(crate) fn embedding_backward<T: OnCube>(ids: T, grad: T, rows: usize) -> T {
    let outputs = [(Shape::from([rows, grad.shape()[1]]), grad.dtype())];
    let body = move |[ids, grad]: [_; 2], _| [gradient(ids, grad, rows)];
    let [made] = run("embedding: gradient", [ids, grad], None, outputs, body);
    made
}

compiled! {
    use burn_std::DType;

    for (dtype, d) in cases() {
        for ids in [DType::I32, DType::I64] {
            gradient(tensor([1024], ids), tensor([1024, d], dtype), 50257);
        }
    }
}

#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests {
    use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};

    use super::*;
    use crate::cube::tested::{Plain, TestRuntime};

    /// Tests an id at nearly all positions, more than are listed at a time; ids at a few, at none, and an id that is not a row.
    #[test]
    fn rows_are_summed_in_order() {
        for [n, v, d] in [[1, 1, 1], [300, 7, 130], [2 * LISTED + 100, 50, 6]] {
            let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 50.0;
            let id = |i: usize| if i.is_multiple_of(3) { (i * i % (v + 2)) as i32 - 1 } else { 0 };
            let ids: Vec<i32> = (0..n).map(id).collect();
            let values: Vec<f32> = (0..n * d).map(number).collect();
            let mut expected = vec![0.0f64; v * d];
            for (place, id) in ids.iter().enumerate().filter(|(_, id)| (0..v as i32).contains(id)) {
                for c in 0..d {
                    expected[*id as usize * d + c] += f64::from(values[place * d + c]);
                }
            }
            let ids = Tensor::<Plain, 1, Int>::from_data(TensorData::new(ids, [n]), &Default::default());
            let grad = Tensor::<Plain, 2>::from_data(TensorData::new(values, [n, d]), &Default::default());
            let made: CubeTensor<TestRuntime> =
                embedding_backward(ids.into_primitive(), grad.into_primitive().tensor(), v);
            let made = Tensor::<Plain, 2>::from_primitive(TensorPrimitive::Float(made));
            let made: Vec<f32> = made.into_data().to_vec().unwrap();
            for (i, (made, expected)) in made.iter().zip(&expected).enumerate() {
                let close = (f64::from(*made) - expected).abs() <= 1e-6 * (1.0 + n as f64);
                assert!(close, "{n} places, element {i}: {made}, {expected}");
            }
        }
    }
}
