//! A safetensors file written sequentially: first the header, then one tensor after another, in full or in parts. No tensor is kept in
//! memory.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::ElementType;
use super::error::{CheckpointError, io_at};
use super::header::Header;
use crate::files;

/// Size of the writes that small tensors are combined into; larger tensors are written without a copy.
const BUFFER_BYTES: usize = 1 << 20;

/// Size of the chunks that are checksummed and then written while they are in the CPU's cache.
const CHUNK_BYTES: usize = 1 << 20;

/// Number of bytes after which the system is asked to start writing to the disk, so that disk writes overlap with checksumming and the
/// final sync is short.
const BEGIN_BYTES: u64 = 32 << 20;

/// Writes one safetensors file, which is complete and durable once [`SafetensorsWriter::finish`] has returned.
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
    /// Name and size in bytes of each tensor.
    expected: Vec<(String, u64)>,
    next: usize,
    /// Bytes of the next tensor that [`SafetensorsWriter::append`] has received.
    begun: u64,
    file_bytes: u64,
    /// Bytes received so far; and how many of them are on the disk, and how many the system has been asked to write.
    written: u64,
    asked: (u64, u64),
}

impl SafetensorsWriter {
    /// Creates the file, which must not exist, and writes the header for `tensors` (name, element type, shape) in the order in which they
    /// will be written. An order of decreasing element sizes keeps each tensor aligned to its elements.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`], and [`CheckpointError::Unfit`] for a size that no file can have.
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
        Ok(Self { path: path.to_path_buf(), out, expected, next: 0, begun: 0, file_bytes, written: 0, asked: (0, 0) })
    }

    /// Writes the next tensor's bytes and returns their crc32c.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unfit`] if another tensor is next or the size differs, and [`CheckpointError::Io`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<u32, CheckpointError> {
        match self.expected.get(self.next) {
            Some((next, size)) if next == name && *size == bytes.len() as u64 && self.begun == 0 => {}
            _ => return Err(self.unfit(name, bytes)),
        }
        self.put(bytes, 0)
    }

    /// Writes the next part of the next tensor's bytes. The tensor after it may follow when all of them are written.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unfit`] if another tensor is next or the tensor has fewer bytes left, and [`CheckpointError::Io`].
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.append_to_sum(name, bytes, 0).map(drop)
    }

    /// Same as [`SafetensorsWriter::append`]; returns `sum`, the crc32c of the tensor's earlier bytes, extended by these bytes.
    pub(super) fn append_to_sum(&mut self, name: &str, bytes: &[u8], sum: u32) -> Result<u32, CheckpointError> {
        match self.expected.get(self.next) {
            Some((next, size)) if next == name && bytes.len() as u64 <= size - self.begun => {}
            _ => return Err(self.unfit(name, bytes)),
        }
        self.put(bytes, sum)
    }

    /// Writes bytes of the next tensor, and adds them to their crc32c.
    fn put(&mut self, bytes: &[u8], mut sum: u32) -> Result<u32, CheckpointError> {
        for chunk in bytes.chunks(CHUNK_BYTES) {
            sum = crc32c::crc32c_append(sum, chunk);
            self.out.write_all(chunk).map_err(io_at("write", &self.path))?;
            self.written += chunk.len() as u64;
            if self.written - self.asked.1 >= BEGIN_BYTES {
                // So that the speed of writing reflects that of the disk, and the final sync is short.
                let (waited, asked) = self.asked;
                let begun = files::write_out(self.out.get_ref(), asked, self.written - asked, false);
                // A length of 0 would mean everything up to the end.
                let ended = match asked - waited {
                    0 => Ok(()),
                    bytes => files::write_out(self.out.get_ref(), waited, bytes, true),
                };
                begun.and(ended).map_err(io_at("write", &self.path))?;
                self.asked = (asked, self.written);
            }
        }
        self.begun += bytes.len() as u64;
        if self.begun == self.expected[self.next].1 {
            (self.next, self.begun) = (self.next + 1, 0);
        }
        Ok(sum)
    }

    fn unfit(&self, name: &str, bytes: &[u8]) -> CheckpointError {
        let expected = match self.expected.get(self.next) {
            Some((next, size)) if self.begun > 0 => {
                format!("the remaining {} of the {size} bytes of '{next}'", size - self.begun)
            }
            Some((next, size)) => format!("{size} bytes of '{next}', tensor {} of the file", self.next),
            None => format!("no more than the {} tensors of the header", self.expected.len()),
        };
        let got = format!("{} bytes of '{name}'", bytes.len());
        CheckpointError::Unfit { tensor: name.to_string(), expected, got }
    }

    /// Makes the contents durable and returns the size of the file in bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unfit`] if a tensor of the header is missing or incomplete, and errors of writing the file.
    pub fn finish(self) -> Result<u64, CheckpointError> {
        if let Some((name, size)) = self.expected.get(self.next) {
            let (expected, got) =
                (format!("{size} bytes before the file is finished"), format!("{} bytes", self.begun));
            return Err(CheckpointError::Unfit { tensor: name.clone(), expected, got });
        }
        let file = self.out.into_inner().map_err(|error| io_at("write", &self.path)(error.into_error()))?;
        file.sync_all().map_err(io_at("sync", &self.path))?;
        let got_bytes = file.metadata().map_err(io_at("read the metadata of", &self.path))?.len();
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
    #[test]
    fn parts_make_the_file_that_wholes_make() {
        let dir = tempfile::tempdir().unwrap();
        let create = |name: &str| {
            let tensors = [
                ("a", ElementType::F32, vec![3]),
                ("none", ElementType::F32, vec![0]),
                ("b", ElementType::U8, vec![5]),
            ];
            let tensors = tensors.map(|(name, dtype, shape)| (name.to_string(), dtype, shape)).into();
            SafetensorsWriter::create(&dir.path().join(name), &BTreeMap::new(), tensors).unwrap()
        };
        let bytes: Vec<u8> = (0..12).collect();
        let mut whole = create("whole");
        for (name, len) in [("a", 12), ("none", 0), ("b", 5)] {
            whole.write(name, &bytes[..len]).unwrap();
        }
        let whole_bytes = whole.finish().unwrap();

        let mut parts = create("parts");
        parts.append("a", &bytes[..5]).unwrap();
        let error = parts.append("b", &[0]).unwrap_err().to_string();
        assert!(error.contains("expected the remaining 7 of the 12 bytes of 'a', got 1 bytes of 'b'"), "{error}");
        assert!(parts.append("a", &bytes[..8]).unwrap_err().to_string().contains("got 8 bytes of 'a'"));
        assert!(parts.write("a", &bytes).unwrap_err().to_string().contains("remaining 7"));
        parts.append("a", &bytes[5..]).unwrap();
        parts.append("none", &[]).unwrap();
        parts.append("b", &bytes[..4]).unwrap();
        parts.append("b", &[]).unwrap();
        parts.append("b", &bytes[4..5]).unwrap();
        assert!(parts.append("b", &[0]).unwrap_err().to_string().contains("no more than the 3 tensors"));
        assert_eq!(parts.finish().unwrap(), whole_bytes);
        let [a, b] = ["whole", "parts"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
        assert_eq!(a, b);

        let mut partial = create("partial");
        partial.append("a", &bytes[..5]).unwrap();
        let error = partial.finish().unwrap_err().to_string();
        assert!(error.contains("tensor 'a': expected 12 bytes") && error.contains("got 5"), "{error}");
    }
}
