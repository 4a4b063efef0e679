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
    /// The whole, of [`Slot::whole`]'s shape.
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self>;
    /// The whole once more, in a backward pass.
    fn gather_again(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self>;
    /// Rows of the whole, which is not kept, and whose gradient is handed over as that of these rows.
    fn rows(piece: FloatTensor<Self>, slot: Arc<Slot>, ids: Arc<[i64]>) -> FloatTensor<Self>;
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
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        slot.load(&piece)
    }
    fn gather_again(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        slot.load_again(&piece)
    }
    fn rows(piece: FloatTensor<Self>, slot: Arc<Slot>, ids: Arc<[i64]>) -> FloatTensor<Self> {
        let rows = slot.whole[0];
        Op::Embedding { ids, rows }.forward(vec![slot.load(&piece)], &[false]).0
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
    fn gather(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        let wanted = piece.is_tracked();
        if !wanted && !slot.is_made() {
            return Self::from_inner(B::gather(piece.into_primitive(), slot));
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
                let op = match slot.is_made() {
                    true => op.memory_bound().retro_forward(again).parents([$(&$parent),*]),
                    false => op.compute_bound(),
                };
                let whole = B::gather(piece.into_primitive(), slot);
                match op.stateful() {
                    OpsKind::Tracked(op) => op.finish((recorded, None), whole),
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
    fn rows(piece: FloatTensor<Self>, slot: Arc<Slot>, ids: Arc<[i64]>) -> FloatTensor<Self> {
        if !piece.is_tracked() {
            return Self::from_inner(B::rows(piece.into_primitive(), slot, ids));
        }
        let recorded = Recorded::new(&slot);
        macro_rules! record {
            ($($parent:expr),*) => {{
                let op = Gather::<B>(PhantomData).prepare::<BalancedCheckpointing>([$($parent.node()),*]);
                let op = op.compute_bound().stateful();
                let rows = B::rows(piece.into_primitive(), slot, ids.clone());
                match op {
                    OpsKind::Tracked(op) => op.finish((Some(recorded), Some(ids)), rows),
                    OpsKind::UnTracked(op) => op.finish(rows),
                }
            }};
        }
        match clock::tick::<B>(piece.primitive()) {
            Some(token) => record!(piece, token),
            None => record!(piece),
        }
    }
    fn publish(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        Self::from_inner(B::publish(piece.into_primitive(), slot))
    }
    fn rebase(piece: FloatTensor<Self>, slot: Arc<Slot>) -> FloatTensor<Self> {
        Self::from_inner(B::rebase(piece.into_primitive(), slot))
    }
}

/// The whole of a parameter whose base is `piece`.
pub(crate) fn gather<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ZeroBackend>::gather(piece.into_dispatch(), slot.clone()))
}

/// Rows of the whole of a table whose base is `piece`.
pub(crate) fn rows(piece: Tensor<2>, slot: &Arc<Slot>, ids: Arc<[i64]>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as ZeroBackend>::rows(piece.into_dispatch(), slot.clone(), ids))
}

/// Lets the other ranks read `piece`, which has no autodiff.
pub(crate) fn publish<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>) {
    drop(<Dispatch as ZeroBackend>::publish(piece.into_dispatch(), slot.clone()));
}

/// `piece`, which has no autodiff, as a view of the whole where that is kept.
pub(crate) fn rebase<const D: usize>(piece: Tensor<D>, slot: &Arc<Slot>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ZeroBackend>::rebase(piece.into_dispatch(), slot.clone()))
}
