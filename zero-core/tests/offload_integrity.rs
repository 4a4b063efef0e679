//! Reads return what was written: any sizes, any order, any settings, every I/O method.

mod offload_common;

use std::collections::HashMap;

use offload_common::{LIMIT, pool, setup, small_blocks, ways};
use proptest::prelude::*;
use zero_core::offload::{AioOptions, DiskError, EngineChoice, PendingTransfer, Region, SwapFile, SwapFileOptions};

const LARGEST: usize = 200_000;
const BUFFERS: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Write { bytes: usize, seed: u8 },
    Rewrite { which: usize, seed: u8 },
    Read { which: usize },
    Free { which: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..LARGEST, any::<u8>()).prop_map(|(bytes, seed)| Step::Write { bytes, seed }),
        2 => (any::<usize>(), any::<u8>()).prop_map(|(which, seed)| Step::Rewrite { which, seed }),
        4 => any::<usize>().prop_map(|which| Step::Read { which }),
        1 => any::<usize>().prop_map(|which| Step::Free { which }),
    ];
    prop::collection::vec(step, 1..60)
}

fn settings() -> impl Strategy<Value = AioOptions> {
    (1..10_usize, 1..9_usize, 1..4_usize, any::<bool>(), any::<bool>()).prop_map(
        |(blocks, queue_depth, intra_op_parallelism, single_submit, overlap_events)| AioOptions {
            block_size: blocks * 4096,
            queue_depth,
            intra_op_parallelism,
            single_submit,
            overlap_events,
            use_gds: false,
        },
    )
}

fn fill(bytes: &mut [u8], seed: u8) {
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed);
}

/// A transfer in flight, and what it must have read.
type Flying = (Region, PendingTransfer, Option<Vec<u8>>);

fn land(flying: Flying) {
    let (region, ticket, expected) = flying;
    let buffer = ticket.wait(LIMIT).unwrap();
    if let Some(expected) = expected {
        assert!(buffer.bytes() == expected, "{region:?} does not hold what was written");
    }
}

fn check(engine: EngineChoice, direct: bool, aio: AioOptions, steps: &[Step]) {
    let setup = setup(&SwapFileOptions { aio, engine, direct });
    let pool = pool(BUFFERS, LARGEST);
    let mut model: HashMap<Region, Vec<u8>> = HashMap::new();
    let mut live: Vec<Region> = Vec::new();
    let mut flying: Vec<Flying> = Vec::new();
    for step in steps {
        let pick = |which: &usize| (!live.is_empty()).then(|| which % live.len());
        let (region, seed) = match step {
            Step::Write { bytes, seed } => {
                let region = setup.file.alloc(*bytes).unwrap();
                if *bytes > 0 {
                    live.push(region);
                }
                (region, Some(*seed))
            }
            Step::Rewrite { which, seed } => match pick(which) {
                Some(place) => (live[place], Some(*seed)),
                None => continue,
            },
            Step::Read { which } => match pick(which) {
                Some(place) => (live[place], None),
                None => continue,
            },
            Step::Free { which } => {
                let Some(place) = pick(which) else { continue };
                let region = live.swap_remove(place);
                flying.drain(..).for_each(land);
                setup.file.free(region).unwrap();
                model.remove(&region);
                continue;
            }
        };
        // Transfers of one region have an order only if they are waited for; and there are so many buffers.
        let (mut now, later): (Vec<Flying>, Vec<Flying>) = flying.into_iter().partition(|(other, ..)| *other == region);
        flying = later;
        if flying.len() == BUFFERS {
            now.push(flying.remove(0));
        }
        now.into_iter().for_each(land);
        let mut buffer = pool.take(LIMIT).unwrap();
        flying.push(match seed {
            Some(seed) => {
                buffer.set_len(region.bytes());
                fill(buffer.bytes_mut(), seed);
                model.insert(region, buffer.bytes().to_vec());
                (region, setup.file.write(region, buffer).unwrap(), None)
            }
            None => (region, setup.file.read(region, buffer).unwrap(), Some(model[&region].clone())),
        });
    }
    flying.drain(..).for_each(land);
    for (region, expected) in model {
        let buffer = setup.file.read(region, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
        assert!(buffer.bytes() == expected);
    }
    assert!(pool.peak() <= BUFFERS && pool.free() == BUFFERS);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_way_agrees_with_the_model(steps in steps(), aio in settings()) {
        for (_, engine, direct) in ways() {
            check(engine, direct, aio.clone(), &steps);
        }
    }
}

#[test]
fn a_region_larger_than_a_buffer_moves_in_parts() {
    for (way, engine, direct) in ways() {
        let setup = setup(&small_blocks(engine, direct));
        let pool = pool(2, 40_000);
        let region = setup.file.alloc(123_457).unwrap();
        for (seed, part) in region.parts(pool.buffer_bytes()).enumerate() {
            let mut buffer = pool.take(LIMIT).unwrap();
            fill(buffer.bytes_mut(), seed as u8);
            drop(setup.file.write(part, buffer).unwrap());
        }
        for (seed, part) in region.parts(pool.buffer_bytes()).enumerate() {
            let buffer = setup.file.read(part, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
            let mut expected = vec![0; part.bytes()];
            fill(&mut expected, seed as u8);
            assert!(buffer.bytes() == expected, "{way}");
        }
    }
}

#[test]
fn ranks_share_a_folder_and_nothing_else() {
    for (_, engine, direct) in ways() {
        let parent = tempfile::tempdir().unwrap();
        let dir = zero_core::offload::SwapDir::open(parent.path()).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..4_u8 {
                let dir = dir.clone();
                scope.spawn(move || {
                    let file = dir.create_file(rank.into(), &small_blocks(engine, direct)).unwrap();
                    let pool = pool(3, 100_000);
                    let regions: Vec<Region> = (1..20).map(|size| file.alloc(size * 4999).unwrap()).collect();
                    for round in 0..3 {
                        for (place, region) in regions.iter().enumerate() {
                            let mut buffer = pool.take(LIMIT).unwrap();
                            fill(buffer.bytes_mut(), rank ^ place as u8 ^ round);
                            drop(file.write(*region, buffer).unwrap());
                        }
                        for (place, region) in regions.iter().enumerate() {
                            let buffer = file.read(*region, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
                            let mut expected = vec![0; region.bytes()];
                            fill(&mut expected, rank ^ place as u8 ^ round);
                            assert!(buffer.bytes() == expected);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn several_threads_may_use_one_file() {
    for (_, engine, direct) in ways() {
        let setup = setup(&small_blocks(engine, direct));
        let pool = pool(4, 100_000);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (file, pool) = (&setup.file, &pool);
                scope.spawn(move || {
                    for round in 0..20_u8 {
                        let region = file.alloc(usize::from(round) * 4000 + 1).unwrap();
                        let mut buffer = pool.take(LIMIT).unwrap();
                        fill(buffer.bytes_mut(), thread ^ round);
                        let buffer = file.write(region, buffer).unwrap().wait(LIMIT).unwrap();
                        let expected = buffer.bytes()[..region.bytes()].to_vec();
                        let buffer = file.read(region, buffer).unwrap().wait(LIMIT).unwrap();
                        assert!(buffer.bytes() == expected);
                        file.free(region).unwrap();
                    }
                });
            }
        });
        assert_eq!(pool.free(), 4);
    }
}

#[test]
fn wrong_regions_and_buffers_are_refused() {
    let first = setup(&small_blocks(EngineChoice::Auto, true));
    let pool = pool(1, 8192);
    let region = first.file.alloc(20_000).unwrap();
    let error = first.file.read(region, pool.take(LIMIT).unwrap()).unwrap_err().to_string();
    assert!(error.contains("20000 bytes (20480 on the disk) does not fit a buffer of 8192 bytes"), "{error}");
    first.file.free(region).unwrap();
    let small = region.parts(4096).next().unwrap();
    let error = first.file.write(small, pool.take(LIMIT).unwrap()).unwrap_err().to_string();
    assert!(error.contains("are not allocated"), "{error}");
    assert!(first.file.free(region).is_err());
    assert_eq!(pool.free(), 1);
}

#[test]
fn a_region_of_another_file_or_freed_before_is_refused() {
    let setup = setup(&SwapFileOptions::default());
    let other = setup.dir.create_file(1, &SwapFileOptions::default()).unwrap();
    let pool = pool(1, 10_000);
    let (first, second) = (setup.file.alloc(10_000).unwrap(), other.alloc(10_000).unwrap());
    let refused = |file: &SwapFile, region| {
        let read = file.read(region, pool.take(LIMIT).unwrap()).err();
        let write = file.write(region, pool.take(LIMIT).unwrap()).err();
        for error in [read, write] {
            assert!(matches!(error, Some(DiskError::NotAllocated { .. })), "{error:?}");
        }
    };
    // Of equal place and length, and not the same.
    assert_eq!((first.offset(), first.bytes()), (second.offset(), second.bytes()));
    refused(&setup.file, second);
    refused(&other, first);
    assert!(matches!(other.free(first), Err(DiskError::NotAllocated { .. })));
    setup.file.free(first).unwrap();
    let again = setup.file.alloc(10_000).unwrap();
    assert_eq!(again.offset(), first.offset());
    refused(&setup.file, first);
    refused(&setup.file, first.parts(4096).next().unwrap());
    assert!(matches!(setup.file.free(first), Err(DiskError::NotAllocated { .. })));
    for part in again.parts(4096) {
        drop(setup.file.write(part, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap());
    }
    setup.file.free(again).unwrap();
}
