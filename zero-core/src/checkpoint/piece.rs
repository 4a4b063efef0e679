//! The data that a rank passes to a save.

use std::borrow::Cow;

use super::ElementType;
use super::error::CheckpointError;
use super::header::METADATA;
use crate::Partition;

/// A rank's shard of one tensor: its own elements of `Partition::new(numel, world)`, possibly none.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece<'a> {
    /// The tensor's name, the same on every rank.
    pub name: Cow<'a, str>,
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the full tensor.
    pub shape: Cow<'a, [usize]>,
    /// The rank's elements, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> Piece<'a> {
    /// Creates the shard `bytes` of the tensor `name`, whose full shape is `shape`.
    pub fn new(
        name: impl Into<Cow<'a, str>>,
        dtype: ElementType,
        shape: impl Into<Cow<'a, [usize]>>,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), bytes: bytes.into() }
    }

    /// Returns the same shard, copying borrowed data.
    pub fn into_owned(self) -> Piece<'static> {
        Piece {
            name: self.name.into_owned().into(),
            dtype: self.dtype,
            shape: self.shape.into_owned().into(),
            bytes: self.bytes.into_owned().into(),
        }
    }

    /// Returns the description of its tensor.
    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec { name: self.name.to_string(), dtype: self.dtype, shape: self.shape.to_vec() }
    }

    /// Checks that `bytes` has the size of the shard of `rank` of `world`.
    pub(super) fn check(&self, rank: usize, world: usize) -> Result<(), CheckpointError> {
        self.spec().check()?;
        let elems = Partition::new(self.shape.iter().product(), world).len(rank);
        let bytes = elems * self.dtype.size();
        if self.bytes.len() != bytes {
            let whole = format!("{} {:?} over {world} ranks", self.dtype, self.shape);
            return Err(CheckpointError::Unfit {
                tensor: self.name.to_string(),
                expected: format!("{bytes} bytes for the {elems} elements that rank {rank} has of {whole}"),
                got: format!("{} bytes", self.bytes.len()),
            });
        }
        Ok(())
    }
}

/// A full tensor, of which every rank has a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name, the same on every rank.
    pub name: String,
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Checks that a file can hold it.
    pub(super) fn check(&self) -> Result<(), CheckpointError> {
        let unfit = |expected: &str, got: String| {
            Err(CheckpointError::Unfit { tensor: self.name.clone(), expected: expected.into(), got })
        };
        if self.name.is_empty() || self.name == METADATA {
            return unfit("a name that safetensors can hold", format!("'{}'", self.name));
        }
        if self.dtype.bytes_of(&self.shape).is_none() {
            return unfit("a size that a file can have", format!("{} {:?}", self.dtype, self.shape));
        }
        Ok(())
    }
}
