//! Measurements of a rank's memory and traffic.

use burn_backend::Backend;
use serde::{Deserialize, Serialize};
use zero_core::accounting::{Gauge, StateBytes, WireBytes};

use crate::abort::raise;
use crate::context::Context;

/// One rank's measured memory and traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStats {
    /// Model state: parameters and gradients at their peak since the last reset, optimizer state held now.
    pub model_state_bytes: StateBytes,
    /// Peak bytes of full gradients waiting to be reduced since the last reset, at stages 2 and 3; at stages 0 and 1 they are part of the
    /// model state.
    pub gradients_in_flight_peak: u64,
    /// Peak bytes of gathered parameters in the cache since the last reset.
    pub gathered_bytes_peak: u64,
    /// Bytes of gathered parameters held now.
    pub gathered_bytes: u64,
    /// Bytes received from other ranks since the rank began.
    pub wire_bytes: WireBytes,
}

/// Returns the measurements of the current thread's rank over inner backend `B`.
pub fn rank_stats<B: Backend>() -> RankStats {
    let context = Context::<B>::current();
    let gauges = &context.rank.gauges;
    RankStats {
        model_state_bytes: StateBytes {
            parameters: gauges.parameters.peak(),
            gradients: gauges.gradients.peak(),
            optimizer: gauges.optimizer.live(),
        },
        gradients_in_flight_peak: gauges.in_flight.peak(),
        gathered_bytes_peak: gauges.gathered.peak(),
        gathered_bytes: gauges.gathered.live(),
        wire_bytes: context.rank.wire.read(),
    }
}

/// Returns the bytes of this rank's model state in host memory instead of with the backend ([`Tier::Host`](crate::config::Tier)).
pub fn host_bytes<B: Backend>() -> u64 {
    Context::<B>::current().rank.gauges.host.live()
}

/// Starts a new measuring period for peaks.
pub fn reset_peaks<B: Backend>() {
    let gauges = &Context::<B>::current().rank.gauges;
    [&gauges.parameters, &gauges.gathered, &gauges.gradients, &gauges.in_flight]
        .into_iter()
        .for_each(Gauge::reset_peak);
}

/// Gathers every rank's `bytes`, of any length, in rank order, on every rank. A collective.
pub fn all_gather_bytes<B: Backend>(bytes: Vec<u8>) -> Vec<Vec<u8>> {
    Context::<B>::current().collective().all_gather_bytes(bytes).unwrap_or_else(|error| raise(error))
}

/// Gathers every rank's `values`, in rank order, on every rank. A collective; it moves 8 bytes per value and rank.
///
/// All ranks pass equally many values.
pub fn all_gather<B: Backend>(values: &[f64]) -> Vec<Vec<f64>> {
    Context::<B>::current().collective().all_gather_values(values).unwrap_or_else(|error| raise(error))
}
