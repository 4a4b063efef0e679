//! Updates of what is not kept with the backend, on the processor. What lies on a disk: all parameters of a step in one pipeline
//! that reads, computes and writes back stretches of their arrays beside one another, in a few buffers of constant size. What
//! lies in the host's memory: one after another, in place.
//!
//! They run on a thread of its own, beside the next forward pass. A cell of the result is *pending* until its
//! parameter's last stretch is there: who reads it earlier waits. Updates are in place, on the disk too, after the fence
//! that keeps fast ranks from replacing what slow ranks still read.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::IterMut;
use std::sync::Arc;

use burn_backend::{Backend, StreamId, TensorData};
use burn_std::DType;
use crossbeam_channel::{Receiver, Sender, bounded};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use parking_lot::Mutex;
use zero_core::CommError;
use zero_core::collective::threads::panic_reason;
use zero_core::offload::{Access, Buffer, DiskError, Item, Part, Work, pipeline_with};
use zero_ops::Elements;

use super::pass::{Stretch, Target, run_stretch};
use super::rule::Kernel;
use crate::context::Context;
use crate::mover::Mover;
use crate::patience::Patience;
use crate::shard::Cell;
use crate::tier::{Disk, Home, OnDisk, Stored};
use crate::worker::Worker;

/// The stretches that the pipeline moves are of a multiple of so many elements, so that each array's begin where the disk
/// wants them to, in any type.
const GRAIN: usize = 8 << 10;

/// Where one array of an update is.
pub(super) enum Array {
    Memory(TensorData),
    Disk {
        stored: Arc<OnDisk>,
        /// What is there means nothing yet.
        fresh: bool,
    },
}

impl Array {
    /// What an array that is kept elsewhere than with the backend is to an update: the host's memory is written in place
    /// where nobody else holds it.
    pub(super) fn of(stored: Stored, mover: &Mover) -> Self {
        match stored {
            Stored::Host(data) => Array::Memory(mover.unshared(data)),
            Stored::Disk(stored) => Array::Disk { stored, fresh: false },
        }
    }
}

/// The update of one parameter.
pub(super) struct Job<B: Backend> {
    pub(super) kernel: Kernel,
    pub(super) scale: f32,
    pub(super) elements: usize,
    /// The fp32 parameter or its master, which is made of `copy` if it is fresh.
    pub(super) parameter: Array,
    pub(super) gradient: (Array, DType),
    /// In the order of the rule's names; zero where fresh.
    pub(super) states: Vec<Array>,
    /// The parameter in 16 bit.
    pub(super) copy: Option<(Array, DType)>,
    /// What comes of it, pending: the states, the master if there is a copy, the parameter's next version.
    pub(super) cells: Vec<Arc<Cell<B>>>,
}

impl<B: Backend> Job<B> {
    /// Arrays in the order in which their buffers come, with their element's size and what becomes of them.
    fn arrays(&self) -> Vec<(&Array, usize, Access)> {
        let updated = |home: &Array| match home {
            Array::Disk { fresh: true, .. } => Access::Write,
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
            (home, DType::F16) => Elements::F16(halves(home, &mut buffers, &range)),
            (home, DType::BF16) => Elements::Bf16(halves(home, &mut buffers, &range)),
            (home, _) => Elements::F32(floats(home, &mut buffers, &range)),
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

    /// Whether something that it has in memory belongs on the disk.
    fn is_to_be_stored(&self) -> bool {
        let homes = self.states.iter().chain([&self.parameter]).chain(self.copy.as_ref().map(|(copy, _)| copy));
        let in_memory = |home: &Array| matches!(home, Array::Memory(_));
        homes.zip(&self.cells).any(|(home, cell)| in_memory(home) && matches!(cell.home(), Home::Disk(_)))
    }

    /// Whether all of it is in memory, and stays there.
    fn is_in_memory(&self) -> bool {
        !self.is_to_be_stored() && self.arrays().iter().all(|(array, ..)| matches!(array, Array::Memory(_)))
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
                Array::Memory(data) => cell.settle_data(data.convert_dtype(cell.dtype)),
                Array::Disk { stored, .. } => cell.settle_stored(Stored::Disk(stored)),
            }
        }
    }
}

fn is_fresh(home: &Array) -> bool {
    matches!(home, Array::Disk { fresh: true, .. })
}

fn floats<'a>(home: &'a mut Array, buffers: &mut IterMut<'a, Buffer>, range: &Range<usize>) -> &'a mut [f32] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<f32>().expect("fp32, by its job")[range.clone()],
        Array::Disk { .. } => buffer(buffers).view_mut::<f32>(),
    }
}

fn halves<'a, T: burn_backend::Element + zero_core::offload::Element>(
    home: &'a mut Array,
    buffers: &mut IterMut<'a, Buffer>,
    range: &Range<usize>,
) -> &'a mut [T] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<T>().expect("16 bit, by its job")[range.clone()],
        Array::Disk { .. } => buffer(buffers).view_mut::<T>(),
    }
}

fn buffer<'a>(buffers: &mut IterMut<'a, Buffer>) -> &'a mut Buffer {
    buffers.next().expect("the pipeline gives a buffer for each array on the disk")
}

/// Stretches of all jobs, in order.
struct Layout {
    items: Vec<Item>,
    /// Of each item, the job and the elements.
    places: Vec<(usize, Range<usize>)>,
    /// Of each job, the number of items up to its end.
    ends: Vec<usize>,
}

impl Layout {
    fn new<B: Backend>(disk: &Disk, jobs: &[Job<B>]) -> Self {
        let most = disk.settings.sub_group_size.min(disk.pool.buffer_bytes() / 4) / GRAIN * GRAIN;
        let stretch = most.max(GRAIN);
        let mut layout = Self { items: Vec::new(), places: Vec::new(), ends: Vec::with_capacity(jobs.len()) };
        for (job_index, job) in jobs.iter().enumerate() {
            let arrays = job.arrays();
            let mut regions: Vec<_> = arrays
                .iter()
                .filter_map(|(home, size, access)| match home {
                    Array::Disk { stored, .. } => Some((stored.region().parts(stretch * size), *access)),
                    Array::Memory(_) => None,
                })
                .collect();
            let mut start = 0;
            while start < job.elements {
                let end = (start + stretch).min(job.elements);
                let part = |(parts, access): &mut (_, Access)| {
                    let region = Iterator::next(parts).expect("a region is as long as its array");
                    Part { region, access: *access }
                };
                layout.items.push(Item { parts: regions.iter_mut().map(part).collect() });
                layout.places.push((job_index, start..end));
                start = end;
            }
            layout.ends.push(layout.items.len());
        }
        layout
    }
}

/// Why a pipeline ended early.
enum Failure {
    Disk(DiskError),
    /// Another rank has failed.
    Comm(CommError),
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

/// Jobs under way. One that has ended gives its cells what they wait for.
struct Running<'a, B: Backend> {
    layout: &'a Layout,
    jobs: Vec<Option<Job<B>>>,
    /// Jobs that have ended.
    ended: usize,
    context: Arc<Context<B>>,
}

impl<B: Backend> Running<'_, B> {
    fn settle_up_to(&mut self, items: usize) {
        while self.layout.ends.get(self.ended).is_some_and(|&end| end <= items) {
            // What is yet to be put on the disk needs buffers, which the pipeline has: it waits for the end of that.
            if let Some(job) = self.jobs[self.ended].take_if(|job| !job.is_to_be_stored()) {
                job.settle();
            }
            self.ended += 1;
        }
    }
}

impl<B: Backend> Work<Failure> for Running<'_, B> {
    fn compute(&mut self, index: usize, buffers: &mut [Buffer]) -> Result<(), Failure> {
        self.context.window.check(&"an update from the disk").map_err(Failure::Comm)?;
        let (job, range) = self.layout.places[index].clone();
        self.jobs[job].as_mut().expect("a job ends after its last item").compute(range, buffers);
        Ok(())
    }

    fn written(&mut self, index: usize) {
        self.settle_up_to(index + 1);
    }
}

/// Runs updates whose arrays are all in memory.
fn run_in_memory<B: Backend>(jobs: Vec<Job<B>>, context: &Context<B>) -> Result<(), Failure> {
    for mut job in jobs {
        context.window.check(&"an update in the host's memory").map_err(Failure::Comm)?;
        let _span = tracing::trace_span!("update in host memory", elements = job.elements).entered();
        job.compute(0..job.elements, &mut []);
        job.settle();
    }
    Ok(())
}

fn run_jobs<B: Backend>(jobs: Vec<Job<B>>, context: &Arc<Context<B>>) -> Result<(), CommError> {
    let cells: Vec<_> = jobs.iter().flat_map(|job| job.cells.iter().cloned()).collect();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let (in_memory, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().partition(Job::is_in_memory);
        run_in_memory(in_memory, context)?;
        let Some(disk) = context.disk.as_deref().filter(|_| !jobs.is_empty()) else { return Ok(()) };
        let layout = Layout::new(disk, &jobs);
        let _span = tracing::trace_span!("update from disk", items = layout.items.len()).entered();
        let mut running =
            Running { layout: &layout, jobs: jobs.into_iter().map(Some).collect(), ended: 0, context: context.clone() };
        let run = pipeline_with(&disk.file, &disk.pool, &layout.items, &disk.settings.pipeline(), &mut running);
        if run.is_ok() {
            // Those without elements have no items, and others waited for the buffers.
            running.jobs.into_iter().flatten().for_each(Job::settle);
        }
        run.map(|_| ())
    }));
    let reason = |reason: String| CommError::Disk { rank: context.rank, reason: reason.into() };
    let error = match result {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(Failure::Comm(error))) => error,
        Ok(Err(Failure::Disk(error))) => reason(error.to_string()),
        Err(payload) => reason(format!("an update panicked: {}", panic_reason(&*payload))),
    };
    for cell in cells.into_iter().filter(|cell| cell.is_pending()) {
        cell.settle(Err(error.clone()));
    }
    Err(error)
}

/// What a thread that updates is given, and where it says how it went.
type Order<B> = (Vec<Job<B>>, Arc<Context<B>>, Sender<Result<(), CommError>>);

/// The rank's thread for updates of what is not kept with the backend, beside the next forward pass: that waits for a parameter only as
/// long as this parameter takes. One step's updates run at a time.
pub(crate) struct Updates<B: Backend> {
    worker: Worker<Order<B>>,
    under_way: Mutex<Option<Receiver<Result<(), CommError>>>>,
}

impl<B: Backend> Updates<B> {
    pub(crate) fn new(rank: usize) -> Self {
        Self { worker: Worker::new(format!("rank-{rank}-update")), under_way: Mutex::new(None) }
    }

    /// Starts the updates of a step, once the last step's have ended.
    pub(super) fn start(&self, context: &Arc<Context<B>>, jobs: Vec<Job<B>>) -> Result<(), CommError> {
        self.wait(context)?;
        let (reply, result) = bounded(1);
        *self.under_way.lock() = Some(result);
        // As many threads as the rank computes with. They sleep but for the arithmetic of a stretch.
        let threads = rayon::current_num_threads();
        self.worker.send((jobs, context.clone(), reply), move |inbox| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|thread| format!("update-{thread}"))
                .build();
            for (jobs, context, reply) in inbox {
                let stream = StreamId::current();
                let result = match &pool {
                    Ok(pool) => pool.install(|| stream.executes(|| run_jobs(jobs, &context))),
                    // The system gives no more threads: this one will do.
                    Err(_) => run_jobs(jobs, &context),
                };
                // Whoever waited may have been stopped.
                let _ = reply.send(result);
            }
        });
        Ok(())
    }

    /// Waits for the updates under way.
    pub(crate) fn wait(&self, context: &Context<B>) -> Result<(), CommError> {
        let Some(result) = self.under_way.lock().take() else { return Ok(()) };
        let _span = tracing::trace_span!("wait for update").entered();
        Patience::receive(context, &result, "a wait for updates")
    }

    pub(crate) fn stop(&self) {
        self.worker.stop();
    }
}
