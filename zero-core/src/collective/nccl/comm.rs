//! A rank's end of a communicator.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Ticket;
use super::inner::Inner;
use super::request::{DeviceRequest, DeviceSlice};
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

/// One rank's end of a communicator of NCCL's. See the [module](super).
///
/// All ranks must issue the same operations in the same order, on all communicators of a device together. Calls from
/// several threads are issued one after another.
#[derive(Debug)]
pub struct NcclComm {
    pub(super) inner: Arc<Inner>,
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
