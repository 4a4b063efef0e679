//! How an operation is given to the device: after this rank's own work, between two marks.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::bounded;
use cudarc::nccl::sys::ncclComm_t;

use super::cuda::{Entered, Event};
use super::inner::Inner;
use super::library::{data_type, reduction};
use super::request::{DeviceRequest, DeviceSlice, Here, words};
use super::state::Op;
use super::{Compute, NcclError, Ticket};
use crate::CommError;
use crate::collective::flight::Opening;

impl Inner {
    /// Makes the communicator's stream wait for this rank's own work. Gives the mark that it waits for, if there is one.
    ///
    /// # Safety
    ///
    /// A stream in `compute` is alive.
    unsafe fn order_after(&self, compute: Compute, here: Here<'_>) -> Result<Option<Event>, CommError> {
        let core = &self.core;
        let failed = |error: NcclError| core.fault(here.failed(error));
        let ready = match compute {
            // SAFETY: the caller's word.
            Compute::Stream(stream) => unsafe { Event::of_stream(&core.device, stream as *mut _) }.map_err(failed)?,
            Compute::Context if self.context_events => Event::of_context(&core.device).map_err(failed)?,
            Compute::Context => return self.synchronize(here).map(|()| None),
        };
        core.stream.wait(&ready).map_err(failed)?;
        Ok(Some(ready))
    }

    /// For drivers without events of contexts: waits on the host until the context has done all it was given.
    fn synchronize(&self, here: Here<'_>) -> Result<(), CommError> {
        let core = &self.core;
        let (done, ended) = bounded(1);
        let device = core.device.clone();
        // The driver's call has no deadline, so that a thread of its own makes it; one that never returns is left behind.
        let wait = move || drop(done.send(device.synchronize()));
        let spawned = std::thread::Builder::new().name(format!("rank-{}-nccl-sync", core.rank())).spawn(wait);
        let thread = spawned.map_err(|error| core.fault(here.failed(NcclError::Thread(error))))?;
        match ended.recv_timeout(core.deadline) {
            Ok(outcome) => {
                let _ = thread.join();
                outcome.map_err(|error| core.fault(here.failed(error)))
            }
            Err(_) => {
                let waited_ms = core.deadline.as_millis() as u64;
                Err(core.fault(here.stalled(waited_ms, "this rank's own work before it has not ended")))
            }
        }
    }

    /// See [`NcclComm::submit`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(super) unsafe fn submit(
        self: &Arc<Self>,
        requests: &[DeviceRequest],
        compute: Compute,
        what: &str,
    ) -> Result<Ticket, CommError> {
        let core = &self.core;
        let mut next = core.order.lock();
        let seq = *next;
        *next += 1;
        core.issued.store(*next, Ordering::Relaxed);
        let op = words(requests, what);
        let here = core.here(seq, &op);
        let _span = tracing::trace_span!("collective", op = %op, group = %core.label, seq).entered();
        core.sound()?;
        here.check(requests)?;
        let received: Vec<_> =
            requests.iter().filter_map(|request| request.received(core.me, core.members.len())).collect();
        let recorder = core.control.recorder();
        let entry = recorder.open(Opening {
            group: &core.label,
            group_id: core.id,
            seq,
            op: op.clone(),
            bytes: received.iter().map(|(_, bytes)| bytes).sum(),
            one_sided: false,
            waiting_for: core.members.iter().copied().filter(|&rank| rank != core.rank()).collect(),
            last: true,
        });
        // SAFETY: the caller's word.
        let issued = unsafe { self.issue(requests, compute, here) };
        if let Err(error) = &issued {
            recorder.close(&entry, Err(error.to_string()));
            core.await_abort();
        }
        let (ready, done) = issued?;
        let op = Arc::new(Op { seq, words: op, entry, ready, done, received, ended: AtomicBool::new(false) });
        core.line_up(op.clone());
        Ok(Ticket { inner: self.clone(), op })
    }

    /// Gives the device the operation between marks.
    ///
    /// # Safety
    ///
    /// As [`NcclComm::submit`]'s.
    unsafe fn issue(
        &self,
        requests: &[DeviceRequest],
        compute: Compute,
        here: Here<'_>,
    ) -> Result<(Option<Event>, Event), CommError> {
        let core = &self.core;
        let failed = |error: NcclError| core.fault(here.failed(error));
        let _entered: Entered = core.device.enter().map_err(failed)?;
        // SAFETY: the caller's word.
        let ready = unsafe { self.order_after(compute, here) }?;
        let handle = core.handle.lock();
        let Some(comm) = handle.0 else { return Err(self.lost(here)) };
        // SAFETY: the communicator is alive while the handle is locked; the rest is the caller's word.
        unsafe { self.launch(comm, requests) }.map_err(failed)?;
        // A call that does not block may return before the device has been given its kernels: the mark comes after them.
        core.until_done(comm, here)?;
        // SAFETY: the stream is the communicator's own.
        let done = unsafe { Event::of_stream(&core.device, core.stream.raw()) }.map_err(failed)?;
        Ok((ready, done))
    }

    /// # Safety
    ///
    /// The communicator is alive and locked; the slices are as [`NcclComm::submit`] says.
    unsafe fn launch(&self, comm: ncclComm_t, requests: &[DeviceRequest]) -> Result<(), NcclError> {
        let (library, stream) = (self.core.library, self.core.stream.raw().cast::<c_void>());
        let from = |slice: &DeviceSlice| slice.pointer as *const c_void;
        let to = |slice: &DeviceSlice| slice.pointer as *mut c_void;
        // SAFETY: the caller's word; sizes have been checked. A group that was begun is ended in every case.
        unsafe {
            library.check("ncclGroupStart", (library.group_start)())?;
            let mut outcome = Ok(());
            for request in requests {
                let (call, code) = match request {
                    DeviceRequest::AllGather { input, output } => {
                        let (len, dtype) = (input.len, data_type(input.dtype));
                        ("ncclAllGather", (library.all_gather)(from(input), to(output), len, dtype, comm, stream))
                    }
                    DeviceRequest::ReduceScatter { input, output, op } => {
                        let (len, dtype, op) = (output.len, data_type(input.dtype), reduction(*op));
                        let code = (library.reduce_scatter)(from(input), to(output), len, dtype, op, comm, stream);
                        ("ncclReduceScatter", code)
                    }
                    DeviceRequest::AllReduce { input, output, op } => {
                        let (len, dtype, op) = (input.len, data_type(input.dtype), reduction(*op));
                        ("ncclAllReduce", (library.all_reduce)(from(input), to(output), len, dtype, op, comm, stream))
                    }
                    DeviceRequest::Broadcast { buffer, root } => {
                        let (len, dtype, root) = (buffer.len, data_type(buffer.dtype), *root as i32);
                        let code = (library.broadcast)(from(buffer), to(buffer), len, dtype, root, comm, stream);
                        ("ncclBroadcast", code)
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

    /// The error of a call on a communicator that has been given up.
    fn lost(&self, here: Here<'_>) -> CommError {
        self.core.sound().err().unwrap_or_else(|| here.failed("the communicator has been ended"))
    }
}
