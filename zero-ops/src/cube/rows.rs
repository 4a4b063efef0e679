//! Shared parts of the kernels over rows: layout of rows, distribution of units over them, sums over a cube.
//!
//! A kernel takes rows `[n, d]` with any stride, as in slices of wider tensors and CUDA's padded allocations, and reads vectors of up to
//! [`WIDEST`] elements if all of its operands allow it.

use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::many::shaped;
use super::tensor::{OnCube, empty, is_float, packed};

/// Maximum number of elements of a vector: every compiler supports it as one value.
const WIDEST: usize = 4;

/// Maximum number of cubes along one dimension of a launch, which Vulkan guarantees.
const CUBES: usize = 65535;

/// Number of vectors of a row that a strip of units covers.
pub(super) const STRIP: usize = 32;

/// Number of rows that a strip of units covers at a time.
pub(super) const HEIGHT: usize = 8;

/// Returns whether the kernels support these operands: they have one float type.
pub(super) fn takes<'a, T: OnCube>(x: &T, others: impl IntoIterator<Item = &'a T>) -> bool {
    is_float(x.dtype()) && others.into_iter().all(|other| other.dtype() == x.dtype())
}

/// Returns the numbers of rows and columns.
pub(super) fn dims<R: CubeRuntime>(x: &CubeTensor<R>) -> [usize; 2] {
    x.meta.shape().dims()
}

/// Returns rows `[n, d]` without gaps within a row; copies only if there are gaps.
pub(super) fn with_whole_rows<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let whole = x.meta.strides()[1] == 1 || x.meta.shape()[1] <= 1;
    if whole { x } else { packed(x) }
}

/// Returns the stride between rows in vectors of `size` elements.
pub(super) fn stride<R: CubeRuntime>(x: &CubeTensor<R>, size: usize) -> usize {
    x.meta.strides()[0] / size
}

/// Returns the number of elements of a vector that suits all `tensors`, which have one width.
pub(super) fn vector_size<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> usize {
    let bytes = tensors.iter().map(|tensor| tensor.elem_size()).max().expect("a kernel has an operand");
    let fits = |size: usize| {
        tensors.iter().all(|tensor| {
            let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
            let rank = shape.num_dims();
            shape[rank - 1].is_multiple_of(size) && strides[..rank - 1].iter().all(|stride| stride.is_multiple_of(size))
        })
    };
    let client = &tensors[0].client;
    client.io_optimized_vector_sizes(bytes).find(|size| *size <= WIDEST && fits(*size)).unwrap_or(1)
}

/// Returns the type of indices into all of these tensors: buffers may have more than 2^32 elements.
pub(super) fn address_type<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> AddressType {
    tensors.iter().map(|tensor| tensor.required_address_type()).max().unwrap_or_default()
}

/// Returns a number of units, a power of two from 32 to `most`, such that each has about `each` of `elements`.
pub(super) fn units<R: CubeRuntime>(client: &ComputeClient<R>, elements: usize, each: usize, most: usize) -> usize {
    let most = most.min(client.properties().hardware.max_units_per_cube as usize);
    let most = if most.is_power_of_two() { most } else { most.next_power_of_two() / 2 };
    elements.div_ceil(each).next_power_of_two().clamp(32.min(most), most)
}

/// Returns a number of cubes for `items`: one each or, if that is too many, the maximum, with every `count`-th item per cube.
pub(super) fn cubes(items: usize) -> usize {
    items.clamp(1, CUBES)
}

/// Distribution of units over rows and columns: cubes of [`STRIP`] vectors by [`HEIGHT`] rows, in vertical blocks of `rows_per_block` rows.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub blocks: usize,
    rows: usize,
    rows_per_block: usize,
}

impl Blocks {
    /// Creates enough blocks to fill a device with rows of `d` elements, and at least 4 rows per unit if there are enough.
    pub fn new(rows: usize, d: usize) -> Self {
        let wanted = 2048usize.div_ceil(d.div_ceil(STRIP * WIDEST).max(1));
        let most = rows.div_ceil(4 * HEIGHT).clamp(1, CUBES);
        Self::of(rows, rows.div_ceil(wanted.min(most)))
    }

    /// Creates blocks of `rows_per_block` rows, at least one.
    pub fn of(rows: usize, rows_per_block: usize) -> Self {
        let rows_per_block = rows_per_block.max(1);
        Self { blocks: rows.div_ceil(rows_per_block).max(1), rows, rows_per_block }
    }

    /// Creates one block of all rows.
    pub fn one(rows: usize) -> Self {
        Self::of(rows, rows)
    }

    /// Returns the cubes over rows of `vectors` vectors.
    pub fn count(&self, vectors: usize) -> CubeCount {
        let strips = vectors.div_ceil(STRIP).try_into().expect("strips of a row are counted in 32 bit");
        CubeCount::new_2d(strips, self.blocks.try_into().expect("there are at most 65535 blocks"))
    }

    pub fn dim() -> CubeDim {
        CubeDim::new_2d(STRIP as u32, HEIGHT as u32)
    }

    /// Returns the kernel's argument, for rows of `vectors` vectors.
    pub fn extent<R: CubeRuntime>(&self, vectors: usize) -> ExtentLaunch<R> {
        ExtentLaunch::new(self.rows, vectors, self.rows_per_block)
    }
}

/// [`Blocks`] in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Extent {
    pub rows: usize,
    pub vectors: usize,
    pub rows_per_block: usize,
}

/// Returns a unit's column of vectors, its first row, and the end of its rows, which are [`HEIGHT`] apart.
#[cube]
pub(super) fn own(extent: &Extent) -> (usize, usize, usize) {
    let first = CUBE_POS_Y as usize * extent.rows_per_block;
    let end = min(first + extent.rows_per_block, extent.rows);
    (CUBE_POS_X as usize * STRIP.comptime() + UNIT_POS_X as usize, first + UNIT_POS_Y as usize, end)
}

/// Rows of vectors in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Strided<E: Float, N: Size> {
    pub vectors: Array<Vector<E, N>>,
    /// Stride between rows in vectors.
    pub stride: usize,
}

/// Returns rows as a kernel's argument, in vectors of `size` elements.
pub(super) fn strided<E: Float, N: Size, R: CubeRuntime>(x: CubeTensor<R>, size: usize) -> StridedLaunch<E, N, R> {
    let stride = stride(&x, size);
    StridedLaunch::new(x.into_array_arg(), stride)
}

#[cube]
pub(super) fn read<E: Float, N: Size>(rows: &Strided<E, N>, row: usize, column: usize) -> Vector<f32, N> {
    Vector::cast_from(rows.vectors[row * rows.stride + column])
}

/// Reads a vector of `from`, or returns zeros if `is_there` is false.
#[cube]
pub(super) fn read_if<E: Float, N: Size>(
    from: &Array<Vector<E, N>>,
    at: usize,
    #[comptime] is_there: bool,
) -> Vector<f32, N> {
    let mut value = Vector::<f32, N>::new(0.0f32);
    if comptime!(is_there) {
        value = Vector::cast_from(from[at]);
    }
    value
}

/// Returns zeros on `like`'s device: the result of a sum over no rows.
pub(super) fn zeros<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    let shape = shape.into();
    if shape.num_elements() == 0 {
        return empty(like, shape, dtype);
    }
    // One axis, as rows would have gaps.
    let flat = Shape::from([shape.num_elements()]);
    shaped(zeros_client(like.client.clone(), like.device.clone(), flat, dtype), shape)
}

/// Returns `tanh(x / cap)`, the soft cap of `x` divided by the cap.
#[cube]
pub(super) fn share_of_cap(x: f32, cap: f32) -> f32 {
    // Beyond 10 it is 1 in f32, where some devices divide infinities. Comparisons keep a NaN; `min` and `max` need not.
    let share = x / cap;
    let share = select(share > 10.0f32, 10.0f32, share);
    select(share < -10.0f32, -10.0f32, share).tanh()
}

/// Returns the sum of a vector's elements, from first to last.
#[cube]
pub(super) fn across<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for k in 0..N::value() {
        sum += vector[k];
    }
    sum
}

/// Returns the sums of `a` and of `b` over a cube of `units`, a power of two, in every unit. `shared` has two numbers per unit.
///
/// Additions are in the order of a tree over units, the same on every device.
#[cube]
pub(super) fn over_cube(shared: &mut SharedMemory<f32>, a: f32, b: f32, #[comptime] units: usize) -> (f32, f32) {
    let me = UNIT_POS as usize;
    shared[me] = a;
    shared[me + units] = b;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if me < half {
            let (other_a, other_b) = (shared[me + half], shared[me + half + units]);
            shared[me] += other_a;
            shared[me + units] += other_b;
        }
        half /= 2;
        sync_cube();
    }
    let sums = (shared[0], shared[units]);
    // Wait until all units have read these sums.
    sync_cube();
    sums
}

/// Returns the sum over the [`HEIGHT`] units of a column, in the first row of units; the others get partial sums.
#[cube]
pub(super) fn over_height<N: Size>(shared: &mut SharedMemory<Vector<f32, N>>, value: Vector<f32, N>) -> Vector<f32, N> {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    let mut half = comptime!(HEIGHT / 2).runtime();
    while half > 0 {
        if (UNIT_POS_Y as usize) < half {
            let other = shared[me + half * STRIP.comptime()];
            shared[me] += other;
        }
        half /= 2;
        sync_cube();
    }
    shared[me]
}
