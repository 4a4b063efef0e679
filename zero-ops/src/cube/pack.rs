//! Conversion between flat tensors and buckets, whose rows one collective sends for many tensors.
//!
//! A tensor of `numel` elements is split over `world` ranks at multiples of `stride = ceil(numel / world)`. A bucket has a row per rank,
//! and a tensor has the same columns in every row: rank `r`'s hold its elements from `r stride` on, padded with zeros to `stride`. A large
//! tensor may span buckets: a bucket then has `columns` of its columns, from `from` on.

use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::any::{self, Body, elements, has_cube_tensors, is_countable};
use super::many::{CHUNK, Layout, TAKES, UNITS, WIDE, array, chunks, cube_of, flat, launch_groups, owned, width};
use super::tensor::{empty, is_float, launch};
pub use zero_kernels::device::PackItem;

/// [`zero_kernels::device::UnpackItem`] with Burn's types.
pub type UnpackItem<T> = zero_kernels::device::UnpackItem<T, DType>;

/// [`zero_kernels::device::SumItem`] with Burn's types.
pub type SumItem<T> = zero_kernels::device::SumItem<T, DType>;

/// Packs a bucket `[world, columns]` of `dtype`. Each element is multiplied by `factor` in fp32 and rounded once.
///
/// # Errors
///
/// Returns the items if the backend's tensors are not CubeCL's, have types other than fp32 and 16 bit, or no item has one.
///
/// # Panics
///
/// If a tensor does not have `numel` elements, or an item has more columns than the tensor has from `from` on.
pub fn pack<B: Backend>(
    items: Vec<PackItem<FloatTensor<B>>>,
    world: usize,
    dtype: DType,
    factor: f32,
) -> Result<FloatTensor<B>, Vec<PackItem<FloatTensor<B>>>> {
    let columns: usize = items.iter().map(|item| item.columns).sum();
    let taken = |item: &PackItem<FloatTensor<B>>| {
        item.tensor.as_ref().is_none_or(|x| is_float(x.dtype())) && is_countable(item.numel)
    };
    let some = items.iter().any(|item| item.tensor.is_some());
    let fits = is_countable(world * columns);
    if !some || !fits || !is_float(dtype) || !has_cube_tensors::<B>() || !items.iter().all(taken) {
        return Err(items);
    }
    let mut cuts = Vec::with_capacity(items.len());
    let mut inputs = Vec::new();
    let mut at = 0;
    for PackItem { tensor, numel, from, columns } in items {
        let cut = Cut::new(numel, world, from, at, columns);
        at += columns;
        if let Some(tensor) = &tensor {
            assert_eq!(elements(tensor), numel, "a tensor to pack has another number of elements than its item");
        }
        cuts.push((cut, tensor.is_some()));
        inputs.extend(tensor);
    }
    let body = Pack { cuts, world, columns, dtype, factor };
    let bucket = any::run::<B>("pack", inputs, vec![(Shape::new([world, columns]), dtype)], body).pop();
    Ok(bucket.expect("the kernel returns one tensor"))
}

/// Unpacks the columns of `bucket`, which has `world` rows or, with 1, the rank's own row, into targets. Each element is multiplied by
/// `factor` in fp32 and rounded once. Targets that nobody else holds are written in place. A target without elements has one zero.
///
/// # Errors
///
/// Returns the arguments if the backend's tensors are not CubeCL's or have types other than fp32 and 16 bit.
///
/// # Panics
///
/// If the bucket does not have `world` rows of the items' columns, or a target's number of elements or type is not the item's.
#[allow(clippy::type_complexity)] // The arguments given back.
pub fn unpack<B: Backend>(
    bucket: FloatTensor<B>,
    world: usize,
    items: Vec<UnpackItem<FloatTensor<B>>>,
    factor: f32,
) -> Result<Vec<FloatTensor<B>>, (FloatTensor<B>, Vec<UnpackItem<FloatTensor<B>>>)> {
    let columns: usize = items.iter().map(|item| item.columns).sum();
    let taken = |item: &UnpackItem<FloatTensor<B>>| is_float(item.dtype) && is_countable(item.numel);
    let fits = is_countable(world * columns);
    if !fits || !is_float(bucket.dtype()) || !has_cube_tensors::<B>() || !items.iter().all(taken) {
        return Err((bucket, items));
    }
    assert_eq!(
        elements(&bucket),
        world * columns,
        "wrong number of elements for a bucket of {world} rows of {columns} columns"
    );
    let mut cuts = Vec::with_capacity(items.len());
    let mut outputs = Vec::with_capacity(items.len());
    let mut inputs = vec![bucket];
    let mut at = 0;
    for UnpackItem { target, numel, from, columns, dtype } in items {
        // A rank's own row has all columns of a tensor; its shard may have fewer elements.
        let cut = if world == 1 {
            Cut::of_a_row(numel, from, at, columns)
        } else {
            Cut::new(numel, world, from, at, columns)
        };
        at += columns;
        let mut shape = Shape::new([numel.max(1)]);
        if let Some(target) = &target {
            assert_eq!(elements(target), numel.max(1), "a target has another number of elements than its item");
            assert_eq!(target.dtype(), dtype, "a target has another type than its item");
            shape = target.shape();
        }
        outputs.push((shape, dtype));
        cuts.push((cut, dtype, target.is_some()));
        inputs.extend(target);
    }
    Ok(any::run::<B>("unpack", inputs, outputs, Unpack { cuts, world, columns, factor }))
}

/// Returns for each item `((part_0 + part_1) + part_2 ...) scale` in fp32, rounded once: flat, with the length of its range.
///
/// # Errors
///
/// Returns the items if the backend's tensors are not CubeCL's or have types other than fp32 and 16 bit.
///
/// # Panics
///
/// If an item has no parts, parts of different lengths or types, or a range that exceeds them.
#[allow(clippy::type_complexity)] // The arguments given back.
pub fn sum_parts<B: Backend>(
    items: Vec<SumItem<FloatTensor<B>>>,
    scale: f32,
) -> Result<Vec<FloatTensor<B>>, Vec<SumItem<FloatTensor<B>>>> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let taken = |item: &SumItem<FloatTensor<B>>| {
        is_float(item.dtype) && item.parts.iter().all(|part| is_float(part.dtype()) && is_countable(elements(part)))
    };
    if !has_cube_tensors::<B>() || !items.iter().all(taken) {
        return Err(items);
    }
    let mut plans = Vec::with_capacity(items.len());
    let mut outputs = Vec::with_capacity(items.len());
    let mut inputs = Vec::new();
    for SumItem { parts, range, dtype } in items {
        let first = parts.first().expect("a sum has at least one part");
        for part in &parts {
            assert_eq!(
                (elements(part), part.dtype()),
                (elements(first), first.dtype()),
                "the parts of a sum differ in size or type"
            );
        }
        assert!(
            range.start <= range.end && range.end <= elements(first),
            "range {range:?} is outside of the {} elements",
            elements(first)
        );
        outputs.push((Shape::new([range.len()]), dtype));
        plans.push((parts.len(), range, dtype));
        inputs.extend(parts);
    }
    Ok(any::run::<B>("sum parts", inputs, outputs, SumParts { plans, scale }))
}

/// Columns of a tensor and of a bucket.
#[derive(Clone, Copy)]
struct Cut {
    numel: usize,
    stride: usize,
    from: usize,
    at: usize,
    columns: usize,
}

impl Cut {
    fn new(numel: usize, world: usize, from: usize, at: usize, columns: usize) -> Self {
        let stride = numel.div_ceil(world);
        assert!(from + columns <= stride, "columns {from}..{} of a tensor with {stride} columns", from + columns);
        Self { numel, stride, from, at, columns }
    }

    /// Creates the cut of one row: columns beyond the target's elements are not read.
    fn of_a_row(numel: usize, from: usize, at: usize, columns: usize) -> Self {
        Self { numel, stride: numel, from, at, columns }
    }

    /// Returns whether all counts are multiples of a wide vector.
    fn is_wide(&self) -> bool {
        [self.numel, self.stride, self.from, self.at, self.columns].iter().all(|count| count.is_multiple_of(WIDE))
    }

    /// Returns a tensor's type, and the vector width in which it and rows of `row` elements of `bucket` can be accessed.
    fn family<R: CubeRuntime>(&self, x: &CubeTensor<R>, bucket: &CubeTensor<R>, row: usize) -> (DType, usize) {
        (x.dtype, if row.is_multiple_of(WIDE) && self.is_wide() { width([x, bucket]) } else { 1 })
    }

    fn cubes(&self, world: usize, width: usize) -> usize {
        world * chunks(self.columns / width)
    }

    fn segment<R: CubeRuntime>(&self, width: usize) -> SegmentLaunch<R> {
        SegmentLaunch::new(
            self.numel / width,
            self.stride / width,
            self.from / width,
            self.at / width,
            self.columns / width,
            chunks(self.columns / width).max(1),
        )
    }
}

/// A [`Cut`] in vectors, with the number of cubes per row.
#[derive(CubeType, CubeLaunch)]
struct Segment {
    numel: usize,
    stride: usize,
    from: usize,
    at: usize,
    columns: usize,
    cubes: usize,
}

struct Pack {
    cuts: Vec<(Cut, bool)>,
    world: usize,
    columns: usize,
    dtype: DType,
    factor: f32,
}

impl Body for Pack {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let inputs: Vec<CubeTensor<R>> = inputs.into_iter().map(flat).collect();
        let mut present = inputs.iter();
        let items = self.cuts.iter().map(|&(cut, some)| match some {
            true => (cut, present.next().expect("all inputs are passed on")),
            // Without a tensor any array will do, as it is not read.
            false => (Cut { numel: 0, ..cut }, &inputs[0]),
        });
        let bucket = empty(&inputs[0], [self.world, self.columns], self.dtype);
        let items = items.filter(|(cut, _)| cut.columns > 0).collect();
        launch_groups(
            &bucket.client,
            items,
            |(cut, x)| cut.family(x, &bucket, self.columns),
            |_| 1,
            |&(_, width), (cut, _)| cut.cubes(self.world, width),
            |&(dtype, width), group, Layout { count, dim, ends }| {
                let types: [StorageType; 2] = [dtype.into(), self.dtype.into()];
                // SAFETY: `Cut` keeps columns within those of the tensor and of the bucket; a unit reads below `numel`, which
                // is the tensor's length or 0.
                unsafe {
                    launch! {
                        pack_kernel on bucket.client, (count, dim, width), [],
                        group.iter().map(|(_, x)| array(x)).collect(),
                        group.iter().map(|(cut, _)| cut.segment(width)).collect(), ends, array(&bucket),
                        self.columns / width, self.factor, types
                    }
                }
            },
        );
        vec![bucket]
    }
}

struct Unpack {
    cuts: Vec<(Cut, DType, bool)>,
    world: usize,
    columns: usize,
    factor: f32,
}

impl Body for Unpack {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let mut inputs = inputs.into_iter();
        let bucket = flat(inputs.next().expect("the bucket is the first input"));
        let targets = self.cuts.iter().map(|&(cut, dtype, some)| {
            let shape = Shape::new([cut.numel.max(1)]);
            if some {
                return owned(flat(inputs.next().expect("all inputs are passed on")));
            }
            if cut.numel > 0 && cut.from == 0 && cut.columns >= cut.stride {
                return empty(&bucket, shape, dtype);
            }
            zeros_client(bucket.client.clone(), bucket.device.clone(), shape, dtype)
        });
        let targets: Vec<CubeTensor<R>> = targets.collect();
        let items = self.cuts.iter().map(|(cut, ..)| cut).zip(&targets);
        let items = items.filter(|(cut, _)| cut.columns > 0 && cut.numel > 0).collect();
        launch_groups(
            &bucket.client,
            items,
            |(cut, x)| cut.family(x, &bucket, self.columns),
            |_| 1,
            |&(_, width), (cut, _)| cut.cubes(self.world, width),
            |&(dtype, width), group, Layout { count, dim, ends }| {
                let types: [StorageType; 2] = [bucket.dtype.into(), dtype.into()];
                // SAFETY: as in `Pack`, with the bucket read and the tensors written below `numel`.
                unsafe {
                    launch! {
                        unpack_kernel on bucket.client, (count, dim, width), [],
                        array(&bucket), group.iter().map(|(cut, _)| cut.segment(width)).collect(), ends,
                        group.iter().map(|(_, x)| array(x)).collect(), self.columns / width, self.factor, types
                    }
                }
            },
        );
        targets
    }
}

struct SumParts {
    plans: Vec<(usize, Range<usize>, DType)>,
    scale: f32,
}

/// Parts, the start of the range in them, and their sum.
type Sum<R> = (Vec<CubeTensor<R>>, usize, CubeTensor<R>);

impl Body for SumParts {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let mut inputs = inputs.into_iter().map(flat);
        let sums = self.plans.iter().map(|(parts, range, dtype)| {
            let parts: Vec<CubeTensor<R>> = inputs.by_ref().take(*parts).collect();
            let sum = empty(&parts[0], [range.len()], *dtype);
            (parts, range.start, sum)
        });
        let sums: Vec<Sum<R>> = sums.collect();
        let client = &sums[0].2.client;
        launch_groups(
            client,
            sums.iter().filter(|(.., sum)| sum.meta.num_elements() > 0).collect(),
            |(parts, start, sum)| {
                let width = if start.is_multiple_of(WIDE) { width(parts.iter().chain([sum])) } else { 1 };
                (parts.len(), parts[0].dtype, sum.dtype, width)
            },
            |(parts, ..)| 1 + parts.len(),
            |&(.., width), (.., sum)| chunks(sum.meta.num_elements() / width),
            |&(parts, from, to, width), group, Layout { count, dim, ends }| {
                let types: [StorageType; 2] = [from.into(), to.into()];
                // SAFETY: ranges are within the parts, and units stay below the sums' lengths.
                unsafe {
                    launch! {
                        sum_kernel on client, (count, dim, width), [],
                        group.iter().flat_map(|(parts, ..)| parts.iter().map(array)).collect(),
                        group.iter().map(|(_, start, _)| start / width).collect(), ends,
                        group.iter().map(|(.., sum)| array(sum)).collect(), self.scale, parts, types
                    }
                }
            },
        );
        sums.into_iter().map(|(.., sum)| sum).collect()
    }
}

/// Returns, for a cube of a cut: its row, the unit's first column, and the end of the row's elements.
#[cube]
fn of_cube(cut: &Segment, cube: usize) -> (usize, usize, usize) {
    let rank = cube / cut.cubes;
    let stop = (rank + 1) * cut.stride;
    (rank, cube % cut.cubes * CHUNK as usize + UNIT_POS as usize, select(stop < cut.numel, stop, cut.numel))
}

#[cube(launch_unchecked)]
fn pack_kernel<I: Float, O: Float, N: Size>(
    tensors: &Sequence<Array<Vector<I, N>>>,
    segments: &Sequence<Segment>,
    ends: &Sequence<usize>,
    bucket: &mut Array<Vector<O, N>>,
    row: usize,
    factor: f32,
    #[define(I, O)] _types: [StorageType; 2],
) {
    #[unroll]
    for i in 0..comptime![tensors.len()] {
        let (is_own, cube) = cube_of(ends, i);
        if is_own {
            let x = tensors.index(i);
            let cut = segments.index(i);
            let (rank, first, stop) = of_cube(cut, cube);
            for k in 0..TAKES as usize {
                let column = first + k * UNITS as usize;
                if column < cut.columns {
                    let at = rank * cut.stride + cut.from + column;
                    let mut value = Vector::<f32, N>::new(0.0);
                    if at < stop {
                        value = Vector::<f32, N>::cast_from(x[at]) * Vector::new(factor);
                    }
                    bucket[rank * row + cut.at + column] = Vector::cast_from(value);
                }
            }
        }
    }
}

#[cube(launch_unchecked)]
fn unpack_kernel<I: Float, O: Float, N: Size>(
    bucket: &Array<Vector<I, N>>,
    segments: &Sequence<Segment>,
    ends: &Sequence<usize>,
    tensors: &mut Sequence<Array<Vector<O, N>>>,
    row: usize,
    factor: f32,
    #[define(I, O)] _types: [StorageType; 2],
) {
    #[unroll]
    for i in 0..comptime![tensors.len()] {
        let (is_own, cube) = cube_of(ends, i);
        if is_own {
            let x = tensors.index_mut(i);
            let cut = segments.index(i);
            let (rank, first, stop) = of_cube(cut, cube);
            for k in 0..TAKES as usize {
                let column = first + k * UNITS as usize;
                let at = rank * cut.stride + cut.from + column;
                if column < cut.columns && at < stop {
                    let value = Vector::<f32, N>::cast_from(bucket[rank * row + cut.at + column]);
                    x[at] = Vector::cast_from(value * Vector::new(factor));
                }
            }
        }
    }
}

#[cube(launch_unchecked)]
fn sum_kernel<I: Float, O: Float, N: Size>(
    parts: &Sequence<Array<Vector<I, N>>>,
    starts: &Sequence<usize>,
    ends: &Sequence<usize>,
    sums: &mut Sequence<Array<Vector<O, N>>>,
    scale: f32,
    #[comptime] count: usize,
    #[define(I, O)] _types: [StorageType; 2],
) {
    #[unroll]
    for i in 0..comptime![sums.len()] {
        let (is_own, cube) = cube_of(ends, i);
        if is_own {
            let out = sums.index_mut(i);
            let start = *starts.index(i);
            let first = cube * CHUNK as usize + UNIT_POS as usize;
            for k in 0..TAKES as usize {
                let at = first + k * UNITS as usize;
                if at < out.len() {
                    let mut sum = Vector::<f32, N>::cast_from(parts.index(comptime![i * count])[start + at]);
                    #[unroll]
                    for part in 1..count {
                        sum += Vector::<f32, N>::cast_from(parts.index(comptime![i * count + part])[start + at]);
                    }
                    out[at] = Vector::cast_from(sum * Vector::new(scale));
                }
            }
        }
    }
}

compiled! {
    use crate::cube::many::GROUP;

    for (from, to) in TYPES.into_iter().flat_map(|from| TYPES.map(|to| (from, to))) {
        for (numel, tensors) in [(4096, GROUP), (4099, 1)] {
            let (world, stride) = (4, usize::div_ceil(numel, 4));
            let many = |dtype| (0..tensors).map(|_| tensor([numel], dtype)).collect::<Vec<_>>();
            let cut = |i| Cut::new(numel, world, 0, i * stride, stride);
            let (columns, factor) = (tensors * stride, 0.5);
            let cuts = (0..tensors).map(|i| (cut(i), true)).collect();
            let bucket = Pack { cuts, world, columns, dtype: to, factor }.run(many(from));
            let cuts = (0..tensors).map(|i| (cut(i), from, false)).collect();
            Unpack { cuts, world, columns, factor }.run(bucket);
            let plans = vec![(2, 0..numel, to)];
            SumParts { plans, scale: factor }.run((0..2).map(|_| tensor([numel], from)).collect());
        }
    }
}
