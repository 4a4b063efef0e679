//! Activation checkpointing, requested by the model (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>).

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::FusedBackend;

/// The output of a block: one tensor, or several.
pub trait Outputs {
    /// The backend of the tensors.
    type Backend: FusedBackend;

    /// Returns handles to its float tensors.
    fn floats(&self) -> Vec<FloatTensor<Self::Backend>>;
}

impl<B: FusedBackend, const D: usize> Outputs for Tensor<B, D> {
    type Backend = B;

    fn floats(&self) -> Vec<FloatTensor<B>> {
        match self.clone().into_primitive() {
            TensorPrimitive::Float(tensor) => vec![tensor],
            TensorPrimitive::QFloat(_) => Vec::new(),
        }
    }
}

impl<B: FusedBackend, const D: usize> Outputs for Tensor<B, D, Int> {
    type Backend = B;

    fn floats(&self) -> Vec<FloatTensor<B>> {
        Vec::new()
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    type Backend = T::Backend;

    fn floats(&self) -> Vec<FloatTensor<T::Backend>> {
        self.iter().flat_map(Outputs::floats).collect()
    }
}

impl<T: Outputs> Outputs for Option<T> {
    type Backend = T::Backend;

    fn floats(&self) -> Vec<FloatTensor<T::Backend>> {
        self.iter().flat_map(Outputs::floats).collect()
    }
}

impl<T: Outputs, U: Outputs<Backend = T::Backend>> Outputs for (T, U) {
    type Backend = T::Backend;

    fn floats(&self) -> Vec<FloatTensor<T::Backend>> {
        self.0.floats().into_iter().chain(self.1.floats()).collect()
    }
}

/// Runs `block(inputs)` and keeps only its inputs and outputs in memory. Intermediate tensors are dropped, and recomputed when the backward
/// pass needs them. Dropout uses the same masks, sharded parameters are gathered again, and the gradients have the same bits. The cost is
/// one more forward pass of the block.
///
/// `block` may use anything, such as the parameters of its module. The call only runs `block` within another block, without autodiff, or on
/// backends that recompute nothing, which are all but `Zero<B>`.
///
/// ```
/// # use burn_flex::Flex;
/// # use burn_autodiff::Autodiff;
/// # type B = Autodiff<Flex>;
/// use burn::tensor::Tensor;
///
/// let x = Tensor::<B, 2>::ones([2, 3], &Default::default());
/// let y = zero_ops::checkpoint(|x: Tensor<B, 2>| x.exp().sin().exp(), x);
/// assert_eq!(y.dims(), [2, 3]);
/// ```
pub fn checkpoint<I, O: Outputs>(block: impl FnOnce(I) -> O, inputs: I) -> O {
    within(false, block, inputs)
}

/// Calls [`checkpoint`] if the run's configuration asks for it. A model for others to train calls this for each of its layers, in order.
/// `zero_burn::config::ZeroConfig::checkpointed_blocks` is the number of leading blocks that are checkpointed; 0 by default.
pub fn checkpoint_block<I, O: Outputs>(block: impl FnOnce(I) -> O, inputs: I) -> O {
    within(true, block, inputs)
}

fn within<I, O: Outputs>(if_configured: bool, block: impl FnOnce(I) -> O, inputs: I) -> O {
    let is_followed = O::Backend::ad_enabled(&Device::<O::Backend>::default());
    if !is_followed || !O::Backend::begin_checkpoint(if_configured) {
        return block(inputs);
    }
    // Ends the block even if it panics.
    let mut begun = scopeguard::guard(Vec::new(), O::Backend::end_checkpoint);
    let outputs = block(inputs);
    *begun = outputs.floats();
    outputs
}
