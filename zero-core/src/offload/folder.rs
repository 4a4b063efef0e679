//! A job's folder for swap files, removed when the job ends.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;

use crate::collective::machine::Machine;
use crate::files::{is_not_offered, warn_once};
use crate::offload::error::system_at;
use crate::offload::sweep::{LOCK, NEWBORN_PREFIX, PREFIX};
use crate::offload::{DiskError, sweep};

/// Prefix of the name of a job's folder on a file system without locks: nobody can tell whether its job is alive, so only the job removes
/// it.
const UNLOCKED_PREFIX: &str = "zero-nolock-swap-";

/// A folder for the swap files of one job. It is removed, with its files, when the last handle is dropped. A clone is another handle; a
/// [`SwapFile`](super::SwapFile) holds one.
///
/// The system releases the lock when the process dies, however it dies. This user's next job that opens a folder in the same place on the
/// same machine removes the remains: swap files, the lock, and the folder if it contains nothing else.
#[derive(Clone, Debug)]
pub struct SwapDir {
    owned: Arc<Owned>,
}

#[derive(Debug)]
struct Owned {
    path: PathBuf,
    /// Holds the lock until it is closed, after the folder is removed.
    _lock: File,
}

impl SwapDir {
    /// Removes the folders of dead jobs in `parent`, and creates a folder for this one.
    ///
    /// # Errors
    /// [`DiskError::Missing`], [`DiskError::NotAFolder`] or [`DiskError::NotWritable`], depending on `parent`.
    pub fn open(parent: &Path) -> Result<Self, DiskError> {
        match fs::metadata(parent) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(DiskError::NotAFolder { path: parent.to_path_buf() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DiskError::Missing { path: parent.to_path_buf() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(DiskError::NotAFolder { path: parent.to_path_buf() });
            }
            Err(error) => return Err(system_at("read the metadata of", parent)(error)),
        }
        sweep::sweep(parent)?;
        let name = sweep::new_job(&Machine::here());
        let newborn = parent.join(format!("{NEWBORN_PREFIX}{name}"));
        DirBuilder::new().mode(0o700).create(&newborn).map_err(|error| not_writable(parent, error))?;
        let outcome = lock_new(&newborn.join(LOCK)).and_then(|(lock, refused)| {
            // The final name comes last: other jobs that see it find the lock held.
            let prefix = if refused.is_some() { UNLOCKED_PREFIX } else { PREFIX };
            let path = parent.join(format!("{prefix}{name}"));
            fs::rename(&newborn, &path).map_err(system_at("rename to", &path))?;
            let job = Self { owned: Arc::new(Owned { path, _lock: lock }) };
            if let Some(error) = refused {
                job.warn_once(&format!(
                    "the file system does not support locks ({error}): if this job is killed, remove the folder by hand"
                ));
            }
            Ok(job)
        });
        if outcome.is_err() {
            // The returned error is more useful than the reason why the empty folder stays.
            let _ = sweep::remove(&newborn);
        }
        outcome
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.owned.path
    }

    /// Checks that the disk has room for `bytes` more, before the first of them is written. This does not reserve the space:
    /// [`SwapFile::require`](super::SwapFile::require) does.
    ///
    /// # Errors
    /// [`DiskError::NoSpace`] with the needed and the free bytes.
    pub fn require(&self, bytes: u64) -> Result<(), DiskError> {
        require(self.path(), bytes)
    }

    /// Logs a warning about the folder, once.
    pub(crate) fn warn_once(&self, message: &str) {
        warn_once(format!("{}: {message}", self.path().display()));
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // It is not found if somebody removed it by hand, or if another job removed it as soon as the lock file was gone.
        if let Err(error) = sweep::remove(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}, the folder of this job: {error}", self.path.display());
        }
    }
}

/// Creates the file and locks it, or returns the reason why the file system does not support locks.
fn lock_new(path: &Path) -> Result<(File, Option<io::Error>), DiskError> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let mut file = file.map_err(|error| not_writable(path, error))?;
    let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
    let refused = match locked {
        Ok(()) => None,
        Err(error) if is_not_offered(&error) => Some(error),
        Err(error) => return Err(system_at("lock", path)(error)),
    };
    // For human readers; programs check the lock.
    writeln!(file, "{}", std::process::id()).map_err(|error| not_writable(path, error))?;
    Ok((file, refused))
}

/// Returns the error for failing to create something at `path`.
pub(crate) fn not_writable(path: &Path, source: io::Error) -> DiskError {
    match source.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            DiskError::NotWritable { path: path.to_path_buf(), source }
        }
        io::ErrorKind::StorageFull => no_space(path, 1, false),
        io::ErrorKind::QuotaExceeded => no_space(path, 1, true),
        _ => system_at("write to", path)(source),
    }
}

/// Returns the error for a disk without room for `needed_bytes` more.
pub(crate) fn no_space(path: &Path, needed_bytes: u64, quota: bool) -> DiskError {
    let folder = path.parent().filter(|_| !path.is_dir()).unwrap_or(path);
    // If the system does not report the free space, it has reported that it is too little.
    DiskError::NoSpace { path: folder.to_path_buf(), needed_bytes, free_bytes: free_bytes(folder).unwrap_or(0), quota }
}

/// Checks that the disk of `path` has room for `bytes` more.
pub(crate) fn require(path: &Path, bytes: u64) -> Result<(), DiskError> {
    let free = free_bytes(path).map_err(system_at("get the free space of", path))?;
    if bytes > free { Err(no_space(path, bytes, false)) } else { Ok(()) }
}

/// Returns the bytes that the file system of `path` still has for this user.
///
/// # Errors
/// Errors of the system call.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
