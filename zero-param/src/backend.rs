//! The gather as an operation that autodiff knows: forward it makes a whole of pieces, backward it hands the gradient over.
//!
//! Its result is never saved: what a backward pass needs of it is gathered again, whatever the user's checkpointing strategy is.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Tensor, TensorData};

use crate::clock;
use crate::fused::Op;
use crate::slot::{Recorded, Slot};

/// What a backend does for sharded parameters. `piece` is what the rank updates of a parameter.
#[backend_extension(Flex, Autodiff)]
pub(crate) trait ZeroBackend: Backend {
    /// The whole, of [`Slot::whole`]'s shape; or these rows of it, whose gradient is handed over as that of rows, and for which the whole
    /// is not kept.
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>, rows: Option<Arc<[i64]>>) -> FloatTensor<Self>;
    /// The whole once more, in a backward pass.
    fn gather_again(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self>;
    /// The piece, which the other ranks may read from now on.
    fn publish(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self>;
    /// The piece, as a view of the whole where that is kept.
    fn rebase(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self>;
}

/// A backend whose tensors are read without waiting for a device.
pub(crate) trait Local: Backend {
    fn read(tensor: FloatTensor<Self>) -> TensorData;
}

impl Local for Flex {
    fn read(tensor: FloatTensor<Self>) -> TensorData {
        tensor.into_data()
    }
}

impl ZeroBackend for Flex {
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>, rows: Option<Arc<[i64]>>) -> FloatTensor<Self> {
        let whole = slot.load(&piece);
        match rows {
            None => whole,
            Some(ids) => Op::Embedding { ids, rows: slot.whole[0] }.forward(vec![whole], &[false]).0,
        }
    }
    fn gather_again(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        slot.load_again(&piece)
    }
    fn publish(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        slot.publish(&piece);
        piece
    }
    fn rebase(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        slot.rebase(piece)
    }
}

#[derive(Debug)]
struct Gather<B>(PhantomData<B>);

impl<B: Local, const N: usize> Backward<B, N> for Gather<B> {
    /// None where no gradient is wanted; the rows that were read, if not the whole was.
    type State = (Option<Arc<Recorded>>, Option<Arc<[i64]>>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let (Some(recorded), rows) = ops.state {
            recorded.hand_over(B::read(gradient), rows);
        }
    }
}

#[derive(Debug)]
struct GatherAgain<B> {
    piece: NodeId,
    token: Option<NodeId>,
    slot: Arc<Slot>,
    backend: PhantomData<B>,
}

impl<B: ZeroBackend> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        if let Some(token) = &self.token {
            // Counted as used, so that its state goes.
            drop(states.get_state::<B::FloatTensorPrimitive>(token));
        }
        let piece = states.get_state::<B::FloatTensorPrimitive>(&self.piece);
        states.save(out, B::gather_again(piece, self.slot.clone()));
    }
}

impl<B: ZeroBackend + Local, C: CheckpointStrategy> ZeroBackend for Autodiff<B, C> {
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>, rows: Option<Arc<[i64]>>) -> FloatTensor<Self> {
        let wanted = piece.is_tracked();
        // Of rows a backward pass needs nothing but their numbers.
        let is_again = slot.is_made() && rows.is_none();
        if !wanted && !is_again {
            return Self::from_inner(B::gather(piece.into_primitive(), slot, rows));
        }
        // An untracked parent would have the whole saved, so a frozen piece is a leaf whose gradient is dropped.
        let piece = match wanted {
            true => piece,
            false => Self::float_set_require_grad(Self::from_inner(piece.into_primitive()), true),
        };
        let recorded = wanted.then(|| Recorded::new(&slot));
        let token = clock::tick::<B>(piece.primitive());
        let again = GatherAgain::<B> {
            piece: piece.id(),
            token: token.as_ref().map(|token| token.id()),
            slot: slot.clone(),
            backend: PhantomData,
        };
        macro_rules! record {
            ($($parent:expr),*) => {{
                let op = Gather::<B>(PhantomData).prepare::<BalancedCheckpointing>([$($parent.node()),*]);
                let op = match is_again {
                    true => op.memory_bound().retro_forward(again).parents([$(&$parent),*]),
                    false => op.compute_bound(),
                };
                let whole = B::gather(piece.into_primitive(), slot, rows.clone());
                match op.stateful() {
                    OpsKind::Tracked(op) => op.finish((recorded, rows), whole),
                    OpsKind::UnTracked(op) => op.finish(whole),
                }
            }};
        }
        match token {
            Some(token) => record!(piece, token),
            None => record!(piece),
        }
    }
    fn gather_again(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        Self::from_inner(B::gather_again(piece.into_primitive(), slot))
    }
    fn publish(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        Self::from_inner(B::publish(piece.into_primitive(), slot))
    }
    fn rebase(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        Self::from_inner(B::rebase(piece.into_primitive(), slot))
    }
}

/// The whole of a parameter whose base is `piece`, or rows of it.
pub(crate) fn gather<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>, rows: Option<Arc<[i64]>>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ZeroBackend>::gather(piece.into_dispatch(), slot.clone(), rows))
}

/// Lets the other ranks read `piece`, which has no autodiff.
pub(crate) fn publish<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>) {
    drop(<Dispatch as ZeroBackend>::publish(piece.into_dispatch(), slot.clone()));
}

/// `piece`, which has no autodiff, as a view of the whole where that is kept.
pub(crate) fn rebase<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ZeroBackend>::rebase(piece.into_dispatch(), slot.clone()))
}
