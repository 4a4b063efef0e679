//! The autodiff backends that train on [`Zero`].

use burn::tensor::backend::AutodiffBackend;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};

use crate::backend::Zero;
use crate::context::Context;
use crate::device::ZeroDevice;
use crate::tensor::ZeroTensor;
use crate::values::read;

/// An autodiff backend over [`Zero`]: `Autodiff<Zero<B>>`, with any checkpointing strategy.
pub trait ZeroAutodiff:
    AutodiffBackend<InnerBackend = Zero<Self::Base>, Device = ZeroDevice<<Self::Base as BackendTypes>::Device>>
{
    /// The backend that `Zero` decorates.
    type Base: Backend;

    /// Returns whether autodiff tracks `tensor`.
    #[doc(hidden)]
    fn is_tracked(tensor: &Self::FloatTensorPrimitive) -> bool;

    /// Returns the id of its node in the graph, which its clones share.
    #[doc(hidden)]
    fn node(tensor: &Self::FloatTensorPrimitive) -> u64;
}

impl<B: Backend, C: CheckpointStrategy> ZeroAutodiff for Autodiff<Zero<B>, C> {
    type Base = B;

    fn is_tracked(tensor: &Self::FloatTensorPrimitive) -> bool {
        tensor.is_tracked()
    }

    fn node(tensor: &Self::FloatTensorPrimitive) -> u64 {
        tensor.node.id.value
    }
}

/// Returns rank 0's values of a tensor that each rank has.
pub(crate) fn from_rank_0<B: Backend>(context: &Context<B>, tensor: ZeroTensor<B>) -> TensorData {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let bytes = context.broadcast_bytes(read::<B>(tensor.load()).as_bytes().to_vec());
    TensorData::from_bytes_vec(bytes, shape, dtype)
}
