//! Functions that return only when the contents and names of files and folders are durable on the disk.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::error::{CheckpointError, io_at};
use crate::files::{is_not_offered, warn_once};

/// Creates `dir` and its missing parents, and makes each name durable in its parent.
pub(super) fn create_dir(dir: &Path) -> Result<(), CheckpointError> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = parent_of(dir);
    if parent != dir {
        create_dir(parent)?;
    }
    match fs::create_dir(dir) {
        // Another process has created it in the meantime.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        outcome => outcome.map_err(io_at("create folder", dir)),
    }?;
    sync_dir(parent)
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// Makes the names in `dir` durable: files created, renamed or removed there.
pub(super) fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    match File::open(dir).and_then(|folder| folder.sync_all()) {
        // Files are synced all the same; the file system then decides the order of names.
        Err(error) if is_not_offered(&error) => {
            warn_once(format!(
                "the file system of {} cannot sync folders ({error}): a power failure may lose its newest file names",
                dir.display()
            ));
            Ok(())
        }
        outcome => outcome.map_err(io_at("sync folder", dir)),
    }
}

/// Writes a new file with durable contents; its name is durable after [`sync_dir`].
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    // `create_new` does not follow a link that somebody else has put there.
    let mut file = File::create_new(path).map_err(io_at("create", path))?;
    file.write_all(bytes).map_err(io_at("write", path))?;
    file.sync_all().map_err(io_at("sync", path))
}

/// Renames a file or folder, replacing a file that has the new name.
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).map_err(io_at("rename to", to))
}

/// Fills `out` from byte `offset` on. It uses positioned reads and no mapping: a bad sector, or a file that another process truncates, is
/// then an error instead of a signal that ends the process.
pub(super) fn read_at(file: &File, path: &Path, out: &mut [u8], offset: u64) -> Result<(), CheckpointError> {
    match file.read_exact_at(out, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            expected_bytes: offset + out.len() as u64,
            got_bytes: file.metadata().map_err(io_at("read the metadata of", path))?.len(),
        }),
        outcome => outcome.map_err(io_at("read", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_synced_is_used_all_the_same() {
        // procfs syncs nothing, as some of CIFS and FUSE.
        let refused = File::open("/proc/self").unwrap().sync_all().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        sync_dir(Path::new("/proc/self")).unwrap();
        assert!(sync_dir(Path::new("/proc/self/none")).is_err());
    }
}
