//! Reading a checkpoint with any number of ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use super::exchange::Heartbeat;
use super::shard::Shard;
use super::{Check, CheckpointError, Manifest, TensorEntry};
use crate::Partition;

/// A complete checkpoint, open for reading. Threads may share it; it stays readable when its folder is removed.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// Files of the ranks; each is set once opened.
    shards: Vec<OnceLock<Shard>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`: reads its manifest, and checks the size and header of each file. The tensors' bytes are checked
    /// when they are read, and the state's values when they are requested.
    ///
    /// # Errors
    ///
    /// The first problem found; [`verify`] returns all of them.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_as_read(folder)?;
        (0..checkpoint.shards.len()).try_for_each(|rank| checkpoint.shard(rank).map(drop))?;
        Ok(checkpoint)
    }

    /// Same as [`Checkpoint::open`], but opens each file, and checks its size and header, at the first read from it. So a rank opens only
    /// the files that it reads. The files must exist until then.
    ///
    /// # Errors
    ///
    /// Same as [`Manifest::read`]; errors of the files come from [`Checkpoint::read`].
    pub fn open_as_read(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let shards = (0..manifest.world).map(|_| OnceLock::new()).collect();
        Ok(Self { path: folder.to_path_buf(), manifest, shards })
    }

    fn shard(&self, rank: usize) -> Result<&Shard, CheckpointError> {
        let shard = &self.shards[rank];
        if shard.get().is_none() {
            // Two threads may both open it; one of the two results is kept.
            let _ = shard.set(Shard::open(&self.path, &self.manifest, rank)?);
        }
        Ok(shard.get().expect("it has been set"))
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the training step.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns every tensor by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.manifest.tensors
    }

    /// Returns the tensor of this name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.checked(name, &(0..0))
    }

    /// Returns the state that the engine saved, parsed from the manifest at each call.
    ///
    /// # Errors
    ///
    /// Same as [`Manifest::state`].
    pub fn state(&self) -> Result<Value, CheckpointError> {
        self.manifest.state(&self.path)
    }

    /// Reads elements `range` of the flattened tensor, little-endian.
    ///
    /// The first read from a rank's shard reads all of it and verifies its checksum; later reads read only what they need.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoTensor`], [`CheckpointError::OutOfRange`], [`CheckpointError::Corrupt`], and errors of opening or reading a
    /// file. Bytes that were not verified are never returned.
    pub fn read(&self, tensor: &str, range: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.checked(tensor, &range)?;
        let mut out = vec![0; range.len() * entry.dtype.size()];
        self.fill(tensor, entry, range, &mut out)?;
        Ok(out)
    }

    /// Same as [`Checkpoint::read`], into the caller's memory.
    ///
    /// # Errors
    ///
    /// Same as [`Checkpoint::read`]; `out` then holds no usable data. [`CheckpointError::Unfit`] if `out` does not have the size of the
    /// elements.
    pub fn read_into(&self, tensor: &str, range: Range<usize>, out: &mut [u8]) -> Result<(), CheckpointError> {
        let entry = self.checked(tensor, &range)?;
        let bytes = range.len() * entry.dtype.size();
        if out.len() != bytes {
            let (expected, got) = (format!("a buffer of {bytes} bytes"), format!("{} bytes", out.len()));
            return Err(CheckpointError::Unfit { tensor: tensor.to_string(), expected, got });
        }
        self.fill(tensor, entry, range, out)
    }

    /// Reads every tensor again and returns all problems; empty if everything is intact.
    pub fn verify(&self) -> Vec<CheckpointError> {
        let (mut problems, progress) = (Vec::new(), Heartbeat::default());
        for rank in 0..self.shards.len() {
            match self.shard(rank) {
                Ok(shard) => problems.extend(shard.verify(&progress)),
                Err(error) => problems.push(error),
            }
        }
        problems
    }

    /// Returns the tensor, if it has these elements.
    fn checked(&self, tensor: &str, range: &Range<usize>) -> Result<&TensorEntry, CheckpointError> {
        let entry = self.tensors().get(tensor).ok_or_else(|| CheckpointError::NoTensor {
            path: self.path.clone(),
            tensor: tensor.to_string(),
            count: self.tensors().len(),
        })?;
        let numel = entry.numel();
        if range.start > range.end || range.end > numel {
            let (start, end) = (range.start, range.end);
            return Err(CheckpointError::OutOfRange { tensor: tensor.to_string(), numel, start, end });
        }
        Ok(entry)
    }

    fn fill(
        &self,
        tensor: &str,
        entry: &TensorEntry,
        range: Range<usize>,
        mut out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (partition, size) = (self.manifest.partition(entry), entry.dtype.size());
        let mut at = range.start;
        while at < range.end {
            let rank = at / partition.stride();
            let piece = partition.range(rank);
            let end = piece.end.min(range.end);
            let (now, later) = out.split_at_mut((end - at) * size);
            self.shard(rank)?.read(tensor, ((at - piece.start) * size) as u64, now)?;
            (out, at) = (later, end);
        }
        Ok(())
    }
}

/// Reads the shard of `tensor` that `rank` of `world` owns now, whatever the number of ranks that saved it.
///
/// # Errors
///
/// Same as [`Checkpoint::read`].
pub fn piece_for(checkpoint: &Checkpoint, tensor: &str, rank: usize, world: usize) -> Result<Vec<u8>, CheckpointError> {
    let numel = checkpoint.tensor(tensor)?.numel();
    checkpoint.read(tensor, Partition::new(numel, world).range(rank))
}

/// Reads the entire checkpoint in `folder` and returns all problems, file by file and tensor by tensor; empty if it is intact.
pub fn verify(folder: &Path) -> Vec<CheckpointError> {
    Manifest::examine(folder, Check::Contents).1
}

impl Manifest {
    /// Returns the manifest in `folder`, if it can be read, and all problems of it and its files that `check` can find; empty if they are
    /// intact. One file is open at a time, and 1 MiB of it is in memory.
    pub fn examine(folder: &Path, check: Check) -> (Option<Self>, Vec<CheckpointError>) {
        match Self::read(folder) {
            Ok(manifest) => {
                let problems = manifest.problems(folder, check);
                (Some(manifest), problems)
            }
            Err(error) => (None, vec![error]),
        }
    }

    /// Returns all problems of the files in `folder`, which this manifest was read from.
    pub fn problems(&self, folder: &Path, check: Check) -> Vec<CheckpointError> {
        let progress = Heartbeat::default();
        let file = |rank| Shard::problems((folder, self), rank, check, usize::MAX, &progress);
        self.state(folder).err().into_iter().chain((0..self.world).flat_map(file)).collect()
    }
}
