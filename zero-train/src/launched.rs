//! Words between a rank that is a process and the launcher on its machine: variables of the environment, and files in a folder.

use std::path::Path;

pub use crate::signals::Asked;

/// The variable that names the folder where ranks write their status.
pub const STATUS_DIR: &str = "ZERO_STATUS_DIR";

/// The variable that says how often a job has been started again.
pub const RESTARTS: &str = "ZERO_RESTARTS";

/// The variable that says how many ranks a job was started with first.
pub const FIRST_RANKS: &str = "ZERO_FIRST_RANKS";

/// The variable that says how many ranks the job's restarts will have.
pub const RESTART_RANKS: &str = "ZERO_RESTART_RANKS";

/// The variable that says when a job was launched first, in milliseconds since 1970.
pub const LAUNCHED: &str = "ZERO_LAUNCHED_UNIX_MS";

/// Tells the launcher on the same machine, if there is one that looks, that this rank has begun.
pub fn say_begun(rank: usize) {
    if let Some(dir) = std::env::var_os(STATUS_DIR) {
        // Where there is no such folder, on another machine, nobody looks.
        let _ = std::fs::write(Path::new(&dir).join(format!("rank-{rank:05}.began")), "");
    }
}

/// Writes the status of a rank that failed, and what it ends with, for the launcher on the same machine.
pub fn write_status(rank: usize, code: u8, reason: &str) {
    let Some(dir) = std::env::var_os(STATUS_DIR) else { return };
    let (path, partial) = (format!("rank-{rank:05}.txt"), format!("rank-{rank:05}.partial"));
    let dir = Path::new(&dir);
    // As above; a word that cannot be left is on standard error too.
    if std::fs::write(dir.join(&partial), format!("{code}\n{reason}")).is_ok() {
        let _ = std::fs::rename(dir.join(partial), dir.join(path));
    }
}
