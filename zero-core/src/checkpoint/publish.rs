//! Rank 0's part of a save: the folder that nobody sees yet, and making it the newest checkpoint.

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

/// What to do besides saving.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Complete checkpoints to keep, the new one among them; all when `None`.
    pub keep_last: Option<NonZeroUsize>,
    /// Steps that are kept in any case, such as the best so far.
    pub protect: Vec<u64>,
    /// Files to keep with the tensors, such as a tokenizer's: the same on every rank.
    pub files: Vec<SideFile>,
}

/// What rank 0 has made visible.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Published {
    pub(super) pruned: Vec<String>,
    pub(super) not_pruned: Vec<String>,
}

/// A save that has begun. Dropped before it is published, it removes what it has made.
#[derive(Debug)]
pub(super) struct Staging {
    dir: PathBuf,
    step: u64,
    id: String,
    /// `None` once the folder has been published.
    folder: Option<PathBuf>,
    /// `None` where the file system has no locks.
    _lock: Option<Lock>,
}

/// A locked file, unlocked by dropping it; by the system when the process ends before.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Not left to the closing of the file: a process that another thread is starting right now has a copy of it, and
        // the next save would find it locked.
        if let Err(error) = self.0.unlock() {
            tracing::warn!("the lock of a folder of checkpoints cannot be given back: {error}");
        }
    }
}

impl Staging {
    /// Takes the folder `dir` for this save, removes remains of others and makes the folder that the ranks write into.
    pub(super) fn begin(dir: &Path, step: u64, progress: &Heartbeat) -> Result<Self, CheckpointError> {
        create_dir(dir)?;
        let path = dir.join(LOCK);
        let file = files::open_own(&path).map_err(io_at("open", &path))?;
        let lock = match file.try_lock() {
            Ok(()) => Some(Lock(file)),
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { dir: dir.to_path_buf() }),
            // What is swept without it is never a complete checkpoint: a second run would lose its save, and be told.
            Err(TryLockError::Error(error)) if files::is_not_offered(&error) => {
                files::warn_once(format!(
                    "{} cannot be locked ({error}): see that no two runs save into one folder",
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
                // Written, its rank says, so that rank sees another disk under this path.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(CheckpointError::Missing { what: "a rank's file, as rank 0 sees the folder,", path });
                }
                Err(error) => return Err(io_at("look at", &path)(error)),
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

    /// The time, or just after the time of the newest checkpoint when the clock went back.
    fn now_unix_ms(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let before = pointed_at(&self.dir).ok().flatten().and_then(|name| Manifest::read(&self.dir.join(name)).ok());
        before.map_or(now, |manifest| now.max(manifest.saved_unix_ms.saturating_add(1)))
    }

    /// Removes the oldest checkpoints. Folders without a sound manifest are not counted and not touched; nor are those whose
    /// tensors are damaged, until enough sound ones are newer: a sound one is never removed for them.
    fn prune(
        &self,
        (newest, manifest): (&str, &Manifest),
        options: &SaveOptions,
        published: &mut Published,
        progress: &Heartbeat,
    ) {
        let Some(keep) = options.keep_last else { return };
        // Every rank has written it just now, and summed what it wrote.
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
        // Nothing is looked at where nothing would be removed.
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
                        "{name} is not one of the {keep} that are kept, because it is damaged; remove it: {problem}"
                    )),
                }
                continue;
            }
            if name == newest || options.protect.contains(&manifest.step) {
                continue;
            }
            let gone = self.dir.join(format!("{PRUNED}{name}"));
            // The new name first, on the disk too, so that no crash leaves half a checkpoint under the old one.
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
            // The save has failed already, and its own error is the one to return.
            if let Err(error) = remove(&path) {
                tracing::warn!("what a failed save leaves, until the next one: {error}");
            }
        }
    }
}

/// Removes what saves of processes that have died left behind, and gives a checkpoint that was to be replaced its name
/// back. Only for who holds the lock.
fn sweep(dir: &Path, progress: &Heartbeat) -> Result<(), CheckpointError> {
    // A process that was killed may not have come to this: what it renamed must not come back as it was.
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
            // A large file may take seconds.
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
