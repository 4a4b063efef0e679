//! Rows from a safetensors file: an integer tensor `input_ids` of shape `[rows, T]`.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::{TokenRows, wrong_data};
use crate::TrainError;
use crate::error::wrong;

/// Gives `body` the tensor `input_ids` of the file, which has two dimensions and at least one row.
pub(super) fn with_ids<T>(
    path: &Path,
    body: impl FnOnce(&TensorView<'_>) -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    let io = |source| TrainError::Io { action: "read", path: path.to_path_buf(), source };
    let problem = |problem: String| wrong_data(path, problem);
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read once, here; a file that another program shortens meanwhile ends this one with a signal,
    // as it would any reader of a map.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    let tensors = SafeTensors::deserialize(&map)
        .map_err(|error| problem(format!("is not a whole safetensors file ({error}): write it again")))?;
    let ids = tensors.tensor("input_ids").map_err(|_| {
        let names = tensors.names();
        problem(format!("has no tensor input_ids (it has {names:?}): expected an int tensor input_ids of [rows, T]"))
    })?;
    match ids.shape() {
        [0, _] => Err(problem("input_ids has no rows: expected at least one".into())),
        [_, _] => body(&ids),
        other => Err(problem(format!("input_ids has shape {other:?}: expected two dimensions, [rows, T]"))),
    }
}

pub(super) fn read(path: &Path, seq: Option<usize>) -> Result<TokenRows, TrainError> {
    with_ids(path, |ids| {
        let problem = |problem: String| wrong_data(path, problem);
        let t = ids.shape()[1];
        if let Some(seq) = seq.filter(|&seq| seq != t) {
            let expected = format!("{} has rows of {t} tokens: leave --seq out, or set it to {t}", path.display());
            return Err(wrong("seq", seq, expected));
        }
        let too_large = |id: i64| problem(format!("token id {id} is outside of any vocabulary: expected 0 or more"));
        let narrow = |id: i64| i32::try_from(id).map_err(|_| too_large(id));
        let data = ids.data();
        let tokens: Result<Vec<i32>, TrainError> = match ids.dtype() {
            Dtype::I64 => data.as_chunks().0.iter().map(|&b| narrow(i64::from_le_bytes(b))).collect(),
            Dtype::I32 => data.as_chunks().0.iter().map(|&b| Ok(i32::from_le_bytes(b))).collect(),
            Dtype::U32 => data.as_chunks().0.iter().map(|&b| narrow(u32::from_le_bytes(b).into())).collect(),
            Dtype::U16 => data.as_chunks().0.iter().map(|&b| Ok(u16::from_le_bytes(b).into())).collect(),
            Dtype::I16 => data.as_chunks().0.iter().map(|&b| Ok(i16::from_le_bytes(b).into())).collect(),
            other => Err(problem(format!("input_ids has type {other:?}: expected I64, I32, U32, I16 or U16"))),
        };
        Ok(TokenRows { tokens: tokens?, seq: t })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, dtype: Dtype, shape: Vec<usize>, data: &[u8]) -> tempfile::NamedTempFile {
        let view = TensorView::new(dtype, shape, data).unwrap();
        let file = tempfile::NamedTempFile::with_suffix(".safetensors").unwrap();
        safetensors::serialize_to_file([(name, view)], None, file.path()).unwrap();
        file
    }

    #[test]
    fn integer_types_are_read_and_others_refused() {
        let ids = [1i64, 2, 3, 4];
        let wide = file("input_ids", Dtype::I64, vec![2, 2], bytemuck::cast_slice(&ids));
        assert_eq!(read(wide.path(), None).unwrap().tokens, [1, 2, 3, 4]);
        let narrow = file("input_ids", Dtype::U16, vec![2, 2], bytemuck::cast_slice(&[1u16, 2, 3, 4]));
        assert_eq!(read(narrow.path(), Some(2)).unwrap().tokens, [1, 2, 3, 4]);
        let floats = file("input_ids", Dtype::F32, vec![2, 2], bytemuck::cast_slice(&[1f32; 4]));
        assert!(read(floats.path(), None).unwrap_err().to_string().contains("expected I64"));
    }

    #[test]
    fn malformed_files_are_named() {
        let good = file("input_ids", Dtype::I32, vec![2, 2], bytemuck::cast_slice(&[1i32; 4]));
        let whole = std::fs::read(good.path()).unwrap();
        let short = tempfile::NamedTempFile::with_suffix(".safetensors").unwrap();
        std::fs::write(short.path(), &whole[..whole.len() - 3]).unwrap();
        assert!(read(short.path(), None).unwrap_err().to_string().contains("not a whole safetensors file"));
        let other = file("tokens", Dtype::I32, vec![4], bytemuck::cast_slice(&[1i32; 4]));
        assert!(read(other.path(), None).unwrap_err().to_string().contains("no tensor input_ids"));
        let flat = file("input_ids", Dtype::I32, vec![4], bytemuck::cast_slice(&[1i32; 4]));
        assert!(read(flat.path(), None).unwrap_err().to_string().contains("[rows, T]"));
        assert!(read(good.path(), Some(3)).unwrap_err().to_string().contains("set it to 2"));
        let huge = file("input_ids", Dtype::I64, vec![1, 2], bytemuck::cast_slice(&[1i64 << 40, 0]));
        assert!(read(huge.path(), None).unwrap_err().to_string().contains("outside of any vocabulary"));
    }
}
