//! The crate's errors: bad input, reported in one message that says what to change.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[cfg(feature = "burn")]
use zero_burn::launch::LaunchError;
use zero_core::checkpoint::CheckpointError;
use zero_core::offload::DiskError;
use zero_core::{CommError, RankFailure};
use zero_models::ModelError;

use crate::loss_scale::LossScaleError;
use crate::step::EngineError;

/// A result whose error is [`TrainError`] by default.
pub type Result<T, E = TrainError> = core::result::Result<T, E>;

/// The reason that training cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// An option's value cannot be used.
    #[error("--{option} {got}: {expected}")]
    Option {
        /// The option's name, without dashes.
        option: &'static str,
        /// The value given.
        got: String,
        /// The expected value, and what to change.
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
        /// The problem, what was expected, and what to change.
        problem: String,
    },
    /// The engine rejected its settings, or stopped.
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
    /// This process cannot be one of its launcher's ranks, or no trial of `zero tune` can run.
    #[error("{0}")]
    Launch(String),
    /// A deadline passed while waiting for another rank.
    #[error("training stopped: {0}")]
    Timeout(String),
    /// A rank failed while training.
    #[error("training failed: {0}")]
    Run(String),
    /// No further update is possible because gradients are not finite; a restart would not help.
    #[error("training stopped: {0}")]
    Diverged(String),
    /// A signal ended the run after a completed step.
    #[error("{told}")]
    Signal {
        /// The signal, the run's progress, and where it can be resumed.
        told: String,
        /// 128 plus the signal's number.
        code: u8,
    },
}

/// Returns the error of an option with an unusable value.
pub fn wrong(option: &'static str, got: impl ToString, expected: impl Into<String>) -> TrainError {
    TrainError::Option { option, got: got.to_string(), expected: expected.into() }
}

/// Returns the error of a file with the wrong content; `problem` says what is wrong, what was expected, and what to change.
pub fn wrong_data(path: &Path, problem: impl Into<String>) -> TrainError {
    TrainError::Data { path: path.to_path_buf(), problem: problem.into() }
}

/// Returns a function that converts I/O errors to this crate's error.
pub fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> TrainError + use<> {
    let path = path.to_path_buf();
    move |source| TrainError::Io { action, path: path.clone(), source }
}

/// Converts a launch error that no rank's body returned.
pub(crate) fn of_ranks<E: core::fmt::Display + core::fmt::Debug>(error: &zero_core::LaunchError<E>) -> TrainError {
    match error {
        zero_core::LaunchError::Rank { rank, world, failure } => match &**failure {
            RankFailure::Comm(error) if is_late(error) => {
                TrainError::Timeout(format!("rank {rank} of {world}: {error}"))
            }
            other => TrainError::Run(format!("rank {rank} of {world}: {other}")),
        },
        other => TrainError::Run(other.to_string()),
    }
}

/// Returns whether a deadline passed while waiting for another rank.
pub(crate) fn is_late(error: &CommError) -> bool {
    matches!(error, CommError::Timeout { .. } | CommError::Stalled { .. })
}

impl From<zero_core::LaunchError<TrainError>> for TrainError {
    fn from(error: zero_core::LaunchError<TrainError>) -> Self {
        match error {
            zero_core::LaunchError::Rank { rank, world, failure } => match *failure {
                RankFailure::Failed(error) => error,
                other => of_ranks(&zero_core::LaunchError::Rank { rank, world, failure: Box::new(other) }),
            },
            other => of_ranks(&other),
        }
    }
}

#[cfg(feature = "language")]
impl From<zero_data::DataError> for TrainError {
    fn from(error: zero_data::DataError) -> Self {
        match error {
            zero_data::DataError::Option { option, got, expected } => Self::Option { option, got, expected },
            zero_data::DataError::Io { action, path, source } => Self::Io { action, path, source },
            zero_data::DataError::Data { path, problem } => Self::Data { path, problem },
        }
    }
}

impl From<LossScaleError> for TrainError {
    fn from(error: LossScaleError) -> Self {
        EngineError::from(error).into()
    }
}

/// A collective's error, with no rank known to have failed.
impl From<CommError> for TrainError {
    fn from(error: CommError) -> Self {
        if is_late(&error) { Self::Timeout(error.to_string()) } else { Self::Run(error.to_string()) }
    }
}

#[cfg(feature = "burn")]
impl From<LaunchError<TrainError>> for TrainError {
    fn from(error: LaunchError<TrainError>) -> Self {
        match error {
            LaunchError::Run(error) => error.into(),
            // What no rank was started for.
            LaunchError::Config(_)
            | LaunchError::Environment(_)
            | LaunchError::WithoutMpi { .. }
            | LaunchError::World { .. } => TrainError::Launch(error.to_string()),
            other => TrainError::Run(other.to_string()),
        }
    }
}

/// Ends a program: prints the error, if there is one, and returns its exit code ([`TrainError::exit_code`]).
///
/// ```no_run
/// use burn_flex::Flex;
/// use zero_burn::config::ZeroConfig;
/// use zero_burn::launch::launch_auto;
/// use zero_train::{TrainError, exit};
///
/// fn main() -> std::process::ExitCode {
///     exit(launch_auto::<Flex, _, TrainError>(2, &ZeroConfig::default(), &Default::default(), |_device| Ok(())))
/// }
/// ```
pub fn exit<T>(result: Result<T, impl Into<TrainError>>) -> ExitCode {
    match result {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            let error = error.into();
            let label = if matches!(error, TrainError::Signal { .. }) { "stopped" } else { "error" };
            eprintln!("{label}: {}", format_error(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

impl TrainError {
    /// Returns the exit code of a command that ends with this error: 2 for bad input and for training with non-finite
    /// gradients, 75 when a deadline passed while waiting for another rank, 128 plus the signal's number for a run that a
    /// signal ended, and 1 for any other failure, after which the run may be started again.
    pub fn exit_code(&self) -> u8 {
        const LATE: u8 = zero_core::collective::exit::code::WATCHDOG as u8;
        match self {
            TrainError::Signal { code, .. } => *code,
            _ if self.is_of_a_device() => 1,
            TrainError::Timeout(_) => LATE,
            TrainError::Engine(EngineError::Checkpoint(CheckpointError::Comm { source, .. })) if is_late(source) => {
                LATE
            }
            TrainError::Run(_)
            | TrainError::Engine(
                EngineError::LoadFailed { .. }
                | EngineError::Disk(DiskError::Truncated { .. } | DiskError::Deadline { .. } | DiskError::Stopped { .. })
                | EngineError::Checkpoint(
                    CheckpointError::SaveFailed { .. } | CheckpointError::Stopped { .. } | CheckpointError::Comm { .. },
                ),
            ) => 1,
            _ => 2,
        }
    }

    /// Returns whether the I/O error behind this one comes from a disk, a network or a limit, and may pass, rather than from
    /// the request, such as one for a missing file.
    fn is_of_a_device(&self) -> bool {
        use io::ErrorKind as Kind;
        let first: &(dyn Error + 'static) = self;
        let mut causes = std::iter::successors(Some(first), |&error| error.source());
        causes.find_map(|error| error.downcast_ref::<io::Error>()).is_some_and(|error| {
            !matches!(
                error.kind(),
                Kind::NotFound
                    | Kind::PermissionDenied
                    | Kind::AlreadyExists
                    | Kind::NotADirectory
                    | Kind::IsADirectory
                    | Kind::DirectoryNotEmpty
                    | Kind::ReadOnlyFilesystem
                    | Kind::InvalidInput
                    | Kind::InvalidData
                    | Kind::InvalidFilename
                    | Kind::ArgumentListTooLong
                    | Kind::UnexpectedEof
                    | Kind::Unsupported
                    | Kind::FileTooLarge
                    | Kind::CrossesDevices
                    | Kind::NotSeekable
            ) && error.raw_os_error() != Some(TOO_MANY_LINKS)
        })
    }
}

/// `ELOOP`, which has no stable [`io::ErrorKind`]: a link that leads to itself.
const TOO_MANY_LINKS: i32 = 40;

/// Formats an error with its causes on one line, without causes that the text already contains.
pub fn format_error(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, more| if text.contains(&more) { text } else { format!("{text}: {more}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_fails_is_no_bad_input() {
        let path = || PathBuf::from("out/metrics.jsonl");
        let errors: [&dyn Fn(io::Error) -> TrainError; 4] = [
            &|source| TrainError::Io { action: "write", path: path(), source },
            &|source| crate::monitor::MonitorError::Io { action: "write", path: path(), source }.into(),
            &|source| EngineError::from(CheckpointError::Io { action: "read", path: path(), source }).into(),
            &|source| {
                let (offset, bytes) = (0, 1);
                EngineError::from(DiskError::Io { action: "read", path: path(), offset, bytes, source }).into()
            },
        ];
        for error in errors {
            // No such file or folder, permission denied, read-only; an argument, a folder in a file's place.
            for code in [2, 13, 30, 22, 21, 40] {
                assert_eq!(error(io::Error::from_raw_os_error(code)).exit_code(), 2, "{code}");
            }
            // I/O error, no space, quota, stale handle, timed out, not connected (FUSE), too many open files, interrupted.
            for code in [5, 28, 122, 116, 110, 107, 24, 4] {
                assert_eq!(error(io::Error::from_raw_os_error(code)).exit_code(), 1, "{code}");
            }
        }
        let wrong = TrainError::Option { option: "steps", got: "0".into(), expected: "at least 1".into() };
        assert_eq!(wrong.exit_code(), 2);
        let stopped = DiskError::Stopped { path: path(), reason: "it did not answer".into() };
        assert_eq!(TrainError::from(EngineError::from(stopped)).exit_code(), 1);
    }
}
