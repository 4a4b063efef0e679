//! Copies between page-locked memory of the host and the memory of an NVIDIA GPU, beside what the GPU computes.
//!
//! * In: an address in device memory, which the caller keeps, and [`Pinned`] memory. Out: the copy has been made when a call
//!   returns; it is meant for threads that work beside the one that computes.
//! * Order: each direction has a stream of its own. A copy comes after all that the device's primary context has been given
//!   when it is asked for (`cuCtxRecordEvent`, a driver of CUDA 12.5), whichever stream CubeCL has put it on, and what the
//!   context is given later goes on beside it. So what a copy reads or writes is used by nothing that is given later until the
//!   call has returned.
//! * Memory: page-locked blocks are kept for later ones of about their size, since the system takes long to lock pages; they
//!   are given back with this.
//!
//! Memory that is not page-locked is copied by the driver through small buffers of its own, and the call then holds up the
//! thread that sends work to the device.

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

/// The functions that are needed besides those of any device.
const NEEDED: [&str; 4] = ["cuMemHostAlloc", "cuMemFreeHost", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"];

/// Most bytes of sources of copies that nobody waits for.
const AHEAD: usize = 1 << 30;

/// What blocks are rounded up to.
const GRAIN: usize = 64 << 10;

/// A copy, or memory for it, that could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} on GPU {device}: {reason}")]
pub struct CopyError {
    /// What was asked for.
    pub what: &'static str,
    /// The device's number among those that this process sees.
    pub device: usize,
    /// What went wrong, and what to change.
    pub reason: String,
}

/// The copies of one device. See the [module](self).
pub struct Copies {
    device: Arc<Device>,
    up: Stream,
    down: Stream,
    deadline: Duration,
    free: Mutex<BTreeMap<usize, Vec<Block>>>,
    /// Copies that nobody waits for, with what they copy from.
    under_way: Mutex<VecDeque<(Event, Source)>>,
}

/// Bytes of the host that are to be copied.
type Source = Arc<dyn AsRef<[u8]> + Send + Sync>;

impl core::fmt::Debug for Copies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Copies(GPU {})", self.device.ordinal)
    }
}

/// A page-locked block.
#[derive(Debug)]
struct Block(NonNull<u8>);

// SAFETY: memory of the whole process.
unsafe impl Send for Block {}

/// Page-locked memory. Its bytes are whatever was there before until they are written.
#[derive(Debug)]
pub struct Pinned {
    block: Option<Block>,
    bytes: usize,
    capacity: usize,
    /// Where it is kept for later; it may itself be kept there, as a source.
    copies: Weak<Copies>,
    device: Arc<Device>,
}

// SAFETY: its bytes are this handle's alone, as a vector's are.
unsafe impl Sync for Pinned {}

impl Copies {
    /// For device `ordinal`; no copy may take longer than `deadline`, what the device has been given before it included.
    ///
    /// # Errors
    ///
    /// [`CopyError`] without a driver of CUDA 12.5 or newer, or without the device.
    pub fn open(ordinal: usize, deadline: Duration) -> Result<Arc<Self>, CopyError> {
        let failed = |error: NcclError| CopyError { what: "copying", device: ordinal, reason: error.to_string() };
        let device = Device::open(ordinal).map_err(failed)?;
        let lacking = NEEDED.into_iter().find(|symbol| !has(symbol));
        if let Some(symbol) = lacking.or((!device.context_events).then_some("cuCtxRecordEvent")) {
            let reason = format!("the driver has no {symbol}: update it to one of CUDA 12.5 or newer");
            return Err(CopyError { what: "copying", device: ordinal, reason });
        }
        let stream = || Stream::new(&device, false).map_err(failed);
        let (up, down) = (stream()?, stream()?);
        Ok(Arc::new(Self { up, down, device, deadline, free: Mutex::default(), under_way: Mutex::default() }))
    }

    fn failed(&self, what: &'static str, error: impl core::fmt::Display) -> CopyError {
        CopyError { what, device: self.device.ordinal, reason: error.to_string() }
    }

    /// Page-locked memory of `bytes` bytes, aligned to 64 at least.
    ///
    /// # Errors
    ///
    /// [`CopyError`] when the system has none.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Pinned, CopyError> {
        let wanted = bytes.max(1).next_multiple_of(GRAIN);
        let kept = {
            let mut free = self.free.lock();
            // One that is not much larger.
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
            // What is kept for later may be what is missing now.
            let kept = std::mem::take(&mut *self.free.lock());
            kept.into_values().flatten().for_each(|block| free(&self.device, block));
            code = lock();
        }
        checked("cuMemHostAlloc", code).map_err(|error| {
            let reason = format!(
                "{error} (of {wanted} bytes); lower what is kept in the host's memory, or ulimit -l allows less"
            );
            self.failed(WHAT, reason)
        })?;
        let block = NonNull::new(block.cast::<u8>()).ok_or_else(|| self.failed(WHAT, "the driver gave no address"))?;
        Ok(self.pinned(Block(block), bytes, wanted))
    }

    fn pinned(self: &Arc<Self>, block: Block, bytes: usize, capacity: usize) -> Pinned {
        Pinned { block: Some(block), bytes, capacity, copies: Arc::downgrade(self), device: self.device.clone() }
    }

    /// Copies from device memory at `from` as many bytes as `to` has, and returns when they are there.
    ///
    /// # Errors
    ///
    /// [`CopyError`] of the driver, or at the deadline; `to` is then given up, since the device may still write to it.
    ///
    /// # Safety
    ///
    /// `from` is the address of so many bytes of the device's primary context, which nothing writes that is given to the
    /// context from now on, until this has returned.
    pub unsafe fn download(&self, from: u64, mut to: Pinned) -> Result<Pinned, CopyError> {
        let (target, bytes) = (to.as_mut_ptr().cast::<c_void>(), to.len());
        // SAFETY: the block is this handle's, kept below until the copy has ended or for ever; the rest is the caller's word.
        let copy = |stream: &Stream| unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, stream.raw()) };
        match self.run("a copy from the device", &self.down, "cuMemcpyDtoHAsync", copy) {
            Ok(()) => Ok(to),
            Err(error) => {
                std::mem::forget(to);
                Err(error)
            }
        }
    }

    /// Copies `from` to device memory at `to`, and returns when it is there. Memory that is not page-locked works, slower.
    ///
    /// # Errors
    ///
    /// [`CopyError`] of the driver, or at the deadline.
    ///
    /// # Safety
    ///
    /// `to` is the address of as many bytes of the device's primary context, which nothing uses that is given to the context
    /// from now on, until this has returned. After an error neither side's memory is used again or given back.
    pub unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CopyError> {
        // SAFETY: the caller's word.
        let copy =
            |stream: &Stream| unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.raw()) };
        self.run("a copy to the device", &self.up, "cuMemcpyHtoDAsync", copy)
    }

    /// As [`Copies::upload`], but returns at once: all that is given to the context from now on comes after the copy. For the
    /// thread that computes.
    ///
    /// # Errors
    ///
    /// [`CopyError`] of the driver.
    ///
    /// # Safety
    ///
    /// `to` is the address of as many bytes of the device's primary context, kept for what is given to the context later.
    pub unsafe fn upload_before(&self, from: Source, to: u64) -> Result<(), CopyError> {
        let failed = |error: NcclError| self.failed("a copy to the device", error);
        let bytes = (*from).as_ref();
        // SAFETY: the caller's word; the source is kept until the copy has ended.
        let copy = |stream: &Stream| unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream.raw())
        };
        let done = match self.begin(&self.up, "cuMemcpyHtoDAsync", copy) {
            Ok(done) => done,
            Err(error) => {
                // It may have been given to the device all the same.
                std::mem::forget(from);
                return Err(failed(error));
            }
        };
        let ordered = self.device.wait(&done).map_err(failed);
        self.under_way.lock().push_back((done, from));
        ordered?;
        self.sweep();
        // What is locked for copies to come is bounded: a thread that is far ahead of the device waits for the oldest.
        let begin = Instant::now();
        let too_much = || self.under_way.lock().iter().map(|(_, from)| (**from).as_ref().len()).sum::<usize>() > AHEAD;
        while too_much() && begin.elapsed() < self.deadline {
            std::thread::sleep(Duration::from_micros(100));
            self.sweep();
        }
        Ok(())
    }

    /// Lets go of the sources of copies that have been made.
    pub fn sweep(&self) {
        // Whether one has ended may be unknown after an error of the device: its source stays.
        self.under_way.lock().retain(|(done, _)| !matches!(done.reached(), Ok(true)));
    }

    /// Gives `stream` a copy after all work of the context, and marks its end.
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

    /// Gives `stream` a copy after all work of the context, and waits for it.
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
                    "not done after {} ms: the device still computes what it was given before, or has failed; raise the deadline",
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
        // Their sources may be read until they have ended.
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

/// Gives a block of which no copy is under way back to the system.
fn free(device: &Arc<Device>, Block(block): Block) {
    let Ok(_entered) = device.enter() else { return };
    // SAFETY: allocated by `alloc`, and freed once. A refusal leaves nothing to do.
    let _ = unsafe { sys::cuMemFreeHost(block.as_ptr().cast()) };
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let block = self.block.as_ref().expect("taken by drop alone");
        // SAFETY: the block has so many bytes, which this handle alone has, and bytes have no invalid values; the driver gives
        // pages, which the system has filled.
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
