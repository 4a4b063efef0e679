//! A folder that appears under its name complete or not at all.
//!
//! Its contents are written into a hidden sibling, `.NAME.writing-...`; publishing syncs the sibling and renames it. A killed process
//! leaves the sibling, which nobody reads and which may be removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::disk::{rename, sync_dir, write_file};
use super::error::{CheckpointError, io_at};

/// A folder that is being written. If dropped before it is published, it removes its files.
///
/// ```
/// use zero_core::checkpoint::NewFolder;
/// # let dir = tempfile::tempdir().unwrap();
/// let folder = NewFolder::begin(&dir.path().join("model")).unwrap();
/// folder.write_file("config.json", b"{}").unwrap();
/// assert!(!dir.path().join("model").exists());
/// assert!(folder.publish().unwrap().join("config.json").is_file());
/// ```
#[derive(Debug)]
pub struct NewFolder {
    /// The target path with links resolved, so that a rename replaces the folder and not a link to it.
    target: PathBuf,
    parent: PathBuf,
    /// `None` once it has been published.
    hidden: Option<PathBuf>,
}

impl NewFolder {
    /// Creates the hidden folder next to `target`, which must either not exist or be an empty folder.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Destination`] if `target` is taken or has no parent, and [`CheckpointError::Io`].
    pub fn begin(target: &Path) -> Result<Self, CheckpointError> {
        let refuse = |reason: String| CheckpointError::Destination { path: target.to_path_buf(), reason };
        let mut resolved = target.to_path_buf();
        if fs::symlink_metadata(target).is_ok() {
            resolved = fs::canonicalize(target).map_err(io_at("resolve", target))?;
            if !resolved.is_dir() {
                return Err(refuse(
                    "a file with this name exists; name a folder that does not exist or is empty".to_string(),
                ));
            }
            let entries = fs::read_dir(&resolved).map_err(io_at("list", target))?.count();
            if entries > 0 {
                return Err(refuse(format!(
                    "the folder is not empty ({entries} found); name one that does not exist or is empty, or remove it"
                )));
            }
        }
        let (Some(name), Some(parent)) = (resolved.file_name(), resolved.parent()) else {
            return Err(refuse("expected the path of a folder to create".to_string()));
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        if !parent.is_dir() {
            return Err(refuse(format!("its parent folder {} does not exist; create it first", parent.display())));
        }
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let hidden = format!(".{}.writing-{nanos:x}-{:x}", name.to_string_lossy(), std::process::id());
        let hidden = parent.join(hidden);
        fs::create_dir(&hidden).map_err(io_at("create folder", &hidden))?;
        Ok(Self { parent: parent.to_path_buf(), target: resolved, hidden: Some(hidden) })
    }

    /// Returns the folder to write files into until it is published.
    pub fn path(&self) -> &Path {
        self.hidden.as_deref().expect("a folder that is published is gone")
    }

    /// Writes a file with durable contents.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
    pub fn write_file(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        write_file(&self.path().join(name), bytes)
    }

    /// Gives the folder its name and returns its path. Its files must have been synced; [`SafetensorsWriter`] and
    /// [`write_file`](Self::write_file) do so.
    ///
    /// [`SafetensorsWriter`]: super::SafetensorsWriter
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`], for example if files were created in the target in the meantime.
    pub fn publish(mut self) -> Result<PathBuf, CheckpointError> {
        let hidden = self.path();
        sync_dir(hidden)?;
        // Replaces an empty folder.
        rename(hidden, &self.target)?;
        self.hidden = None;
        sync_dir(&self.parent)?;
        Ok(self.target.clone())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if let Some(hidden) = &self.hidden
            && let Err(error) = fs::remove_dir_all(hidden)
        {
            // The earlier failure has its own error, which is returned.
            tracing::warn!("cannot remove the incomplete folder {}; remove it by hand: {error}", hidden.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn it_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        drop(NewFolder::begin(&target).unwrap());
        assert_eq!(names(dir.path()), [""; 0]);

        fs::create_dir(&target).unwrap();
        let folder = NewFolder::begin(&target).unwrap();
        folder.write_file("a", b"1").unwrap();
        assert_eq!(names(&target), [""; 0]);
        folder.publish().unwrap();
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&target), ["a"]);
    }

    #[test]
    fn what_is_taken_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &str| NewFolder::begin(&dir.path().join(name)).unwrap_err().to_string();
        fs::create_dir(dir.path().join("full")).unwrap();
        fs::write(dir.path().join("full/a"), "").unwrap();
        assert!(refused("full").contains("is not empty (1 found); name one that does not exist or is empty"));
        assert!(refused("full/a").contains("a file with this name exists"));
        assert!(refused("absent/out").contains("create it first"));
        assert_eq!(names(dir.path()), ["full"]);

        // Taken while it is being written.
        let folder = NewFolder::begin(&dir.path().join("late")).unwrap();
        fs::create_dir(dir.path().join("late")).unwrap();
        fs::write(dir.path().join("late/mine"), "").unwrap();
        folder.publish().unwrap_err();
        assert_eq!(names(dir.path()), ["full", "late"]);
        assert_eq!(names(&dir.path().join("late")), ["mine"]);
    }

    #[test]
    fn a_link_to_an_empty_folder_stays_a_link() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", dir.path().join("link")).unwrap();
        let folder = NewFolder::begin(&dir.path().join("link")).unwrap();
        folder.write_file("a", b"").unwrap();
        folder.publish().unwrap();
        assert!(fs::symlink_metadata(dir.path().join("link")).unwrap().is_symlink());
        assert_eq!(names(&dir.path().join("real")), ["a"]);
        std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
        assert!(NewFolder::begin(&dir.path().join("dangling")).unwrap_err().to_string().contains("cannot resolve"));
    }
}
