//! Bytes that a rank holds, see [`crate::stats`].

use zero_core::accounting::Gauge;

/// Bytes by kind.
#[derive(Default)]
pub(crate) struct Gauges {
    pub(crate) parameters: Gauge,
    pub(crate) gradients: Gauge,
    pub(crate) optimizer: Gauge,
    /// Full gradients on their way to be reduced, at the stages that shard gradients.
    pub(crate) in_flight: Gauge,
    pub(crate) gathered: Gauge,
    /// Bytes kept in host memory instead of with the backend.
    pub(crate) host: Gauge,
}
