//! A version of a rank's shard of a parameter, as other ranks read it.

use std::sync::{Arc, Weak};

use burn::backend::flex::Layout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{Bytes, Shape};
use parking_lot::Mutex;
use zero_core::window::{Expose, Exposure, Key};

pub(crate) type Raw = FloatTensor<Flex>;

/// A version of this rank's shard.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The shard that the optimizer updates. The handle keeps its memory alive, so that no other tensor can be mistaken for it.
    pub(crate) master: Raw,
    /// The shard that is gathered; in fp32 the master itself.
    pub(crate) sent: Raw,
    /// The full parameter that this rank has gathered, while it is in use: ranks of the same process borrow it.
    lent: Mutex<Weak<Bytes>>,
    /// A rank that assembles the full parameter locks the first rank's shard, so that the others find the result.
    pub(crate) joining: Mutex<()>,
}

impl Piece {
    pub(crate) fn new(master: Raw, sent: Raw) -> Self {
        Self { master, sent, lent: Mutex::default(), joining: Mutex::default() }
    }

    /// Lends `whole` while it is in use. Nobody writes to it meanwhile: Flex computes in place only if it holds the sole strong handle, and
    /// then moves the memory away from weak ones (`Arc::make_mut`), which ends the loan.
    pub(crate) fn lend(&self, whole: &Raw) {
        *self.lent.lock() = Arc::downgrade(&whole.data_arc());
    }

    /// Borrows the full parameter that was lent with this shard, if it is still in use.
    pub(crate) fn borrow(&self, shape: &Shape) -> Option<Raw> {
        Some(Raw::from_arc(self.lent.lock().upgrade()?, Layout::contiguous(shape.clone()), self.sent.dtype()))
    }
}

/// A shard's elements, kept alive while they are sent.
struct Lent(Raw);

/// Returns the bytes of a contiguous tensor.
pub(crate) fn bytes(tensor: &Raw) -> &[u8] {
    let (begin, end) = tensor.layout().contiguous_offsets().expect("pieces are contiguous");
    let size = tensor.dtype().size();
    &tensor.bytes()[begin * size..end * size]
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        bytes(&self.0)
    }
}

impl Expose for Piece {
    fn expose(&self, _: Key) -> Exposure {
        Exposure::Ready { tag: tag(&self.sent), bytes: Box::new(Lent(self.sent.clone())) }
    }
}

/// Returns the name that every rank gives its shard of a parameter.
pub(crate) fn tag(tensor: &Raw) -> String {
    format!("{:?} piece", tensor.dtype())
}

/// Returns whether two handles refer to the same tensor.
pub(crate) fn same(a: &Raw, b: &Raw) -> bool {
    let at = |tensor: &Raw| (tensor.bytes().as_ptr(), tensor.layout().start_offset(), tensor.shape().num_elements());
    at(a) == at(b)
}
