//! What can go wrong, and how code that cannot return errors ends a rank.

use std::path::PathBuf;

use zero_core::CommError;
use zero_core::checkpoint::CheckpointError;
use zero_core::collective::Difference;
use zero_core::collective::threads::Stopped;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective or a gather failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Ranks have different models or settings.
    #[error(transparent)]
    Different(#[from] Difference),
    /// A parameter of a type that is not sharded.
    #[error(
        "parameter '{path}': expected fp32, got {got}: cast the model before it is sharded; ZeroConfig::param_dtype gathers in 16 bit"
    )]
    Dtype {
        /// The parameter.
        path: String,
        /// Its type.
        got: String,
    },
    /// A parameter on a device that cannot be served.
    #[error("parameter '{path}' is on {device}, {reason}: {instead}")]
    Device {
        /// The parameter.
        path: String,
        /// Where it is.
        device: String,
        /// What is wrong with it.
        reason: &'static str,
        /// What to do in its place.
        instead: &'static str,
    },
    /// Two places of the module have one parameter.
    #[error(
        "parameters '{first}' and '{second}' have one id, so Burn's optimizers would update only the first: \
         give each layer its own parameters, or use one field twice in `forward`"
    )]
    Twice {
        /// Where it was found first.
        first: String,
        /// Where it was found again.
        second: String,
    },
    /// A parameter has a reparameterization, of which Burn allows one.
    #[error(
        "parameter '{path}' has the reparameterization '{name}', and Burn 0.22 allows one a parameter: \
         merge it by `materialize()`, or make adapters of parameters of their own"
    )]
    Reparameterized {
        /// The parameter.
        path: String,
        /// What it has.
        name: String,
    },
    /// An optimizer that needs whole parameters.
    #[error("{optimizer} {reason}, which pieces of parameters cannot give: {instead}")]
    Optimizer {
        /// Its name.
        optimizer: &'static str,
        /// What it does.
        reason: &'static str,
        /// What to do in its place.
        instead: &'static str,
    },
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint is of something else.
    #[error("{}: {what}", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// An optimizer's state cannot be saved or loaded.
    #[error("{0}")]
    State(String),
    /// Gradients meet a model that they are not of.
    #[error(
        "parameter '{path}' has a gradient, but is not in the model that is updated: pass the model that `shard` returned"
    )]
    Missing {
        /// The parameter.
        path: String,
    },
}

/// Ends a computation that cannot return an error: the launcher catches the payload, nothing is printed.
pub(crate) fn raise(error: CommError) -> ! {
    std::panic::resume_unwind(Box::new(error))
}

/// Ends a computation for a reason that is not a collective's: the library used wrongly.
pub(crate) fn stop(message: String) -> ! {
    std::panic::resume_unwind(Box::new(Stopped(message)))
}
