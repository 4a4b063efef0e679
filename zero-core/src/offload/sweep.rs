//! Removal of the files that dead jobs leave behind, and of nothing else.
//!
//! Users may also put files of any name into the parent folder. So a folder belongs to a job only if it has exactly the format of a job's
//! name, is a folder and not a link to one, and belongs to this user. Within it, only regular files with a job's names are removed. Files
//! are removed through the open folder, so that a folder put in its place is not affected.

use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::fs::{self, DirEntry};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::collective::machine::Machine;
use crate::offload::DiskError;
use crate::offload::error::system_at;

/// Prefix of the name of a job's folder.
pub(crate) const PREFIX: &str = "zero-swap-";

/// Prefix of the name before the lock is held, so that no other job takes the folder for a dead job's.
pub(crate) const NEWBORN_PREFIX: &str = ".zero-swap-new-";

/// The file in the folder whose lock shows that the job is alive.
pub(crate) const LOCK: &str = "owner.lock";

/// Time that a folder may exist before its lock is held: far longer than the two calls in between take.
const NEWBORN: Duration = Duration::from_secs(60);

/// Removes this machine's folders in `parent` whose owners are dead, that is, whose locks nobody holds. A folder that cannot be removed is
/// logged; it is not an error.
pub(crate) fn sweep(parent: &Path) -> Result<(), DiskError> {
    let machine = Machine::here();
    for entry in fs::read_dir(parent).map_err(system_at("list", parent))? {
        let entry = entry.map_err(system_at("list", parent))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let newborn = name.strip_prefix(NEWBORN_PREFIX);
        if !newborn.or(name.strip_prefix(PREFIX)).is_some_and(|rest| is_job(rest, &machine))
            || newborn.is_some() && !is_old(&entry)
        {
            continue;
        }
        match remove_if_dead(&entry.path()) {
            Ok(true) => tracing::info!("removed {}, left by a job that has died", entry.path().display()),
            Ok(false) => {}
            // Another job has already removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("cannot remove {}, left by another job: {error}", entry.path().display()),
        }
    }
    Ok(())
}

/// Returns the rest of the name of a new job's folder: host, start of the boot identity, process, and 16 hexadecimal digits.
pub(crate) fn new_job(machine: &Machine) -> String {
    let (host, boot) = name_of(machine);
    format!("{host}-{boot}-{}-{:016x}", std::process::id(), RandomState::new().build_hasher().finish())
}

/// Returns `true` if the rest of a name is that of a job of this machine: it has the same host name (before a reboot) or the same boot
/// identity (from another container).
fn is_job(rest: &str, machine: &Machine) -> bool {
    let parts: Vec<&str> = rest.rsplitn(4, '-').collect();
    let &[random, process, boot, host] = parts.as_slice() else { return false };
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let is_process = process.parse::<u32>().is_ok_and(|number| number.to_string() == process);
    let (own_host, own_boot) = name_of(machine);
    is_process
        && random.len() == 16
        && is_hex(random)
        && boot.len() == 8
        && is_hex(boot)
        && (host == own_host || boot == own_boot)
}

/// Returns the host and boot identity as used in names: the identity as 8 hexadecimal digits.
fn name_of(machine: &Machine) -> (String, String) {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let host = machine.host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    (host, format!("{:08x}", crc32c::crc32c(machine.id.as_bytes())))
}

/// Returns whether this is the name of a rank's file.
fn is_swap_file(name: &CStr) -> bool {
    let rank = name.to_str().ok().and_then(|name| name.strip_prefix("rank-")?.strip_suffix(".swap"));
    rank.is_some_and(|rank| rank.len() >= 5 && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_old(entry: &DirEntry) -> bool {
    let age = entry.metadata().and_then(|found| found.modified()).ok().and_then(|then| then.elapsed().ok());
    age.is_some_and(|age| age > NEWBORN)
}

fn remove_if_dead(path: &Path) -> io::Result<bool> {
    let folder = match open(path) {
        // A link, a file, or a folder that only another user may enter.
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(false),
        folder => folder?,
    };
    if rustix::fs::fstat(&folder)?.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    // The open must not block: a FIFO in place of the lock would keep the job from starting.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = match rustix::fs::openat(&folder, LOCK, flags, Mode::empty()) {
        Ok(lock) => lock,
        // The owner died after removing everything but the folder, or before it had a lock: a folder gets its final name only with
        // a lock. Only an empty folder is removed.
        Err(Errno::NOENT) => return remove_folder(path).map(|()| true),
        Err(error) => return Err(io::Error::new(io::Error::from(error).kind(), format!("its {LOCK}: {error}"))),
    };
    if !FileType::from_raw_mode(rustix::fs::fstat(&lock)?.st_mode).is_file() {
        return Err(io::Error::other(format!("its {LOCK} is not a regular file")));
    }
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        // Held until the folder is gone. Two jobs cannot both get here, and no job reuses an existing folder.
        Ok(()) => remove_own(path, folder.as_fd()).map(|()| true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
}

/// Removes a folder that this job has created.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    remove_own(path, open(path)?.as_fd())
}

/// Removes the files that a job creates in its folder, the lock last, and then the folder.
fn remove_own(path: &Path, folder: BorrowedFd<'_>) -> io::Result<()> {
    let (mut own, mut foreign) = (Vec::new(), None);
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_file = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode).is_file();
        let regular = || rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).map(is_file);
        match name.to_bytes() {
            b"." | b".." => {}
            bytes if bytes == LOCK.as_bytes() => {}
            _ if is_swap_file(name) && regular()? => own.push(name.to_owned()),
            _ => foreign = Some(name.to_owned()),
        }
    }
    own.iter().try_for_each(|name| rustix::fs::unlinkat(folder, name, AtFlags::empty()))?;
    if let Some(name) = foreign {
        // Its lock stays too, so that the folder can still be recognized.
        let name = name.to_string_lossy();
        return Err(io::Error::other(format!(
            "it contains {name}, which no job created: move that away, or remove the folder"
        )));
    }
    match rustix::fs::unlinkat(folder, LOCK, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => remove_folder(path),
        Err(error) => Err(error.into()),
    }
}

/// Removes an empty folder.
fn remove_folder(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_jobs_of_this_machine_are_ours() {
        let machine = |host: &str, id: &str| Machine { host: host.into(), id: id.into() };
        let own = machine("node-1.cluster", "boot a");
        let name = new_job(&own);
        assert!(name.starts_with("node-1.cluster-"), "{name}");
        for (other, is_ours) in [
            (own, true),
            (machine("node-1.cluster", "after a reboot"), true),
            (machine("another container", "boot a"), true),
            (machine("node-2.cluster", "boot b"), false),
            (machine("cluster", "boot b"), false),
        ] {
            assert_eq!(is_job(&name, &other), is_ours, "{other:?}");
        }
        assert!(!new_job(&machine("a/b", "c")).contains('/'));
    }
}
