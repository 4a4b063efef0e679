//! A version of a rank's piece of a parameter, as the other ranks read it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use zero_core::window::{Expose, Exposure, Key};

pub(crate) type Raw = FloatTensor<Flex>;

/// A version of this rank's piece.
#[derive(Debug)]
pub(crate) struct Piece {
    /// As the optimizer updates it. The handle keeps its memory, so that no other tensor can be taken for it.
    pub(crate) master: Raw,
    /// As it is gathered; the master itself in fp32.
    pub(crate) sent: Raw,
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
