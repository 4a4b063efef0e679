//! Which checkpoint of a folder to resume from.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, io_at};
use super::publish::REPLACED;
use super::{Checkpoint, Manifest, step_folder};

/// Name of the file that names the newest complete checkpoint.
pub(super) const LATEST: &str = "latest";

/// How closely [`find_latest`] looks at a checkpoint before it takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The manifest, and that every file is there with its size and a header that fits. Takes milliseconds.
    Sizes,
    /// Also every byte of every tensor. Takes as long as reading the checkpoint.
    Contents,
}

/// What [`find_latest`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The checkpoint to resume from, if there is any.
    pub checkpoint: Option<PathBuf>,
    /// Newer ones that are not sound, each with the reason, in the order in which they were tried.
    pub skipped: Vec<(PathBuf, CheckpointError)>,
}

/// The newest sound checkpoint in `dir`: the one that `dir/latest` names, else, of the others that are sound, the one
/// saved last. A folder that does not exist has none. Changes nothing.
///
/// # Errors
///
/// When the system does not let `dir` be read.
pub fn find_latest(dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let mut found = Found::default();
    let mut names = names_in(dir)?;
    match named_by_latest(dir, &names) {
        Ok(None) => {}
        Ok(Some(named)) => {
            names.retain(|name| *name != named);
            if found.try_one(dir.join(named), check) {
                return Ok(found);
            }
        }
        Err(error) => found.skipped.push((dir.join(LATEST), error)),
    }
    // Those without a manifest last, and so their reasons.
    names.sort_by_key(|name| {
        let manifest = Manifest::read(&dir.join(name)).ok();
        std::cmp::Reverse(manifest.map(|manifest| (manifest.saved_unix_ms, manifest.step)))
    });
    for name in names {
        if found.try_one(dir.join(name), check) {
            break;
        }
    }
    Ok(found)
}

/// The folder that `latest` means, of those of [`names_in`] or none of them.
pub(super) fn named_by_latest(dir: &Path, names: &[String]) -> Result<Option<String>, CheckpointError> {
    Ok(pointed_at(dir)?.map(|named| {
        // Between two renames of a save the checkpoint is where it was set aside.
        let aside = format!("{REPLACED}{named}");
        if names.contains(&aside) { aside } else { named }
    }))
}

impl Found {
    /// Takes the checkpoint at `path` if it is sound, else notes why not.
    fn try_one(&mut self, path: PathBuf, check: Check) -> bool {
        let problem = match check {
            Check::Sizes => Checkpoint::open(&path).err(),
            Check::Contents => super::verify(&path).into_iter().next(),
        };
        match problem {
            None => self.checkpoint = Some(path),
            Some(error) => self.skipped.push((path, error)),
        }
        self.checkpoint.is_some()
    }
}

/// The step of a folder's name.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_folder(step) == name).then_some(step)
}

/// The names of what may be checkpoints in `dir`, also of those set aside by a save that did not end.
pub(super) fn names_in(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_at("list", dir))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(io_at("list", dir))?.file_name();
        names.extend(name.to_str().map(str::to_string));
    }
    let visible: Vec<String> = names.iter().filter(|name| step_of(name).is_some()).cloned().collect();
    let aside = |name: &String| {
        name.strip_prefix(REPLACED).is_some_and(|n| step_of(n).is_some() && !visible.iter().any(|v| v == n))
    };
    names.retain(|name| step_of(name).is_some() || aside(name));
    Ok(names)
}

/// The name in `dir/latest`, if there is such a file.
pub(super) fn pointed_at(dir: &Path) -> Result<Option<String>, CheckpointError> {
    let path = dir.join(LATEST);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(io_at("read", &path))?,
    };
    // The name of a step and nothing else, so that it leads nowhere outside of `dir`.
    match std::str::from_utf8(&bytes).ok().map(str::trim_end).filter(|name| step_of(name).is_some()) {
        Some(name) => Ok(Some(name.to_string())),
        None => Err(CheckpointError::BadManifest {
            reason: format!("expected a name such as {}, found {} other bytes", step_folder(12), bytes.len()),
            path,
        }),
    }
}
