//! One rank's file, open for reading, with its header checked against the manifest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::disk::read_at;
use super::error::{CheckpointError, brief, io_at};
use super::exchange::Heartbeat;
use super::names::{OWNER, rank_file};
use super::{Check, Header, Manifest};
use crate::files;

/// Size of the chunks that are read and then checksummed while they are in the CPU's cache.
const CHUNK_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct PieceAt {
    /// First byte in the file.
    offset: u64,
    bytes: u64,
    crc32c: u32,
    /// Set once the checksum has been verified. It guards no memory, so its loads and stores are relaxed; two concurrent threads both
    /// verify.
    verified: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    /// Shards of the tensors that the rank has elements of, by name.
    pieces: BTreeMap<String, PieceAt>,
}

impl Shard {
    /// Opens the file of `rank` of the checkpoint in `folder` and checks everything but the tensors' bytes.
    pub(super) fn open(folder: &Path, manifest: &Manifest, rank: usize) -> Result<Self, CheckpointError> {
        let path = folder.join(rank_file(rank, manifest.world));
        let file = match files::open(&path, File::options().read(true)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::Missing { what: "a rank's file", path });
            }
            file => file.map_err(io_at("open", &path))?,
        };
        let header = Header::read(&file, &path);
        // The owner is checked before the size: the file of another rank or step has another size for a good reason.
        if let Ok(header) = &header {
            check_owner(&header.metadata, manifest, rank, &path)?;
        }
        let (expected_bytes, got_bytes) =
            (manifest.file_bytes[rank], file.metadata().map_err(io_at("read the metadata of", &path))?.len());
        if got_bytes < expected_bytes {
            return Err(CheckpointError::Truncated { path, expected_bytes, got_bytes });
        }
        if got_bytes > expected_bytes {
            return Err(CheckpointError::TooLong { path, expected_bytes, got_bytes });
        }
        let pieces = pieces(&header?, manifest, rank)
            .map_err(|reason| CheckpointError::BadHeader { path: path.clone(), reason })?;
        Ok(Self { path, file, pieces })
    }

    /// Fills `out` from byte `begin` on of this rank's shard of `tensor`, which is not empty. The first read of a shard reads all of it and
    /// verifies its checksum; `out` then holds the very bytes that were verified.
    pub(super) fn read(&self, tensor: &str, begin: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let piece = self.pieces.get(tensor).expect("the rank has elements of the tensor");
        if piece.verified.load(Ordering::Relaxed) {
            return read_at(&self.file, &self.path, out, piece.offset + begin);
        }
        self.read_and_sum(tensor, piece, begin, out, &Heartbeat::default())?;
        piece.verified.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the first `most` problems of the file of `rank` that `check` can find.
    pub(super) fn problems(
        (folder, manifest): (&Path, &Manifest),
        rank: usize,
        check: Check,
        most: usize,
        progress: &Heartbeat,
    ) -> Vec<CheckpointError> {
        match Self::open(folder, manifest, rank) {
            Ok(shard) if check == Check::Contents => shard.verify(progress).take(most).collect(),
            Ok(_) => Vec::new(),
            Err(error) => vec![error],
        }
    }

    /// Reads everything, including bytes that were read before, and returns the problems.
    pub(super) fn verify<'s>(&'s self, progress: &'s Heartbeat) -> impl Iterator<Item = CheckpointError> + 's {
        let read = |(name, piece): (&String, &PieceAt)| self.read_and_sum(name, piece, 0, &mut [], progress).err();
        self.pieces.iter().filter_map(read)
    }

    fn read_and_sum(
        &self,
        tensor: &str,
        piece: &PieceAt,
        begin: u64,
        out: &mut [u8],
        progress: &Heartbeat,
    ) -> Result<(), CheckpointError> {
        let end = begin + out.len() as u64;
        let mut other =
            vec![0; if out.len() as u64 == piece.bytes { 0 } else { CHUNK_BYTES.min(piece.bytes) as usize }];
        let (mut at, mut got) = (0, 0);
        while at < piece.bytes {
            // Requested bytes go directly into `out`; bytes that are only checksummed go into the spare buffer.
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
            progress.made();
        }
        if got != piece.crc32c {
            let (path, tensor, expected) = (self.path.clone(), tensor.to_string(), piece.crc32c);
            return Err(CheckpointError::Corrupt { path, tensor, expected, got });
        }
        Ok(())
    }
}

/// Checks that a header's metadata describes the file of `rank`.
fn check_owner(
    got: &BTreeMap<String, String>,
    manifest: &Manifest,
    rank: usize,
    path: &Path,
) -> Result<(), CheckpointError> {
    let (rank, world, step) = (rank.to_string(), manifest.world.to_string(), manifest.step.to_string());
    let expected: [&str; 4] = [&rank, &world, &step, &manifest.id];
    let found = OWNER.map(|key| got.get(key).map(String::as_str));
    if let Some(at) = found.iter().position(Option::is_none) {
        let reason = format!("its metadata has no key '{}'", OWNER[at]);
        return Err(CheckpointError::BadHeader { path: path.to_path_buf(), reason });
    }
    let got = found.map(Option::unwrap_or_default);
    if got == expected {
        return Ok(());
    }
    let name = |of: [&str; 4]| {
        let [rank, world, step, id] = of.map(brief);
        format!("rank {rank} of {world}, step {step}, save {id}")
    };
    Err(CheckpointError::Swapped { path: path.to_path_buf(), expected: name(expected), got: name(got) })
}

/// Returns the position of the rank's shard of each tensor, if the header matches the manifest.
fn pieces(header: &Header, manifest: &Manifest, rank: usize) -> Result<BTreeMap<String, PieceAt>, String> {
    let mut pieces = BTreeMap::new();
    for (name, tensor) in &manifest.tensors {
        let Some(crc32c) = tensor.crc32c[rank] else { continue };
        let shape = [manifest.partition(tensor).len(rank)];
        let found = header.tensors.get(name).ok_or_else(|| format!("tensor '{}' is not in it", brief(name)))?;
        if (found.dtype, &found.shape[..]) != (tensor.dtype.into(), &shape[..]) {
            let (name, dtype, found_shape) = (brief(name), found.dtype, brief(format_args!("{:?}", found.shape)));
            return Err(format!("tensor '{name}' is {dtype} {found_shape}, expected {} {shape:?}", tensor.dtype));
        }
        let (begin, end) = found.data_offsets;
        let (offset, bytes) = (header.data_start + begin, end - begin);
        pieces.insert(name.clone(), PieceAt { offset, bytes, crc32c, verified: AtomicBool::new(false) });
    }
    if pieces.len() < header.tensors.len() {
        let expected = |name: &str| manifest.tensors.get(name).is_some_and(|tensor| tensor.crc32c[rank].is_some());
        if let Some(name) = header.tensors.keys().find(|name| !expected(name)) {
            return Err(format!("tensor '{}' is in it, but not in the manifest", brief(name)));
        }
    }
    Ok(pieces)
}
