//! A rank's NCCL communicator, and its options.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::inner::Inner;
use crate::CommError;
use crate::accounting::WireCounter;
use crate::collective::Collective;
use crate::collective::threads::ThreadOptions;

/// Options of communicators.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// Longest time that an operation may be first in the queue, and that any call may wait for other ranks.
    pub deadline: Duration,
    /// Folder for flight records of communicators made by [`NcclComm::from_environment`] (others use their control
    /// group's).
    pub flight_dir: Option<PathBuf>,
    /// Number of consecutive ranks that count as one machine, instead of detecting machines. It also applies only to
    /// [`NcclComm::from_environment`] (others use their control group's machines).
    pub node_size: Option<usize>,
    /// Orders work by events of the context, if the driver supports them.
    pub context_events: bool,
    /// Gives operations priority over compute kernels that wait for resources of the device.
    pub high_priority: bool,
}

impl Default for NcclOptions {
    fn default() -> Self {
        let deadline = ThreadOptions::default().deadline;
        Self { deadline, flight_dir: None, node_size: None, context_events: true, high_priority: true }
    }
}

/// The work of this rank that a collective must wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// All work submitted so far to the device's primary context, on any stream.
    Context,
    /// All work submitted so far to this stream (a `CUstream`).
    Stream(u64),
}

/// One rank's NCCL communicator. See the [module](super).
///
/// All ranks must issue the same operations in the same order, across all communicators of a device. Calls from
/// several threads are serialized.
#[derive(Debug)]
pub struct NcclComm {
    pub(super) inner: Arc<Inner>,
}

impl NcclComm {
    /// Returns this rank in the communicator, from 0.
    pub fn rank(&self) -> usize {
        self.inner.core.group.me
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.inner.core.group.world()
    }

    /// Returns the control group of the same ranks, for small messages between their hosts.
    pub fn control(&self) -> &Arc<dyn Collective> {
        &self.inner.core.control
    }

    /// Returns the index of the device among those that this process sees.
    pub fn device(&self) -> usize {
        self.inner.core.device.ordinal
    }

    /// Returns the counter of bytes that this rank has received in completed operations, over all communicators split from one another.
    pub fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.core.wire
    }

    /// Returns `true` if events of the context (a driver of CUDA 12.5 or newer) order work, without the host.
    pub fn orders_on_device(&self) -> bool {
        self.inner.context_events
    }

    /// Makes every rank's present and future operation fail with `reason`, and ends this communicator's kernels.
    pub fn abort(&self, reason: &str) {
        let core = &self.inner.core;
        // Relaxed: the number is only for a message.
        let seq = core.issued.load(Ordering::Relaxed);
        core.fault(core.group.at(seq, &"abort").device(format!("this rank has aborted: {reason}")));
        core.await_abort();
    }

    /// Checks that the communicator has not faulted.
    ///
    /// # Errors
    ///
    /// The error of the fault.
    pub fn health(&self) -> Result<(), CommError> {
        self.inner.core.poll()
    }
}
