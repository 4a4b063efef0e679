//! Errors of an engine's setup and use.

use std::path::PathBuf;

use zero_core::checkpoint::CheckpointError;

use crate::loss_scale::LossScaleError;

/// A result whose error is [`EngineError`] by default.
pub type Result<T, E = EngineError> = core::result::Result<T, E>;

/// The reason that the engine cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Ranks have different settings.
    #[error(transparent)]
    Ranks(#[from] zero_core::collective::Difference),
    /// A setting that cannot work.
    #[error("{key} is {got}: {expected}")]
    Setting {
        /// The setting's name.
        key: &'static str,
        /// Its value.
        got: String,
        /// The expected value, and what to change.
        expected: String,
    },
    /// The parameters are in 16 bit and the optimizer keeps no fp32 masters of them.
    #[error(
        "parameters are stored in 16 bit, but {optimizer} keeps no fp32 master weights, so small updates would be \
         lost: use zero_burn::optim::Fused, or fp32"
    )]
    NoMasters {
        /// The optimizer's type.
        optimizer: &'static str,
    },
    /// A name that no parameter has.
    #[error("there is no parameter {path:?}{}", hint.as_ref().map(|hint| format!("; did you mean {hint:?}?")).unwrap_or_default())]
    UnknownParameter {
        /// The name given.
        path: String,
        /// A name that is close to it.
        hint: Option<String>,
    },
    /// A parameter has no such state, or not yet.
    #[error("parameter {path:?} has no {what}: {why}")]
    NoState {
        /// The parameter.
        path: String,
        /// The requested state.
        what: String,
        /// The reason that there is none.
        why: &'static str,
    },
    /// The number of values is not the parameter's number of elements.
    #[error("{path:?} has {expected} elements, but {got} values were given")]
    Size {
        /// The parameter.
        path: String,
        /// Its number of elements.
        expected: usize,
        /// The number of values.
        got: usize,
    },
    /// A call at the wrong time.
    #[error("{0}")]
    Order(&'static str),
    /// A schedule that cannot work.
    #[error(transparent)]
    Schedule(#[from] crate::schedule::ScheduleError),
    /// The training cannot be saved, and what to do instead.
    #[error("this training cannot be saved: {0}")]
    CannotSave(String),
    /// A checkpoint of another training.
    #[error("cannot resume from {}: {what}", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// The difference, and what to change.
        what: String,
    },
    /// Another rank could not load its shards; its own error says why.
    #[error("rank {rank} could not load its part of {}", path.display())]
    LoadFailed {
        /// The first rank that failed.
        rank: usize,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A checkpoint could not be saved or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// State could not be moved to a disk.
    #[error(transparent)]
    Disk(#[from] zero_core::offload::DiskError),
    /// Weights could not be written for Hugging Face.
    #[error(transparent)]
    Export(#[from] zero_models::ModelError),
    /// Rank 0 could not write weights; its own error says why.
    #[error("rank 0 could not write {}", out.display())]
    ExportFailed {
        /// The folder.
        out: PathBuf,
    },
    /// Gradients hold an infinity or a NaN. Nothing was updated.
    #[error(
        "the gradients of update {step} are not finite{}{}: lower the learning rate, clip gradients, or check the data \
         and the loss of this update",
        parameter.as_ref().map_or(String::new(), |path| format!(", first in parameter {path:?}")),
        match rank {
            Some(rank) => format!("; the loss is not finite on rank {rank}"),
            None => "; the loss is finite on every rank".to_owned(),
        }
    )]
    NotFinite {
        /// Number of the update, from 1.
        step: usize,
        /// The first rank on which a loss of the update was not finite.
        rank: Option<usize>,
        /// The first parameter, in the order of the module's fields, whose gradient is not finite. `None` if all are
        /// finite, and only their norm is not.
        parameter: Option<String>,
    },
    /// The loss scale cannot get smaller.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
}
