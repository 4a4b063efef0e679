//! The contents of a folder of checkpoints, for inspection. Nothing is changed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::error::{CheckpointError, io_at};
use super::latest::named_by_latest;
use super::names::{LATEST, REPLACED, is_remains, names_in, step_of};
use super::{Check, Manifest};

/// The contents of a folder of checkpoints.
#[derive(Debug, Default)]
pub struct Listing {
    /// The checkpoints, by step.
    pub checkpoints: Vec<ListedCheckpoint>,
    /// Name of the folder that `latest` points to, which need not exist.
    pub latest: Option<String>,
    /// The error if `latest` cannot be read.
    pub latest_problem: Option<CheckpointError>,
    /// Name of the checkpoint that [`find_latest`](super::find_latest) returns after the same check.
    pub resume: Option<String>,
    /// Remains of interrupted saves, by name. The next save into the folder removes them. A save in progress is listed here too.
    pub remains: Vec<InterruptedSave>,
}

/// A checkpoint of a [`Listing`].
#[derive(Debug)]
pub struct ListedCheckpoint {
    /// Its folder's name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// The step in the name.
    pub step: u64,
    /// Time of the save, in milliseconds since 1970, if its manifest can be read.
    pub saved_unix_ms: Option<u64>,
    /// Number of ranks that saved it, if its manifest can be read.
    pub world: Option<usize>,
    /// Version of the crate that wrote it, if its manifest can be read.
    pub crate_version: Option<String>,
    /// Size of the files in its folder, in bytes.
    pub disk_bytes: u64,
    /// All problems found; empty if it is intact.
    pub problems: Vec<CheckpointError>,
}

/// Remains of an interrupted save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InterruptedSave {
    /// Its name.
    pub name: String,
    /// Its size.
    pub disk_bytes: u64,
}

/// Lists everything in `dir`, which may be written to concurrently.
///
/// # Errors
///
/// [`CheckpointError::Io`] if `dir` does not exist or cannot be read.
pub fn list(dir: &Path, check: Check) -> Result<Listing, CheckpointError> {
    let entries = fs::read_dir(dir).map_err(io_at("list", dir))?;
    let names = names_in(dir)?;
    let mut listing = Listing::default();
    match named_by_latest(dir, &names) {
        Ok(named) => listing.latest = named,
        Err(error) => listing.latest_problem = Some(error),
    }
    for entry in entries {
        let entry = entry.map_err(io_at("list", dir))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if is_remains(&name) && !names.contains(&name) {
            listing.remains.push(InterruptedSave { disk_bytes: disk_bytes(&entry.path())?, name });
        }
    }
    listing.remains.sort_by(|a, b| a.name.cmp(&b.name));
    for name in names {
        let path = dir.join(&name);
        let (manifest, problems) = Manifest::examine(&path, check);
        let Some(step) = step_of(name.strip_prefix(REPLACED).unwrap_or(&name)) else { continue };
        listing.checkpoints.push(ListedCheckpoint {
            disk_bytes: disk_bytes(&path)?,
            name,
            path,
            step,
            saved_unix_ms: manifest.as_ref().map(|manifest| manifest.saved_unix_ms),
            world: manifest.as_ref().map(|manifest| manifest.world),
            crate_version: manifest.map(|manifest| manifest.crate_version),
            problems,
        });
    }
    listing.checkpoints.sort_by(|a, b| (a.step, &a.name).cmp(&(b.step, &b.name)));
    listing.resume = listing.choose();
    Ok(listing)
}

impl Listing {
    /// Chooses as [`find_latest`](super::find_latest) does: the named checkpoint if it is intact, else the most recently saved intact one.
    fn choose(&self) -> Option<String> {
        let sound = || self.checkpoints.iter().filter(|listed| listed.problems.is_empty());
        let named = sound().find(|listed| self.latest.as_ref() == Some(&listed.name));
        let chosen = named.or_else(|| sound().max_by_key(|listed| (listed.saved_unix_ms, listed.step)));
        chosen.map(|listed| listed.name.clone())
    }

    /// Returns the problem of `latest`, if it cannot be read or names no checkpoint.
    pub fn problem(&self, dir: &Path) -> Option<String> {
        if let Some(error) = &self.latest_problem {
            return Some(error.to_string());
        }
        let named = self.latest.as_ref()?;
        let there = self.checkpoints.iter().any(|listed| listed.name == *named);
        (!there).then(|| format!("{} names {named}, which does not exist", dir.join(LATEST).display()))
    }
}

/// Returns whether a checkpoint's folder may have this name.
pub fn is_checkpoint_name(name: &str) -> bool {
    step_of(name.strip_prefix(REPLACED).unwrap_or(name)).is_some()
}

/// Returns the size of a file, or of the files in a folder, in bytes of content. A path that no longer exists counts as 0.
///
/// # Errors
///
/// [`CheckpointError::Io`].
pub fn disk_bytes(path: &Path) -> Result<u64, CheckpointError> {
    let gone = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(0),
        _ => Err(io_at("read the metadata of", path)(error)),
    };
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => return Ok(found.len()),
        Ok(_) => {}
        Err(error) => return gone(error),
    }
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) => return gone(error),
    };
    let mut bytes = 0;
    for entry in entries {
        let found = entry.and_then(|entry| entry.metadata());
        bytes += found.map_or_else(gone, |found| Ok(if found.is_file() { found.len() } else { 0 }))?;
    }
    Ok(bytes)
}
