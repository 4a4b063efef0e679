//! The state of a cell: its shard, and the gathered full tensor.

use burn_backend::Backend;
use zero_core::CommError;
use zero_ops::Shared;

use crate::bulk::Begun;
use crate::tier::Stored;

/// This rank's shard.
pub(crate) enum Piece<B: Backend> {
    /// Its reduction or update is in progress, and ends in one of the other variants.
    Pending,
    /// There is none, for this reason.
    Failed(CommError),
    Tensor(Shared<B>),
    /// In host memory or in this rank's file, and moved to the backend on demand ([`crate::tier`]).
    Stored(Stored),
    /// A slice of the full tensor, taken on demand: for parameters at stages 1 and 2.
    OfWhole,
}

/// The full tensor, gathered from all shards. The policy of [`crate::gather`] decides how long it is kept.
pub(crate) enum Whole<B: Backend> {
    Absent,
    /// The rank's prefetch thread is gathering it.
    Gathering,
    /// All ranks are gathering it collectively ([`crate::bulk`]).
    Arriving(Begun<B>),
    There(Shared<B>),
}

impl<B: Backend> Whole<B> {
    pub(crate) fn is_begun(&self) -> bool {
        matches!(self, Whole::Arriving(_) | Whole::There(_))
    }

    /// Returns the full tensor, if it is available.
    pub(crate) fn tensor(&self) -> Option<B::FloatTensorPrimitive> {
        match self {
            Whole::There(whole) => Some(whole.tensor()),
            _ => None,
        }
    }

    /// Takes the collective gather in progress, if there is one, and leaves [`Whole::Absent`].
    pub(crate) fn take_arriving(&mut self) -> Option<Begun<B>> {
        match std::mem::replace(self, Whole::Absent) {
            Whole::Arriving(begun) => Some(begun),
            other => {
                *self = other;
                None
            }
        }
    }
}

pub(crate) struct State<B: Backend> {
    pub(crate) piece: Piece<B>,
    pub(crate) whole: Whole<B>,
    /// True if the full tensor was gathered, or is arriving, ahead of its use, and counts against the prefetch budget.
    pub(crate) prefetched: bool,
}

impl<B: Backend> State<B> {
    pub(super) fn of(piece: Piece<B>) -> Self {
        Self { piece, whole: Whole::Absent, prefetched: false }
    }

    /// Returns whether the shard is held separately from the full tensor.
    pub(crate) fn has_piece(&self) -> bool {
        matches!(self.piece, Piece::Tensor(_) | Piece::Stored(_))
    }

    pub(crate) fn is_gathering(&self) -> bool {
        matches!(self.whole, Whole::Gathering)
    }

    pub(super) fn stored(&self) -> Option<&Stored> {
        match &self.piece {
            Piece::Stored(stored) => Some(stored),
            _ => None,
        }
    }
}
