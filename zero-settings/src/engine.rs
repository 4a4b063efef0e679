//! Settings of an engine's steps.

use crate::loss_scale::LossScaler;
use crate::schedule::Schedule;

/// Settings of an engine's steps.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Micro-batches per update. Their losses are averaged.
    pub accumulation: usize,
    /// True if gradients are reduced with each micro-batch, into this rank's shard at stages 2 and 3; otherwise they are
    /// summed on the rank, whole and in fp32, and reduced once, at the last. `None` is true at stages 2 and 3, for
    /// memory, and false at 0 and 1, for fewer bytes on the wire: sums in another order, which differ in their last bits.
    /// With either value all stages give the same bits. Accelerate's `sync_each_batch`.
    pub sync_each_batch: Option<bool>,
    /// Gradients are scaled down so that their L2 norm over all parameters and ranks is at most this.
    pub clipping: Option<f64>,
    /// Gradients are added over the ranks; otherwise they are averaged. DeepSpeed's `gradient_allreduce_op`.
    pub sums_gradients: bool,
    /// The number of ranks that the program was planned for: another number of them is an error. `None` for any.
    pub world: Option<usize>,
    /// Learning rate by update.
    pub schedule: Schedule,
    /// The scale of the loss, for fp16.
    pub loss_scale: Option<LossScaler>,
    /// An update whose gradients hold an infinity or a NaN on any rank is skipped on all (`Step::Skipped` of `zero-train`). Always so with a loss
    /// scale. Default true; where it is false, such an update is made, and rank 0 warns once.
    pub skip_overflow: bool,
    /// An update whose gradients hold an infinity or a NaN is an error (`EngineError::NotFinite`) on all ranks, and is neither
    /// made nor skipped. PyTorch's `error_if_nonfinite`.
    pub error_if_nonfinite: bool,
    /// Checkpoints hold what is trained, and not the parameters that are frozen, which the program has from elsewhere: an
    /// adapter alone. DeepSpeed's `exclude_frozen_parameters`.
    pub exclude_frozen_parameters: bool,
}

impl Default for EngineConfig {
    /// One micro-batch, no clipping, learning rate 1e-3, no loss scale; updates that are not finite are skipped.
    fn default() -> Self {
        Self {
            accumulation: 1,
            sync_each_batch: None,
            clipping: None,
            sums_gradients: false,
            world: None,
            schedule: Schedule::Constant(1e-3),
            loss_scale: None,
            skip_overflow: true,
            error_if_nonfinite: false,
            exclude_frozen_parameters: false,
        }
    }
}
