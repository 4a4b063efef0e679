//! Errors of a disk, its folder or its settings. Each says what was requested, what is available and what to change.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of offloading to a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// An unsupported setting.
    #[error("{key} = {value} is invalid: {reason}")]
    Setting {
        /// The setting's name, as in a configuration file.
        key: &'static str,
        /// The value that was set.
        value: String,
        /// The reason, and what to set instead.
        reason: String,
    },
    /// The folder for swap files does not exist.
    #[error("{} does not exist: create it on the disk to offload to, or correct nvme_path", path.display())]
    Missing {
        /// The configured folder.
        path: PathBuf,
    },
    /// The configured folder for swap files is not a folder.
    #[error("{} is not a folder: nvme_path must name a folder on the disk to offload to", path.display())]
    NotAFolder {
        /// The configured folder.
        path: PathBuf,
    },
    /// The folder for swap files is not writable.
    #[error("cannot write into {}: {source}; set nvme_path to a folder that this user may write to", path.display())]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The operating system reported an error outside of a transfer.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has truncated the file: its contents are lost.
    #[error(
        "{} was truncated by another process: expected {expected_bytes} bytes, found {got_bytes}; keep other processes \
         from writing to it, and resume from the last checkpoint", path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes reserved in it.
        expected_bytes: u64,
        /// Bytes that it has.
        got_bytes: u64,
    },
    /// The disk has too little space.
    #[error(
        "no space for {} more in {}: {} is free{}; free some space, or set nvme_path to a folder on a larger disk",
        Size(*needed_bytes), path.display(), Size(*free_bytes),
        if *quota { ", but this user's quota is used up" } else { "" }
    )]
    NoSpace {
        /// The folder on the full disk.
        path: PathBuf,
        /// Bytes needed in addition to those in use.
        needed_bytes: u64,
        /// Free bytes.
        free_bytes: u64,
        /// True if the user's quota ran out.
        quota: bool,
    },
    /// The file would exceed the size limit of the process or the file system.
    #[error(
        "{} would grow to {}, above the limit of {} per file: raise the limit (ulimit -f), or use a file system that \
         allows larger files", path.display(), Size(*needed_bytes), Size(*limit_bytes)
    )]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size with the requested bytes.
        needed_bytes: u64,
        /// The maximum size.
        limit_bytes: u64,
    },
    /// A read or write failed.
    #[error("cannot {action} {bytes} bytes at byte {offset} of {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Offset of the part that failed.
        offset: u64,
        /// Length of the part.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The requested engine is not available.
    #[error("io_uring cannot be used: {reason}; choose Auto to use threads instead")]
    NoUring {
        /// The failed call and the kernel's error.
        reason: String,
    },
    /// An operation exceeded its deadline.
    #[error("{doing} did not finish within {waited:?}")]
    Deadline {
        /// The operation.
        doing: String,
        /// The time waited.
        waited: Duration,
    },
    /// The region is not, or no longer, allocated in this file.
    #[error("{bytes} bytes at byte {offset} of {} are not allocated: a region belongs to one file until it is freed", path.display())]
    NotAllocated {
        /// The file.
        path: PathBuf,
        /// Offset of the region.
        offset: u64,
        /// Length of the region.
        bytes: usize,
    },
    /// The region does not fit its buffer.
    #[error(
        "a region of {region_bytes} bytes ({padded_bytes} on the disk) does not fit a buffer of {buffer_bytes} bytes \
         aligned to {buffer_alignment}: the disk needs {alignment}; make the pool's buffers larger, or transfer the \
         region in parts"
    )]
    Unfit {
        /// The region's bytes.
        region_bytes: usize,
        /// Bytes that it takes on the disk.
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
        /// Number of buffers needed.
        needed: usize,
        /// Number of buffers in the pool.
        count: usize,
    },
    /// The system has no memory for buffers.
    #[error("cannot map {} of buffers: {source}; lower buffer_count or buffer_size", Size(*bytes as u64))]
    Memory {
        /// Number of bytes.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The file's transfers are no longer reliable.
    #[error("{} can no longer be used: {reason}", path.display())]
    Stopped {
        /// The file.
        path: PathBuf,
        /// The earlier failure.
        reason: String,
    },
}

/// Adds the action and the path to an error of the system.
pub(crate) fn system_at<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> DiskError {
    move |source| DiskError::System { action, path: path.to_path_buf(), source: source.into() }
}

/// A number of bytes, formatted for people: exact below 1 MiB, with a unit above.
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
