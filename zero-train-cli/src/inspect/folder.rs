//! Inspects a folder of checkpoints.

use std::path::Path;

use serde::Serialize;
use zero_core::checkpoint::{Check, InterruptedSave, ListedCheckpoint, Listing, list};

use super::describe::checked;
use super::{FORMAT, InspectError};

/// Result of inspecting a folder of checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Folder {
    /// See [`FORMAT`].
    pub format: u32,
    /// "folder".
    pub kind: &'static str,
    /// Path of the folder.
    pub path: String,
    /// The check level, see [`Inspection::checked`](super::Inspection::checked).
    pub checked: &'static str,
    /// True if no check found a problem in any checkpoint or in `latest`.
    pub sound: bool,
    /// Problems outside the checkpoints: a `latest` that names none of them.
    pub problems: Vec<String>,
    /// The checkpoint that `latest` names.
    pub latest: Option<String>,
    /// The checkpoint that `--resume auto` selects after the same checks.
    pub resume: Option<String>,
    /// The checkpoints, by step.
    pub checkpoints: Vec<FolderEntry>,
    /// Remains of incomplete saves, or the start of one in progress.
    pub remains: Vec<InterruptedSave>,
}

/// One checkpoint of a [`Folder`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FolderEntry {
    /// Name of its folder.
    pub name: String,
    /// The step in that name.
    pub step: u64,
    /// Milliseconds since 1970, if the manifest can be read.
    pub saved_unix_ms: Option<u64>,
    /// Number of ranks that saved it, if the manifest can be read.
    pub ranks: Option<usize>,
    /// Version of the crate that wrote it, if the manifest can be read.
    pub crate_version: Option<String>,
    /// Size of its files in bytes.
    pub disk_bytes: u64,
    /// True if no check found a problem.
    pub sound: bool,
    /// All problems found.
    pub problems: Vec<String>,
}

/// Inspects every checkpoint in the folder `path`; damaged ones are not errors.
///
/// # Errors
///
/// [`InspectError::Path`] if the folder has no checkpoint, and I/O errors.
pub fn folder(path: &Path, check: Check) -> Result<Folder, InspectError> {
    let listing = list(path, check)?;
    if listing.checkpoints.is_empty() {
        let mut problem = "expected checkpoints (folders step-...), found none".to_string();
        if !listing.remains.is_empty() {
            let names: Vec<&str> = listing.remains.iter().map(|remains| remains.name.as_str()).collect();
            problem += &format!(", only remains of incomplete saves: {}", names.join(", "));
        }
        return Err(InspectError::Path { path: path.to_path_buf(), problem: problem + "; check the path" });
    }
    let problems: Vec<String> = listing.problem(path).into_iter().collect();
    let Listing { checkpoints, latest, resume, remains, .. } = listing;
    Ok(Folder {
        format: FORMAT,
        kind: "folder",
        path: path.display().to_string(),
        checked: checked(check),
        sound: problems.is_empty() && checkpoints.iter().all(|listed| listed.problems.is_empty()),
        problems,
        latest,
        resume,
        checkpoints: checkpoints.into_iter().map(FolderEntry::new).collect(),
        remains,
    })
}

impl FolderEntry {
    fn new(listed: ListedCheckpoint) -> Self {
        let ListedCheckpoint { name, step, saved_unix_ms, world, crate_version, disk_bytes, problems, .. } = listed;
        let sound = problems.is_empty();
        let problems = problems.iter().map(ToString::to_string).collect();
        Self { name, step, saved_unix_ms, ranks: world, crate_version, disk_bytes, sound, problems }
    }
}
