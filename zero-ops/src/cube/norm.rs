//! Sums of squares of many tensors, and the number of non-finite elements, without waiting for the device.
//!
//! Additions have a fixed order: a unit adds the elements that it reads, a cube its units' sums in a tree, and a second launch the cubes'
//! sums in the same way, in blocks. So the same elements give the same bits. A chain of additions is about 70 long for 10^9 elements, which
//! bounds the relative error of the sum by 5e-6.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::any::{self, Body, elements, has_cube_tensors, is_countable};
use super::many::{Layout, UNITS, array, cube_of, flat, grid, launch_groups, width};
use super::tensor::{empty, is_float, launch};

/// Number of vectors that a unit adds.
const ADDS: u32 = 16;

/// Number of vectors that a cube adds.
const CHUNK: u32 = UNITS * ADDS;

/// Number of sums that a unit adds before it adds their sum to the others.
const BLOCK: u32 = 16;

/// Returns the sum of squares of each tensor in fp32, and the number of all elements that are infinite or NaN (rounded to fp32 from 2^24
/// on): `[tensors + 1]`. If there are any, the sums are unspecified. Returns `None` if the backend's tensors are not CubeCL's, one is
/// neither fp32 nor 16 bit, or there are none.
pub fn sums_of_squares<B: Backend>(tensors: &[FloatTensor<B>]) -> Option<FloatTensor<B>> {
    let taken = |x: &FloatTensor<B>| is_float(x.dtype()) && is_countable(elements(x));
    if tensors.is_empty() || !has_cube_tensors::<B>() || !tensors.iter().all(taken) {
        return None;
    }
    let output = (Shape::new([tensors.len() + 1]), DType::F32);
    any::run::<B>("sums of squares", tensors.to_vec(), vec![output], SumsOfSquares).pop()
}

struct SumsOfSquares;

/// A tensor, and the position of its cubes' sums.
struct Place<'a, R: CubeRuntime> {
    x: &'a CubeTensor<R>,
    width: usize,
    first: usize,
    cubes: usize,
}

impl Body for SumsOfSquares {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let inputs: Vec<CubeTensor<R>> = inputs.into_iter().map(flat).collect();
        let mut offsets = vec![0u32];
        let mut total = 0;
        let mut places: Vec<Place<'_, R>> = Vec::new();
        for x in &inputs {
            let width = width([x]);
            let cubes = (x.meta.num_elements() / width).div_ceil(CHUNK as usize);
            places.push(Place { x, width, first: total, cubes });
            total += cubes;
            offsets.push(total as u32);
        }
        // The counts follow the sums, and are added like those of one more tensor.
        offsets.push(2 * total as u32);

        let client = inputs[0].client.clone();
        let partial = empty(&inputs[0], [2 * total.max(1)], DType::F32);
        launch_groups(
            &client,
            places.into_iter().filter(|place| place.cubes > 0).collect(),
            |place| (place.x.dtype, place.width),
            |_| 1,
            |_, place| place.cubes,
            |&(dtype, width), group, Layout { count, dim, ends }| {
                // SAFETY: a unit reads below an array's length; the cubes' positions are below `total` and distinct.
                unsafe {
                    launch! {
                        squares_kernel on client, (count, dim, width), [],
                        group.iter().map(|place| array(place.x)).collect(), ends,
                        group.iter().map(|place| place.first).collect(), total, array(&partial), dtype.into()
                    }
                }
            },
        );

        let out = empty(&inputs[0], [inputs.len() + 1], DType::F32);
        let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        let (count, dim) = grid(&client, inputs.len() + 1);
        // SAFETY: the handle holds all offsets; a cube beyond the results writes nothing, and reads none.
        unsafe {
            let offsets = ArrayArg::from_raw_parts(client.create_from_slice(&bytes), offsets.len());
            total_kernel::launch_unchecked(&client, count, dim, array(&partial), offsets, array(&out));
        }
        vec![out]
    }
}

/// Adds the `value`s of a cube's units; all of them get the sum.
#[cube]
pub(super) fn cube_sum(value: f32) -> f32 {
    let mut tree = SharedMemory::<f32>::new(comptime![UNITS as usize]);
    tree[UNIT_POS as usize] = value;
    sync_cube();
    #[unroll]
    for step in 0..comptime![UNITS.ilog2()] {
        let half = comptime![UNITS >> (step + 1)];
        if UNIT_POS < half {
            tree[UNIT_POS as usize] = tree[UNIT_POS as usize] + tree[(UNIT_POS + half) as usize];
        }
        sync_cube();
    }
    tree[0]
}

#[cube(launch_unchecked)]
fn squares_kernel<G: Float, N: Size>(
    tensors: &Sequence<Array<Vector<G, N>>>,
    ends: &Sequence<usize>,
    firsts: &Sequence<usize>,
    total: usize,
    partial: &mut Array<f32>,
    #[define(G)] _type: StorageType,
) {
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut others = Vector::<f32, N>::new(0.0);
    let mut place = 0usize;
    #[unroll]
    for i in 0..comptime![tensors.len()] {
        let (is_own, cube) = cube_of(ends, i);
        if is_own {
            let x_all = tensors.index(i);
            place = *firsts.index(i) + cube;
            let first_at = cube * CHUNK as usize + UNIT_POS as usize;
            for k in 0..ADDS as usize {
                let at = first_at + k * UNITS as usize;
                if at < x_all.len() {
                    let x = Vector::<f32, N>::cast_from(x_all[at]);
                    squares += x * x;
                    // Compares bits: a compiler's fast math may change a comparison with infinity.
                    let exponent = Vector::<u32, N>::reinterpret(x) & Vector::new(0x7f80_0000u32);
                    let finite = exponent.less_than(Vector::new(0x7f80_0000u32));
                    others += select_many(finite, Vector::new(0.0f32), Vector::new(1.0f32));
                }
            }
        }
    }
    let mut square = 0.0f32;
    let mut other = 0.0f32;
    #[unroll]
    for lane in 0..N::value() {
        square += squares[lane];
        other += others[lane];
    }
    let square = cube_sum(square);
    let other = cube_sum(other);
    if UNIT_POS == 0 && CUBE_POS < *ends.index(comptime![ends.len() - 1]) {
        partial[place] = square;
        partial[total + place] = other;
    }
}

#[cube(launch_unchecked)]
fn total_kernel(partial: &Array<f32>, offsets: &Array<u32>, out: &mut Array<f32>) {
    let cube = CUBE_POS;
    let mut sum = 0.0f32;
    if cube < out.len() {
        let end = offsets[cube + 1];
        let mut block = offsets[cube] + UNIT_POS;
        while block < end {
            let mut inner = 0.0f32;
            for k in 0..BLOCK {
                let at = block + k * UNITS;
                if at < end {
                    inner += partial[at as usize];
                }
            }
            sum += inner;
            block += BLOCK * UNITS;
        }
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 && cube < out.len() {
        out[cube] = sum;
    }
}

compiled! {
    use crate::cube::many::GROUP;

    for (dtype, d) in cases() {
        for tensors in [1, GROUP] {
            SumsOfSquares.run((0..tensors).map(|_| tensor([3, d], dtype)).collect());
        }
    }
}
