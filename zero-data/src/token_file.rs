//! Token ids in a safetensors file, an integer tensor `input_ids` of shape `[rows, T]` or `[N]`, read on demand.
//!
//! Reads use `pread` and not a memory map: a file that is truncated meanwhile is an error and not a signal, and data that is
//! read once does not count as the process's memory. All ranks of a machine share the page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Result, io, wrong_data};
use zero_core::checkpoint::{CheckpointError, ElementType as Type, Header};

/// Bytes of ids per read when all are scanned.
const PART: usize = 1 << 20;

/// An open file of ids.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    path: PathBuf,
    /// Byte offset of the ids.
    begin: u64,
    shape: Vec<usize>,
    dtype: Type,
}

impl TokenFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let problem = |problem: String| wrong_data(path, problem);
        let file = File::open(path).map_err(io("read", path))?;
        let header = Header::read(&file, path).map_err(|error| match error {
            CheckpointError::BadHeader { reason, .. } => problem(format!(
                "cannot be read as a safetensors file ({reason}): write it again, with integers in input_ids"
            )),
            CheckpointError::Io { source, .. } => io("read", path)(source),
            other => problem(other.to_string()),
        })?;
        let ids = header.tensors.get("input_ids").ok_or_else(|| {
            let names: Vec<&String> = header.tensors.keys().collect();
            problem(format!(
                "has no tensor input_ids (it has {names:?}): expected an integer tensor input_ids of shape [rows, T] \
                 or [N]"
            ))
        })?;
        match *ids.shape {
            [0] | [0, _] | [_, 0] => return Err(problem("input_ids has no rows: expected at least one".into())),
            [_] | [_, _] => {}
            ref other => {
                return Err(problem(format!(
                    "input_ids has shape {other:?}: expected two dimensions, [rows, T], or one"
                )));
            }
        }
        let integer = |dtype: &Type| matches!(dtype, Type::I64 | Type::I32 | Type::U32 | Type::I16 | Type::U16);
        let dtype = Type::try_from(ids.dtype)
            .ok()
            .filter(integer)
            .ok_or_else(|| problem(format!("input_ids has type {}: expected I64, I32, U32, I16 or U16", ids.dtype)))?;
        let (begin, shape) = (header.data_start + ids.data_offsets.0, ids.shape.clone());
        Ok(Self { file, path: path.to_path_buf(), begin, shape, dtype })
    }

    /// Returns the length of the rows, if the tensor has two dimensions.
    pub(super) fn row_length(&self) -> Option<usize> {
        self.shape.get(1).copied()
    }

    /// Returns the number of ids.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    fn width(&self) -> usize {
        self.dtype.size()
    }

    /// Reads the ids from `first` on into `ids`. An id that does not fit `i32` becomes -1, which is in no vocabulary.
    pub(super) fn read(&self, first: usize, ids: &mut [i32]) -> Result<()> {
        let width = self.width();
        let mut bytes = vec![0; ids.len() * width];
        let at = self.begin + (first * width) as u64;
        self.file.read_exact_at(&mut bytes, at).map_err(io("read", &self.path))?;
        let id = |id: i64| i32::try_from(id).unwrap_or(-1);
        match self.dtype {
            Type::I64 => fill(ids, bytes.as_chunks().0, |&bytes| id(i64::from_le_bytes(bytes))),
            Type::I32 => fill(ids, bytes.as_chunks().0, |&bytes| i32::from_le_bytes(bytes)),
            Type::U32 => fill(ids, bytes.as_chunks().0, |&bytes| id(u32::from_le_bytes(bytes).into())),
            Type::I16 => fill(ids, bytes.as_chunks().0, |&bytes| i16::from_le_bytes(bytes).into()),
            _ => fill(ids, bytes.as_chunks().0, |&bytes| u16::from_le_bytes(bytes).into()),
        }
        Ok(())
    }

    /// Passes ids `first..last` to `each`, in parts, with the position of each part's first id.
    pub(super) fn scan<F>(&self, (first, last): (usize, usize), mut each: F) -> Result<()>
    where
        F: FnMut(usize, &[i32]) -> Result<()>,
    {
        let mut part = vec![0; (PART / self.width()).min(last - first)];
        for begin in (first..last).step_by(part.len().max(1)) {
            let part = &mut part[..(PART / self.width()).min(last - begin)];
            self.read(begin, part)?;
            each(begin, part)?;
        }
        Ok(())
    }
}

fn fill<T>(ids: &mut [i32], from: &[T], id: impl Fn(&T) -> i32) {
    ids.iter_mut().zip(from).for_each(|(to, from)| *to = id(from));
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::{Dtype, TensorView};

    use super::*;

    fn file(name: &str, dtype: Dtype, shape: Vec<usize>, data: &[u8]) -> tempfile::NamedTempFile {
        let view = TensorView::new(dtype, shape, data).unwrap();
        let file = tempfile::NamedTempFile::with_suffix(".safetensors").unwrap();
        safetensors::serialize_to_file([(name, view)], None, file.path()).unwrap();
        file
    }

    fn ids(path: &Path) -> Vec<i32> {
        let file = TokenFile::open(path).unwrap();
        let mut ids = vec![0; file.len()];
        file.read(0, &mut ids).unwrap();
        let mut scanned: Vec<i32> = Vec::new();
        file.scan((1, file.len()), |at, part| {
            assert_eq!(at, scanned.len() + 1);
            scanned.extend(part);
            Ok(())
        })
        .unwrap();
        assert_eq!(scanned, ids[1..]);
        ids
    }

    #[test]
    fn integer_types_are_read_and_others_refused() {
        let values = [1i64, 2, 3, 1 << 40];
        let wide = file("input_ids", Dtype::I64, vec![2, 2], bytemuck::cast_slice(&values));
        assert_eq!(ids(wide.path()), [1, 2, 3, -1]);
        let narrow = file("input_ids", Dtype::U16, vec![4], bytemuck::cast_slice(&[1u16, 2, 3, u16::MAX]));
        assert_eq!(ids(narrow.path()), [1, 2, 3, 65535]);
        assert_eq!(TokenFile::open(narrow.path()).unwrap().row_length(), None);
        let floats = file("input_ids", Dtype::F32, vec![2, 2], bytemuck::cast_slice(&[1f32; 4]));
        assert!(TokenFile::open(floats.path()).unwrap_err().to_string().contains("expected I64"));
    }

    #[test]
    fn malformed_files_are_named() {
        let good = file("input_ids", Dtype::I32, vec![2, 2], bytemuck::cast_slice(&[1i32; 4]));
        let open = |path: &Path| TokenFile::open(path).unwrap_err().to_string();
        let whole = std::fs::read(good.path()).unwrap();
        let short = tempfile::NamedTempFile::with_suffix(".safetensors").unwrap();
        std::fs::write(short.path(), &whole[..whole.len() - 3]).unwrap();
        assert!(open(short.path()).contains("cannot be read as a safetensors file"));
        let other = file("tokens", Dtype::I32, vec![4], bytemuck::cast_slice(&[1i32; 4]));
        assert!(open(other.path()).contains("no tensor input_ids"));
        let deep = file("input_ids", Dtype::I32, vec![1, 2, 2], bytemuck::cast_slice(&[1i32; 4]));
        assert!(open(deep.path()).contains("[rows, T]"));
        // Truncated after it was opened.
        let file = TokenFile::open(good.path()).unwrap();
        std::fs::OpenOptions::new().write(true).open(good.path()).unwrap().set_len(whole.len() as u64 - 4).unwrap();
        assert!(file.read(2, &mut [0; 2]).unwrap_err().to_string().contains("cannot read"));
    }
}
