//! Monitoring of a run: files that a person or a program can read while it runs, and tables of time and memory.
//!
//! * Input: a step number and named values, `&[(&str, f64)]`; or timer and memory events.
//! * Output: [`CsvMonitor`] and [`TensorBoardMonitor`] append complete records to files; [`RunReport`] is an HTML page;
//!   [`MemoryTracker`] makes a table.
//! * Threads: everything runs on the caller's thread, except the sampler of [`MemoryTracker`]. Intended for rank 0.

mod csv;
mod memory_table;
pub mod metrics;
mod peak;
mod report;
mod tensorboard;

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

pub use csv::CsvMonitor;
pub use memory_table::{MemoryFigures, MemoryReport, MemoryTracker, Phase};
pub use peak::peak_flops;
pub(crate) use report::write_whole;
pub use report::{RunFacts, RunReport, RunState, page, write_page};
pub use tensorboard::TensorBoardMonitor;

/// A result whose error is [`MonitorError`] by default.
pub type Result<T, E = MonitorError> = core::result::Result<T, E>;

/// The reason that a monitor failed. None of these errors needs to end a run.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "create", "read", "write", ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A monitor's name is not a plain file name.
    #[error("{got:?} cannot be a file name; use letters, digits, '.', '-' and '_'")]
    Name {
        /// The name given.
        got: String,
    },
    /// The existing CSV file has other columns.
    #[error(
        "{} was written with other columns, \"{got}\" instead of \"{expected}\"; move it away or choose another name",
        path.display()
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The first line it should have.
        expected: String,
        /// The first line it has.
        got: String,
    },
    /// A value for a column that the CSV file does not have.
    #[error("{} has no column {got:?}; its columns are {}", path.display(), columns.join(", "))]
    Column {
        /// The file.
        path: PathBuf,
        /// The value's name.
        got: String,
        /// The names of the columns.
        columns: Vec<String>,
    },
    /// The folder is not the output folder of a run.
    #[error("{} is not the --out folder of a run: {problem}", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The thread that samples the memory cannot be started, or panicked.
    #[error("cannot sample the memory: {problem}")]
    Sampler {
        /// The problem.
        problem: String,
    },
}

/// Appends all of `bytes` to a file, or nothing, so that later records stay readable after an error.
pub(crate) fn append(file: &mut File, bytes: &[u8], path: &Path) -> Result<()> {
    let end = file.seek(SeekFrom::End(0)).map_err(io_error("write", path))?;
    file.write_all(bytes).map_err(|error| {
        // Of no use to a file that can be written no more.
        let _ = file.set_len(end);
        io_error("write", path)(error)
    })
}

/// Returns a function that adds the action and the path to an I/O error.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MonitorError {
    let path = path.to_path_buf();
    move |source| MonitorError::Io { action, path, source }
}
