//! Packing, unpacking and adding, against the layout in plain Rust.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};
use zero_ops::{PackItem, SumItem, UnpackItem, pack, sum_parts, unpack};

use crate::{Fused, Plain, assert_panics, numbers, rounded, supports, tensor, values};

const LENGTHS: [usize; 10] = [1, 2, 3, 31, 1000, 4097, 70_001, 65_536, 8, 4096];

/// A tensor's columns in a bucket; `None` without a tensor.
struct Source {
    values: Option<Vec<f32>>,
    numel: usize,
    from: usize,
    columns: usize,
}

fn range(numel: usize, world: usize, rank: usize) -> std::ops::Range<usize> {
    let stride = numel.div_ceil(world);
    (rank * stride).min(numel)..((rank + 1) * stride).min(numel)
}

/// Returns a bucket's rows by the layout's definition.
fn reference(sources: &[Source], world: usize, factor: f32) -> Vec<f32> {
    let mut bucket = Vec::new();
    for rank in 0..world {
        for source in sources {
            let owned = range(source.numel, world, rank);
            for column in source.from..source.from + source.columns {
                let at = owned.start + column;
                let value = source.values.as_ref().filter(|_| at < owned.end).map_or(0.0, |values| values[at]);
                bucket.push(value * factor);
            }
        }
    }
    bucket
}

fn packed<B: Backend>(sources: &[Source], world: usize, from: DType, to: DType, factor: f32) -> FloatTensor<B> {
    let items = sources.iter().map(|source| PackItem {
        tensor: source.values.as_ref().map(|values| tensor::<B>(values.clone(), from)),
        numel: source.numel,
        from: source.from,
        columns: source.columns,
    });
    pack::<B>(items.collect(), world, to, factor).unwrap_or_else(|_| panic!("the tensors are CubeCL's"))
}

/// Returns `count` full tensors, of which every fifth is absent.
fn whole(count: usize, world: usize, dtype: DType) -> Vec<Source> {
    let source = |i: usize| {
        let numel = LENGTHS[i % LENGTHS.len()] + i / LENGTHS.len();
        let values = (i % 5 != 4).then(|| rounded(&numbers(numel, i as u64), dtype));
        Source { values, numel, from: 0, columns: numel.div_ceil(world) }
    };
    (0..count).map(source).collect()
}

fn there_and_back<B: Backend>(world: usize, count: usize, from: DType, to: DType) {
    let sources = whole(count, world, from);
    let columns: usize = sources.iter().map(|source| source.columns).sum();
    let bucket = packed::<B>(&sources, world, from, to, 0.5);
    assert_eq!((bucket.shape().as_slice(), bucket.dtype()), (&[world, columns][..], to));
    let expected = rounded(&reference(&sources, world, 0.5), to);
    assert_eq!(values::<B>(bucket.clone()), expected, "{world} ranks, {count} tensors");

    // All rows, as stage 0 does.
    let items = |numel: fn(&Source, usize, usize) -> usize, rank: usize| {
        let item = |source: &Source| UnpackItem {
            target: None,
            numel: numel(source, world, rank),
            from: source.from,
            columns: source.columns,
            dtype: from,
        };
        sources.iter().map(item).collect::<Vec<_>>()
    };
    let wholes = unpack::<B>(bucket, world, items(|source, _, _| source.numel, 0), 2.0).ok().unwrap();
    for (source, whole) in sources.iter().zip(wholes) {
        let expected = source.values.clone().unwrap_or(vec![0.0; source.numel]);
        let expected: Vec<f32> = rounded(&expected.iter().map(|x| x * 0.5).collect::<Vec<_>>(), to);
        assert_eq!(values::<B>(whole), expected.iter().map(|x| x * 2.0).collect::<Vec<_>>());
    }

    // A rank's own row, as the other stages do.
    let all = reference(&sources, world, 0.5);
    for rank in 0..world {
        let row = tensor::<B>(all[rank * columns..(rank + 1) * columns].to_vec(), to);
        let pieces =
            unpack::<B>(row, 1, items(|source, world, rank| range(source.numel, world, rank).len(), rank), 2.0)
                .ok()
                .unwrap();
        for (source, piece) in sources.iter().zip(pieces) {
            let owned = range(source.numel, world, rank);
            let mut expected = source.values.as_ref().map_or(vec![0.0; owned.len()], |x| x[owned.clone()].to_vec());
            expected.resize(expected.len().max(1), 0.0);
            let expected: Vec<f32> = rounded(&expected.iter().map(|x| x * 0.5).collect::<Vec<_>>(), to);
            let expected: Vec<f32> = expected.iter().map(|x| x * 2.0).collect();
            assert_eq!(values::<B>(piece), expected, "rank {rank} of {world}, {} elements", source.numel);
        }
    }
}

#[test]
fn every_world_and_number_of_tensors() {
    for world in 1..=5 {
        there_and_back::<Plain>(world, 10, DType::F32, DType::F32);
    }
    there_and_back::<Plain>(3, 40, DType::F32, DType::F32);
    there_and_back::<Fused>(4, 17, DType::F32, DType::F32);
    there_and_back::<Fused>(2, 1, DType::F32, DType::F32);
}

#[test]
fn in_16_bit() {
    for dtype in [DType::F16, DType::BF16] {
        if supports::<Plain>(dtype) {
            there_and_back::<Plain>(3, 11, DType::F32, dtype);
            there_and_back::<Plain>(4, 11, dtype, dtype);
            there_and_back::<Fused>(2, 11, dtype, DType::F32);
        }
    }
}

/// Multiples of four use wide vectors.
#[test]
fn multiples_of_four() {
    let source = |i: usize| {
        let numel = [64, 4096, 65_536, 16_400][i % 4];
        Source { values: Some(numbers(numel, i as u64)), numel, from: 0, columns: numel / 4 }
    };
    let sources: Vec<Source> = (0..20).map(source).collect();
    let bucket = packed::<Fused>(&sources, 4, DType::F32, DType::F32, 3.0);
    assert_eq!(values::<Fused>(bucket), reference(&sources, 4, 3.0));
}

/// A tensor in three buckets, with another's columns before and after; targets are written in turn and in place.
#[test]
fn a_tensor_that_spans_buckets() {
    let (world, numel, small) = (3, 10_001, 50);
    let x = numbers(numel, 1);
    let stride = numel.div_ceil(world);
    let mut target: Option<FloatTensor<Plain>> = None;
    let mut memory = None;
    for (from, columns) in [(0, 1000), (1000, 2001), (3001, stride - 3001)] {
        let beside = || Source { values: Some(numbers(small, 2)), numel: small, from: 5, columns: 7 };
        let sources = [beside(), Source { values: Some(x.clone()), numel, from, columns }, beside()];
        let bucket = packed::<Plain>(&sources, world, DType::F32, DType::F32, 1.0);
        assert_eq!(values::<Plain>(bucket.clone()), reference(&sources, world, 1.0));
        let beside = || UnpackItem { target: None, numel: small, from: 5, columns: 7, dtype: DType::F32 };
        let of_x = UnpackItem { target: target.take(), numel, from, columns, dtype: DType::F32 };
        let mut made = unpack::<Plain>(bucket, world, vec![beside(), of_x, beside()], 1.0).ok().unwrap();
        let after = values::<Plain>(made.pop().unwrap());
        let whole = numbers(small, 2);
        let stride = small.div_ceil(world);
        let expected = |i: usize| if (5..12).contains(&(i % stride)) { whole[i] } else { 0.0 };
        assert_eq!(after, (0..small).map(expected).collect::<Vec<_>>(), "columns that did not come are zeros");
        let made = made.pop().unwrap();
        let now = format!("{:?}", made.handle.memory);
        assert_eq!(memory.get_or_insert(now.clone()), &now, "a target that nobody else holds is written in place");
        target = Some(made);
    }
    assert_eq!(values::<Plain>(target.unwrap()), x);
}

#[test]
fn a_target_that_others_hold_is_not_changed() {
    let held = tensor::<Fused>(vec![1.0; 100], DType::F32);
    let item = UnpackItem { target: Some(held.clone()), numel: 100, from: 0, columns: 100, dtype: DType::F32 };
    let bucket = tensor::<Fused>(vec![2.0; 100], DType::F32);
    let made = unpack::<Fused>(bucket, 1, vec![item], 1.0).ok().unwrap().pop().unwrap();
    assert_eq!(values::<Fused>(held), vec![1.0; 100]);
    assert_eq!(values::<Fused>(made), vec![2.0; 100]);
}

fn sums<B: Backend>(parts: usize, dtype: DType) {
    if !supports::<B>(dtype) {
        return;
    }
    let ranges: Vec<(usize, std::ops::Range<usize>)> = vec![
        (1, 0..1),
        (70_001, 0..70_001),
        (65_536, 16_384..32_768),
        (1000, 3..998),
        (10, 4..4),
        (4097, 4096..4097),
        (8192, 0..4096),
    ];
    let of = |len: usize, part: usize| rounded(&numbers(len, (10 * part + 1) as u64), dtype);
    let items = ranges.iter().cycle().take(21).map(|(len, range)| SumItem {
        parts: (0..parts).map(|part| tensor::<B>(of(*len, part), dtype)).collect(),
        range: range.clone(),
        dtype: DType::F32,
    });
    let scale = 1.0 / parts as f32;
    let got = sum_parts::<B>(items.collect(), scale).ok().unwrap();
    assert_eq!(got.len(), 21);
    for ((len, range), got) in ranges.iter().cycle().zip(got) {
        let mut expected = of(*len, 0);
        for part in 1..parts {
            expected.iter_mut().zip(of(*len, part)).for_each(|(sum, x)| *sum += x);
        }
        let expected: Vec<f32> = expected[range.clone()].iter().map(|x| x * scale).collect();
        assert_eq!(values::<B>(got), expected, "{parts} parts, {range:?} of {len}");
    }
}

#[test]
fn parts_are_added_in_the_order_of_ranks() {
    for parts in [1, 2, 3, 5, 8] {
        sums::<Plain>(parts, DType::F32);
    }
    sums::<Fused>(4, DType::F32);
    sums::<Plain>(3, DType::F16);
    sums::<Plain>(3, DType::BF16);
}

#[test]
fn what_does_not_fit_is_refused() {
    let item =
        |numel, columns| PackItem { tensor: Some(tensor::<Plain>(vec![1.0; 10], DType::F32)), numel, from: 0, columns };
    assert_panics("a tensor to pack has another number of elements", || {
        drop(pack::<Plain>(vec![item(9, 5)], 2, DType::F32, 1.0))
    });
    assert_panics("of a tensor with 5 columns", || drop(pack::<Plain>(vec![item(10, 6)], 2, DType::F32, 1.0)));
    let absent = PackItem { tensor: None, ..item(10, 5) };
    assert!(pack::<Plain>(vec![absent], 2, DType::F32, 1.0).is_err(), "there is no tensor to know the device by");
    let bucket = || tensor::<Plain>(vec![1.0; 10], DType::F32);
    let item = || UnpackItem { target: None, numel: 8, from: 0, columns: 4, dtype: DType::F32 };
    assert_panics("number of elements for a bucket of 2 rows", || {
        drop(unpack::<Plain>(bucket(), 2, vec![item()], 1.0))
    });
    let parts = vec![bucket(), tensor::<Plain>(vec![1.0; 11], DType::F32)];
    let sum = SumItem { parts, range: 0..10, dtype: DType::F32 };
    assert_panics("parts of a sum", || drop(sum_parts::<Plain>(vec![sum], 1.0)));
}
