//! Errors of this crate.

use std::path::PathBuf;

use zero_core::CommError;
use zero_core::checkpoint::CheckpointError;
use zero_core::collective::Difference;
use zero_core::config::ConfigError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective or a gather failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Ranks have different models or settings.
    #[error(transparent)]
    Different(#[from] Difference),
    /// Settings that contradict one another or the number of ranks.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A setting that is not implemented for Burn 0.22.
    #[error("{setting}: not supported with Burn 0.22; remove it, or use Burn 0.21")]
    Unsupported {
        /// The setting.
        setting: &'static str,
    },
    /// A parameter whose type cannot be sharded.
    #[error(
        "parameter '{path}': expected fp32, got {got}: cast the model to fp32 before you shard it; to gather in 16 bit, set ZeroConfig::param_dtype"
    )]
    Dtype {
        /// The parameter.
        path: String,
        /// Its type.
        got: String,
    },
    /// A parameter on a device that is not supported.
    #[error("parameter '{path}' is on {device}, {reason}: {instead}")]
    Device {
        /// The parameter.
        path: String,
        /// Its device.
        device: String,
        /// Reason why the device is not supported.
        reason: &'static str,
        /// The remedy.
        instead: &'static str,
    },
    /// Two places of the module share one parameter.
    #[error(
        "parameters '{first}' and '{second}' have the same id, so Burn's optimizers would update only the first: \
         give each layer its own parameters, or use one field twice in `forward`"
    )]
    Twice {
        /// Path of its first place.
        first: String,
        /// Path of its second place.
        second: String,
    },
    /// A parameter has a reparameterization already, and Burn allows only one.
    #[error(
        "parameter '{path}' already has the reparameterization '{name}', and Burn 0.22 allows one per parameter: \
         merge it with `materialize()`; to train LoRA adapters, pass the model without them to `shard_lora`"
    )]
    Reparameterized {
        /// The parameter.
        path: String,
        /// Name of that reparameterization.
        name: String,
    },
    /// A weight to quantize has an element that is not finite.
    #[error(
        "parameter '{path}' has an infinity or a NaN, which cannot be quantized: check the weights' files, or do not quantize"
    )]
    NotFinite {
        /// The parameter.
        path: String,
    },
    /// An optimizer that needs full parameters.
    #[error("{optimizer} {reason}, which is not possible on sharded parameters: {instead}")]
    Optimizer {
        /// Its name.
        optimizer: &'static str,
        /// Reason why it needs them.
        reason: &'static str,
        /// The remedy.
        instead: &'static str,
    },
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint of a different model or optimizer.
    #[error("{}: {what}", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// The difference.
        what: String,
    },
    /// An optimizer's state cannot be saved or loaded.
    #[error("{0}")]
    State(String),
    /// Gradients for parameters that the model does not have.
    #[error(
        "parameter '{path}' has a gradient, but the updated model does not have it: pass the model that `shard` returned"
    )]
    Missing {
        /// The parameter.
        path: String,
    },
}
