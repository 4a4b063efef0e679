//! The state of a cell: its shard, and the gathered full tensor.

use zero_core::CommError;

use crate::backend::{Backend, Shared};
use crate::tensor_collectives::Begun;
use crate::tier::Stored;

/// This rank's shard.
pub enum ShardState<B: Backend> {
    /// Its reduction or update is in progress, and ends in one of the other variants.
    Pending,
    /// There is none, for this reason.
    Failed(CommError),
    /// With the backend, flat; one filler element if the rank owns none.
    Tensor(Shared<B>),
    /// The fp32 master that the optimizer's state holds, flat: each read rounds its elements to the cell's type.
    OfMaster(Shared<B>),
    /// In host memory or in this rank's file, and moved to the backend on demand ([`crate::tier`]).
    Stored(Stored<B>),
    /// A slice of the full tensor, taken on demand: for parameters at stages 1 and 2.
    OfFull,
}

/// The full tensor, gathered from all shards. The policy of [`crate::gather`] decides how long it is kept.
pub enum FullState<B: Backend> {
    /// Not gathered.
    Absent,
    /// The rank's prefetch thread is gathering it.
    Gathering,
    /// All ranks are gathering it collectively ([`crate::tensor_collectives`]).
    Arriving(Begun<B>),
    /// Gathered.
    There(Shared<B>),
}

impl<B: Backend> FullState<B> {
    /// Returns whether the full tensor is available, or is being gathered by all ranks.
    pub fn is_begun(&self) -> bool {
        matches!(self, FullState::Arriving(_) | FullState::There(_))
    }

    /// Returns the full tensor, if it is available.
    pub fn tensor(&self) -> Option<B::Tensor> {
        match self {
            FullState::There(full) => Some(full.tensor()),
            _ => None,
        }
    }

    /// Takes the collective gather in progress, if there is one, and leaves [`FullState::Absent`].
    pub fn take_arriving(&mut self) -> Option<Begun<B>> {
        match std::mem::replace(self, FullState::Absent) {
            FullState::Arriving(begun) => Some(begun),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// The state of a cell.
pub struct State<B: Backend> {
    /// This rank's shard.
    pub shard: ShardState<B>,
    /// The full tensor.
    pub full: FullState<B>,
    /// True if the full tensor was gathered, or is arriving, ahead of its use, and counts against the prefetch budget.
    pub prefetched: bool,
}

impl<B: Backend> State<B> {
    pub(super) fn of(shard: ShardState<B>) -> Self {
        Self { shard, full: FullState::Absent, prefetched: false }
    }

    /// Returns whether the shard is held separately from the full tensor.
    pub fn has_shard(&self) -> bool {
        matches!(self.shard, ShardState::Tensor(_) | ShardState::OfMaster(_) | ShardState::Stored(_))
    }

    /// Returns whether the rank's prefetch thread is gathering the full tensor.
    pub fn is_gathering(&self) -> bool {
        matches!(self.full, FullState::Gathering)
    }

    /// Returns the shard, if it is a tensor of its own.
    pub fn tensor(&self) -> Option<&Shared<B>> {
        match &self.shard {
            ShardState::Tensor(local) => Some(local),
            _ => None,
        }
    }

    pub(super) fn stored(&self) -> Option<&Stored<B>> {
        match &self.shard {
            ShardState::Stored(stored) => Some(stored),
            _ => None,
        }
    }
}
