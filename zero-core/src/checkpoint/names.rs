//! The names of what lies in a folder of checkpoints.

use std::fs;
use std::io;
use std::path::Path;

use super::error::{CheckpointError, io_at};
use crate::files;

/// Name of the manifest in a checkpoint's folder.
pub(super) const MANIFEST: &str = "manifest.json";

/// Name of the file that names the newest complete checkpoint.
pub(super) const LATEST: &str = "latest";

/// What a save makes before it is visible, and what it removes.
pub(super) const SAVING: &str = ".saving-";
pub(super) const PRUNED: &str = ".pruned-";
pub(super) const NEW_LATEST: &str = ".latest-new";
/// A checkpoint that another of the same step is about to replace; readers know it (see [`names_in`]).
pub(super) const REPLACED: &str = ".replaced-";

/// What a rank's file says about itself, so that one in another's place is known.
pub(super) const OWNER: [&str; 4] = ["rank", "world", "step", "id"];

/// Bytes of `latest` at most: more than a name and line ends have.
const LONGEST_NAME: u64 = 1024;

/// Name of a checkpoint's folder.
pub(super) fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// Name of a rank's file.
pub(super) fn rank_file(rank: usize, world: usize) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
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
    let bytes = match files::read(&path, LONGEST_NAME) {
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

/// Whether a name is one that a save gives to what it removes in the end.
pub(super) fn is_remains(name: &str) -> bool {
    let saving = name.strip_prefix(SAVING).and_then(|rest| Some(&rest[..rest.match_indices('-').nth(1)?.0]));
    let pruned = name.strip_prefix(PRUNED).map(|name| name.strip_prefix(REPLACED).unwrap_or(name));
    let step = saving.or(pruned).or(name.strip_prefix(REPLACED));
    name == NEW_LATEST || step.is_some_and(|step| step_of(step).is_some())
}
