//! Updates of what lies on a disk: all parameters of a step in one pipeline that reads, computes and writes back stretches
//! of their arrays beside one another, in a few buffers of constant size.
//!
//! A cell of the result is *pending* until the pipeline has ended: who reads it earlier waits. Updates are in place, on the
//! disk too, after the fence that keeps fast ranks from replacing what slow ranks still read.

use std::ops::Range;
use std::slice::IterMut;
use std::sync::Arc;

use burn_backend::{Backend, TensorData};
use burn_std::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::offload::{Access, Buffer, DiskError, Item, Part, pipeline};

use super::pass::{Source, Stretch, Target, run_stretch};
use super::rule::Kernel;
use crate::shard::Cell;
use crate::tier::{Disk, Stored, or_stop};

/// The stretches that the pipeline moves are of a multiple of so many elements, so that each array's begin where the disk
/// wants them to, in any type.
const GRAIN: usize = 8 << 10;

/// Where one array of an update is.
pub(super) enum Home {
    Memory(TensorData),
    Disk {
        stored: Arc<Stored>,
        /// What is there means nothing yet.
        fresh: bool,
    },
}

/// The update of one parameter.
pub(super) struct Job<B: Backend> {
    pub(super) kernel: Kernel,
    pub(super) scale: f32,
    pub(super) elements: usize,
    /// The fp32 parameter or its master, which is made of `copy` if it is fresh.
    pub(super) parameter: Home,
    pub(super) gradient: (Home, DType),
    /// In the order of the rule's names; zero where fresh.
    pub(super) states: Vec<Home>,
    /// The parameter in 16 bit.
    pub(super) copy: Option<(Home, DType)>,
    /// What comes of it, pending: the states, the master if there is a copy, the parameter's next version.
    pub(super) cells: Vec<Arc<Cell<B>>>,
}

impl<B: Backend> Job<B> {
    /// Arrays in the order in which their buffers come, with their element's size and what becomes of them.
    fn arrays(&self) -> Vec<(&Home, usize, Access)> {
        let updated = |home: &Home| match home {
            Home::Disk { fresh: true, .. } => Access::Write,
            _ => Access::Update,
        };
        let mut arrays = vec![
            (&self.parameter, 4, updated(&self.parameter)),
            (&self.gradient.0, self.gradient.1.size(), Access::Read),
        ];
        arrays.extend(self.states.iter().map(|home| (home, 4, updated(home))));
        if let Some((home, dtype)) = &self.copy {
            // It is written over, unless the master is made of it.
            let access = if is_fresh(&self.parameter) { Access::Update } else { Access::Write };
            arrays.push((home, dtype.size(), access));
        }
        arrays
    }

    /// Updates elements `range`.
    fn compute(&mut self, range: Range<usize>, buffers: &mut [Buffer]) {
        let mut buffers = buffers.iter_mut();
        let fresh = is_fresh(&self.parameter);
        let p = floats(&mut self.parameter, &mut buffers, &range);
        let g = match &mut self.gradient {
            (home, DType::F16) => Source::F16(halves(home, &mut buffers, &range)),
            (home, DType::BF16) => Source::Bf16(halves(home, &mut buffers, &range)),
            (home, _) => Source::F32(floats(home, &mut buffers, &range)),
        };
        let mut states = self.states.iter_mut().map(|home| {
            let fresh = is_fresh(home);
            let values = floats(home, &mut buffers, &range);
            if fresh {
                values.fill(0.0);
            }
            values
        });
        let (a, b) = (states.next().unwrap_or_default(), states.next().unwrap_or_default());
        drop(states);
        let copy = self.copy.as_mut().map(|(home, dtype)| match dtype {
            DType::F16 => Target::F16(halves::<f16>(home, &mut buffers, &range)),
            _ => Target::Bf16(halves::<bf16>(home, &mut buffers, &range)),
        });
        if fresh {
            match &copy {
                Some(Target::F16(copy)) => copy.convert_to_f32_slice(p),
                Some(Target::Bf16(copy)) => copy.convert_to_f32_slice(p),
                None => unreachable!("a parameter without a copy has values"),
            }
        }
        run_stretch(self.kernel, self.scale, Stretch { p, g, a, b, copy });
    }

    fn settle(self) {
        let mut cells = self.cells.into_iter();
        let homes = self.states.into_iter();
        let homes = match self.copy {
            Some((copy, _)) => homes.chain([self.parameter, copy]).collect::<Vec<_>>(),
            None => homes.chain([self.parameter]).collect(),
        };
        for home in homes {
            let cell = cells.next().expect("a cell for each array that is kept");
            match home {
                Home::Memory(data) => {
                    let data = data.convert_dtype(cell.dtype);
                    cell.settle(Ok(B::float_from_data(data, &cell.device)));
                }
                Home::Disk { stored, .. } => cell.settle_stored(stored),
            }
        }
    }
}

fn is_fresh(home: &Home) -> bool {
    matches!(home, Home::Disk { fresh: true, .. })
}

fn floats<'a>(home: &'a mut Home, buffers: &mut IterMut<'a, Buffer>, range: &Range<usize>) -> &'a mut [f32] {
    match home {
        Home::Memory(data) => &mut data.as_mut_slice::<f32>().expect("fp32, by its job")[range.clone()],
        Home::Disk { .. } => buffer(buffers).view_mut::<f32>(),
    }
}

fn halves<'a, T: burn_backend::Element + zero_core::offload::Element>(
    home: &'a mut Home,
    buffers: &mut IterMut<'a, Buffer>,
    range: &Range<usize>,
) -> &'a mut [T] {
    match home {
        Home::Memory(data) => &mut data.as_mut_slice::<T>().expect("16 bit, by its job")[range.clone()],
        Home::Disk { .. } => buffer(buffers).view_mut::<T>(),
    }
}

fn buffer<'a>(buffers: &mut IterMut<'a, Buffer>) -> &'a mut Buffer {
    buffers.next().expect("the pipeline gives a buffer for each array on the disk")
}

/// Runs all updates, in order, and settles their cells.
pub(super) fn run_jobs<B: Backend>(disk: &Disk, mut jobs: Vec<Job<B>>) {
    let most = disk.settings.sub_group_size.min(disk.pool.buffer_bytes() / 4) / GRAIN * GRAIN;
    let stretch = most.max(GRAIN);
    let (mut items, mut places) = (Vec::new(), Vec::new());
    for (job_index, job) in jobs.iter().enumerate() {
        let arrays = job.arrays();
        let mut regions: Vec<_> = arrays
            .iter()
            .filter_map(|(home, size, access)| match home {
                Home::Disk { stored, .. } => Some((stored.region().parts(stretch * size), *access)),
                Home::Memory(_) => None,
            })
            .collect();
        let mut start = 0;
        while start < job.elements {
            let end = (start + stretch).min(job.elements);
            let part = |(parts, access): &mut (_, Access)| {
                let region = Iterator::next(parts).expect("a region is as long as its array");
                Part { region, access: *access }
            };
            items.push(Item { parts: regions.iter_mut().map(part).collect() });
            places.push((job_index, start..end));
            start = end;
        }
    }
    let compute = |index: usize, buffers: &mut [Buffer]| {
        let (job, range) = places[index].clone();
        jobs[job].compute(range, buffers);
        Ok::<(), DiskError>(())
    };
    let _span = tracing::trace_span!("update from disk", items = items.len()).entered();
    or_stop(pipeline(&disk.file, &disk.pool, &items, &disk.settings.pipeline(), compute));
    jobs.into_iter().for_each(Job::settle);
}
