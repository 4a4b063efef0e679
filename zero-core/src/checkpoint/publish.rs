//! Rank 0's part of a save: it creates the hidden folder, and makes it the newest checkpoint.

use std::fs::{self, File, TryLockError};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::disk::{create_dir, rename, sync_dir, write_file};
use super::error::{CheckpointError, io_at};
use super::exchange::Heartbeat;
use super::names::{
    LATEST, MANIFEST, NEW_LATEST, PRUNED, REPLACED, SAVING, is_remains, names_in, pointed_at, rank_file, step_folder,
};
use super::{Manifest, SideFile, sound};
use crate::files;

const LOCK: &str = ".lock";
const NEW_MANIFEST: &str = ".manifest-new";

/// Options of a save.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Number of complete checkpoints to keep, including the new one; all if `None`.
    pub keep_last: Option<NonZeroUsize>,
    /// Steps whose checkpoints are always kept, such as the best so far.
    pub protect: Vec<u64>,
    /// Files to save with the tensors, such as a tokenizer's: the same on every rank.
    pub files: Vec<SideFile>,
}

/// Names of the pruned checkpoints, and reasons why others remain.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Published {
    pub(super) pruned: Vec<String>,
    pub(super) not_pruned: Vec<String>,
}

/// A save in progress. If dropped before it is published, it removes its files.
#[derive(Debug)]
pub(super) struct Staging {
    dir: PathBuf,
    step: u64,
    id: String,
    /// `None` once the folder has been published.
    folder: Option<PathBuf>,
    /// `None` if the file system has no locks.
    _lock: Option<Lock>,
}

/// A locked file. Dropping it unlocks it; if the process ends first, the system unlocks it.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Unlocked explicitly, not by closing the file: a process that another thread is starting right now holds a copy of it, and the
        // next save would find it locked.
        if let Err(error) = self.0.unlock() {
            tracing::warn!("cannot release the lock of a checkpoint folder: {error}");
        }
    }
}

impl Staging {
    /// Locks the folder `dir` for this save, removes remains of other saves and creates the folder that the ranks write into.
    pub(super) fn begin(dir: &Path, step: u64, progress: &Heartbeat) -> Result<Self, CheckpointError> {
        create_dir(dir)?;
        let path = dir.join(LOCK);
        let file = files::open_own(&path).map_err(io_at("open", &path))?;
        let lock = match file.try_lock() {
            Ok(()) => Some(Lock(file)),
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { dir: dir.to_path_buf() }),
            // The sweep without a lock never removes a complete checkpoint: a second run would lose its save, and get an error.
            Err(TryLockError::Error(error)) if files::is_not_offered(&error) => {
                files::warn_once(format!(
                    "cannot lock {} ({error}): make sure that no two runs save into the same folder",
                    path.display()
                ));
                None
            }
            Err(TryLockError::Error(error)) => return Err(io_at("lock", &path)(error)),
        };
        sweep(dir, progress)?;
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let id = format!("{nanos:x}-{:x}", std::process::id());
        let folder = dir.join(Self::folder_name(step, &id));
        fs::create_dir(&folder).map_err(io_at("create folder", &folder))?;
        Ok(Self { dir: dir.to_path_buf(), step, id, folder: Some(folder), _lock: lock })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn folder_name(step: u64, id: &str) -> String {
        format!("{SAVING}{}-{id}", step_folder(step))
    }

    /// Makes the folder, in which every rank's file is durable, the newest checkpoint.
    pub(super) fn publish(
        mut self,
        mut manifest: Manifest,
        options: &SaveOptions,
        progress: &Heartbeat,
    ) -> Result<Published, CheckpointError> {
        let folder = self.folder.clone().expect("a staging is published once");
        for (rank, &expected_bytes) in manifest.file_bytes.iter().enumerate() {
            let path = folder.join(rank_file(rank, manifest.world));
            let got_bytes = match fs::metadata(&path) {
                Ok(found) => found.len(),
                // Its rank has written it, so that rank sees another disk under this path.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(CheckpointError::Missing {
                        what: "a rank's file in rank 0's view of the folder",
                        path,
                    });
                }
                Err(error) => return Err(io_at("read the metadata of", &path)(error)),
            };
            if got_bytes != expected_bytes {
                return Err(CheckpointError::Truncated { path, expected_bytes, got_bytes });
            }
        }
        manifest.saved_unix_ms = self.now_unix_ms();
        let path = folder.join(MANIFEST);
        let new_manifest = folder.join(NEW_MANIFEST);
        write_file(&new_manifest, &manifest.encode(&path)?)?;
        rename(&new_manifest, &path)?;
        sync_dir(&folder)?;

        let name = step_folder(self.step);
        let (new_latest, latest) = (self.dir.join(NEW_LATEST), self.dir.join(LATEST));
        write_file(&new_latest, format!("{name}\n").as_bytes())?;

        let target = self.dir.join(&name);
        let aside = self.dir.join(format!("{REPLACED}{name}"));
        let replaces = target.exists();
        if replaces {
            rename(&target, &aside)?;
        }
        if let Err(error) = rename(&folder, &target) {
            if replaces {
                rename(&aside, &target)?;
            }
            return Err(error);
        }
        self.folder = None;
        sync_dir(&self.dir)?;
        rename(&new_latest, &latest)?;
        sync_dir(&self.dir)?;

        let mut published = Published::default();
        if replaces {
            remove(&aside).unwrap_or_else(|error| published.not_pruned.push(error.to_string()));
        }
        self.prune((&name, &manifest), options, &mut published, progress);
        Ok(published)
    }

    /// Returns the current time, or a time just after that of the newest checkpoint if the clock went back.
    fn now_unix_ms(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let before = pointed_at(&self.dir).ok().flatten().and_then(|name| Manifest::read(&self.dir.join(name)).ok());
        before.map_or(now, |manifest| now.max(manifest.saved_unix_ms.saturating_add(1)))
    }

    /// Removes the oldest checkpoints. Folders without a valid manifest are neither counted nor removed. Checkpoints with damaged tensors
    /// are not counted, and are removed only if enough intact ones are newer: an intact one is never removed because of them.
    fn prune(
        &self,
        (newest, manifest): (&str, &Manifest),
        options: &SaveOptions,
        published: &mut Published,
        progress: &Heartbeat,
    ) {
        let Some(keep) = options.keep_last else { return };
        // Every rank has just written its file and computed the checksums.
        sound::remember(&self.dir.join(newest), manifest, None);
        let names = match names_in(&self.dir) {
            Ok(names) => names,
            Err(error) => return published.not_pruned.push(error.to_string()),
        };
        let mut complete: Vec<(String, Manifest)> = names
            .into_iter()
            .filter_map(|name| Manifest::read(&self.dir.join(&name)).ok().map(|manifest| (name, manifest)))
            .collect();
        complete.sort_by(|(a, b), (c, d)| (d.saved_unix_ms, d.step, c).cmp(&(b.saved_unix_ms, b.step, a)));
        // Skips the check if nothing would be removed.
        if complete.len() <= keep.get() {
            return;
        }
        let mut kept = 0;
        for (name, manifest) in complete {
            let path = self.dir.join(&name);
            if kept < keep.get() {
                match sound::problem(&path, &manifest, progress) {
                    None => kept += 1,
                    Some(problem) => published.not_pruned.push(format!(
                        "{name} is damaged, so it does not count as one of the {keep} to keep; remove it: {problem}"
                    )),
                }
                continue;
            }
            if name == newest || options.protect.contains(&manifest.step) {
                continue;
            }
            let gone = self.dir.join(format!("{PRUNED}{name}"));
            // Renamed first, durably, so that no crash leaves half a checkpoint under the old name.
            let renamed = rename(&path, &gone).and_then(|()| sync_dir(&self.dir));
            match renamed.and_then(|()| remove(&gone)) {
                Ok(()) => {
                    sound::forget(&manifest);
                    published.pruned.push(name);
                }
                Err(error) => published.not_pruned.push(error.to_string()),
            }
            progress.made();
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let Some(folder) = &self.folder else { return };
        for path in [folder.clone(), self.dir.join(NEW_LATEST)] {
            // The save has already failed, and its own error is returned.
            if let Err(error) = remove(&path) {
                tracing::warn!("cannot clean up after a failed save; the next save does it: {error}");
            }
        }
    }
}

/// Removes the remains of saves whose processes died, and restores the name of a checkpoint that was about to be replaced. The caller must
/// hold the lock.
fn sweep(dir: &Path, progress: &Heartbeat) -> Result<(), CheckpointError> {
    // A process may have been killed before its sync: its renames must not be undone later.
    sync_dir(dir)?;
    for entry in fs::read_dir(dir).map_err(io_at("list", dir))? {
        let entry = entry.map_err(io_at("list", dir))?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str() else { continue };
        let replaced = name.strip_prefix(REPLACED).filter(|_| is_remains(name));
        if let Some(former) = replaced.map(|name| dir.join(name)).filter(|former| !former.exists()) {
            rename(&path, &former)?;
            sync_dir(dir)?;
        } else if is_remains(name) {
            // Removing a large file may take seconds.
            for file in fs::read_dir(&path).into_iter().flatten().flatten() {
                remove(&file.path())?;
                progress.made();
            }
            remove(&path)?;
        }
    }
    Ok(())
}

/// Removes a file, or a folder with its contents, that may be gone already.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    let outcome = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(io_at("remove", path)),
    }
}
