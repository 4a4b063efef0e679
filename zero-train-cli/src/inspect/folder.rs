//! A folder of checkpoints.

use std::path::Path;

use serde::Serialize;
use zero_core::checkpoint::{Check, Listed, Listing, Remains, list};

use super::describe::checked;
use super::{FORMAT, InspectError};

/// What was found out about a folder of checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Folder {
    /// See [`FORMAT`].
    pub format: u32,
    /// "folder".
    pub kind: &'static str,
    /// The folder.
    pub path: String,
    /// As [`Inspection::checked`](super::Inspection::checked).
    pub checked: &'static str,
    /// Whether every checkpoint is sound, as far as was checked, and so is `latest`.
    pub sound: bool,
    /// What is wrong besides the checkpoints: a `latest` that names none of them.
    pub problems: Vec<String>,
    /// The checkpoint that `latest` names.
    pub latest: Option<String>,
    /// The checkpoint that `--resume auto` takes after as close a look.
    pub resume: Option<String>,
    /// The checkpoints, by step.
    pub checkpoints: Vec<FolderEntry>,
    /// What saves left that did not end, or the beginning of one that goes on.
    pub remains: Vec<Remains>,
}

/// One checkpoint of a [`Folder`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FolderEntry {
    /// Its folder's name.
    pub name: String,
    /// The step that the name says.
    pub step: u64,
    /// Milliseconds since 1970, if the manifest can be read.
    pub saved_unix_ms: Option<u64>,
    /// Number of ranks that saved it, if the manifest can be read.
    pub ranks: Option<usize>,
    /// Version of the crate that wrote it, if the manifest can be read.
    pub crate_version: Option<String>,
    /// Size of its files.
    pub disk_bytes: u64,
    /// Whether nothing is wrong, as far as was checked.
    pub sound: bool,
    /// Everything that is wrong.
    pub problems: Vec<String>,
}

/// Looks at every checkpoint in the folder `path`; damaged ones are no error.
///
/// # Errors
///
/// [`InspectError::Path`] when there is no checkpoint in it, and what the system says.
pub fn folder(path: &Path, check: Check) -> Result<Folder, InspectError> {
    let listing = list(path, check)?;
    if listing.checkpoints.is_empty() {
        let mut problem = "expected checkpoints (folders step-...) in it, there are none".to_string();
        if !listing.remains.is_empty() {
            let names: Vec<&str> = listing.remains.iter().map(|remains| remains.name.as_str()).collect();
            problem += &format!(", only what saves left that did not end: {}", names.join(", "));
        }
        return Err(InspectError::Path { path: path.to_path_buf(), problem: problem + "; look at the path" });
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
    fn new(listed: Listed) -> Self {
        let Listed { name, step, saved_unix_ms, world, crate_version, disk_bytes, problems, .. } = listed;
        let sound = problems.is_empty();
        let problems = problems.iter().map(ToString::to_string).collect();
        Self { name, step, saved_unix_ms, ranks: world, crate_version, disk_bytes, sound, problems }
    }
}
