//! A rank's end of a communicator, and how it is run.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::inner::Inner;
use crate::CommError;
use crate::accounting::WireCounter;
use crate::collective::Collective;
use crate::collective::threads::ThreadOptions;

/// How communicators are run.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// The longest that an operation may be first in line without ending, and that any call may wait for other ranks.
    pub deadline: Duration,
    /// Where flight records go; of communicators made by [`NcclComm::from_environment`] (others record in their control
    /// group's).
    pub flight_dir: Option<PathBuf>,
    /// So many ranks in a row count as one machine, instead of those that say so; of communicators made so, too (others stand on
    /// their control group's machines).
    pub node_size: Option<usize>,
    /// Whether the order of work may be kept by events of the context, where the driver has them.
    pub context_events: bool,
    /// Whether operations go before computing kernels that wait for room on the device.
    pub high_priority: bool,
}

impl Default for NcclOptions {
    fn default() -> Self {
        let deadline = ThreadOptions::default().deadline;
        Self { deadline, flight_dir: None, node_size: None, context_events: true, high_priority: true }
    }
}

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
        self.inner.core.group.me
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.inner.core.group.world()
    }

    /// The group that the communicator stands on: its ranks, and small messages between their hosts.
    pub fn control(&self) -> &Arc<dyn Collective> {
        &self.inner.core.control
    }

    /// The device's number among those that this process sees.
    pub fn device(&self) -> usize {
        self.inner.core.device.ordinal
    }

    /// Bytes that this rank has received by operations that have ended, over all communicators split from one another.
    pub fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.core.wire
    }

    /// Whether work is ordered by events of the context (a driver of CUDA 12.5 or newer), without the host.
    pub fn orders_on_device(&self) -> bool {
        self.inner.context_events
    }

    /// Makes every rank's present and future operation fail with `reason`, and ends this communicator's kernels.
    pub fn abort(&self, reason: &str) {
        let core = &self.inner.core;
        // Relaxed: a number for a message.
        let seq = core.issued.load(Ordering::Relaxed);
        core.fault(core.group.at(seq, &"abort").device(format!("this rank has aborted: {reason}")));
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
