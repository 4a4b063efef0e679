//! Reading a Hugging Face checkpoint: in goes a folder, out come its tensors by name.
//!
//! The folder holds `model.safetensors`, or `model.safetensors.index.json` with the shards that it names. Files are
//! memory-mapped: opening reads the headers only and checks them in full, and elements come from disk when they are
//! converted, any range of them, so that one tensor, or one rank's piece of it, is in memory at a time. A [`Checkpoint`]
//! owns the maps; a [`StoredTensor`] borrows from it.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError};
use serde::Deserialize;

use crate::ModelError;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header's length at the start of a file.
const LENGTH_BYTES: usize = 8;
/// The longest header that readers of the format accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The tensors of one checkpoint, by name.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<MappedFile>,
    /// Name of a tensor to the place of its file in `files`.
    tensors: BTreeMap<String, usize>,
    /// A count and nothing else: it guards no memory, so it is relaxed.
    converted_bytes: AtomicU64,
}

/// One tensor of a [`Checkpoint`], not yet read.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// The file it lies in.
    pub path: &'a Path,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: Dtype,
    bytes: &'a [u8],
    converted_bytes: &'a AtomicU64,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder; of a single file and an index, the single file, as Hugging Face does.
    ///
    /// # Errors
    /// When there is no checkpoint, a file is cut short or malformed, or index and shards disagree.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        if single.is_file() {
            Self::open_single(dir, single)
        } else if index.is_file() {
            Self::open_sharded(dir, index)
        } else {
            Err(no_checkpoint(dir))
        }
    }

    fn open_single(dir: &Path, path: PathBuf) -> Result<Self, ModelError> {
        let file = MappedFile::open(path)?;
        let tensors = file.names().map(|name| (name, 0)).collect();
        Ok(Self::of(dir, vec![file], tensors))
    }

    fn open_sharded(dir: &Path, index: PathBuf) -> Result<Self, ModelError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }

        let text = fs::read_to_string(&index).map_err(|source| ModelError::Io {
            action: "read",
            path: index.clone(),
            source,
        })?;
        let Index { weight_map } =
            serde_json::from_str(&text).map_err(|source| ModelError::IndexSyntax { path: index.clone(), source })?;

        let mut files = Vec::new();
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            let place = match places.get(shard.as_str()) {
                Some(&place) => place,
                None => {
                    files.push(open_shard(dir, &index, tensor, shard)?);
                    places.insert(shard, files.len() - 1);
                    files.len() - 1
                }
            };
            tensors.insert(tensor.clone(), place);
        }

        let disagree = |file: &MappedFile, tensor: &str, listed| ModelError::IndexDisagrees {
            index: index.clone(),
            shard: file.path.clone(),
            tensor: tensor.to_string(),
            listed,
        };
        for (tensor, &place) in &tensors {
            if files[place].metadata.info(tensor).is_none() {
                return Err(disagree(&files[place], tensor, true));
            }
        }
        for (place, file) in files.iter().enumerate() {
            if let Some(extra) = file.names().find(|name| tensors.get(name) != Some(&place)) {
                return Err(disagree(file, &extra, false));
            }
        }
        Ok(Self::of(dir, files, tensors))
    }

    fn of(dir: &Path, files: Vec<MappedFile>, tensors: BTreeMap<String, usize>) -> Self {
        Self { dir: dir.to_path_buf(), files, tensors, converted_bytes: AtomicU64::new(0) }
    }

    /// The folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, &place) = self.tensors.get_key_value(name)?;
        self.files[place].tensor(name, &self.converted_bytes)
    }

    /// Bytes of elements that have been converted so far, as they lie in the files. A rank that keeps a piece of each
    /// parameter converts that piece.
    pub fn converted_bytes(&self) -> u64 {
        self.converted_bytes.load(Relaxed)
    }
}

impl StoredTensor<'_> {
    /// Whether [`to_f32`](Self::to_f32) can convert this tensor.
    ///
    /// # Errors
    /// [`ModelError::TensorDtype`] when the elements are not 16, 32 or 64-bit floats.
    pub fn check_dtype(&self) -> Result<(), ModelError> {
        match self.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64 => Ok(()),
            got => Err(ModelError::TensorDtype { name: self.name.to_string(), path: self.path.to_path_buf(), got }),
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements in row-major order, as 32-bit floats.
    ///
    /// # Errors
    /// As [`check_dtype`](Self::check_dtype).
    pub fn to_f32(&self) -> Result<Vec<f32>, ModelError> {
        self.elements(0..self.numel())
    }

    /// Elements `range` in row-major order, as 32-bit floats.
    ///
    /// # Errors
    /// As [`check_dtype`](Self::check_dtype).
    ///
    /// # Panics
    /// If the range reaches beyond the tensor.
    pub fn elements(&self, range: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.convert(range, Order::AsStored)
    }

    /// Elements `range` in row-major order of the tensor's transpose, as 32-bit floats.
    ///
    /// # Errors
    /// As [`check_dtype`](Self::check_dtype).
    ///
    /// # Panics
    /// If the tensor is no matrix, or the range reaches beyond it.
    pub fn elements_transposed(&self, range: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let &[rows, columns] = self.shape else {
            panic!("tensor \"{}\" of shape {:?} has no transpose", self.name, self.shape);
        };
        self.convert(range, Order::Transposed { rows, columns })
    }

    fn convert(&self, range: Range<usize>, order: Order) -> Result<Vec<f32>, ModelError> {
        self.check_dtype()?;
        assert!(
            range.start <= range.end && range.end <= self.numel(),
            "tensor \"{}\" has {} elements, {range:?} were asked for",
            self.name,
            self.numel()
        );
        self.converted_bytes.fetch_add((range.len() * self.dtype.bitsize() / 8) as u64, Relaxed);
        Ok(match self.dtype {
            Dtype::F16 => self.select(range, order, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => self.select(range, order, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Dtype::F64 => self.select(range, order, |bytes| f64::from_le_bytes(bytes) as f32),
            _ => self.select(range, order, f32::from_le_bytes),
        })
    }

    /// Safetensors data is little-endian, and need not be aligned.
    fn select<const N: usize>(&self, range: Range<usize>, order: Order, element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        let (elements, rest) = self.bytes.as_chunks::<N>();
        debug_assert!(rest.is_empty(), "the header was checked against the data");
        match order {
            Order::AsStored => elements[range].iter().map(|&bytes| element(bytes)).collect(),
            Order::Transposed { rows, columns } => transposed(rows, columns, range, |at| element(elements[at])),
        }
    }
}

/// In which order elements are wanted.
#[derive(Clone, Copy, Debug)]
enum Order {
    AsStored,
    /// Of a matrix of these sizes in the file.
    Transposed {
        rows: usize,
        columns: usize,
    },
}

/// Elements `range` of the transpose of a row-major `[rows, columns]`, tile by tile so that both sides stay in the cache.
/// `element` gives the matrix's element at a flat place.
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
    metadata: Metadata,
    /// Where the data starts, in bytes.
    data_start: usize,
}

impl MappedFile {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let io = |action, source| ModelError::Io { action, path: path.clone(), source };
        let file = File::open(&path).map_err(|source| io("open", source))?;
        let got_bytes = file.metadata().map_err(|source| io("open", source))?.len();
        if got_bytes == 0 {
            // Which cannot be mapped.
            return Err(ModelError::Truncated { path, expected_bytes: LENGTH_BYTES as u64, got_bytes });
        }
        // SAFETY: a map is unsound only if the file changes under it. Checkpoints are written to a new file and then
        // renamed (this project's own too), and nothing here writes to the file.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| io("map", source))?;
        match read_header(&map) {
            Ok((data_start, metadata)) => Ok(Self { data_start, path, map, metadata }),
            Err(Damage::Short { expected_bytes }) => Err(ModelError::Truncated { path, expected_bytes, got_bytes }),
            Err(Damage::Format(source)) => Err(ModelError::Safetensors { path, source }),
        }
    }

    fn names(&self) -> impl Iterator<Item = String> + use<> {
        self.metadata.offset_keys().into_iter()
    }

    fn tensor<'a>(&'a self, name: &'a str, converted_bytes: &'a AtomicU64) -> Option<StoredTensor<'a>> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        Some(StoredTensor {
            name,
            path: &self.path,
            shape: &info.shape,
            dtype: info.dtype,
            bytes: &self.map[self.data_start + start..self.data_start + end],
            converted_bytes,
        })
    }
}

/// What is wrong with a file.
enum Damage {
    /// Its header asks for more bytes; for a file cut inside the header, for those up to the header's end.
    Short { expected_bytes: u64 },
    /// It breaks the format.
    Format(SafeTensorError),
}

/// Where the data of a file starts, and what its header says, checked in full: the tensors lie in the file, one after
/// another, each with the bytes of its shape.
///
/// Not by `SafeTensors::read_metadata`: safetensors 0.7.0 adds up the sizes of header and tensors without a check, and a
/// header of tensors that end just below 2^64 makes it panic where overflows are checked.
fn read_header(file: &[u8]) -> Result<(usize, Metadata), Damage> {
    let got_bytes = file.len() as u64;
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(Damage::Short { expected_bytes: LENGTH_BYTES as u64 });
    };
    let length = u64::from_le_bytes(*length);
    let data_start = length.saturating_add(LENGTH_BYTES as u64);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let header = header.ok_or(Damage::Short { expected_bytes: data_start })?;
    if length > MAX_HEADER_BYTES {
        return Err(Damage::Format(SafeTensorError::HeaderTooLarge));
    }
    // Checks everything but the file's length.
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|error| Damage::Format(SafeTensorError::InvalidHeaderDeserialization(error)))?;
    let data_bytes = metadata.tensors().values().map(|tensor| tensor.data_offsets.1 as u64).max().unwrap_or(0);
    let expected_bytes = data_start.saturating_add(data_bytes);
    match expected_bytes.cmp(&got_bytes) {
        Ordering::Greater => Err(Damage::Short { expected_bytes }),
        Ordering::Less => Err(Damage::Format(SafeTensorError::MetadataIncompleteBuffer)),
        Ordering::Equal => Ok((LENGTH_BYTES + header.len(), metadata)),
    }
}

fn open_shard(dir: &Path, index: &Path, tensor: &str, shard: &str) -> Result<MappedFile, ModelError> {
    let mut components = Path::new(shard).components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !shard.contains(['/', '\\']);
    if !plain {
        return Err(ModelError::ShardOutside {
            index: index.to_path_buf(),
            tensor: tensor.to_string(),
            shard: shard.to_string(),
        });
    }
    let path = dir.join(shard);
    if !path.is_file() {
        return Err(ModelError::ShardMissing {
            index: index.to_path_buf(),
            tensor: tensor.to_string(),
            shard: shard.to_string(),
        });
    }
    MappedFile::open(path)
}

fn no_checkpoint(dir: &Path) -> ModelError {
    let hint = if !dir.is_dir() {
        "this is not a folder, name the folder of the checkpoint"
    } else if dir.join("pytorch_model.bin").is_file() || dir.join("pytorch_model.bin.index.json").is_file() {
        "it has pytorch_model.bin, which is not read: save it with save_pretrained(..., safe_serialization=True)"
    } else {
        "name the folder that Hugging Face's save_pretrained wrote"
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
}
