//! Copies between page-locked host memory and the memory of an NVIDIA GPU, concurrent with the GPU's computation.
//!
//! * In: an address in device memory, which the caller keeps, and [`Pinned`] memory. Out: the copy is complete when a call
//!   returns. Such calls are meant for threads other than the one that computes.
//! * Order: each direction has its own stream. A copy waits for all work that the device's primary context has queued, on
//!   any of CubeCL's streams, when the copy is requested (`cuCtxRecordEvent`, a driver of CUDA 12.5). Work queued later runs
//!   concurrently with the copy, so it must not use the copy's memory until the call has returned.
//! * Memory: freed page-locked blocks are kept and reused for requests of about their size, since locking pages is slow.
//!   They are freed when [`Copies`] is dropped.
//!
//! The driver copies memory that is not page-locked through small buffers of its own, and the call then blocks the thread
//! that submits work to the device.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use parking_lot::Mutex;

use crate::collective::nccl::NcclError;
use crate::collective::nccl::cuda::{Device, Event, Stream, checked, has};

/// Functions needed in addition to those of every device.
const NEEDED: [&str; 4] = ["cuMemHostAlloc", "cuMemFreeHost", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"];

/// Most bytes of sources of copies that no thread waits for.
const AHEAD: usize = 1 << 30;

/// Granularity of block sizes, in bytes.
const GRAIN: usize = 64 << 10;

/// A failed copy, or a failed allocation of memory for one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} on GPU {device}: {reason}")]
pub struct CopyError {
    /// The operation that failed.
    pub what: &'static str,
    /// The device's number among those that this process sees.
    pub device: usize,
    /// The reason for the failure, and what to change.
    pub reason: String,
}

/// The copies to and from one device. See the [module](self).
pub struct Copies {
    device: Arc<Device>,
    up: Stream,
    down: Stream,
    deadline: Duration,
    free: Mutex<BTreeMap<usize, Vec<Block>>>,
    /// Copies that no thread waits for, with their sources.
    under_way: Mutex<VecDeque<(Event, Source)>>,
}

/// Bytes in host memory that are to be copied.
type Source = Arc<dyn AsRef<[u8]> + Send + Sync>;

impl core::fmt::Debug for Copies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Copies(GPU {})", self.device.ordinal)
    }
}

/// A page-locked block.
#[derive(Debug)]
struct Block(NonNull<u8>);

// SAFETY: the memory belongs to the whole process.
unsafe impl Send for Block {}

/// Page-locked memory. Its bytes hold stale data until they are written.
#[derive(Debug)]
pub struct Pinned {
    block: Option<Block>,
    bytes: usize,
    capacity: usize,
    /// The pool that the block returns to; weak, since that pool may itself hold this memory as a source.
    copies: Weak<Copies>,
    device: Arc<Device>,
}

// SAFETY: its bytes belong to this handle alone, as a vector's do.
unsafe impl Sync for Pinned {}

impl Copies {
    /// Opens device `ordinal`. No copy may take longer than `deadline`, including the device's earlier work that it waits for.
    ///
    /// # Errors
    ///
    /// [`CopyError`] if the driver is older than CUDA 12.5 or the device does not exist.
    pub fn open(ordinal: usize, deadline: Duration) -> Result<Arc<Self>, CopyError> {
        let failed = |error: NcclError| CopyError { what: "copying", device: ordinal, reason: error.to_string() };
        let device = Device::open(ordinal).map_err(failed)?;
        let lacking = NEEDED.into_iter().find(|symbol| !has(symbol));
        if let Some(symbol) = lacking.or((!device.context_events).then_some("cuCtxRecordEvent")) {
            let reason = format!("the driver has no {symbol}: update it to the driver of CUDA 12.5 or newer");
            return Err(CopyError { what: "copying", device: ordinal, reason });
        }
        let stream = || Stream::new(&device, false).map_err(failed);
        let (up, down) = (stream()?, stream()?);
        Ok(Arc::new(Self { up, down, device, deadline, free: Mutex::default(), under_way: Mutex::default() }))
    }

    fn failed(&self, what: &'static str, error: impl core::fmt::Display) -> CopyError {
        CopyError { what, device: self.device.ordinal, reason: error.to_string() }
    }

    /// Allocates `bytes` bytes of page-locked memory, aligned to at least 64 bytes.
    ///
    /// # Errors
    ///
    /// [`CopyError`] when the system has none left.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Pinned, CopyError> {
        let wanted = bytes.max(1).next_multiple_of(GRAIN);
        let kept = {
            let mut free = self.free.lock();
            // A block that is not much larger.
            let found =
                free.range(wanted..=wanted + wanted / 4).find(|(_, blocks)| !blocks.is_empty()).map(|(&of, _)| of);
            found.and_then(|of| Some((free.get_mut(&of)?.pop()?, of)))
        };
        if let Some((block, capacity)) = kept {
            return Ok(self.pinned(block, bytes, capacity));
        }
        const WHAT: &str = "page-locked memory";
        let mut block: *mut c_void = std::ptr::null_mut();
        let _entered = self.device.enter().map_err(|error| self.failed(WHAT, error))?;
        // SAFETY: the pointer is to a local, and a context is current. Portable: any device's copies may use it.
        let mut lock = || unsafe { sys::cuMemHostAlloc(&raw mut block, wanted, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let mut code = lock();
        if code != sys::CUresult::CUDA_SUCCESS {
            // The memory kept for reuse may be the memory that is missing now.
            let kept = std::mem::take(&mut *self.free.lock());
            kept.into_values().flatten().for_each(|block| free(&self.device, block));
            code = lock();
        }
        checked("cuMemHostAlloc", code).map_err(|error| {
            let reason = format!("{error} (for {wanted} bytes); offload less to host memory, or raise the limit on locked memory (`ulimit -l`) if it is lower");
            self.failed(WHAT, reason)
        })?;
        let block =
            NonNull::new(block.cast::<u8>()).ok_or_else(|| self.failed(WHAT, "the driver returned no address"))?;
        Ok(self.pinned(Block(block), bytes, wanted))
    }

    fn pinned(self: &Arc<Self>, block: Block, bytes: usize, capacity: usize) -> Pinned {
        Pinned { block: Some(block), bytes, capacity, copies: Arc::downgrade(self), device: self.device.clone() }
    }

    /// Fills `to` from device memory at `from`, and returns when the bytes have arrived.
    ///
    /// # Errors
    ///
    /// [`CopyError`] from the driver, or at the deadline. `to` is leaked then, since the device may still write to it.
    ///
    /// # Safety
    ///
    /// `from` is the address of `to.len()` bytes of the device's primary context. No work that the context is given from now
    /// on writes them until this call has returned.
    pub unsafe fn download(&self, from: u64, mut to: Pinned) -> Result<Pinned, CopyError> {
        let (target, bytes) = (to.as_mut_ptr().cast::<c_void>(), to.len());
        // SAFETY: the block is this handle's, kept below until the copy has ended, or leaked; the caller guarantees the rest.
        let copy = |stream: &Stream| unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, stream.raw()) };
        match self.run("a copy from the device", &self.down, "cuMemcpyDtoHAsync", copy) {
            Ok(()) => Ok(to),
            Err(error) => {
                std::mem::forget(to);
                Err(error)
            }
        }
    }

    /// Copies `from` to device memory at `to`, and returns when it has arrived. Memory that is not page-locked works, but is slower.
    ///
    /// # Errors
    ///
    /// [`CopyError`] from the driver, or at the deadline.
    ///
    /// # Safety
    ///
    /// `to` is the address of `from.len()` bytes of the device's primary context. No work that the context is given from now
    /// on uses them until this call has returned. After an error, neither side's memory is used again or freed.
    pub unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CopyError> {
        // SAFETY: guaranteed by the caller.
        let copy =
            |stream: &Stream| unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.raw()) };
        self.run("a copy to the device", &self.up, "cuMemcpyHtoDAsync", copy)
    }

    /// Copies like [`Copies::upload`], but returns at once: all work that the context is given from now on waits for the
    /// copy. For the thread that computes.
    ///
    /// # Errors
    ///
    /// [`CopyError`] from the driver.
    ///
    /// # Safety
    ///
    /// `to` is the address of as many bytes as `from` has, in the device's primary context, and stays allocated for the
    /// context's later work.
    pub unsafe fn upload_before(&self, from: Source, to: u64) -> Result<(), CopyError> {
        let failed = |error: NcclError| self.failed("a copy to the device", error);
        let bytes = (*from).as_ref();
        // SAFETY: guaranteed by the caller; the source is kept until the copy has ended.
        let copy = |stream: &Stream| unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream.raw())
        };
        let done = match self.begin(&self.up, "cuMemcpyHtoDAsync", copy) {
            Ok(done) => done,
            Err(error) => {
                // The device may have received the copy all the same.
                std::mem::forget(from);
                return Err(failed(error));
            }
        };
        let ordered = self.device.wait(&done).map_err(failed);
        self.under_way.lock().push_back((done, from));
        ordered?;
        self.sweep();
        // Bounds the memory locked for queued copies: a thread that is far ahead of the device waits for the oldest copy.
        let begin = Instant::now();
        let too_much = || self.under_way.lock().iter().map(|(_, from)| (**from).as_ref().len()).sum::<usize>() > AHEAD;
        while too_much() && begin.elapsed() < self.deadline {
            std::thread::sleep(Duration::from_micros(100));
            self.sweep();
        }
        Ok(())
    }

    /// Releases the sources of finished copies.
    pub fn sweep(&self) {
        // After a device error it may be unknown whether a copy has ended: its source stays.
        self.under_way.lock().retain(|(done, _)| !matches!(done.reached(), Ok(true)));
    }

    /// Submits a copy to `stream`, ordered after all work of the context, and returns an event that marks its end.
    fn begin(
        &self,
        stream: &Stream,
        call: &'static str,
        copy: impl FnOnce(&Stream) -> sys::CUresult,
    ) -> Result<Event, NcclError> {
        let _entered = self.device.enter()?;
        stream.wait(&Event::of_context(&self.device)?)?;
        checked(call, copy(stream))?;
        // SAFETY: the stream is this object's own.
        unsafe { Event::of_stream(&self.device, stream.raw()) }
    }

    /// Submits a copy to `stream`, ordered after all work of the context, and waits for it.
    fn run(
        &self,
        what: &'static str,
        stream: &Stream,
        call: &'static str,
        copy: impl FnOnce(&Stream) -> sys::CUresult,
    ) -> Result<(), CopyError> {
        let begin = Instant::now();
        let failed = |error: NcclError| self.failed(what, error);
        let done = self.begin(stream, call, copy).map_err(failed)?;
        loop {
            if done.reached().map_err(failed)? {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= self.deadline {
                let reason = format!(
                    "not finished after {} ms: the device is still busy with earlier work, or has failed; raise the \
                     deadline",
                    waited.as_millis()
                );
                return Err(self.failed(what, reason));
            }
            match waited {
                short if short < Duration::from_micros(50) => std::thread::yield_now(),
                _ => std::thread::sleep((waited / 20).clamp(Duration::from_micros(20), Duration::from_millis(1))),
            }
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // The device may read the sources until their copies have ended.
        let end = Instant::now() + self.deadline;
        for (done, source) in std::mem::take(self.under_way.get_mut()) {
            while matches!(done.reached(), Ok(false)) && Instant::now() < end {
                std::thread::sleep(Duration::from_micros(100));
            }
            if !matches!(done.reached(), Ok(true)) {
                std::mem::forget(source);
            }
        }
        let blocks = std::mem::take(self.free.get_mut());
        blocks.into_values().flatten().for_each(|block| free(&self.device, block));
    }
}

/// Returns a block to the system. No copy may be using it.
fn free(device: &Arc<Device>, Block(block): Block) {
    let Ok(_entered) = device.enter() else { return };
    // SAFETY: allocated by `alloc`, and freed once. If the driver refuses, nothing is left to do.
    let _ = unsafe { sys::cuMemFreeHost(block.as_ptr().cast()) };
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let block = self.block.as_ref().expect("taken by drop alone");
        // SAFETY: the block has at least `bytes` bytes, which belong to this handle alone, and bytes have no invalid values;
        // the driver returns pages that the system has initialized.
        unsafe { std::slice::from_raw_parts(block.0.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        let block = self.block.as_ref().expect("taken by drop alone");
        // SAFETY: as above, and the handle is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(block.0.as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        match self.copies.upgrade() {
            Some(copies) => copies.free.lock().entry(self.capacity).or_default().push(block),
            None => free(&self.device, block),
        }
    }
}
