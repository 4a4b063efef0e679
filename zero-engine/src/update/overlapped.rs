//! Updates on the CPU of state that is not kept with the backend. State on a disk: all parameters of a step go through one pipeline that
//! concurrently reads, computes and writes back ranges of their arrays, in a few buffers of constant size. State in host memory: the
//! updates run in place, one after another, between those ranges and while the pipeline waits for the disk.
//!
//! They run on a thread of their own, concurrently with the next forward pass. A cell of the result is *pending* until its parameter's last
//! range is computed (for the parameter in memory) or written (otherwise); earlier reads wait. Updates are in place, on the disk too. They
//! run after the fence that keeps fast ranks from replacing what slow ranks still read.
//!
//! A first pass of two runs in the same way on the rank's own thread: the step waits for its sums.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use zero_core::CommError;
use zero_core::collective::threads::panic_reason;
use zero_core::offload::{Access, DiskError, EarlyReads, Item, Part, Region, SwapBuffer, Work, pipeline_with};

use super::{Array, Job};
use crate::backend::Backend;
use crate::cell::deadline::Deadline;
use crate::cell::rank::Rank;
use crate::tier::{OnDisk, SwapDisk};
use crate::worker::Worker;

/// The pipeline moves ranges of a multiple of this many elements, so that each array's ranges begin at offsets that the disk accepts, in
/// any type.
const GRAIN: usize = 8 << 10;

/// Ranges of all jobs, in order.
#[derive(Default)]
struct Layout {
    items: Vec<Item>,
    /// For each item, the job and the elements.
    places: Vec<(usize, Range<usize>)>,
    /// For each job, the number of items up to its end.
    ends: Vec<usize>,
}

impl Layout {
    fn new<B: Backend>(disk: &SwapDisk, jobs: &[Job<B>]) -> Self {
        let stretch = stretch(disk);
        let mut layout = Self::default();
        for (job_index, job) in jobs.iter().enumerate() {
            let arrays = job.arrays();
            let mut regions: Vec<_> = arrays
                .iter()
                .filter_map(|(home, size, access)| match home {
                    Array::Disk { stored, .. } => Some((stored.region().parts(stretch * size), *access)),
                    Array::Memory(_) | Array::Tensor(_) => None,
                })
                .collect();
            let mut start = 0;
            while start < job.elements {
                let end = (start + stretch).min(job.elements);
                let part = |(parts, access): &mut (_, Access)| {
                    let region = Iterator::next(parts).expect("a region and its array have the same length");
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

/// Returns the number of elements of an item.
fn stretch(disk: &SwapDisk) -> usize {
    let most = disk.settings.sub_group_size.min(disk.pool.buffer_bytes() / 4) / GRAIN * GRAIN;
    most.max(GRAIN)
}

/// Returns the regions that the update of the next step reads first, at most `most`: parts of what these jobs keep on the disk, each with
/// the handle that keeps it allocated.
fn next_reads<B: Backend>(disk: &SwapDisk, jobs: &[Job<B>], most: usize) -> Vec<(Arc<OnDisk>, Region)> {
    let mut regions = Vec::new();
    for job in jobs {
        let arrays = job.arrays();
        // The 16-bit copy comes last, and is only written.
        let kept = &arrays[..arrays.len() - usize::from(job.copy.is_some())];
        let mut parts: Vec<_> = kept
            .iter()
            .filter_map(|(home, size, access)| match home {
                Array::Disk { stored, .. } if *access != Access::Read => {
                    let stored = stored.clone();
                    Some(stored.region().parts(stretch(disk) * size).map(move |part| (stored.clone(), part)))
                }
                _ => None,
            })
            .collect();
        while regions.len() < most {
            let before = regions.len();
            regions.extend(parts.iter_mut().filter_map(Iterator::next));
            if regions.len() == before {
                break;
            }
        }
    }
    regions.truncate(most);
    regions
}

/// The reason why a pipeline ended early.
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

/// Jobs in progress. A job that ends settles its cells.
struct Running<'a, B: Backend> {
    layout: &'a Layout,
    /// Jobs whose arrays are all in memory; `halfway` has those that have a second pass.
    in_memory: VecDeque<Job<B>>,
    halfway: Vec<Job<B>>,
    jobs: Vec<Option<Job<B>>>,
    /// Number of jobs that have ended.
    ended: usize,
    rank: Arc<Rank<B>>,
}

impl<B: Backend> Running<'_, B> {
    fn settle_up_to(&mut self, items: usize) {
        while self.layout.ends.get(self.ended).is_some_and(|&end| end <= items) {
            // A job with data to be stored on the disk needs buffers, which the pipeline has, so it waits for the pipeline's end.
            let is_done = |job: &mut Job<B>| !job.is_first_pass() && !job.is_to_be_stored();
            if let Some(job) = self.jobs[self.ended].take_if(is_done) {
                job.settle();
            }
            self.ended += 1;
        }
    }
}

impl<B: Backend> Work<Failure> for Running<'_, B> {
    fn compute(&mut self, index: usize, buffers: &mut [SwapBuffer]) -> Result<(), Failure> {
        self.rank.window.check(&"an update from disk").map_err(Failure::Comm)?;
        let (job, range) = self.layout.places[index].clone();
        let job = self.jobs[job].as_mut().expect("a job ends after its last item");
        let end = range.end;
        job.compute(range, buffers);
        if end == job.elements {
            job.settle_version();
        }
        Ok(())
    }

    fn meanwhile(&mut self) -> Result<bool, Failure> {
        let Some(job) = self.in_memory.pop_front() else { return Ok(false) };
        self.rank.window.check(&"an update in host memory").map_err(Failure::Comm)?;
        let _span = tracing::trace_span!("update in host memory", elements = job.elements).entered();
        self.halfway.extend(job.run());
        Ok(true)
    }

    fn written(&mut self, index: usize) {
        self.settle_up_to(index + 1);
    }
}

/// Runs a pass of each update; returns those that have a second pass.
pub fn run_jobs<B: Backend>(jobs: Vec<Job<B>>, rank: &Arc<Rank<B>>) -> Result<Vec<Job<B>>, CommError> {
    let cells: Vec<_> = jobs.iter().flat_map(|job| job.cells.iter().cloned()).collect();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let (in_memory, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().partition(Job::is_in_memory);
        let (in_memory, halfway) = (in_memory.into(), Vec::new());
        let disk = rank.disk.as_deref().filter(|_| !jobs.is_empty());
        let layout = disk.map_or_else(Layout::default, |disk| Layout::new(disk, &jobs));
        let jobs = jobs.into_iter().map(Some).collect();
        let mut running = Running { layout: &layout, in_memory, halfway, jobs, ended: 0, rank: rank.clone() };
        match disk {
            None => while running.meanwhile()? {},
            Some(disk) => {
                let _span = tracing::trace_span!("update from disk", items = layout.items.len()).entered();
                let mut early = std::mem::take(&mut *disk.early.lock());
                pipeline_with(
                    &disk.file,
                    &disk.pool,
                    &layout.items,
                    &disk.settings.pipeline(),
                    &mut early,
                    &mut running,
                )?;
                // For the jobs of another pipeline of this step.
                *disk.early.lock() = early;
            }
        }
        let mut halfway = running.halfway;
        // Jobs without elements have no items, and others waited for the buffers.
        halfway.extend(running.jobs.into_iter().flatten().filter_map(Job::end));
        Ok(halfway)
    }));
    let reason = |reason: String| CommError::Disk { rank: rank.place.rank, reason: reason.into() };
    let error = match result {
        Ok(Ok(halfway)) => return Ok(halfway),
        Ok(Err(Failure::Comm(error))) => error,
        Ok(Err(Failure::Disk(error))) => reason(error.to_string()),
        Err(payload) => reason(format!("an update panicked: {}", panic_reason(&*payload))),
    };
    for cell in cells.into_iter().filter(|cell| cell.is_pending()) {
        cell.settle(Err(error.clone()));
    }
    Err(error)
}

/// Runs the last pass of each update, and starts to read what the next step's updates read first: half of the buffers wait for it with
/// their data, while the ranks compute.
fn run_and_read_on<B: Backend>(jobs: Vec<Job<B>>, rank: &Arc<Rank<B>>) -> Result<(), CommError> {
    let disk = rank.disk.as_deref().filter(|disk| disk.settings.pipeline_read);
    let spare = disk.map_or(0, |disk| disk.pool.count().div_ceil(2));
    let next = disk.map(|disk| next_reads(disk, &jobs, disk.pool.count() - spare));
    run_jobs(jobs, rank)?;
    if let Some((disk, next)) = disk.zip(next) {
        let early = EarlyReads::start(&disk.file, &disk.pool, next.iter().map(|(_, region)| *region), spare);
        let reason = |error: DiskError| CommError::Disk { rank: rank.place.rank, reason: error.to_string().into() };
        *disk.early.lock() = early.map_err(reason)?;
    }
    Ok(())
}

/// The input of an update thread, and the channel for its result.
type Order<B> = (Vec<Job<B>>, Arc<Rank<B>>, Sender<Result<(), CommError>>);

/// The rank's thread for updates of state that is not kept with the backend. It runs concurrently with the next forward pass, which waits
/// for a parameter only until that one is updated. Only one step's updates run at a time.
pub struct Updates<B: Backend> {
    worker: Worker<Order<B>>,
    under_way: Mutex<Option<Receiver<Result<(), CommError>>>>,
}

impl<B: Backend> Updates<B> {
    /// Creates the updates of a rank. The thread starts with the first update.
    pub fn new(rank: usize) -> Self {
        Self { worker: Worker::new(format!("rank-{rank}-update")), under_way: Mutex::new(None) }
    }

    /// Starts the updates of a step, once the last step's have ended.
    pub fn start(&self, rank: &Arc<Rank<B>>, jobs: Vec<Job<B>>) -> Result<(), CommError> {
        self.wait(rank)?;
        let (reply, result) = bounded(1);
        *self.under_way.lock() = Some(result);
        // One thread per compute thread of the rank. They sleep except while a range is computed.
        let threads = rayon::current_num_threads();
        self.worker.send::<B>((jobs, rank.clone(), reply), move |inbox| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|thread| format!("update-{thread}"))
                .build();
            for (jobs, rank, reply) in inbox {
                let stream = B::stream();
                let ended = match &pool {
                    Ok(pool) => pool.install(|| B::in_stream(stream, || run_and_read_on(jobs, &rank))),
                    // The system provides no more threads: use this one.
                    Err(_) => run_and_read_on(jobs, &rank),
                };
                // Whoever waited may have been stopped.
                let _ = reply.send(ended);
            }
        });
        Ok(())
    }

    /// Waits for the updates in progress.
    pub fn wait(&self, rank: &Rank<B>) -> Result<(), CommError> {
        let Some(result) = self.under_way.lock().take() else { return Ok(()) };
        let _span = tracing::trace_span!("wait for update").entered();
        Deadline::receive(rank, &result, "a wait for updates")
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.worker.stop();
    }
}
