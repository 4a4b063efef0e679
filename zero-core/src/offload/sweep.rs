//! Removal of what dead jobs left behind.

use std::fs::{self, DirEntry, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::offload::DiskError;
use crate::offload::error::system_at;
use crate::offload::folder::{LOCK, NEWBORN_PREFIX, PREFIX};

/// How long a folder may exist before its lock is held: far longer than the two calls in between take.
const NEWBORN: Duration = Duration::from_secs(60);

/// Removes the folders in `parent` whose owners are dead, which is to say, whose locks nobody holds. What cannot be
/// removed (another user's) is named in the log and no error.
pub(crate) fn sweep(parent: &Path) -> Result<(), DiskError> {
    for entry in fs::read_dir(parent).map_err(system_at("list", parent))? {
        let entry = entry.map_err(system_at("list", parent))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !(name.starts_with(PREFIX) || name.starts_with(NEWBORN_PREFIX) && is_old(&entry)) {
            continue;
        }
        match remove_if_dead(&entry.path()) {
            Ok(true) => tracing::info!("removed {}, left by a job that has died", entry.path().display()),
            Ok(false) => {}
            // Another job was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("cannot remove {}, left by another job: {error}", entry.path().display()),
        }
    }
    Ok(())
}

fn is_old(entry: &DirEntry) -> bool {
    let age = entry.metadata().and_then(|found| found.modified()).ok().and_then(|then| then.elapsed().ok());
    age.is_some_and(|age| age > NEWBORN)
}

fn remove_if_dead(folder: &Path) -> io::Result<bool> {
    // Not followed if it is a link: what a link of that name points to is nobody's to remove.
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Ok(false);
    }
    let lock = match File::open(folder.join(LOCK)) {
        Ok(lock) => lock,
        // The owner died while its folder was being removed, or before it had a lock: nothing under a job's name
        // comes into being without one.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return fs::remove_dir_all(folder).map(|()| true),
        Err(error) => return Err(error),
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        // Held until the folder is gone. Two sweepers cannot both get here, and no job takes an existing folder.
        Ok(()) => fs::remove_dir_all(folder).map(|()| true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
