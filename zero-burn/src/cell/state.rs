//! What a cell has of its tensor.

use burn_backend::Backend;
use zero_core::CommError;
use zero_ops::Shared;

use crate::bulk::Begun;
use crate::tier::Stored;

/// This rank's piece.
pub(crate) enum Piece<B: Backend> {
    /// Its reduction or its update is under way; ends in one of the others.
    Pending,
    /// There is none, for this reason.
    Failed(CommError),
    Tensor(Shared<B>),
    /// In the host's memory or in this rank's file, and moved to the backend when it is asked for ([`crate::tier`]).
    Stored(Stored),
    /// A slice of the whole, taken on demand: of parameters at stages 1 and 2.
    OfWhole,
}

/// What is gathered of all pieces. It comes and goes by the policy of [`crate::gather`].
pub(crate) enum Whole<B: Backend> {
    Absent,
    /// The rank's prefetch thread is at it.
    Gathering,
    /// All ranks gather it together ([`crate::bulk`]).
    Arriving(Begun<B>),
    There(Shared<B>),
}

impl<B: Backend> Whole<B> {
    pub(crate) fn is_begun(&self) -> bool {
        matches!(self, Whole::Arriving(_) | Whole::There(_))
    }

    /// What is there, as a tensor.
    pub(crate) fn tensor(&self) -> Option<B::FloatTensorPrimitive> {
        match self {
            Whole::There(whole) => Some(whole.tensor()),
            _ => None,
        }
    }

    /// What was begun by all ranks, if it was: nothing of the whole is left here.
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
    /// The whole was put there, or is arriving, ahead of its use and counts against the prefetch budget.
    pub(crate) prefetched: bool,
}

impl<B: Backend> State<B> {
    pub(super) fn of(piece: Piece<B>) -> Self {
        Self { piece, whole: Whole::Absent, prefetched: false }
    }

    /// Whether the piece is there, besides the whole.
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
