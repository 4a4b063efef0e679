//! Additional files in a checkpoint, such as a tokenizer's: byte tensors, sharded, checksummed and read like the others.

use std::fmt;
use std::sync::Arc;

use super::{Checkpoint, CheckpointError, ElementType, TensorSpec};

/// Prefix of the name of a tensor that holds a file.
const PREFIX: &str = "file.";

/// A file that is saved in a checkpoint.
#[derive(Clone, PartialEq, Eq)]
pub struct SideFile {
    /// Its name, without a folder.
    pub name: String,
    /// Its content.
    pub bytes: Arc<[u8]>,
}

impl fmt::Debug for SideFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes, crc32c {:08x})", self.name, self.bytes.len(), crc32c::crc32c(&self.bytes))
    }
}

impl SideFile {
    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec { name: format!("{PREFIX}{}", self.name), dtype: ElementType::U8, shape: vec![self.bytes.len()] }
    }
}

impl Checkpoint {
    /// Returns the files that were saved with the tensors ([`SaveOptions::files`](super::SaveOptions::files)).
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if a file cannot be read or is damaged.
    pub fn files(&self) -> Result<Vec<SideFile>, CheckpointError> {
        let mut files = Vec::new();
        for (tensor, entry) in self.tensors() {
            // A name from a checkpoint must not lead out of a folder.
            let is_plain = |name: &&str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
            let Some(name) = tensor.strip_prefix(PREFIX).filter(is_plain) else { continue };
            if entry.dtype == ElementType::U8 {
                let bytes = self.read(tensor, 0..entry.shape.iter().product())?;
                files.push(SideFile { name: name.to_string(), bytes: bytes.into() });
            }
        }
        Ok(files)
    }
}
