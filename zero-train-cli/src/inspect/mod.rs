//! What lies in a sharded checkpoint, for people and for programs: `zero inspect`.
//!
//! * In: the folder of a checkpoint, or the folder above with several (see [`zero_core::checkpoint`]). Nothing is assumed of
//!   the state in a manifest, which other programs may have written; what the engine writes is told in words.
//! * Out: [`Inspection`] and [`Folder`], each of which is text by `Display` and stable JSON by `serde`:
//!   keys may be added, and a change of meaning raises `format`.
//! * Memory: a few MiB and the manifests, whatever the tensors. Threads: the caller's.

mod describe;
mod facts;
mod folder;
mod text;
mod time;
mod words;

use std::path::{Path, PathBuf};

use zero_core::checkpoint::{CheckpointError, is_checkpoint_name};

pub use describe::{Description, Inspection, Kind, ModelFacts, TensorFacts, inspect};
pub use facts::{EngineFacts, Group, OptimizerFacts};
pub use folder::{Folder, FolderEntry, folder};
pub use words::Use;

/// The version of the JSON that this module writes.
pub const FORMAT: u32 = 1;

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// Neither a checkpoint nor a folder with some.
    #[error("{}: {problem}", path.display())]
    Path {
        /// What was named.
        path: PathBuf,
        /// What was expected, what came, and what to name instead.
        problem: String,
    },
    /// A checkpoint that cannot be read as far as it must be.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// What a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A checkpoint, or what should be one.
    Checkpoint,
    /// A folder that may have checkpoints in it.
    Folder,
}

impl Subject {
    /// Looks at what `path` names.
    ///
    /// # Errors
    ///
    /// [`InspectError::Path`] when it is no folder.
    pub fn of(path: &Path) -> Result<Self, InspectError> {
        let no = |problem: &str| Err(InspectError::Path { path: path.to_path_buf(), problem: problem.to_string() });
        if path.is_dir() {
            // `.` has a name too, once it is resolved.
            let resolved = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            let named = resolved.file_name().and_then(|name| name.to_str()).is_some_and(is_checkpoint_name);
            return Ok(if named || path.join("manifest.json").exists() { Self::Checkpoint } else { Self::Folder });
        }
        if path.exists() {
            no("expected the folder of a checkpoint (step-...) or the folder above, this is a file; name its folder")
        } else {
            no("expected the folder of a checkpoint (step-...) or the folder above, there is nothing; look at the path")
        }
    }
}
