//! Errors of data and tokenizers.

use std::io;
use std::path::{Path, PathBuf};

/// `Result` with this crate's error type.
pub type Result<T, E = DataError> = core::result::Result<T, E>;

/// Unusable data or an unusable tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A setting does not fit the data or the model. Settings have the names of the options of `zero train`.
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
        source: io::Error,
    },
    /// A file has the wrong content.
    #[error("{}: {problem}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// The problem, what was expected, and what to change.
        problem: String,
    },
}

pub(crate) fn wrong(option: &'static str, got: impl ToString, expected: impl Into<String>) -> DataError {
    DataError::Option { option, got: got.to_string(), expected: expected.into() }
}

pub(crate) fn wrong_data(path: &Path, problem: impl Into<String>) -> DataError {
    DataError::Data { path: path.to_path_buf(), problem: problem.into() }
}

pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> DataError + use<> {
    let path = path.to_path_buf();
    move |source| DataError::Io { action, path: path.clone(), source }
}
