//! Reading a checkpoint, by as many ranks as there are now.

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
    /// Those that have been opened.
    shards: Vec<OnceLock<Shard>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`: its manifest, and of each file the size and the header. The tensors' bytes are
    /// checked when they are read, and the values of the state when they are asked for.
    ///
    /// # Errors
    ///
    /// The first thing that is not as it was saved, by name; [`verify`] tells all of them.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_as_read(folder)?;
        (0..checkpoint.shards.len()).try_for_each(|rank| checkpoint.shard(rank).map(drop))?;
        Ok(checkpoint)
    }

    /// As [`Checkpoint::open`], but each file is opened, and its size and header checked, when something is first read from
    /// it, so that a rank opens only those that it reads. The files must stay until then.
    ///
    /// # Errors
    ///
    /// As [`Manifest::read`]; those of the files come from [`Checkpoint::read`].
    pub fn open_as_read(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let shards = (0..manifest.world).map(|_| OnceLock::new()).collect();
        Ok(Self { path: folder.to_path_buf(), manifest, shards })
    }

    fn shard(&self, rank: usize) -> Result<&Shard, CheckpointError> {
        let shard = &self.shards[rank];
        if shard.get().is_none() {
            // Two threads may both open it: one of the two is kept.
            let _ = shard.set(Shard::open(&self.path, &self.manifest, rank)?);
        }
        Ok(shard.get().expect("it has been set"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The training step.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Every tensor by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.manifest.tensors
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.checked(name, &(0..0))
    }

    /// What the engine gave when it saved, made from the manifest at each call.
    ///
    /// # Errors
    ///
    /// As [`Manifest::state`].
    pub fn state(&self) -> Result<Value, CheckpointError> {
        self.manifest.state(&self.path)
    }

    /// Elements `range` of the flat tensor, little-endian.
    ///
    /// The first read that touches a rank's piece reads and sums the whole piece; later ones read what they want.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoTensor`], [`CheckpointError::OutOfRange`], [`CheckpointError::Corrupt`], and what the
    /// system says. Bytes that were not verified are never returned.
    pub fn read(&self, tensor: &str, range: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.checked(tensor, &range)?;
        let mut out = vec![0; range.len() * entry.dtype.size()];
        self.fill(tensor, entry, range, &mut out)?;
        Ok(out)
    }

    /// As [`Checkpoint::read`], into memory that the caller has.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::read`], after which `out` holds nothing of use; [`CheckpointError::Unfit`] when `out` does not
    /// have the size of the elements.
    pub fn read_into(&self, tensor: &str, range: Range<usize>, out: &mut [u8]) -> Result<(), CheckpointError> {
        let entry = self.checked(tensor, &range)?;
        let bytes = range.len() * entry.dtype.size();
        if out.len() != bytes {
            let (expected, got) = (format!("room for {bytes} bytes"), format!("{} bytes", out.len()));
            return Err(CheckpointError::Unfit { tensor: tensor.to_string(), expected, got });
        }
        self.fill(tensor, entry, range, out)
    }

    /// Reads every tensor again and says what is damaged; nothing when all is sound.
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

    /// The tensor, if it has these elements.
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

/// The elements of `tensor` that `rank` of `world` owns now, whatever the number of ranks that saved it.
///
/// # Errors
///
/// As [`Checkpoint::read`].
pub fn piece_for(checkpoint: &Checkpoint, tensor: &str, rank: usize, world: usize) -> Result<Vec<u8>, CheckpointError> {
    let numel = checkpoint.tensor(tensor)?.numel();
    checkpoint.read(tensor, Partition::new(numel, world).range(rank))
}

/// Reads the checkpoint in `folder` as a whole and says everything that is wrong with it, file by file and tensor by
/// tensor; nothing when it is sound.
pub fn verify(folder: &Path) -> Vec<CheckpointError> {
    Manifest::examine(folder, Check::Contents).1
}

impl Manifest {
    /// The manifest in `folder`, if it can be read, and everything that is wrong with it and its files, as far as `check`
    /// looks; nothing when they are sound. One file is open at a time, and a MiB of it is in memory.
    pub fn examine(folder: &Path, check: Check) -> (Option<Self>, Vec<CheckpointError>) {
        match Self::read(folder) {
            Ok(manifest) => {
                let problems = manifest.problems(folder, check);
                (Some(manifest), problems)
            }
            Err(error) => (None, vec![error]),
        }
    }

    /// Everything that is wrong with the files in `folder` that this manifest, read from there, is about.
    pub fn problems(&self, folder: &Path, check: Check) -> Vec<CheckpointError> {
        let progress = Heartbeat::default();
        let file = |rank| Shard::problems((folder, self), rank, check, usize::MAX, &progress);
        self.state(folder).err().into_iter().chain((0..self.world).flat_map(file)).collect()
    }
}
