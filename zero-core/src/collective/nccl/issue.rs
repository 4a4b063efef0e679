//! Submission of an operation to the device: after this rank's own work, between two events.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cudarc::nccl::sys::ncclComm_t;

use super::cuda::{Entered, Event};
use super::inner::Inner;
use super::library::{data_type, reduction};
use super::request::{DeviceRequest, check, words};
use super::state::Issued;
use super::{Compute, DevicePending, NcclComm, NcclError};
use crate::CommError;
use crate::collective::operation::OperationContext;
use crate::collective::progress::apart;

impl Inner {
    /// Makes the communicator's stream wait for this rank's own work. Returns the event that it waits for, if there is one.
    ///
    /// # Safety
    ///
    /// A stream in `compute` is alive.
    unsafe fn order_after(&self, compute: Compute, at: OperationContext<'_>) -> Result<Option<Event>, CommError> {
        let core = &self.core;
        let failed = |error: NcclError| core.fault(at.device(error));
        let ready = match compute {
            // SAFETY: guaranteed by the caller.
            Compute::Stream(stream) => unsafe { Event::of_stream(&core.device, stream as *mut _) }.map_err(failed)?,
            Compute::Context if self.context_events => Event::of_context(&core.device).map_err(failed)?,
            Compute::Context => return self.synchronize(at).map(|()| None),
        };
        core.stream.wait(&ready).map_err(failed)?;
        Ok(Some(ready))
    }

    /// Waits on the host until the context has completed all its work, for drivers without events of contexts.
    fn synchronize(&self, at: OperationContext<'_>) -> Result<(), CommError> {
        let core = &self.core;
        let device = core.device.clone();
        // The driver's call has no deadline.
        let ended = apart(format!("rank-{}-nccl-sync", core.group.rank()), core.deadline, move || device.synchronize());
        match ended.map_err(|error| core.fault(at.device(NcclError::Thread(error))))? {
            Some(outcome) => outcome.map_err(|error| core.fault(at.device(error))),
            None => Err(core.fault(at.stalled(core.deadline, "this rank's own earlier work has not finished"))),
        }
    }

    /// Submits the operation to the device; returns the events before and after it.
    ///
    /// # Safety
    ///
    /// Same as for [`NcclComm::submit`].
    unsafe fn issue(
        &self,
        requests: &[DeviceRequest],
        compute: Compute,
        at: OperationContext<'_>,
    ) -> Result<(Option<Event>, Event), CommError> {
        let core = &self.core;
        let failed = |error: NcclError| core.fault(at.device(error));
        let _entered: Entered = core.device.enter().map_err(failed)?;
        // SAFETY: guaranteed by the caller.
        let ready = unsafe { self.order_after(compute, at) }?;
        let handle = core.handle.lock();
        let Some(comm) = handle.0 else { return Err(self.lost(at)) };
        // SAFETY: the communicator is alive while the handle is locked; the caller guarantees the rest.
        unsafe { self.launch(comm, requests) }.map_err(failed)?;
        // A nonblocking call may return before its kernels are submitted to the device: the event must come after them.
        core.until_done(comm, at)?;
        // SAFETY: the stream is the communicator's own.
        let done = unsafe { Event::of_stream(&core.device, core.stream.raw()) }.map_err(failed)?;
        Ok((ready, done))
    }

    /// # Safety
    ///
    /// The communicator is alive and locked; the slices meet the conditions of [`NcclComm::submit`].
    unsafe fn launch(&self, comm: ncclComm_t, requests: &[DeviceRequest]) -> Result<(), NcclError> {
        let (library, stream) = (self.core.library, self.core.stream.raw().cast::<c_void>());
        let reduction = |op| reduction(op, self.core.group.world());
        // SAFETY: guaranteed by the caller; sizes have been checked. A group that was started is ended in every case.
        unsafe {
            library.check("ncclGroupStart", (library.group_start)())?;
            let mut outcome = Ok(());
            for request in requests {
                let (input, output) = request.slices();
                let (from, to) = (input.pointer as *const c_void, output.pointer as *mut c_void);
                let (len, dtype) = (input.len, data_type(input.dtype));
                let (call, code) = match *request {
                    DeviceRequest::AllGather { .. } => {
                        ("ncclAllGather", (library.all_gather)(from, to, len, dtype, comm, stream))
                    }
                    DeviceRequest::ReduceScatter { op, .. } => {
                        let code = (library.reduce_scatter)(from, to, output.len, dtype, reduction(op), comm, stream);
                        ("ncclReduceScatter", code)
                    }
                    DeviceRequest::AllReduce { op, .. } => {
                        ("ncclAllReduce", (library.all_reduce)(from, to, len, dtype, reduction(op), comm, stream))
                    }
                    DeviceRequest::Broadcast { root, .. } => {
                        ("ncclBroadcast", (library.broadcast)(from, to, len, dtype, root as i32, comm, stream))
                    }
                };
                outcome = library.check(call, code);
                if outcome.is_err() {
                    break;
                }
            }
            let ended = library.check("ncclGroupEnd", (library.group_end)());
            outcome.and(ended)
        }
    }

    /// Returns the error of a call on a communicator that has been ended.
    fn lost(&self, at: OperationContext<'_>) -> CommError {
        self.core.sound().err().unwrap_or_else(|| at.device("the communicator has already been closed"))
    }
}

impl NcclComm {
    /// Issues `requests` as one operation, after this rank's own work selected by `compute`, and returns without waiting for
    /// it. `what` names its purpose in errors and flight records; it may be empty.
    ///
    /// The first operation of a kind connects the ranks, and returns when they are connected.
    ///
    /// # Errors
    ///
    /// [`CommError::Shape`] for sizes that do not fit, after which the communicator remains usable; otherwise as for
    /// [`DevicePending::wait`].
    ///
    /// # Safety
    ///
    /// * Each slice is memory of the communicator's device, allocated in its primary context. It stays allocated until the operation
    ///   has ended: until [`DevicePending::wait`] has returned, or until work ordered after the operation frees or reuses it. Until
    ///   then, only work ordered before or after the operation writes inputs, or reads or writes outputs.
    /// * Outputs overlap nothing, except as [`DeviceRequest`] allows. A stream in `compute` is alive.
    pub unsafe fn submit(
        &self,
        requests: &[DeviceRequest],
        compute: Compute,
        what: &str,
    ) -> Result<DevicePending, CommError> {
        let core = &self.inner.core;
        let (_order, seq) = core.next();
        let op = words(requests, what);
        let at = core.group.at(seq, &op);
        let _span = tracing::trace_span!("collective", op = %op, group = %core.group.label, seq).entered();
        core.sound()?;
        check(requests, core.group.world(), at)?;
        let received: Vec<_> =
            requests.iter().filter_map(|request| request.moved().received(core.group.me, core.group.world())).collect();
        let recorder = core.control.recorder();
        let bytes = received.iter().map(|(_, bytes)| bytes).sum();
        let entry = recorder.open(core.group.opening(seq, &op, bytes, core.group.peers().collect(), true));
        // SAFETY: guaranteed by the caller.
        let issued = unsafe { self.inner.issue(requests, compute, at) };
        if let Err(error) = &issued {
            recorder.close(&entry, Err(error.to_string()));
            core.await_abort();
        }
        let (ready, done) = issued?;
        let op = Arc::new(Issued { seq, words: op, entry, ready, done, received, ended: AtomicBool::new(false) });
        core.line_up(op.clone());
        Ok(DevicePending { inner: self.inner.clone(), op })
    }
}
