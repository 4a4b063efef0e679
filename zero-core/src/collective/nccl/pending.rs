//! An operation that has been issued, as its caller sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::cuda;
use super::inner::Inner;
use super::state::{Core, Issued};
use crate::CommError;

/// A collective on the device that has been issued, and may not have ended. Dropping it without waiting is allowed: the
/// operation goes on, and its memory must stay.
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

    /// Its number in its communicator, from 0.
    pub fn seq(&self) -> u64 {
        self.op.seq
    }

    /// Makes all work that is given to the device's primary context from now on, by whichever stream, wait for this
    /// operation; the host does not wait. With a driver older than CUDA 12.5 the host waits instead.
    ///
    /// # Errors
    ///
    /// [`CommError`] as [`DevicePending::wait`]'s.
    pub fn order_compute(&self) -> Result<(), CommError> {
        if !self.inner.context_events {
            return self.wait();
        }
        let core = self.core();
        // Its kernels may touch memory until then.
        core.sound().inspect_err(|_| core.await_abort())?;
        core.device.wait(&self.op.done).map_err(|error| core.fault(self.op.at(&core.group).device(error)))
    }

    /// Makes what is given to `stream` (a `CUstream`) from now on wait for this operation; the host does not wait.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the communicator has faulted.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this process that is alive.
    pub unsafe fn order_stream(&self, stream: u64) -> Result<(), CommError> {
        let core = self.core();
        core.sound().inspect_err(|_| core.await_abort())?;
        // SAFETY: the caller's word.
        let ordered = unsafe { cuda::wait_on(stream as *mut _, &self.op.done) };
        ordered.map_err(|error| core.fault(self.op.at(&core.group).device(error)))
    }

    /// Whether the operation has ended.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the communicator has faulted, and this operation had not ended before.
    pub fn is_done(&self) -> Result<bool, CommError> {
        // Acquire: with the release of who saw the end.
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
    /// [`CommError::Stalled`] when the deadline passes, [`CommError::Device`] when the library reports an error,
    /// [`CommError::PeerFailed`] when another rank has failed. The communicator has then been aborted: nothing of it
    /// touches memory any more, and every later call gives the same error. When it cannot be aborted, this does not return:
    /// the process ends with [`code::WATCHDOG`](crate::collective::exit::code::WATCHDOG), and says why.
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
