//! Two checkpoints side by side.

use std::path::Path;

use serde::Serialize;
use zero_core::checkpoint::{Checkpoint, list};

use super::{Comparison, FORMAT, InspectError, Subject, Tolerance, compare};

/// What differs between two checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// See [`FORMAT`].
    pub format: u32,
    /// "diff".
    pub kind: &'static str,
    /// Whether nothing differs by more than the tolerance.
    pub same: bool,
    /// Whether no tensor does.
    pub tensors_same: bool,
    /// Whether step and state are the same.
    pub state_same: bool,
    /// The first checkpoint.
    pub a: Side,
    /// The second checkpoint.
    pub b: Side,
    /// What differs.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// One of the two.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    /// Its folder.
    pub path: String,
    /// The training step.
    pub step: u64,
    /// Number of ranks that saved it.
    pub ranks: usize,
    /// Number of its tensors.
    pub tensors: usize,
}

/// Compares the checkpoints in folders `a` and `b`, as [`compare`] does.
///
/// # Errors
///
/// [`InspectError::Path`] when one of them is no checkpoint, and as [`Checkpoint::open`] and [`Checkpoint::read`].
pub fn diff(a: &Path, b: &Path, tolerance: Option<Tolerance>) -> Result<Difference, InspectError> {
    let (a, b) = (open(a)?, open(b)?);
    let comparison = compare(&a, &b, tolerance)?;
    Ok(Difference {
        format: FORMAT,
        kind: "diff",
        same: comparison.is_same(),
        tensors_same: comparison.tensors_same(),
        state_same: comparison.state_same(),
        a: Side::new(&a),
        b: Side::new(&b),
        comparison,
    })
}

fn open(path: &Path) -> Result<Checkpoint, InspectError> {
    if Subject::of(path)? == Subject::Checkpoint {
        return Ok(Checkpoint::open(path)?);
    }
    let listing = list(path, zero_core::checkpoint::Check::Sizes)?;
    let names: Vec<&str> = listing.checkpoints.iter().map(|listed| listed.name.as_str()).collect();
    let problem = match names.as_slice() {
        [] => "expected the folder of a checkpoint (step-...), this is none and has none in it".to_string(),
        names => format!("expected one checkpoint, this folder has several: name one of {}", names.join(", ")),
    };
    Err(InspectError::Path { path: path.to_path_buf(), problem })
}

impl Side {
    fn new(checkpoint: &Checkpoint) -> Self {
        Self {
            path: checkpoint.path().display().to_string(),
            step: checkpoint.step(),
            ranks: checkpoint.manifest().world,
            tensors: checkpoint.tensors().len(),
        }
    }
}
