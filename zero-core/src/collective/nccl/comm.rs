//! A rank's end of a communicator, and how it ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::ncclComm_t;

use super::request::{DeviceRequest, DeviceSlice};
use super::state::{ABORT, Core};
use super::{NcclError, Ticket};
use crate::CommError;
use crate::accounting::WireCounter;
use crate::collective::launcher::Place;
use crate::collective::{Collective, ReduceOp};

/// Which of this rank's work a collective comes after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// All that the device's primary context has been given so far, by whichever stream.
    Context,
    /// What this stream (a `CUstream`) has been given so far.
    Stream(u64),
}

/// How long a communicator that is dropped may take to end.
const CLOSE: Duration = Duration::from_secs(10);

/// One rank's end of a communicator of NCCL's. See the [module](super).
///
/// All ranks must issue the same operations in the same order, on all communicators of a device together. Calls from
/// several threads are issued one after another.
#[derive(Debug)]
pub struct NcclComm {
    pub(super) inner: Arc<Inner>,
}

/// A communicator with its watchdog; ended with the last ticket.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) core: Arc<Core>,
    pub(super) place: Arc<Place>,
    /// Whether work of the context is ordered by events, without the host.
    pub(super) context_events: bool,
    pub(super) high_priority: bool,
    watchdog: Option<JoinHandle<()>>,
}

impl Inner {
    pub(super) fn new(
        core: Arc<Core>,
        place: Arc<Place>,
        context_events: bool,
        high_priority: bool,
    ) -> Result<Arc<Self>, NcclError> {
        let watched = core.clone();
        let name = format!("rank-{}-nccl-{}", core.rank(), core.label);
        let watchdog = std::thread::Builder::new().name(name).spawn(move || watched.watch());
        let watchdog = Some(watchdog.map_err(NcclError::Thread)?);
        Ok(Arc::new(Self { core, place, context_events, high_priority, watchdog }))
    }

    /// Ends the communicator: with the other ranks when all is well, by aborting it otherwise.
    fn close(&mut self) {
        let core = self.core.clone();
        let end = Instant::now() + CLOSE.min(core.deadline);
        while core.busy() && core.poll().is_ok() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        // Relaxed: see `watch`.
        core.stop.store(true, Ordering::Relaxed);
        core.changed.notify_all();
        if let Some(watchdog) = self.watchdog.take() {
            let limit = Instant::now() + ABORT;
            while !watchdog.is_finished() && Instant::now() < limit {
                std::thread::sleep(Duration::from_micros(200));
            }
            // One that does not end is inside the library, which may never return.
            if watchdog.is_finished() && watchdog.join().is_err() {
                tracing::warn!(rank = core.rank(), group = %core.label, "the watchdog has panicked");
            }
        }
        if core.busy() || core.sound().is_err() {
            return core.abort();
        }
        // As `poll` would, but for a rank that has left: it has ended its own part.
        let others = |core: &Core| match core.control.check(&core.label, u64::MAX, "ending") {
            Err(CommError::PeerLeft { .. }) | Ok(()) => true,
            Err(_) => false,
        };
        let ended = {
            // A watchdog that is inside the library for good may hold it.
            let Some(mut handle) = core.handle.try_lock_for(ABORT) else { return core.abort() };
            let Some(comm) = handle.0 else { return };
            let _entered = core.device.enter();
            // SAFETY: the communicator is alive, and the handle locked.
            let code = unsafe { (core.library.finalize)(comm) };
            let mut ended = core.library.check("ncclCommFinalize", code).is_ok();
            while ended && Instant::now() < end + CLOSE {
                match core.library_state(comm) {
                    Ok(true) => break,
                    Ok(false) => std::thread::sleep(Duration::from_micros(200)),
                    Err(_) => ended = false,
                }
                ended &= others(&core) && Instant::now() < end + CLOSE;
            }
            if ended {
                handle.0 = None;
                // SAFETY: as above; nobody uses it after.
                let code = unsafe { (core.library.destroy)(comm) };
                ended = core.library.check("ncclCommDestroy", code).is_ok();
            }
            ended
        };
        if !ended {
            core.abort();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl NcclComm {
    /// This rank in the communicator, from 0.
    pub fn rank(&self) -> usize {
        self.inner.core.me
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.inner.core.members.len()
    }

    /// The communicator's ranks as ranks of the control group, in the order of the communicator.
    pub fn members(&self) -> &[usize] {
        &self.inner.core.members
    }

    /// Name of the communicator, for errors.
    pub fn label(&self) -> &str {
        &self.inner.core.label
    }

    /// The device's number among those that this process sees.
    pub fn device(&self) -> usize {
        self.inner.core.device.ordinal
    }

    /// This rank's place among the machines.
    pub fn place(&self) -> &Place {
        &self.inner.place
    }

    /// The group for small messages between the hosts that the communicator stands on.
    pub fn control(&self) -> &Arc<dyn Collective> {
        &self.inner.core.control
    }

    /// Bytes that this rank has received by operations that have ended, over all communicators split from one another.
    pub fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.core.wire
    }

    /// Whether work is ordered by events of the context (a driver of CUDA 12.5 or newer), without the host.
    pub fn orders_on_device(&self) -> bool {
        self.inner.context_events
    }

    /// Issues `requests` as one operation, after this rank's own work as `compute` says, and returns without waiting for
    /// it. `what` it is for stands in errors and flight records; it may be empty.
    ///
    /// The first operation of a kind connects the ranks, and returns when they are connected.
    ///
    /// # Errors
    ///
    /// [`CommError::Shape`] for sizes that do not fit, after which the communicator can be used; otherwise as
    /// [`Ticket::wait`]'s.
    ///
    /// # Safety
    ///
    /// Each slice is memory of the communicator's device, allocated in its primary context, and stays so until the operation
    /// has ended: [`Ticket::wait`] has returned, or what frees or reuses it is ordered after the operation. Until then inputs
    /// are not written and outputs neither read nor written, but by work ordered before or after. Outputs overlap nothing,
    /// but as [`DeviceRequest`] allows. A stream in `compute` is alive.
    pub unsafe fn submit(&self, requests: &[DeviceRequest], compute: Compute, what: &str) -> Result<Ticket, CommError> {
        // SAFETY: the caller's word.
        unsafe { self.inner.submit(requests, compute, what) }
    }

    /// [`DeviceRequest::AllGather`], after all work of the context.
    ///
    /// # Errors
    ///
    /// As [`NcclComm::submit`]'s.
    ///
    /// # Safety
    ///
    /// As [`NcclComm::submit`]'s.
    pub unsafe fn all_gather(&self, input: DeviceSlice, output: DeviceSlice, what: &str) -> Result<Ticket, CommError> {
        // SAFETY: the caller's word.
        unsafe { self.submit(&[DeviceRequest::AllGather { input, output }], Compute::Context, what) }
    }

    /// [`DeviceRequest::ReduceScatter`], after all work of the context.
    ///
    /// # Errors
    ///
    /// As [`NcclComm::submit`]'s.
    ///
    /// # Safety
    ///
    /// As [`NcclComm::submit`]'s.
    pub unsafe fn reduce_scatter(
        &self,
        input: DeviceSlice,
        output: DeviceSlice,
        op: ReduceOp,
        what: &str,
    ) -> Result<Ticket, CommError> {
        // SAFETY: the caller's word.
        unsafe { self.submit(&[DeviceRequest::ReduceScatter { input, output, op }], Compute::Context, what) }
    }

    /// [`DeviceRequest::AllReduce`], after all work of the context.
    ///
    /// # Errors
    ///
    /// As [`NcclComm::submit`]'s.
    ///
    /// # Safety
    ///
    /// As [`NcclComm::submit`]'s.
    pub unsafe fn all_reduce(
        &self,
        input: DeviceSlice,
        output: DeviceSlice,
        op: ReduceOp,
        what: &str,
    ) -> Result<Ticket, CommError> {
        // SAFETY: the caller's word.
        unsafe { self.submit(&[DeviceRequest::AllReduce { input, output, op }], Compute::Context, what) }
    }

    /// [`DeviceRequest::Broadcast`], after all work of the context.
    ///
    /// # Errors
    ///
    /// As [`NcclComm::submit`]'s.
    ///
    /// # Safety
    ///
    /// As [`NcclComm::submit`]'s.
    pub unsafe fn broadcast(&self, buffer: DeviceSlice, root: usize, what: &str) -> Result<Ticket, CommError> {
        // SAFETY: the caller's word.
        unsafe { self.submit(&[DeviceRequest::Broadcast { buffer, root }], Compute::Context, what) }
    }

    /// Makes every rank's present and future operation fail with `reason`, and ends this communicator's kernels.
    pub fn abort(&self, reason: &str) {
        let core = &self.inner.core;
        // Relaxed: a number for a message.
        let seq = core.issued.load(Ordering::Relaxed);
        core.fault(core.here(seq, "abort").failed(format!("this rank has aborted: {reason}")));
        core.await_abort();
    }

    /// Whether the communicator can be used.
    ///
    /// # Errors
    ///
    /// The error that it has faulted with.
    pub fn health(&self) -> Result<(), CommError> {
        self.inner.core.poll()
    }
}

/// Ends what the library has begun to make and does not become a communicator.
pub(super) fn discard(core: &Core, comm: ncclComm_t) {
    if let Err(reason) = core.end_now(comm) {
        tracing::debug!(rank = core.rank(), %reason, "of a communicator that was not made");
    }
}
