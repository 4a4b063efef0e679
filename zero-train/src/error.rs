//! The crate's errors: bad input, told in one message that says what to change.

use std::path::PathBuf;

use zero_core::checkpoint::CheckpointError;
use zero_models::ModelError;

use crate::engine::EngineError;

/// Why training cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// An option's value cannot be used.
    #[error("--{option} {got}: {expected}")]
    Option {
        /// The option's name, without dashes.
        option: &'static str,
        /// The value given.
        got: String,
        /// What is expected, and what to change.
        expected: String,
    },
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "read", "create", ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A data file has the wrong content.
    #[error("{}: {problem}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// What is wrong, what was expected, and what to change.
        problem: String,
    },
    /// The engine refused its settings, or stopped.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A log file cannot be written.
    #[error(transparent)]
    Monitor(#[from] crate::monitor::MonitorError),
    /// A model cannot be configured or loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model does not fit into this machine's memory.
    #[error("{0}")]
    Memory(String),
    /// A configuration file, or the plan made of options, is wrong.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// This process cannot be one of its launcher's ranks.
    #[error("{0}")]
    Launch(String),
    /// A deadline passed in a wait for another rank.
    #[error("training stopped: {0}")]
    Late(String),
    /// A rank failed while training.
    #[error("training failed: {0}")]
    Run(String),
    /// A signal ended the run, after a whole step.
    #[error("{told}")]
    Signal {
        /// The signal, how far the run has come, and where it can be resumed.
        told: String,
        /// 128 and the signal's number.
        code: u8,
    },
}

impl TrainError {
    /// The exit code of a command that ends with this error: 2 for bad input, 75 when a deadline passed in a wait for
    /// another rank, 128 and the number of the signal for a run that one ended, 1 for a run that failed in another way.
    pub fn exit_code(&self) -> u8 {
        match self {
            TrainError::Signal { code, .. } => *code,
            TrainError::Late(_) => zero_core::collective::exit::code::WATCHDOG as u8,
            TrainError::Engine(EngineError::Checkpoint(CheckpointError::Comm { source, .. }))
                if matches!(**source, zero_core::CommError::Timeout { .. } | zero_core::CommError::Stalled { .. }) =>
            {
                zero_core::collective::exit::code::WATCHDOG as u8
            }
            TrainError::Run(_) | TrainError::Engine(EngineError::LossScale(_) | EngineError::LoadFailed { .. }) => 1,
            TrainError::Engine(EngineError::Checkpoint(
                CheckpointError::SaveFailed { .. } | CheckpointError::Stopped { .. } | CheckpointError::Comm { .. },
            )) => 1,
            _ => 2,
        }
    }
}
