//! Reading of Hugging Face checkpoints: the tensors in a folder, by name.
//!
//! The folder holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names. Files are memory-mapped:
//! opening reads only the headers, and checks them in full. Elements are read from disk when they are converted, in any range, so only
//! one tensor, or one rank's shard of it, is in memory at a time. A [`Checkpoint`] owns the maps; a [`StoredTensor`] borrows from it.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use half::{bf16, f16};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::Dtype;
use serde::Deserialize;
use zero_core::checkpoint::{CheckpointError, Header};
use zero_kernels::quantized::Format;

use crate::error::io_at;
use crate::{ModelError, Result};

pub(crate) const SINGLE: &str = "model.safetensors";
/// PEFT's name of an adapter's file.
pub(crate) const ADAPTER: &str = "adapter_model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The tensors of one checkpoint, by name.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: BTreeMap<String, MappedFile>,
    /// Name of each tensor's file, by the tensor's name.
    tensors: BTreeMap<String, String>,
    /// A counter that guards no memory, hence relaxed ordering.
    converted_bytes: AtomicU64,
    /// Parameters to load in fewer bits ([`crate::quantize`]).
    #[cfg_attr(not(feature = "burn"), allow(dead_code))] // Read by modules.
    pub(crate) quantized: Option<(Format, HashSet<u64>)>,
}

/// One tensor of a [`Checkpoint`], not yet read.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// The file that contains it.
    pub path: &'a Path,
    /// Shape.
    pub shape: &'a [usize],
    /// Element type.
    pub dtype: Dtype,
    bytes: &'a [u8],
    map: &'a Mmap,
    converted_bytes: &'a AtomicU64,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder. If there are both a single file and an index, opens the single file, as Hugging Face does.
    ///
    /// # Errors
    /// If there is no checkpoint, a file is truncated or malformed, or index and shards disagree.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = dir.join(INDEX);
        if dir.join(SINGLE).is_file() {
            return Self::open_file(dir, SINGLE);
        }
        if !index.is_file() {
            return Err(no_checkpoint(dir));
        }
        let (files, tensors) = open_shards(dir, &index)?;
        Ok(Self { dir: dir.to_path_buf(), files, tensors, converted_bytes: AtomicU64::new(0), quantized: None })
    }

    /// Sets the weights of these parameters to be loaded in `format`.
    #[cfg(feature = "burn")]
    pub(crate) fn quantized_as(self, format: Format, weights: HashSet<u64>) -> Self {
        Self { quantized: Some((format, weights)), ..self }
    }

    /// Opens one file in a folder.
    pub(crate) fn open_file(dir: &Path, name: &str) -> Result<Self> {
        let file = MappedFile::open(dir.join(name))?;
        let tensors = file.header.tensors.keys().map(|tensor| (tensor.clone(), name.to_string())).collect();
        let files = BTreeMap::from([(name.to_string(), file)]);
        Ok(Self { dir: dir.to_path_buf(), files, tensors, converted_bytes: AtomicU64::new(0), quantized: None })
    }

    /// Returns the folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the tensor of this name.
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, file) = self.tensors.get_key_value(name)?;
        self.files[file].tensor(name, &self.converted_bytes)
    }

    /// Returns the number of bytes of elements that have been converted so far, in the files' types. A rank that keeps a shard of each
    /// parameter converts only that shard.
    pub fn converted_bytes(&self) -> u64 {
        self.converted_bytes.load(Relaxed)
    }
}

impl StoredTensor<'_> {
    /// Checks that [`to_f32`](Self::to_f32) can convert this tensor.
    ///
    /// # Errors
    /// [`ModelError::TensorDtype`] if the elements are not 16, 32 or 64-bit floats.
    pub fn check_dtype(&self) -> Result<()> {
        match self.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64 => Ok(()),
            got => Err(ModelError::TensorDtype { name: self.name.to_string(), path: self.path.to_path_buf(), got }),
        }
    }

    /// Returns whether two tensors have the same type and the same bytes.
    pub(crate) fn has_bytes_of(&self, other: &Self) -> bool {
        let is_same = self.dtype == other.dtype && self.bytes == other.bytes;
        for tensor in [self, other] {
            tensor.unmap_pages(0..tensor.numel());
        }
        is_same
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the elements in row-major order, as 32-bit floats.
    ///
    /// # Errors
    /// Same as [`check_dtype`](Self::check_dtype).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.elements(0..self.numel())
    }

    /// Returns elements `range` in row-major order, as 32-bit floats.
    ///
    /// # Errors
    /// Same as [`check_dtype`](Self::check_dtype).
    ///
    /// # Panics
    /// If the range reaches beyond the tensor.
    pub fn elements(&self, range: Range<usize>) -> Result<Vec<f32>> {
        self.convert(range, None)
    }

    /// Returns elements `range` in row-major order of the tensor's transpose, as 32-bit floats.
    ///
    /// # Errors
    /// Same as [`check_dtype`](Self::check_dtype).
    ///
    /// # Panics
    /// If the tensor is not a matrix, or the range reaches beyond it.
    pub fn elements_transposed(&self, range: Range<usize>) -> Result<Vec<f32>> {
        let &[rows, columns] = self.shape else {
            panic!("tensor \"{}\" of shape {:?} is not a matrix, so it cannot be transposed", self.name, self.shape);
        };
        self.convert(range, Some((rows, columns)))
    }

    /// Converts elements `range`; those of the transpose if `matrix` holds the tensor's rows and columns.
    fn convert(&self, range: Range<usize>, matrix: Option<(usize, usize)>) -> Result<Vec<f32>> {
        self.check_dtype()?;
        assert!(
            range.start <= range.end && range.end <= self.numel(),
            "tensor \"{}\" has {} elements, but {range:?} were requested",
            self.name,
            self.numel()
        );
        self.converted_bytes.fetch_add((range.len() * self.dtype.bitsize() / 8) as u64, Relaxed);
        let read = if matrix.is_some() { 0..self.numel() } else { range.clone() };
        let values = match self.dtype {
            Dtype::F16 => self.select(range, matrix, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => self.select(range, matrix, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Dtype::F64 => self.select(range, matrix, |bytes| f64::from_le_bytes(bytes) as f32),
            _ => self.select(range, matrix, f32::from_le_bytes),
        };
        self.unmap_pages(read);
        Ok(values)
    }

    /// Unmaps the pages of elements `read`, so that a thread holds the file's pages of one tensor at a time.
    fn unmap_pages(&self, read: Range<usize>) {
        let size = self.dtype.bitsize() / 8;
        let begin = self.bytes.as_ptr() as usize - self.map.as_ptr() as usize + read.start * size;
        // SAFETY: the map is shared and read-only, so the call only drops page-table entries. Whoever reads through a reference to the map,
        // in any thread, gets the same bytes of the file again. If the call fails, the pages stay mapped.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, read.len() * size) };
    }

    /// Converts elements of `N` bytes. Safetensors data is little-endian, and need not be aligned.
    fn select<const N: usize>(
        &self,
        range: Range<usize>,
        matrix: Option<(usize, usize)>,
        element: impl Fn([u8; N]) -> f32,
    ) -> Vec<f32> {
        let (elements, rest) = self.bytes.as_chunks::<N>();
        debug_assert!(rest.is_empty(), "the header was checked against the data");
        match matrix {
            None => elements[range].iter().map(|&bytes| element(bytes)).collect(),
            Some((rows, columns)) => transposed(rows, columns, range, |at| element(elements[at])),
        }
    }
}

/// Returns elements `range` of the transpose of a row-major `[rows, columns]` matrix, tile by tile so that both sides stay in the cache.
/// `element` returns the matrix's element at a flat index.
pub(crate) fn transposed<T: Copy + Default>(
    rows: usize,
    columns: usize,
    range: Range<usize>,
    element: impl Fn(usize) -> T,
) -> Vec<T> {
    const TILE: usize = 32;
    let mut out = vec![T::default(); range.len()];
    if range.is_empty() {
        return out;
    }
    // The transpose's rows are the matrix's columns; the first and the last that the range touches may be cut.
    let (first, end) = (range.start / rows, range.end.div_ceil(rows));
    debug_assert!(end <= columns, "the range lies within the matrix");
    for first_column in (first..end).step_by(TILE) {
        for first_row in (0..rows).step_by(TILE) {
            for column in first_column..end.min(first_column + TILE) {
                let begin = (column * rows + first_row).max(range.start);
                let until = (column * rows + rows.min(first_row + TILE)).min(range.end);
                for at in begin..until {
                    out[at - range.start] = element((at - column * rows) * columns + column);
                }
            }
        }
    }
    out
}

/// A safetensors file whose header has been read and checked against its length.
#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl MappedFile {
    fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).map_err(io_at("open", &path))?;
        let mut begins = Vec::new();
        (&file).take(LFS_POINTER.len() as u64).read_to_end(&mut begins).map_err(io_at("read", &path))?;
        if begins == LFS_POINTER {
            return Err(ModelError::Pointer { path });
        }
        let header = Header::read(&file, &path).map_err(|error| match error {
            CheckpointError::BadHeader { path, reason } => ModelError::BadFile { path, reason },
            CheckpointError::Io { action, path, source } => ModelError::Io { action, path, source },
            other => ModelError::BadFile { path: path.clone(), reason: other.to_string() },
        })?;
        // SAFETY: a map is unsound only if the file changes under it. Checkpoints are written to a new file and then
        // renamed (this project's own too), and nothing here writes to the file.
        let map = unsafe { Mmap::map(&file) }.map_err(io_at("map", &path))?;
        Ok(Self { path, map, header })
    }

    fn tensor<'a>(&'a self, name: &'a str, converted_bytes: &'a AtomicU64) -> Option<StoredTensor<'a>> {
        let entry = self.header.tensors.get(name)?;
        let [start, end] =
            [entry.data_offsets.0, entry.data_offsets.1].map(|at| (self.header.data_start + at) as usize);
        Some(StoredTensor {
            name,
            path: &self.path,
            shape: &entry.shape,
            dtype: entry.dtype,
            bytes: &self.map[start..end],
            map: &self.map,
            converted_bytes,
        })
    }
}

/// The beginning of a Git LFS pointer, <https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>.
pub const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

type Shards = (BTreeMap<String, MappedFile>, BTreeMap<String, String>);

/// Opens the shards of an index. Returns them by name, and the name of each tensor's shard.
fn open_shards(dir: &Path, index: &Path) -> Result<Shards> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let path = || index.to_path_buf();
    let text = fs::read_to_string(index).map_err(io_at("read", index))?;
    let format = "a safetensors index: expected {\"weight_map\": {tensor: file}}";
    let Index { weight_map } = serde_json::from_str(&text).map_err(|error| ModelError::Format {
        path: path(),
        format,
        source: error.into(),
    })?;

    let mut files = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if !files.contains_key(shard) {
            let wrong = |problem| {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                Err(ModelError::Shard { index: path(), tensor, shard, problem })
            };
            let mut components = Path::new(shard).components();
            let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
            if !plain || shard.contains(['/', '\\']) {
                return wrong("; a shard must be a plain file name in the folder of the index");
            }
            if !dir.join(shard).is_file() {
                return wrong(", which is not in that folder; copy the missing shard there");
            }
            files.insert(shard.clone(), MappedFile::open(dir.join(shard))?);
        }
    }

    let disagree = |shard: &str, tensor: &str, difference| {
        let (shard, tensor) = (dir.join(shard), tensor.to_string());
        Err(ModelError::IndexDisagrees { index: path(), shard, tensor, difference })
    };
    for (tensor, shard) in &weight_map {
        if !files[shard].header.tensors.contains_key(tensor) {
            return disagree(shard, tensor, "lists it there, but the shard does not have it");
        }
    }
    for (shard, file) in &files {
        if let Some(extra) = file.header.tensors.keys().find(|name| weight_map.get(*name) != Some(shard)) {
            return disagree(shard, extra, "does not list it there, but the shard has it");
        }
    }
    Ok((files, weight_map))
}

fn no_checkpoint(dir: &Path) -> ModelError {
    let hint = if !dir.is_dir() {
        "this is not a folder: pass the folder of the checkpoint"
    } else if dir.join("pytorch_model.bin").is_file() || dir.join("pytorch_model.bin.index.json").is_file() {
        "it has pytorch_model.bin, which is not supported: save it with save_pretrained(..., safe_serialization=True)"
    } else {
        "pass the folder that Hugging Face's save_pretrained wrote"
    };
    ModelError::NoCheckpoint { dir: dir.to_path_buf(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_of_a_transpose_is_its_slice() {
        let (rows, columns) = (70, 33);
        let whole: Vec<usize> = (0..rows * columns).map(|i| i % rows * columns + i / rows).collect();
        for range in [0..rows * columns, 0..0, 5..5, 0..1, 69..71, 35..36, 1000..2309, 2309..2310, 140..210, 3..2000] {
            assert_eq!(transposed(rows, columns, range.clone(), |at| at), whole[range]);
        }
        assert_eq!(transposed(0, 5, 0..0, |at| at), [0usize; 0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_of_converted_tensors_are_unmapped() {
        let folder = tempfile::tempdir().expect("a folder for the file");
        let values: Vec<u8> = (0..1_000_000_u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let tensors = ["a", "b"].map(|name| {
            let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![1000, 1000], &values).expect("a matrix");
            (name, view)
        });
        safetensors::serialize_to_file(tensors, None, &folder.path().join(SINGLE)).expect("the disk has room");
        let checkpoint = Checkpoint::open(folder.path()).expect("the file was just written");
        for name in ["a", "b"] {
            let tensor = checkpoint.get(name).expect("the file has it");
            let all = tensor.elements(0..1_000_000).expect("the type is known");
            assert_eq!((all[1], all[999_999]), (1.0, 999_999.0));
            assert_eq!(tensor.elements_transposed(1..1001).expect("the type is known")[..2], [1000.0, 2000.0]);
            assert_eq!(tensor.elements(500..502).expect("the type is known"), all[500..502]);
        }
        let maps = fs::read_to_string("/proc/self/smaps").expect("Linux has this file");
        let path = folder.path().to_str().expect("a path in ASCII");
        let mut lines = maps.lines().skip_while(|line| !line.contains(path));
        let resident = lines.find(|line| line.starts_with("Rss:")).expect("the file is mapped");
        let kib: usize = resident.split_whitespace().nth(1).expect("a number").parse().expect("a number");
        assert!(kib <= 256, "of a file of 8 MB, {kib} KiB are mapped");
    }
}
