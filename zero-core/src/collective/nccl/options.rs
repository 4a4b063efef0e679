//! What communicators may be told.

use std::path::PathBuf;
use std::time::Duration;

use crate::collective::threads::ThreadOptions;

/// How communicators are run.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// The longest that an operation may be first in line without ending, and that any call may wait for other ranks.
    pub deadline: Duration,
    /// Where flight records go; of communicators made by [`NcclComm::from_environment`](super::NcclComm::from_environment) (others record in their control
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
