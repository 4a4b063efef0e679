//! The pipeline: the same result with and without overlap, never more buffers than the pool has, and one error.

mod offload_common;

use std::time::Duration;

use offload_common::{LIMIT, pool, setup, small_blocks, ways};
use zero_core::offload::{
    Access, BufferPool, DiskError, EarlyReads, EngineChoice, Item, Part, PipelineOptions, Region, SwapBuffer, SwapFile,
    Work, pipeline, pipeline_with,
};

const ELEMS: usize = 5_003;

fn options(pipeline_read: bool, pipeline_write: bool) -> PipelineOptions {
    PipelineOptions { pipeline_read, pipeline_write, limit: LIMIT }
}

fn all_options() -> [PipelineOptions; 4] {
    [options(false, false), options(true, false), options(false, true), options(true, true)]
}

fn regions(file: &SwapFile, count: usize) -> Vec<Region> {
    (0..count).map(|_| file.alloc(ELEMS * 4).unwrap()).collect()
}

/// Fills each region with its index.
fn fill(file: &SwapFile, pool: &BufferPool, regions: &[Region]) {
    let items: Vec<Item> = regions.iter().map(|region| item(&[(*region, Access::Write)])).collect();
    let write = |index: usize, buffers: &mut [SwapBuffer]| {
        buffers[0].view_mut::<f32>().fill(index as f32);
        Ok::<(), DiskError>(())
    };
    pipeline(file, pool, &items, &options(true, true), write).unwrap();
}

fn item(parts: &[(Region, Access)]) -> Item {
    Item { parts: parts.iter().map(|(region, access)| Part { region: *region, access: *access }).collect() }
}

fn values(file: &SwapFile, pool: &BufferPool, regions: &[Region]) -> Vec<f32> {
    let read = |region: &Region| {
        let buffer = file.read(*region, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
        let first = buffer.view::<f32>()[0];
        assert!(buffer.len() == ELEMS * 4 && buffer.view::<f32>().iter().all(|value| *value == first));
        first
    };
    regions.iter().map(read).collect()
}

/// Fills items, and checks each item that is reported as written.
struct Fill<'a> {
    file: &'a SwapFile,
    look: &'a BufferPool,
    regions: &'a [Region],
    computed: usize,
    written: Vec<(usize, usize)>,
    /// Remaining units of work that needs no disk.
    others: usize,
}

impl Work<DiskError> for Fill<'_> {
    fn compute(&mut self, index: usize, buffers: &mut [SwapBuffer]) -> Result<(), DiskError> {
        buffers[0].view_mut::<f32>().fill(index as f32);
        self.computed += 1;
        Ok(())
    }

    fn meanwhile(&mut self) -> Result<bool, DiskError> {
        let left = self.others > 0;
        self.others -= usize::from(left);
        Ok(left)
    }

    fn written(&mut self, index: usize) {
        assert_eq!(values(self.file, self.look, &self.regions[index..=index]), [index as f32]);
        self.written.push((index, self.computed));
    }
}

#[test]
fn what_is_written_is_told_in_order_while_the_rest_goes_on() {
    for (way, engine, direct) in ways() {
        for options in all_options() {
            let setup = setup(&small_blocks(engine, direct));
            let (pool, look) = (pool(3, ELEMS * 4), pool(1, ELEMS * 4));
            let regions = regions(&setup.file, 20);
            let items: Vec<Item> = regions.iter().map(|region| item(&[(*region, Access::Write)])).collect();
            let (computed, written, others) = (0, Vec::new(), 9);
            let mut work = Fill { file: &setup.file, look: &look, regions: &regions, computed, written, others };
            pipeline_with(&setup.file, &pool, &items, &options, &mut EarlyReads::default(), &mut work).unwrap();
            let indices: Vec<usize> = work.written.iter().map(|(index, _)| *index).collect();
            assert_eq!(indices, (0..20).collect::<Vec<_>>(), "{way}");
            // Three buffers: when the fourth item is computed, the first has been written.
            assert!(work.written.iter().all(|(index, computed)| *computed <= index + 3), "{way}: {:?}", work.written);
            assert_eq!(work.others, 0, "{way}");
            let (computed, written, others) = (0, Vec::new(), 2);
            let mut work = Fill { file: &setup.file, look: &look, regions: &regions, computed, written, others };
            pipeline_with(&setup.file, &pool, &[], &options, &mut EarlyReads::default(), &mut work).unwrap();
            assert_eq!(work.others, 0, "without items, {way}");
        }
    }
}

#[test]
fn every_overlap_gives_the_same_result_within_the_pool() {
    for (way, engine, direct) in ways() {
        for options in all_options() {
            // Regions that are read early: none, the first ones, and the last ones, whose buffers the first items need.
            for (buffers, early) in
                [3, 4, 7].into_iter().flat_map(|buffers| [0..0, 0..30, 20..30].map(|early| (buffers, early)))
            {
                let setup = setup(&small_blocks(engine, direct));
                let pool = pool(buffers, ELEMS * 4);
                let regions = regions(&setup.file, 30);
                fill(&setup.file, &pool, &regions);
                let mut early =
                    EarlyReads::start(&setup.file, &pool, regions[early].iter().copied(), buffers / 3).unwrap();
                // Each item: a gradient that is read, a moment that is updated, an output that is written.
                let items: Vec<Item> = regions
                    .chunks(3)
                    .map(|three| {
                        item(&[(three[0], Access::Read), (three[1], Access::Update), (three[2], Access::Write)])
                    })
                    .collect();
                let mut order = Vec::new();
                let mut step = |index: usize, buffers: &mut [SwapBuffer]| {
                    order.push(index);
                    let [gradient, moment, output] = buffers else { panic!("three parts") };
                    assert_eq!(output.len(), ELEMS * 4);
                    for ((gradient, moment), output) in gradient
                        .view_mut::<f32>()
                        .iter_mut()
                        .zip(moment.view_mut::<f32>())
                        .zip(output.view_mut::<f32>())
                    {
                        *moment += 100.0 * *gradient;
                        *output = *moment + 0.5;
                        // Not written back.
                        *gradient = -1.0;
                    }
                    Ok::<(), DiskError>(())
                };
                let report = pipeline_with(&setup.file, &pool, &items, &options, &mut early, &mut step).unwrap();
                assert_eq!(order, (0..10).collect::<Vec<_>>());
                assert!(report.elapsed >= report.computing);
                let expected = (0..10).flat_map(|index| {
                    let (gradient, moment) = (3.0 * index as f32, 3.0 * index as f32 + 1.0 + 300.0 * index as f32);
                    [gradient, moment, moment + 0.5]
                });
                assert_eq!(values(&setup.file, &pool, &regions), expected.collect::<Vec<_>>(), "{way}, {options:?}");
                assert!(pool.peak() <= buffers && pool.free() == buffers);
            }
        }
    }
}

#[test]
fn an_item_that_needs_what_an_earlier_one_writes_sees_it() {
    for (way, engine, direct) in ways() {
        for options in all_options() {
            let setup = setup(&small_blocks(engine, direct));
            let pool = pool(6, ELEMS * 4);
            let regions = regions(&setup.file, 3);
            fill(&setup.file, &pool, &regions);
            // The same regions over and over, as fast as it goes.
            let order: Vec<usize> = (0..40).map(|step| step * step % 3).collect();
            let items: Vec<Item> = order.iter().map(|place| item(&[(regions[*place], Access::Update)])).collect();
            let add = |_: usize, buffers: &mut [SwapBuffer]| {
                buffers[0].view_mut::<f32>().iter_mut().for_each(|value| *value += 1.0);
                Ok::<(), DiskError>(())
            };
            pipeline(&setup.file, &pool, &items, &options, add).unwrap();
            let count = |place: usize| order.iter().filter(|other| **other == place).count() as f32;
            let expected: Vec<f32> = (0..3).map(|place| place as f32 + count(place)).collect();
            assert_eq!(values(&setup.file, &pool, &regions), expected, "{way}, {options:?}");
        }
    }
}

#[derive(Debug)]
enum StepError {
    Disk(DiskError),
    Overflow(usize),
}

impl From<DiskError> for StepError {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

#[test]
fn the_first_error_of_the_compute_ends_it() {
    for options in all_options() {
        let setup = setup(&small_blocks(EngineChoice::Auto, true));
        let pool = pool(4, ELEMS * 4);
        let regions = regions(&setup.file, 12);
        fill(&setup.file, &pool, &regions);
        let items: Vec<Item> = regions.iter().map(|region| item(&[(*region, Access::Update)])).collect();
        let mut last = 0;
        let outcome = pipeline(&setup.file, &pool, &items, &options, |index, buffers| {
            last = index;
            buffers[0].view_mut::<f32>().fill(77.0);
            if index == 5 { Err(StepError::Overflow(index)) } else { Ok(()) }
        });
        assert!(matches!(outcome, Err(StepError::Overflow(5))) && last == 5);
        assert_eq!(pool.free(), 4);
        // What came before is on the disk, and the rest as it was.
        let expected: Vec<f32> = (0..12).map(|index| if index < 5 { 77.0 } else { index as f32 }).collect();
        assert_eq!(values(&setup.file, &pool, &regions), expected);
    }
}

#[test]
fn an_error_of_the_disk_ends_it() {
    for options in all_options() {
        let setup = setup(&small_blocks(EngineChoice::Auto, true));
        let pool = pool(4, ELEMS * 4);
        let regions = regions(&setup.file, 12);
        fill(&setup.file, &pool, &regions);
        // Behind its back: from the seventh region on, there is nothing to read, and so the rest is not trusted either.
        let file = std::fs::File::options().write(true).open(setup.file.path()).unwrap();
        file.set_len(regions[6].offset()).unwrap();
        let items: Vec<Item> = regions.iter().map(|region| item(&[(*region, Access::Update)])).collect();
        let mut last = 0;
        let outcome = pipeline(&setup.file, &pool, &items, &options, |index, _| {
            last = index;
            Ok::<(), StepError>(())
        });
        assert!(matches!(outcome, Err(StepError::Disk(DiskError::Truncated { .. }))), "{outcome:?}");
        assert_eq!((last, pool.free()), (0, 4));
    }
}

#[test]
fn a_panic_of_the_compute_leaves_nothing_under_way() {
    let setup = setup(&small_blocks(EngineChoice::Auto, true));
    let pool = pool(4, ELEMS * 4);
    let regions = regions(&setup.file, 12);
    fill(&setup.file, &pool, &regions);
    let items: Vec<Item> = regions.iter().map(|region| item(&[(*region, Access::Update)])).collect();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pipeline(&setup.file, &pool, &items, &options(true, true), |index, _| {
            assert!(index < 5, "a test's panic");
            Ok::<(), DiskError>(())
        })
    }));
    assert!(outcome.is_err());
    assert_eq!(pool.free(), 4);
}

#[test]
fn what_cannot_fit_is_refused_before_the_compute() {
    let setup = setup(&small_blocks(EngineChoice::Auto, true));
    let small = pool(2, 4096);
    let three = regions(&setup.file, 3);
    let never = |_: usize, _: &mut [SwapBuffer]| -> Result<(), DiskError> { panic!("nothing to compute") };
    let items = [item(&[(three[0], Access::Read), (three[1], Access::Read), (three[2], Access::Read)])];
    let error = pipeline(&setup.file, &small, &items, &options(true, true), never).unwrap_err();
    assert!(matches!(error, DiskError::FewBuffers { needed: 3, count: 2 }));
    for access in [Access::Read, Access::Write] {
        let error =
            pipeline(&setup.file, &small, &[item(&[(three[0], access)])], &options(true, true), never).unwrap_err();
        assert!(matches!(error, DiskError::Unfit { .. }));
    }
    // Somebody else has the buffers and does not give them back.
    let held = small.take_many(2, LIMIT).unwrap();
    let short = PipelineOptions { limit: Duration::from_millis(20), ..options(true, true) };
    let region = setup.file.alloc(100).unwrap();
    let error = pipeline(&setup.file, &small, &[item(&[(region, Access::Read)])], &short, never).unwrap_err();
    assert!(matches!(error, DiskError::Deadline { .. }), "{error}");
    drop(held);
}

#[test]
fn ranks_may_share_a_pool() {
    let pool = pool(5, ELEMS * 4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let setup = setup(&small_blocks(EngineChoice::Auto, true));
                let regions = regions(&setup.file, 30);
                fill(&setup.file, &pool, &regions);
                let items: Vec<Item> = regions
                    .chunks(3)
                    .map(|three| item(&three.iter().map(|region| (*region, Access::Update)).collect::<Vec<_>>()))
                    .collect();
                let add = |_: usize, buffers: &mut [SwapBuffer]| {
                    buffers.iter_mut().flat_map(|buffer| buffer.view_mut::<f32>()).for_each(|value| *value += 1.0);
                    Ok::<(), DiskError>(())
                };
                pipeline(&setup.file, &pool, &items, &options(true, true), add).unwrap();
                let expected: Vec<f32> = (0..30).map(|index| index as f32 + 1.0).collect();
                assert_eq!(values(&setup.file, &pool, &regions), expected);
            });
        }
    });
    assert!(pool.peak() <= 5 && pool.free() == 5);
}
