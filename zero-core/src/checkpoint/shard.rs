//! One rank's file, open for reading, its header checked against the manifest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::disk::read_at;
use super::error::{CheckpointError, io_at};
use super::save::metadata;
use super::{Header, Manifest};

/// Bytes that are read and then summed while the processor's cache has them.
const CHUNK_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct PieceAt {
    /// First byte in the file.
    offset: u64,
    bytes: u64,
    crc32c: u32,
    /// Whether the bytes have been summed. Guards no memory, so its loads and stores are relaxed; two threads that come
    /// at once both sum.
    verified: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    pieces: BTreeMap<String, PieceAt>,
}

impl Shard {
    /// Opens the file of `rank` of the checkpoint in `folder` and checks everything but the tensors' bytes.
    pub(super) fn open(folder: &Path, manifest: &Manifest, rank: usize) -> Result<Self, CheckpointError> {
        let entry = &manifest.files[rank];
        let path = folder.join(&entry.name);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::Missing { what: "a rank's file", path });
            }
            file => file.map_err(io_at("open", &path))?,
        };
        let header = Header::read(&file, &path);
        // Whose file it is comes before its size: that of another rank or step has another size for a good reason.
        if let Ok(header) = &header {
            check_owner(&header.metadata, &metadata(rank, manifest.world, manifest.step, &manifest.id), &path)?;
        }
        let (expected_bytes, got_bytes) = (entry.bytes, file.metadata().map_err(io_at("look at", &path))?.len());
        if got_bytes < expected_bytes {
            return Err(CheckpointError::Truncated { path, expected_bytes, got_bytes });
        }
        if got_bytes > expected_bytes {
            return Err(CheckpointError::TooLong { path, expected_bytes, got_bytes });
        }
        let pieces = pieces(header?, manifest, rank)
            .map_err(|reason| CheckpointError::BadHeader { path: path.clone(), reason })?;
        Ok(Self { path, file, pieces })
    }

    /// Reads from byte `begin` of this rank's piece of `tensor`, which has elements, to the end of `out`. The first
    /// read of a piece reads all of it and checks its sum; what comes into `out` is then the very bytes summed.
    pub(super) fn read(&self, tensor: &str, begin: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let piece = &self.pieces[tensor];
        if piece.verified.load(Ordering::Relaxed) {
            return read_at(&self.file, &self.path, out, piece.offset + begin);
        }
        self.read_and_sum(tensor, begin, out)?;
        piece.verified.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Reads everything, also what has been read before, and adds what is wrong.
    pub(super) fn verify(&self, problems: &mut Vec<CheckpointError>) {
        problems.extend(self.pieces.keys().filter_map(|tensor| self.read_and_sum(tensor, 0, &mut []).err()));
    }

    fn read_and_sum(&self, tensor: &str, begin: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let piece = &self.pieces[tensor];
        let end = begin + out.len() as u64;
        let mut other =
            vec![0; if out.len() as u64 == piece.bytes { 0 } else { CHUNK_BYTES.min(piece.bytes) as usize }];
        let (mut at, mut got) = (0, 0);
        while at < piece.bytes {
            // What is wanted goes straight to where it is wanted, what is only to be summed into the spare buffer.
            let chunk = if (begin..end).contains(&at) {
                let from = (at - begin) as usize;
                let len = CHUNK_BYTES.min(end - at) as usize;
                &mut out[from..from + len]
            } else {
                let limit = if at < begin { begin } else { piece.bytes };
                &mut other[..CHUNK_BYTES.min(limit - at) as usize]
            };
            read_at(&self.file, &self.path, chunk, piece.offset + at)?;
            got = crc32c::crc32c_append(got, chunk);
            at += chunk.len() as u64;
        }
        if got != piece.crc32c {
            let (path, tensor, expected) = (self.path.clone(), tensor.to_string(), piece.crc32c);
            return Err(CheckpointError::Corrupt { path, tensor, expected, got });
        }
        Ok(())
    }
}

fn check_owner(
    got: &BTreeMap<String, String>,
    expected: &BTreeMap<String, String>,
    path: &Path,
) -> Result<(), CheckpointError> {
    let wanted = expected.keys();
    if let Some(key) = wanted.clone().find(|key| !got.contains_key(*key)) {
        let reason = format!("it does not name the {key} that the file is of");
        return Err(CheckpointError::BadHeader { path: path.to_path_buf(), reason });
    }
    if wanted.clone().all(|key| got[key] == expected[key]) {
        return Ok(());
    }
    let name = |of: &BTreeMap<String, String>| {
        format!("rank {} of {}, step {}, save {}", of["rank"], of["world"], of["step"], of["id"])
    };
    Err(CheckpointError::Swapped { path: path.to_path_buf(), expected: name(expected), got: name(got) })
}

/// Where the rank's piece of each tensor lies, if the header says what the manifest says.
fn pieces(mut header: Header, manifest: &Manifest, rank: usize) -> Result<BTreeMap<String, PieceAt>, String> {
    let mut pieces = BTreeMap::new();
    for (name, tensor) in &manifest.tensors {
        let Some(crc32c) = tensor.crc32c[rank] else { continue };
        let shape = vec![manifest.partition(tensor).len(rank)];
        let found = header.tensors.remove(name).ok_or_else(|| format!("tensor '{name}' is not in it"))?;
        if (found.dtype, &found.shape) != (tensor.dtype, &shape) {
            let (dtype, found_shape) = (found.dtype, found.shape);
            return Err(format!("tensor '{name}' is {dtype} {found_shape:?}, expected {} {shape:?}", tensor.dtype));
        }
        let (begin, end) = found.data_offsets;
        let (offset, bytes) = (header.data_start + begin, end - begin);
        pieces.insert(name.clone(), PieceAt { offset, bytes, crc32c, verified: AtomicBool::new(false) });
    }
    match header.tensors.keys().next() {
        Some(name) => Err(format!("tensor '{name}' is in it, but not in the manifest")),
        None => Ok(pieces),
    }
}
