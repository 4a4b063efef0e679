//! What a disk, its folder or a setting ran into: what was asked for, what there is, and what to change.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why something could not be kept on the disk or read back.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A setting that cannot be acted on.
    #[error("{key} = {value} is refused: {reason}")]
    Setting {
        /// The setting's name, as in a configuration file.
        key: &'static str,
        /// What was set.
        value: String,
        /// Why not, and what to set.
        reason: String,
    },
    /// The folder for swap files is not there.
    #[error("{} does not exist: create it on the disk that is to be used, or correct nvme_path", path.display())]
    Missing {
        /// What was given as the folder.
        path: PathBuf,
    },
    /// What was given as the folder for swap files is something else.
    #[error("{} is not a folder: nvme_path must name a folder on the disk that is to be used", path.display())]
    NotAFolder {
        /// What was given as the folder.
        path: PathBuf,
    },
    /// Nothing can be written into the folder for swap files.
    #[error("cannot write into {}: {source}; set nvme_path to a folder that this user may write to", path.display())]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The operating system refused something else than a transfer.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file has been cut by somebody else: what it held is lost.
    #[error(
        "{} was cut from outside: expected {expected_bytes} bytes, found {got_bytes}; nothing else may write to it: resume from \
         the last checkpoint", path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes reserved in it.
        expected_bytes: u64,
        /// Bytes that it has.
        got_bytes: u64,
    },
    /// The disk is too small.
    #[error(
        "no space for {} more in {}, {} is free{}: free some, or set nvme_path to a folder on a larger disk",
        Size(*needed_bytes), path.display(), Size(*free_bytes), if *quota { " but this user's quota is used up" } else { "" }
    )]
    NoSpace {
        /// Where it was to be.
        path: PathBuf,
        /// What is needed beyond what there is already.
        needed_bytes: u64,
        /// What is free.
        free_bytes: u64,
        /// The user's quota is what ran out.
        quota: bool,
    },
    /// The process may not have a file as large.
    #[error(
        "{} would have {}, a process may have files of {}: raise the limit (ulimit -f), or use a file system that allows \
         larger files", path.display(), Size(*needed_bytes), Size(*limit_bytes)
    )]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size with what was asked for.
        needed_bytes: u64,
        /// The largest size allowed.
        limit_bytes: u64,
    },
    /// A read or write failed.
    #[error("cannot {action} {bytes} bytes at byte {offset} of {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Where the part begins that failed.
        offset: u64,
        /// How long it is.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The engine that was asked for cannot run here.
    #[error("io_uring cannot be used: {reason}; choose Auto to use threads instead")]
    NoUring {
        /// What the kernel said to what.
        reason: String,
    },
    /// Something took longer than the caller allowed.
    #[error("{doing} has not ended after {waited:?}")]
    Deadline {
        /// What was waited for.
        doing: String,
        /// How long.
        waited: Duration,
    },
    /// A region was used that is not, or no longer, allocated in this file.
    #[error("{bytes} bytes at byte {offset} of {} are not allocated: a region belongs to one file until it is freed", path.display())]
    NotAllocated {
        /// The file.
        path: PathBuf,
        /// Where the region begins.
        offset: u64,
        /// How long it is.
        bytes: usize,
    },
    /// A region does not fit the buffer that came with it.
    #[error(
        "a region of {region_bytes} bytes ({padded_bytes} on the disk) does not fit a buffer of {buffer_bytes} bytes \
         aligned to {buffer_alignment}: the disk needs {alignment}; make the pool's buffers larger, or move the region in parts"
    )]
    Unfit {
        /// The region's bytes.
        region_bytes: usize,
        /// What it takes on the disk.
        padded_bytes: usize,
        /// The buffer's bytes.
        buffer_bytes: usize,
        /// The buffer's alignment.
        buffer_alignment: usize,
        /// The alignment that the disk needs.
        alignment: usize,
    },
    /// More buffers are needed at the same time than a pool has.
    #[error(
        "{needed} buffers are needed at the same time, the pool has {count}: raise buffer_count to {needed} or more"
    )]
    FewBuffers {
        /// How many at once.
        needed: usize,
        /// How many there are.
        count: usize,
    },
    /// The system has no memory for buffers.
    #[error("cannot map {} of buffers: {source}; lower buffer_count or buffer_size", Size(*bytes as u64))]
    Memory {
        /// How many bytes.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The file's transfers can no longer be relied on.
    #[error("{} is no longer used: {reason}", path.display())]
    Stopped {
        /// The file.
        path: PathBuf,
        /// What happened before.
        reason: String,
    },
}

/// Names action and path of an error of the system.
pub(crate) fn system_at<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> DiskError {
    move |source| DiskError::System { action, path: path.to_path_buf(), source: source.into() }
}

/// Bytes, as a person reads them: exact below a MiB, with a unit above.
pub(crate) struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes < 1 << 20 => write!(f, "{bytes} bytes"),
            bytes if bytes < 1 << 30 => write!(f, "{:.1} MiB", bytes as f64 / (1 << 20) as f64),
            bytes => write!(f, "{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64),
        }
    }
}
