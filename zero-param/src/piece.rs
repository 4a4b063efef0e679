//! A version of a rank's piece of a parameter, as the other ranks read it.

use std::sync::{Arc, Weak};

use burn::backend::flex::Layout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{Bytes, Shape};
use parking_lot::Mutex;
use zero_core::window::{Expose, Exposure, Key};

pub(crate) type Raw = FloatTensor<Flex>;

/// A version of this rank's piece.
#[derive(Debug)]
pub(crate) struct Piece {
    /// As the optimizer updates it. The handle keeps its memory, so that no other tensor can be taken for it.
    pub(crate) master: Raw,
    /// As it is gathered; the master itself in fp32.
    pub(crate) sent: Raw,
    /// The whole that this rank has gathered, for as long as something uses it: ranks of one process borrow it.
    lent: Mutex<Weak<Bytes>>,
    /// Who joins pieces holds the first rank's, so that the others find a whole.
    pub(crate) joining: Mutex<()>,
}

impl Piece {
    pub(crate) fn new(master: Raw, sent: Raw) -> Self {
        Self { master, sent, lent: Mutex::default(), joining: Mutex::default() }
    }

    /// Lends `whole` while it is used anywhere. Nobody writes to it meanwhile: Flex computes in place where it holds the one strong
    /// handle, and takes the memory away from weak ones when it does (`Arc::make_mut`), which voids the loan.
    pub(crate) fn lend(&self, whole: &Raw) {
        *self.lent.lock() = Arc::downgrade(&whole.data_arc());
    }

    /// What is lent of this piece's whole.
    pub(crate) fn borrow(&self, shape: &Shape) -> Option<Raw> {
        Some(Raw::from_arc(self.lent.lock().upgrade()?, Layout::contiguous(shape.clone()), self.sent.dtype()))
    }
}

/// A piece's elements, lent while they are sent.
struct Lent(Raw);

/// The bytes of a tensor whose elements lie one after the other.
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

/// What every rank calls its piece of a parameter.
pub(crate) fn tag(tensor: &Raw) -> String {
    format!("{:?} piece", tensor.dtype())
}

/// Whether two handles are of one tensor.
pub(crate) fn same(a: &Raw, b: &Raw) -> bool {
    let at = |tensor: &Raw| (tensor.bytes().as_ptr(), tensor.layout().start_offset(), tensor.shape().num_elements());
    at(a) == at(b)
}
