//! Bytes that a rank holds, by kind.

use zero_core::accounting::Gauge;

/// Bytes by kind.
#[derive(Default)]
pub struct Gauges {
    /// Shards of parameters; full parameters at the stages that do not shard them.
    pub parameters: Gauge,
    /// Reduced gradients.
    pub gradients: Gauge,
    /// Optimizer state, master weights and moving averages.
    pub optimizer: Gauge,
    /// Full gradients on their way to be reduced, at the stages that shard gradients.
    pub in_flight: Gauge,
    /// Full parameters that were gathered.
    pub gathered: Gauge,
    /// Bytes kept in host memory instead of with the backend.
    pub host: Gauge,
}
