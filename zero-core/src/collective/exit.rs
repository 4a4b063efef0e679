//! Exit of a rank that is a process: its exit codes, and an exit that nothing can block.

use std::io::Write;

pub use crate::collective::error::code;
use crate::{CommError, LaunchError, RankFailure};

/// Returns the exit code for `error`.
pub fn code_of<E: core::fmt::Display + core::fmt::Debug>(error: &LaunchError<E>) -> i32 {
    match error {
        LaunchError::Rank { failure, .. } => match &**failure {
            RankFailure::Comm(error) if matches!(**error, CommError::Timeout { .. } | CommError::Stalled { .. }) => {
                code::WATCHDOG
            }
            _ => code::FAILURE,
        },
        LaunchError::Start(error) => error.code(),
        _ => code::FAILURE,
    }
}

/// Flushes the output and ends the process at once, without destructors and exit handlers: an MPI library uses these to
/// wait for ranks that may never come.
pub fn end_process(code: i32) -> ! {
    flush();
    // SAFETY: `_exit` may be called at any time; it does not return.
    unsafe { libc::_exit(code) }
}

/// Flushes standard output and standard error.
pub(crate) fn flush() {
    // An output that fails cannot show the error either.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
}
