//! How a rank that is a process ends: its exit codes, and an end that nothing can hold up.

use std::io::Write;

pub use crate::collective::error::code;
use crate::{CommError, LaunchError, RankFailure};

/// The exit code that tells of `error`.
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

/// Ends the process at once, after what was printed: without destructors and exit handlers, which an MPI library uses to
/// wait for ranks that may never come.
pub fn end_process(code: i32) -> ! {
    flush();
    // SAFETY: `_exit` may be called at any time; it does not return.
    unsafe { libc::_exit(code) }
}

/// Lets out what was printed.
pub(crate) fn flush() {
    // Who cannot be written to any more will not read why.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
}
