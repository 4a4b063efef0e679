//! Bytes that a rank holds, see [`crate::stats`].

use zero_core::accounting::Gauge;

/// Bytes by kind.
#[derive(Default)]
pub(crate) struct Gauges {
    pub(crate) parameters: Gauge,
    pub(crate) gradients: Gauge,
    pub(crate) optimizer: Gauge,
    /// Whole gradients on their way to being reduced, at the stages that shard gradients.
    pub(crate) in_flight: Gauge,
    pub(crate) gathered: Gauge,
    /// What is kept in the host's memory in place of the backend's.
    pub(crate) host: Gauge,
}
