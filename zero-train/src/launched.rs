//! Communication between a rank's process and the launcher on its machine: environment variables, and files in a folder.

use std::path::Path;

pub use crate::signals::{SIGNALS, StopSignals};

/// The variable that names the folder where ranks write their status.
pub const STATUS_DIR: &str = "ZERO_STATUS_DIR";

/// The variable with the number of restarts of a job so far.
pub const RESTARTS: &str = "ZERO_RESTARTS";

/// The variable with the number of ranks that a job was first started with.
pub const FIRST_RANKS: &str = "ZERO_FIRST_RANKS";

/// The variable with the number of ranks that the job's restarts will have.
pub const RESTART_RANKS: &str = "ZERO_RESTART_RANKS";

/// The variable with the time of a job's first launch, in milliseconds since 1970.
pub const LAUNCHED: &str = "ZERO_LAUNCHED_UNIX_MS";

/// Notifies the launcher on the same machine, if it listens, that this rank has started.
pub fn notify_started(rank: usize) {
    if let Some(dir) = std::env::var_os(STATUS_DIR) {
        // Where there is no such folder, on another machine, nobody looks.
        let _ = std::fs::write(Path::new(&dir).join(format!("rank-{rank:05}.began")), "");
    }
}

/// Writes the exit code and the reason of a failed rank for the launcher on the same machine.
pub fn write_status(rank: usize, code: u8, reason: &str) {
    let Some(dir) = std::env::var_os(STATUS_DIR) else { return };
    let (path, partial) = (format!("rank-{rank:05}.txt"), format!("rank-{rank:05}.partial"));
    let dir = Path::new(&dir);
    // As above; a word that cannot be left is on standard error too.
    if std::fs::write(dir.join(&partial), format!("{code}\n{reason}")).is_ok() {
        let _ = std::fs::rename(dir.join(partial), dir.join(path));
    }
}
