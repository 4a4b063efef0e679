//! Settings of an engine's steps.

use crate::loss_scale::LossScaler;
use crate::schedule::Schedule;

/// Settings of an engine's steps.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Micro-batches per update. Losses are averaged over them.
    pub accumulation: usize,
    /// If true, gradients are reduced with each micro-batch, into this rank's shard at stages 2 and 3. If false, each
    /// rank accumulates full gradients in fp32 and reduces them once, with the last micro-batch. `None` is true at
    /// stages 2 and 3, to save memory, and false at 0 and 1, to send fewer bytes. The order of the sums differs, and so
    /// do their last bits. For either value, all stages give the same bits. Accelerate's `sync_each_batch`.
    pub sync_each_batch: Option<bool>,
    /// Maximum L2 norm of the gradients over all parameters and ranks; larger gradients are scaled down.
    pub clipping: Option<f64>,
    /// If true, gradients are summed over the ranks, not averaged. DeepSpeed's `gradient_allreduce_op`.
    pub sums_gradients: bool,
    /// Number of ranks that the program is planned for; any other number is an error. `None` accepts any.
    pub world: Option<usize>,
    /// Learning rate by update.
    pub schedule: Schedule,
    /// The scale of the loss, for fp16.
    pub loss_scale: Option<LossScaler>,
    /// If true, all ranks skip an update if any rank's gradients hold an infinity or a NaN (`Step::Skipped` of `zero-train`). A
    /// loss scale always skips it. Default true; if false, the update is applied and rank 0 warns once.
    pub skip_overflow: bool,
    /// If true, gradients that hold an infinity or a NaN are an error (`EngineError::NotFinite`) on all ranks; the
    /// update is neither applied nor skipped. PyTorch's `error_if_nonfinite`.
    pub error_if_nonfinite: bool,
    /// If true, checkpoints hold only the trained parameters, e.g. an adapter. The program gets the frozen ones from
    /// elsewhere. DeepSpeed's `exclude_frozen_parameters`.
    pub exclude_frozen_parameters: bool,
}

impl Default for EngineConfig {
    /// Returns one micro-batch, no clipping, learning rate 1e-3, no loss scale; non-finite updates are skipped.
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
