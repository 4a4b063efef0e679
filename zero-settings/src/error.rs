//! Errors and warnings of a configuration.

use std::path::PathBuf;

use super::auto::Filled;
use super::batch::BatchError;
pub use super::node::Format;
use super::node::Node;

/// An error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file with a syntax error.
    #[error("{file}: not valid {format}: {message}")]
    Syntax {
        /// The file.
        file: String,
        /// The format it was read as.
        format: Format,
        /// The parser's message, including the position.
        message: String,
    },
    /// All problems found, one line each.
    #[error("{}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid {
        /// At least one.
        problems: Vec<Problem>,
    },
}

impl ConfigError {
    /// Returns the problems found in the settings; empty if the file could not be read or parsed.
    pub fn problems(&self) -> &[Problem] {
        match self {
            ConfigError::Invalid { problems } => problems,
            ConfigError::Io { .. } | ConfigError::Syntax { .. } => &[],
        }
    }
}

/// A problem at one place.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{file}: {path}{}{kind}", if path.is_empty() { "" } else { ": " })]
pub struct Problem {
    /// The file, as it was named.
    pub file: String,
    /// The dotted path of the key; empty for the file as a whole.
    pub path: String,
    /// The kind of problem.
    pub kind: ProblemKind,
}

/// The kind of a problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    /// A key that neither DeepSpeed nor Accelerate has.
    #[error("unknown key{}", hint(suggestion.as_deref(), known))]
    UnknownKey {
        /// The known key it resembles.
        suggestion: Option<String>,
        /// All keys of the section, when they are few.
        known: Vec<&'static str>,
    },
    /// A value of the wrong type or outside its range.
    #[error("expected {expected}, got {got}")]
    Value {
        /// Accepted values.
        expected: String,
        /// The value found.
        got: String,
    },
    /// A feature that is not supported and that changes the training result if left out.
    #[error("{got} is not supported: {reason}")]
    Refused {
        /// The value found.
        got: String,
        /// Effect of the setting, and an alternative.
        reason: String,
    },
    /// A key that must be given, and what to give.
    #[error("missing: {0}")]
    Missing(String),
    /// An `"auto"` without a value, and what the program has to supply.
    #[error("\"auto\" cannot be filled: {0}")]
    Unfilled(String),
    /// Mutually exclusive settings, and what to change.
    #[error("{0}")]
    Conflict(String),
    /// The file and the program disagree on the number of ranks.
    #[error("the file sets a world size of {file}, but the program runs {program} rank(s): change one of them")]
    World {
        /// The file's number.
        file: usize,
        /// The program's number.
        program: usize,
    },
    /// Batch sizes that do not fit together.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

impl ProblemKind {
    pub(super) fn value(expected: impl Into<String>, got: impl ToString) -> Self {
        Self::Value { expected: expected.into(), got: got.to_string() }
    }

    pub(super) fn refused(got: impl Into<String>, reason: &str) -> Self {
        Self::Refused { got: got.into(), reason: reason.to_owned() }
    }
}

fn hint(suggestion: Option<&str>, known: &[&str]) -> String {
    match (suggestion, known) {
        (Some(key), _) => format!("; did you mean `{key}`?"),
        (None, []) => String::new(),
        (None, known) => format!("; known keys: {}", known.join(", ")),
    }
}

/// A setting that is accepted without its documented effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct Warning {
    /// The dotted path of the key.
    pub path: String,
    /// The actual effect, and the reason.
    pub message: String,
}

/// Limit on reported problems; a file with so many is not a configuration.
const MAX_PROBLEMS: usize = 100;

/// Collects problems and warnings under the keys that the user wrote: an Accelerate YAML is converted to DeepSpeed's
/// keys before it is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Findings {
    /// The file problems are reported for.
    pub(super) file: String,
    /// DeepSpeed path, with the file and path to report instead.
    pub(super) names: Vec<(String, String, String)>,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
    pub(super) filled: Vec<Filled>,
}

impl Findings {
    pub(super) fn new(file: &str) -> Self {
        Self { file: file.to_owned(), ..Self::default() }
    }

    pub(super) fn problem(&mut self, path: &str, kind: impl Into<ProblemKind>) {
        let (file, path) = self.shown(path);
        let problem = Problem { file, path, kind: kind.into() };
        if self.problems.len() < MAX_PROBLEMS && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    pub(super) fn conflict(&mut self, path: &str, message: impl Into<String>) {
        self.problem(path, ProblemKind::Conflict(message.into()));
    }

    pub(super) fn warn(&mut self, path: &str, message: impl Into<String>) {
        let path = self.shown(path).1;
        self.warnings.push(Warning { path, message: message.into() });
    }

    /// Records the value for an `"auto"`; the first record counts.
    pub(super) fn filled(&mut self, path: &str, by: &'static str, value: Option<Node>) {
        let path = self.shown(path).1;
        if self.filled.iter().all(|filled| filled.path != path) {
            self.filled.push(Filled { path, by, value });
        }
    }

    /// Returns `self`, or all problems.
    pub(super) fn finish(self) -> Result<Self, ConfigError> {
        if self.problems.is_empty() { Ok(self) } else { Err(ConfigError::Invalid { problems: self.problems }) }
    }

    fn shown(&self, path: &str) -> (String, String) {
        let named = self.names.iter().find(|(inner, _, _)| inner == path);
        named.map_or_else(|| (self.file.clone(), path.to_owned()), |(_, file, shown)| (file.clone(), shown.clone()))
    }
}
