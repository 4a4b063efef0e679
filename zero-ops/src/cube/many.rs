//! Many flat tensors in one launch.
//!
//! A launch takes up to [`GROUP`] items. What each has to do is cut into chunks of [`CHUNK`] vectors, a chunk for a cube; the
//! cubes of a launch are those of its items one after another, so that a launch is balanced whatever the items' sizes.
//!
//! Kernels are compiled for a number of items. To compile few, [`launch_groups`] only makes groups whose size is a power of two.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{Metadata, Shape, strides};
use cubecl::prelude::*;

use super::tensor::{empty, packed};

/// The largest number of items in a launch.
pub(super) const GROUP: usize = 16;

/// The largest number of arrays in a launch: CUDA's kernels may have only 4 KiB of arguments.
const BINDINGS: usize = 128;

/// Units of a cube: what every device that runs compute shaders of use has.
pub(super) const UNITS: u32 = 256;

/// Vectors that a unit takes.
pub(super) const TAKES: u32 = 4;

/// Vectors that a cube takes.
pub(super) const CHUNK: u32 = UNITS * TAKES;

/// Elements of a wide vector: 16 bytes of fp32, the widest load of a GPU's unit.
pub(super) const WIDE: usize = 4;

/// Chunks of `vectors` vectors.
pub(super) fn chunks(vectors: usize) -> usize {
    vectors.div_ceil(CHUNK as usize)
}

/// How a launch over a group of items is laid out.
pub(super) struct Layout<R: CubeRuntime> {
    pub count: CubeCount,
    pub dim: CubeDim,
    /// Where the cubes of each item end.
    pub ends: SequenceArg<R, usize>,
}

/// Launches kernels over `items`: those of one `family` together, in the order in which families first come, in groups of as
/// many as a launch of so many `bindings` an item may have, and of a power of two each. A launch may have more cubes than the
/// items' `cubes`.
pub(super) fn launch_groups<R: CubeRuntime, T, F: PartialEq>(
    client: &ComputeClient<R>,
    mut items: Vec<T>,
    family: impl Fn(&T) -> F,
    bindings: impl Fn(&T) -> usize,
    cubes: impl Fn(&F, &T) -> usize,
    launch: impl Fn(&F, &[T], Layout<R>),
) {
    // Two are left for what all items share, one for the sizes of arrays.
    let most = (client.properties().hardware.max_bindings as usize).saturating_sub(3).min(BINDINGS);
    while let Some(first) = items.first() {
        let which = family(first);
        let most = (most / bindings(first)).clamp(1, GROUP);
        let (mut same, others): (Vec<T>, Vec<T>) = items.into_iter().partition(|item| family(item) == which);
        while !same.is_empty() {
            let rest = same.split_off(1 << same.len().min(most).ilog2());
            let group = std::mem::replace(&mut same, rest);
            let (mut ends, mut total) = (SequenceArg::new(), 0);
            for item in &group {
                total += cubes(&which, item);
                ends.push(total);
            }
            let (count, dim) = grid(client, total);
            launch(&which, &group, Layout { count, dim, ends });
        }
        items = others;
    }
}

/// The units and cubes of a launch of `cubes` cubes; there may be more cubes than that.
pub(super) fn grid<R: CubeRuntime>(client: &ComputeClient<R>, cubes: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(UNITS);
    (cubecl::calculate_cube_count_elemwise(client, cubes * UNITS as usize, dim), dim)
}

/// Whether the cube is one of item `i`'s, where the cubes of each end at `ends`, and which of these.
#[cube]
pub(super) fn cube_of(ends: &Sequence<usize>, #[comptime] i: usize) -> (bool, usize) {
    let begin = if comptime!(i > 0) { *ends.index(comptime!(i - 1)) } else { 0usize.runtime() };
    (CUBE_POS >= begin && CUBE_POS < *ends.index(i), CUBE_POS - begin)
}

/// A tensor of one axis with the elements of `x` in row-major order; a copy only if they do not lie so.
pub(super) fn flat<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let elements = x.meta.num_elements();
    shaped(packed(x), Shape::new([elements]))
}

/// A tensor without gaps, seen in another shape.
pub(crate) fn shaped<R: CubeRuntime>(mut x: CubeTensor<R>, shape: Shape) -> CubeTensor<R> {
    let mut steps = strides![0; shape.num_dims()];
    let mut step = 1;
    for (axis, size) in shape.iter().enumerate().rev() {
        steps[axis] = step;
        step *= size;
    }
    *x.meta = Metadata::new(shape, steps);
    x
}

/// A flat tensor with the same elements that nobody else holds: it may be written to.
pub(super) fn owned<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.handle.can_mut() { x } else { x.copy() }
}

/// A flat tensor like `x` to be written to, its elements whatever they were: `x` itself, if nobody else holds it.
pub(super) fn overwritten<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.handle.can_mut() {
        return x;
    }
    let (shape, dtype) = (x.meta.shape().clone(), x.dtype);
    empty(&x, shape, dtype)
}

/// Elements of the vectors in which all of `x` can be read: their number and where they begin in memory must allow it.
pub(super) fn width<'a, R: CubeRuntime>(x: impl IntoIterator<Item = &'a CubeTensor<R>>) -> usize {
    let wide = |x: &CubeTensor<R>| {
        let bytes = (WIDE * x.dtype.size()) as u64;
        x.meta.num_elements().is_multiple_of(WIDE) && x.handle.offset_start.unwrap_or(0).is_multiple_of(bytes)
    };
    if x.into_iter().all(wide) { WIDE } else { 1 }
}

/// An array argument over all of a flat tensor.
pub(super) fn array<R: CubeRuntime>(x: &CubeTensor<R>) -> ArrayArg<R> {
    x.clone().into_array_arg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover() {
        assert_eq!([0, 1, CHUNK as usize, CHUNK as usize + 1].map(chunks), [0, 1, 1, 2]);
    }
}
