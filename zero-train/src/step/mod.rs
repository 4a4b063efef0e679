//! A step of any engine: its settings, results and errors.

mod error;

use std::time::Duration;

pub use error::{EngineError, Result};
pub use zero_settings::EngineConfig;

/// The result of a call of `step`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    /// More micro-batches belong to the update.
    Accumulating {
        /// Micro-batches so far.
        micro_batches: usize,
    },
    /// The parameters have been updated.
    Updated(Update),
    /// The gradients held an infinity or a NaN on some rank: nothing has been updated.
    Skipped {
        /// The loss scale that overflowed.
        loss_scale: f64,
        /// The loss scale from here on.
        next_loss_scale: f64,
        /// Skipped updates so far.
        skipped: usize,
    },
}

/// An update of the parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Number of the update, from 1.
    pub step: usize,
    /// Learning rate used.
    pub lr: f64,
    /// L2 norm of the averaged gradient over all parameters, before clipping.
    pub grad_norm: f64,
    /// Factor by which gradients were multiplied to clip them; 1 if they were not.
    pub clip_factor: f64,
    /// The loss scale used.
    pub loss_scale: f64,
}

/// Returns the warning that is given once, when an update is made with non-finite gradients.
pub fn nonfinite_warning(step: usize) -> String {
    format!(
        "the gradients of update {step} contain an infinity or a NaN, and so do the parameters from now on; \
         set EngineConfig::skip_overflow (bf16.check_grad_overflow in a file) to skip such updates, or \
         error_if_nonfinite (watchdog.error_if_nonfinite) to stop at the first one"
    )
}

/// Time spent since the previous call of `take_times`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// In forward passes.
    pub forward: Duration,
    /// In backward passes, concurrent reductions included.
    pub backward: Duration,
    /// In updates.
    pub step: Duration,
}
