//! One launch over many flat tensors.
//!
//! A launch takes up to [`GROUP`] items. Each item is split into chunks of [`CHUNK`] vectors, one cube per chunk. The cubes of a launch are
//! those of its items in order, so a launch is balanced for items of any sizes.
//!
//! A kernel is compiled per number of items. To compile few, [`launch_groups`] only makes groups whose size is a power of two.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{Metadata, Shape, strides};
use cubecl::prelude::*;

use super::tensor::{empty, packed};

/// Maximum number of items in a launch.
pub(super) const GROUP: usize = 16;

/// Maximum number of arrays in a launch: CUDA's kernels can have only 4 KiB of arguments.
const BINDINGS: usize = 128;

/// Number of units of a cube: supported by every device that is useful for compute shaders.
pub(super) const UNITS: u32 = 256;

/// Number of vectors per unit.
pub(super) const TAKES: u32 = 4;

/// Number of vectors per cube.
pub(super) const CHUNK: u32 = UNITS * TAKES;

/// Number of elements of a wide vector: 16 bytes of fp32, the widest load of a GPU's unit.
pub(super) const WIDE: usize = 4;

/// Returns the number of chunks of `vectors` vectors.
pub(super) fn chunks(vectors: usize) -> usize {
    vectors.div_ceil(CHUNK as usize)
}

/// Layout of a launch over a group of items.
pub(super) struct Layout<R: CubeRuntime> {
    pub count: CubeCount,
    pub dim: CubeDim,
    /// The end of each item's cubes.
    pub ends: SequenceArg<R, usize>,
}

/// Launches kernels over `items`. Items of one `family` are launched together, in order of the families' first occurrence, in groups whose
/// size is a power of two and that fit the device at `bindings` per item. A launch may have more cubes than the items' `cubes`.
pub(super) fn launch_groups<R: CubeRuntime, T, F: PartialEq>(
    client: &ComputeClient<R>,
    mut items: Vec<T>,
    family: impl Fn(&T) -> F,
    bindings: impl Fn(&T) -> usize,
    cubes: impl Fn(&F, &T) -> usize,
    launch: impl Fn(&F, &[T], Layout<R>),
) {
    // Two bindings are reserved for arguments that all items share, one for the sizes of arrays.
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

/// Returns the units and cubes of a launch of at least `cubes` cubes.
pub(super) fn grid<R: CubeRuntime>(client: &ComputeClient<R>, cubes: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(UNITS);
    (cubecl::calculate_cube_count_elemwise(client, cubes * UNITS as usize, dim), dim)
}

/// Returns whether the cube belongs to item `i`, given the `ends` of all items' cubes, and its index within the item.
#[cube]
pub(super) fn cube_of(ends: &Sequence<usize>, #[comptime] i: usize) -> (bool, usize) {
    let begin = if comptime!(i > 0) { *ends.index(comptime!(i - 1)) } else { 0usize.runtime() };
    (CUBE_POS >= begin && CUBE_POS < *ends.index(i), CUBE_POS - begin)
}

/// Flattens `x` to one axis in row-major order; copies only if its elements are in another order.
pub(super) fn flat<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let elements = x.meta.num_elements();
    shaped(packed(x), Shape::new([elements]))
}

/// Returns a view of a tensor without gaps in another shape.
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

/// Returns `x`, or a copy if others hold it, so that it may be written to.
pub(super) fn owned<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.handle.can_mut() { x } else { x.copy() }
}

/// Returns a flat tensor like `x` to be overwritten: `x` itself if nobody else holds it, otherwise uninitialized memory.
pub(super) fn overwritten<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.handle.can_mut() {
        return x;
    }
    let (shape, dtype) = (x.meta.shape().clone(), x.dtype);
    empty(&x, shape, dtype)
}

/// Returns the vector width at which all of `x` can be read, given their numbers of elements and their alignments.
pub(super) fn width<'a, R: CubeRuntime>(x: impl IntoIterator<Item = &'a CubeTensor<R>>) -> usize {
    let wide = |x: &CubeTensor<R>| {
        let bytes = (WIDE * x.dtype.size()) as u64;
        x.meta.num_elements().is_multiple_of(WIDE) && x.handle.offset_start.unwrap_or(0).is_multiple_of(bytes)
    };
    if x.into_iter().all(wide) { WIDE } else { 1 }
}

/// Returns an array argument over a full flat tensor.
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
