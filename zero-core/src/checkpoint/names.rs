//! Names of the files and folders in a folder of checkpoints.

use std::fs;
use std::io;
use std::path::Path;

use super::error::{CheckpointError, io_at};
use crate::files;

/// Name of the manifest in a checkpoint's folder.
pub(super) const MANIFEST: &str = "manifest.json";

/// Name of the file that names the newest complete checkpoint.
pub(super) const LATEST: &str = "latest";

/// Names and prefixes of the temporary files and folders of a save, and of what it removes.
pub(super) const SAVING: &str = ".saving-";
pub(super) const PRUNED: &str = ".pruned-";
pub(super) const NEW_LATEST: &str = ".latest-new";
/// Prefix of a checkpoint that another of the same step is about to replace; readers accept it (see [`names_in`]).
pub(super) const REPLACED: &str = ".replaced-";

/// Metadata keys that identify the owner of a rank's file, so that a file in another's place is detected.
pub(super) const OWNER: [&str; 4] = ["rank", "world", "step", "id"];

/// Maximum size of `latest` in bytes: more than a name and line ends need.
const LONGEST_NAME: u64 = 1024;

/// Returns the name of a checkpoint's folder.
pub(super) fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the name of a rank's file.
pub(super) fn rank_file(rank: usize, world: usize) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// Returns the step in a folder's name.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_folder(step) == name).then_some(step)
}

/// Returns the names in `dir` that may be checkpoints, including those that an interrupted save set aside.
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

/// Returns the name in `dir/latest`, if that file exists.
pub(super) fn pointed_at(dir: &Path) -> Result<Option<String>, CheckpointError> {
    let path = dir.join(LATEST);
    let bytes = match files::read(&path, LONGEST_NAME) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(io_at("read", &path))?,
    };
    // Only the name of a step is accepted, so that it cannot lead outside `dir`.
    match std::str::from_utf8(&bytes).ok().map(str::trim_end).filter(|name| step_of(name).is_some()) {
        Some(name) => Ok(Some(name.to_string())),
        None => Err(CheckpointError::BadManifest {
            reason: format!(
                "expected a name such as {}, found {} bytes that are not such a name",
                step_folder(12),
                bytes.len()
            ),
            path,
        }),
    }
}

/// Returns whether a save gives this name to something that it removes in the end.
pub(super) fn is_remains(name: &str) -> bool {
    let saving = name.strip_prefix(SAVING).and_then(|rest| Some(&rest[..rest.match_indices('-').nth(1)?.0]));
    let pruned = name.strip_prefix(PRUNED).map(|name| name.strip_prefix(REPLACED).unwrap_or(name));
    let step = saving.or(pruned).or(name.strip_prefix(REPLACED));
    name == NEW_LATEST || step.is_some_and(|step| step_of(step).is_some())
}
