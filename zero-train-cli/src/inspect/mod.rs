//! Inspects sharded checkpoints, for people and for programs: `zero inspect`.
//!
//! * In: the folder of a checkpoint, or its parent with several (see [`zero_core::checkpoint`]). The state in a
//!   manifest may come from other programs, so nothing is assumed about it; the engine's state is described in words.
//! * Out: [`Inspection`] and [`Folder`], which format as text with `Display` and as stable JSON with `serde`: keys may
//!   be added, and a change of meaning raises `format`.
//! * Memory: a few MiB and the manifests, regardless of the tensors. Threads: the caller's.

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

/// Version of the JSON that this module writes.
pub const FORMAT: u32 = 1;

/// An error of an inspection.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// Neither a checkpoint nor a folder of checkpoints.
    #[error("{}: {problem}", path.display())]
    Path {
        /// The given path.
        path: PathBuf,
        /// Expected and actual contents, and the path to give instead.
        problem: String,
    },
    /// A checkpoint whose necessary parts cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// The kind of object at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A checkpoint, or a folder named like one.
    Checkpoint,
    /// A folder that may contain checkpoints.
    Folder,
}

impl Subject {
    /// Returns the kind of object at `path`.
    ///
    /// # Errors
    ///
    /// [`InspectError::Path`] if it is not a folder.
    pub fn of(path: &Path) -> Result<Self, InspectError> {
        let no = |problem: &str| Err(InspectError::Path { path: path.to_path_buf(), problem: problem.to_string() });
        if path.is_dir() {
            // Resolve first, so that `.` has a name too.
            let resolved = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            let named = resolved.file_name().and_then(|name| name.to_str()).is_some_and(is_checkpoint_name);
            return Ok(if named || path.join("manifest.json").exists() { Self::Checkpoint } else { Self::Folder });
        }
        if path.exists() {
            no("expected a checkpoint folder (step-...) or its parent folder, got a file; name its folder")
        } else {
            no("expected a checkpoint folder (step-...) or its parent folder, found nothing; check the path")
        }
    }
}
