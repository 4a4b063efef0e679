//! A safetensors file written front to back: header first, then one tensor after another, none of them held.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::ElementType;
use super::error::{CheckpointError, io_at};
use super::header::Header;

/// Small tensors are collected to writes of this size; larger ones are written from where they are.
const BUFFER_BYTES: usize = 1 << 20;

/// Bytes that are summed and then written while the processor's cache has them.
const CHUNK_BYTES: usize = 1 << 20;

/// Writes one safetensors file. The file is whole and durable when [`SafetensorsWriter::finish`] has returned.
///
/// ```
/// use std::collections::BTreeMap;
/// use zero_core::checkpoint::{ElementType, SafetensorsWriter};
/// # let dir = tempfile::tempdir().unwrap();
/// let tensors = vec![("bias".to_string(), ElementType::F32, vec![2])];
/// let mut writer = SafetensorsWriter::create(&dir.path().join("model.safetensors"), &BTreeMap::new(), tensors).unwrap();
/// writer.write("bias", &[0; 8]).unwrap();
/// assert_eq!(writer.finish().unwrap() % 8, 0);
/// ```
#[derive(Debug)]
pub struct SafetensorsWriter {
    path: PathBuf,
    out: BufWriter<File>,
    /// Name and bytes of each tensor.
    expected: Vec<(String, u64)>,
    next: usize,
    file_bytes: u64,
}

impl SafetensorsWriter {
    /// Creates the file, which must not exist, and writes the header for `tensors` (name, element type, shape) in the
    /// order in which they will come. An order of falling element sizes keeps each aligned to its elements.
    ///
    /// # Errors
    ///
    /// What the system says, [`CheckpointError::Unfit`] for a size that no file can have.
    pub fn create(
        path: &Path,
        metadata: &BTreeMap<String, String>,
        tensors: Vec<(String, ElementType, Vec<usize>)>,
    ) -> Result<Self, CheckpointError> {
        let (header, entries) = Header::encode(metadata, &tensors)?;
        let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(io_at("create", path))?;
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
        out.write_all(&header).map_err(io_at("write", path))?;
        let sizes = entries.iter().map(|entry| entry.data_offsets.1 - entry.data_offsets.0);
        let file_bytes = header.len() as u64 + entries.last().map_or(0, |entry| entry.data_offsets.1);
        let expected = tensors.iter().map(|(name, ..)| name.clone()).zip(sizes).collect();
        Ok(Self { path: path.to_path_buf(), out, expected, next: 0, file_bytes })
    }

    /// Writes the next tensor's bytes and returns their crc32c.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unfit`] when it is another tensor's turn or the size differs, and what the system says.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<u32, CheckpointError> {
        let got = (name, bytes.len() as u64);
        match self.expected.get(self.next) {
            Some((next, size)) if (next.as_str(), *size) == got => self.next += 1,
            other => {
                let expected = match other {
                    Some((next, size)) => format!("{size} bytes of '{next}' as number {} of the file", self.next),
                    None => format!("no more than the {} tensors of the header", self.expected.len()),
                };
                let got = format!("{} bytes of '{name}'", bytes.len());
                return Err(CheckpointError::Unfit { tensor: name.to_string(), expected, got });
            }
        }
        let mut sum = 0;
        for chunk in bytes.chunks(CHUNK_BYTES) {
            sum = crc32c::crc32c_append(sum, chunk);
            self.out.write_all(chunk).map_err(io_at("write", &self.path))?;
        }
        Ok(sum)
    }

    /// Makes the contents durable and returns the size of the file in bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unfit`] when a tensor of the header has not come, and what the system says.
    pub fn finish(self) -> Result<u64, CheckpointError> {
        if let Some((name, size)) = self.expected.get(self.next) {
            let (expected, got) = (format!("{size} bytes before the file is finished"), "nothing".to_string());
            return Err(CheckpointError::Unfit { tensor: name.clone(), expected, got });
        }
        let file = self.out.into_inner().map_err(|error| io_at("write", &self.path)(error.into_error()))?;
        file.sync_all().map_err(io_at("sync", &self.path))?;
        let got_bytes = file.metadata().map_err(io_at("look at", &self.path))?.len();
        if got_bytes != self.file_bytes {
            return Err(CheckpointError::Truncated { path: self.path, expected_bytes: self.file_bytes, got_bytes });
        }
        Ok(got_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_announced_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let create = |name: &str| {
            let tensors = vec![("a".into(), ElementType::F32, vec![2]), ("b".into(), ElementType::U8, vec![])];
            SafetensorsWriter::create(&dir.path().join(name), &BTreeMap::new(), tensors)
        };
        let mut writer = create("x").unwrap();
        assert!(writer.write("b", &[0]).unwrap_err().to_string().contains("8 bytes of 'a'"));
        assert!(writer.write("a", &[0; 7]).unwrap_err().to_string().contains("got 7 bytes"));
        writer.write("a", &[0; 8]).unwrap();
        assert!(writer.finish().unwrap_err().to_string().contains("tensor 'b'"));
        assert!(create("x").unwrap_err().to_string().contains("cannot create"));
    }
}
