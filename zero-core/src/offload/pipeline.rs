//! A sequence of items, each read, computed and written back. Disk transfers overlap with computation.
//!
//! The caller's thread submits and computes; the file's threads transfer bytes. An item and its buffers go through these states:
//!
//! 1. *Ahead*: its buffers are taken from the pool and its reads submitted, in the items' order, as soon as the pool has buffers for all of
//!    its parts. An item that shares bytes with a pending write of an earlier one waits for that write.
//! 2. *Current*: its reads have ended and `compute` runs.
//! 3. *Behind*: its writes are submitted, with the same buffers. Buffers of completed writes return to the pool.
//!
//! The pool bounds the memory. No item waits for a buffer that a later one holds, since buffers are taken in order and for a full item at
//! once. If none are free for the current item, the pipeline waits for the oldest write, and then drops what was read early.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::offload::{BufferPool, DiskError, PendingTransfer, Region, SwapBuffer, SwapFile};

/// The operation on a part of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read; unchanged on the disk.
    Read,
    /// Read and written back.
    Update,
    /// Written; the buffer's initial contents are undefined.
    Write,
}

/// A region, or a part of one ([`Region::parts`]), and the operation on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Region of the part.
    pub region: Region,
    /// Operation on it.
    pub access: Access,
}

/// Data that is computed together, each part in a buffer of its own: parameters, moments and gradients of a sub-group. The parts of an item
/// must not share bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// Parts in the order in which `compute` gets their buffers.
    pub parts: Vec<Part>,
}

/// Overlap options, with DeepSpeed's names and defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineOptions {
    /// Reads later items while computing. Otherwise, an item is read after the previous one has been computed.
    pub pipeline_read: bool,
    /// Continues while writes are in flight. Otherwise, an item's writes are waited for after its compute.
    pub pipeline_write: bool,
    /// Timeout of one read or write, or of a wait for buffers.
    pub limit: Duration,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self { pipeline_read: false, pipeline_write: false, limit: Duration::from_secs(600) }
    }
}

/// Times of a [`pipeline()`] on its caller's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PipelineReport {
    /// Time spent waiting for reads.
    pub reading: Duration,
    /// Time spent in `compute`.
    pub computing: Duration,
    /// Time spent waiting for writes, or for the buffers that they hold.
    pub writing: Duration,
    /// Time from the first submission to the end of the last write.
    pub elapsed: Duration,
}

/// Work of a pipeline on its items ([`pipeline_with`]).
pub trait Work<E> {
    /// Computes on the buffers of item `index`.
    ///
    /// # Errors
    ///
    /// An error ends the pipeline.
    fn compute(&mut self, index: usize, buffers: &mut [SwapBuffer]) -> Result<(), E>;

    /// Does a part of the work that needs no disk; returns `false` if none is left. The pipeline calls it at least once before each item,
    /// repeatedly while it waits for the disk, and at the end until none is left.
    ///
    /// # Errors
    ///
    /// An error ends the pipeline.
    fn meanwhile(&mut self) -> Result<bool, E> {
        Ok(false)
    }

    /// Called when item `index`, and all before it, is on the disk as far as the kernel knows.
    fn written(&mut self, _index: usize) {}
}

impl<E, F: FnMut(usize, &mut [SwapBuffer]) -> Result<(), E>> Work<E> for F {
    fn compute(&mut self, index: usize, buffers: &mut [SwapBuffer]) -> Result<(), E> {
        self(index, buffers)
    }
}

/// Reads that are submitted before a pipeline begins, which takes their buffers instead of reading these regions again. Only pipelines that
/// are given these reads may write the regions meanwhile, in the same parts.
#[derive(Debug, Default)]
pub struct EarlyReads(Vec<(Region, PendingTransfer)>);

impl EarlyReads {
    /// Submits reads of `regions`, in order, while the pool has more than `spare` free buffers.
    ///
    /// # Errors
    /// If the file refuses a read.
    pub fn start(
        file: &SwapFile,
        pool: &BufferPool,
        regions: impl IntoIterator<Item = Region>,
        spare: usize,
    ) -> Result<Self, DiskError> {
        let mut reads = Vec::new();
        for region in regions {
            let Some(buffer) = (pool.free() > spare).then(|| pool.try_take_many(1)).flatten() else { break };
            let reading = buffer.into_iter().map(|buffer| Ok((region, file.read(region, buffer)?)));
            reads.extend(reading.collect::<Result<Vec<_>, _>>()?);
        }
        Ok(Self(reads))
    }

    fn holds(&self, part: &Part) -> bool {
        part.access != Access::Write && self.0.iter().any(|(region, _)| *region == part.region)
    }

    fn take(&mut self, region: Region) -> Option<PendingTransfer> {
        let at = self.0.iter().position(|(early, _)| *early == region)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Drops all reads, and returns whether there were any.
    fn release(&mut self) -> bool {
        !std::mem::take(&mut self.0).is_empty()
    }
}

/// Reads every item, calls `compute` with its index and buffers, in order, and writes the parts that have changed. When it returns,
/// everything is on the disk (as far as the kernel knows).
///
/// # Errors
/// The first error, of the disk or of `compute`. Nothing starts after it, and transfers in flight are waited for, so that all buffers are
/// back in the pool. [`DiskError::FewBuffers`] if an item has more parts than the pool has buffers.
pub fn pipeline<E: From<DiskError>>(
    file: &SwapFile,
    pool: &BufferPool,
    items: &[Item],
    options: &PipelineOptions,
    mut compute: impl FnMut(usize, &mut [SwapBuffer]) -> Result<(), E>,
) -> Result<PipelineReport, E> {
    pipeline_with(file, pool, items, options, &mut EarlyReads::default(), &mut compute)
}

/// Same as [`pipeline()`], with reads that have been submitted before, and with work that is notified of completed writes.
///
/// # Errors
/// Same as [`pipeline()`].
pub fn pipeline_with<E: From<DiskError>>(
    file: &SwapFile,
    pool: &BufferPool,
    items: &[Item],
    options: &PipelineOptions,
    early: &mut EarlyReads,
    work: &mut impl Work<E>,
) -> Result<PipelineReport, E> {
    let needed = items.iter().map(|item| item.parts.len()).max().unwrap_or(0);
    if needed > pool.count() {
        return Err(DiskError::FewBuffers { needed, count: pool.count() }.into());
    }
    let (ahead, behind, written) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
    let mut run =
        Flow { file, pool, items, options, early, next: 0, ahead, behind, written, report: PipelineReport::default() };
    let start = Instant::now();
    for (index, item) in items.iter().enumerate() {
        run.read_ahead(index, false)?;
        loop {
            let is_more = work.meanwhile()?;
            run.read_ahead(index, false)?;
            run.tell(work);
            if !is_more || run.is_read() {
                break;
            }
        }
        run.read_ahead(index, true)?;
        let mut buffers = run.finish_reads()?;
        // While this one is computed, buffers that have become free can be filled.
        run.read_ahead(index, true)?;
        run.tell(work);
        let begin = Instant::now();
        work.compute(index, &mut buffers)?;
        run.report.computing += begin.elapsed();
        run.write_behind(index, item, buffers)?;
    }
    while work.meanwhile()? {
        run.finish_done_writes()?;
        run.tell(work);
    }
    while run.finish_oldest_write()? {
        run.tell(work);
    }
    run.tell(work);
    run.report.elapsed = start.elapsed();
    Ok(run.report)
}

struct Flow<'a> {
    file: &'a SwapFile,
    pool: &'a BufferPool,
    items: &'a [Item],
    options: &'a PipelineOptions,
    early: &'a mut EarlyReads,
    /// The first item whose reads have not been submitted.
    next: usize,
    /// Items from the current one to `next`.
    ahead: VecDeque<Vec<Loading>>,
    /// Items whose writes may be in flight, oldest first.
    behind: VecDeque<(usize, Vec<PendingTransfer>)>,
    /// Items whose writes have ended since the last notification, in order.
    written: VecDeque<usize>,
    report: PipelineReport,
}

/// Buffer of a part before the compute.
enum Loading {
    Reading(PendingTransfer),
    Ready(SwapBuffer),
}

impl Flow<'_> {
    /// Submits the reads of `current`, unless already submitted, and of as many later items as there are buffers for. With `waits`, waits
    /// for buffers for `current`.
    fn read_ahead(&mut self, current: usize, waits: bool) -> Result<(), DiskError> {
        self.finish_done_writes()?;
        while self.next < self.items.len() && (self.next <= current || self.options.pipeline_read) {
            let (items, index) = (self.items, self.next);
            let parts = &items[index].parts;
            let needed = parts.iter().filter(|part| !self.early.holds(part)).count();
            let buffers = if self.must_wait(index, current) { None } else { self.pool.try_take_many(needed) };
            let buffers = match buffers {
                Some(buffers) => buffers,
                None if index > current || !waits => break,
                None if self.finish_oldest_write()? || self.early.release() => continue,
                // Other users of the pool have them.
                None => {
                    let begin = Instant::now();
                    let buffers = self.pool.take_many(needed, self.options.limit)?;
                    self.report.writing += begin.elapsed();
                    buffers
                }
            };
            let (mut loading, mut buffers) = (Vec::with_capacity(parts.len()), buffers.into_iter());
            for part in parts {
                if self.early.holds(part) {
                    loading.extend(self.early.take(part.region).map(Loading::Reading));
                    continue;
                }
                let mut buffer = buffers.next().expect("one was taken for each part that is not read early");
                loading.push(if part.access == Access::Write {
                    // It would be stale for a later item.
                    drop(self.early.take(part.region));
                    // Checked before the compute, so that the write is not refused after it.
                    self.file.check(&part.region, &buffer)?;
                    buffer.set_len(part.region.bytes());
                    Loading::Ready(buffer)
                } else {
                    Loading::Reading(self.file.read(part.region, buffer)?)
                });
            }
            self.ahead.push_back(loading);
            self.next += 1;
        }
        Ok(())
    }

    /// Returns whether an item shares bytes with a pending write of an earlier one.
    fn must_wait(&self, index: usize, current: usize) -> bool {
        let earlier = self.behind.iter().map(|(earlier, _)| *earlier).chain(current..index);
        let parts = || self.items[index].parts.iter();
        earlier
            .flat_map(|earlier| &self.items[earlier].parts)
            .any(|written| written.access != Access::Read && parts().any(|part| part.region.overlaps(&written.region)))
    }

    /// Returns whether [`Flow::finish_reads`] would return at once.
    fn is_read(&self) -> bool {
        let is_done = |part: &Loading| !matches!(part, Loading::Reading(ticket) if !ticket.is_done());
        self.ahead.front().is_some_and(|parts| parts.iter().all(is_done))
    }

    /// Waits for the reads of the next item.
    fn finish_reads(&mut self) -> Result<Vec<SwapBuffer>, DiskError> {
        let begin = Instant::now();
        let loading = self.ahead.pop_front().expect("the current item's reads have been submitted");
        let wait = |part| match part {
            Loading::Reading(ticket) => ticket.wait(self.options.limit),
            Loading::Ready(buffer) => Ok(buffer),
        };
        let buffers = loading.into_iter().map(wait).collect();
        self.report.reading += begin.elapsed();
        buffers
    }

    /// Submits the writes of an item that has been computed.
    fn write_behind(&mut self, index: usize, item: &Item, buffers: Vec<SwapBuffer>) -> Result<(), DiskError> {
        let mut tickets = Vec::with_capacity(buffers.len());
        for (part, buffer) in item.parts.iter().zip(buffers) {
            if part.access != Access::Read {
                tickets.push(self.file.write(part.region, buffer)?);
            }
        }
        self.behind.push_back((index, tickets));
        if !self.options.pipeline_write {
            while self.finish_oldest_write()? {}
        }
        Ok(())
    }

    /// Takes the buffers of completed writes.
    fn finish_done_writes(&mut self) -> Result<(), DiskError> {
        while self.behind.front().is_some_and(|(_, tickets)| tickets.iter().all(PendingTransfer::is_done)) {
            self.finish_oldest_write()?;
        }
        Ok(())
    }

    /// Reports the items written since the last call.
    fn tell<E>(&mut self, work: &mut impl Work<E>) {
        self.written.drain(..).for_each(|written| work.written(written));
    }

    /// Waits for the writes of the oldest item; returns `false` if there are none.
    fn finish_oldest_write(&mut self) -> Result<bool, DiskError> {
        let Some((index, tickets)) = self.behind.pop_front() else { return Ok(false) };
        let begin = Instant::now();
        for ticket in tickets {
            ticket.wait(self.options.limit)?;
        }
        self.report.writing += begin.elapsed();
        self.written.push_back(index);
        Ok(true)
    }
}
