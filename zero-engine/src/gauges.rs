//! Bytes that a rank holds, by kind.

use zero_core::accounting::Gauge;

/// Bytes by kind.
#[derive(Default)]
pub struct Gauges {
    pub parameters: Gauge,
    pub gradients: Gauge,
    pub optimizer: Gauge,
    /// Full gradients on their way to be reduced, at the stages that shard gradients.
    pub in_flight: Gauge,
    pub gathered: Gauge,
    /// Bytes kept in host memory instead of with the backend.
    pub host: Gauge,
}
