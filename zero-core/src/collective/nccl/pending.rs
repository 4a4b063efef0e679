//! The caller's handle to an issued operation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::cuda;
use super::inner::Inner;
use super::state::{Core, Issued};
use crate::CommError;

/// An issued collective on the device, which may not have ended. Dropping it without waiting is allowed: the
/// operation continues, and its memory must remain allocated.
#[derive(Debug)]
#[must_use = "later work must be ordered after it, by `order_compute`, `order_stream` or `wait`"]
pub struct DevicePending {
    pub(super) inner: Arc<Inner>,
    pub(super) op: Arc<Issued>,
}

impl DevicePending {
    fn core(&self) -> &Core {
        &self.inner.core
    }

    /// Returns its sequence number in the communicator, from 0.
    pub fn seq(&self) -> u64 {
        self.op.seq
    }

    /// Makes all work submitted to the device's primary context from now on, on any stream, wait for this operation. The host
    /// does not wait, except with a driver older than CUDA 12.5, where it waits instead.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for [`DevicePending::wait`].
    pub fn order_compute(&self) -> Result<(), CommError> {
        if !self.inner.context_events {
            return self.wait();
        }
        let core = self.core();
        // Its kernels may access memory until it has been aborted.
        core.sound().inspect_err(|_| core.await_abort())?;
        core.device.wait(&self.op.done).map_err(|error| core.fault(self.op.at(&core.group).device(error)))
    }

    /// Makes work submitted to `stream` (a `CUstream`) from now on wait for this operation; the host does not wait.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the communicator has faulted.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this process that is alive.
    pub unsafe fn order_stream(&self, stream: u64) -> Result<(), CommError> {
        let core = self.core();
        core.sound().inspect_err(|_| core.await_abort())?;
        // SAFETY: guaranteed by the caller.
        let ordered = unsafe { cuda::wait_on(stream as *mut _, &self.op.done) };
        ordered.map_err(|error| core.fault(self.op.at(&core.group).device(error)))
    }

    /// Returns `true` if the operation has ended.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the communicator has faulted before this operation ended.
    pub fn is_done(&self) -> Result<bool, CommError> {
        // Acquire: pairs with the release of the thread that saw the end.
        if self.op.ended.load(Ordering::Acquire) {
            return Ok(true);
        }
        self.core().poll()?;
        Ok(self.op.ended.load(Ordering::Acquire))
    }

    /// Waits on the host until the operation has ended.
    ///
    /// # Errors
    ///
    /// [`CommError::Stalled`] if the deadline passes, [`CommError::Device`] if the library reports an error,
    /// [`CommError::PeerFailed`] if another rank has failed. The communicator has then been aborted: it accesses no memory
    /// any more, and every later call returns the same error. If it cannot be aborted, this does not return: the process
    /// prints the reason and ends with [`code::WATCHDOG`](crate::collective::exit::code::WATCHDOG).
    pub fn wait(&self) -> Result<(), CommError> {
        let begin = Instant::now();
        loop {
            match self.is_done() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    self.core().await_abort();
                    return Err(error);
                }
            }
            let waited = begin.elapsed();
            if waited < Duration::from_micros(200) {
                std::thread::yield_now();
            } else {
                std::thread::sleep((waited / 20).clamp(Duration::from_micros(20), Duration::from_millis(1)));
            }
        }
    }
}
