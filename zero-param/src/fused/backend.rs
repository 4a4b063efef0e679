//! Each fused operation as one operation of Burn's backends, and its backward pass as one node of autodiff's graph.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, ExtensionType, Flex, TensorMetadata, backend_extension};
use burn::tensor::DType;

use super::flex::Op;
use crate::tensors::Raw;

/// Operands of an operation. An enum, as the macro takes no list of tensors.
#[derive(ExtensionType)]
pub(crate) enum Operands<B: Backend> {
    One(FloatTensor<B>),
    Two(FloatTensor<B>, FloatTensor<B>),
    Three(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    Four(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
}

#[backend_extension(Flex, Autodiff)]
pub(crate) trait FusedBackend: Backend {
    /// Computes the operation's result.
    fn fused(#[extension_type] operands: Operands<Self>, op: Op) -> FloatTensor<Self>;
}

impl FusedBackend for Flex {
    fn fused(operands: Operands<Self>, op: Op) -> FloatTensor<Self> {
        let operands = match operands {
            Operands::One(a) => vec![a],
            Operands::Two(a, b) => vec![a, b],
            Operands::Three(a, b, c) => vec![a, b, c],
            Operands::Four(a, b, c, d) => vec![a, b, c, d],
        };
        let operands = op.with_weight(operands);
        let nobody = vec![false; operands.len()];
        op.forward(operands, &nobody).0
    }
}

impl<C: CheckpointStrategy> FusedBackend for Autodiff<Flex, C> {
    fn fused(operands: Operands<Self>, op: Op) -> FloatTensor<Self> {
        match operands {
            Operands::One(a) => record::<C, 1>([a], op),
            Operands::Two(a, b) => record::<C, 2>([a, b], op),
            Operands::Three(a, b, c) => record::<C, 3>([a, b, c], op),
            Operands::Four(a, b, c, d) => record::<C, 4>([a, b, c, d], op),
        }
    }
}

#[derive(Debug)]
struct Node;

#[derive(Debug, Clone)]
struct State {
    op: Op,
    /// Data type of the operands.
    dtype: DType,
    /// Operands that the backward pass reads. A gathered operand is gathered again.
    read: Vec<Option<NodeId>>,
    kept: Vec<Raw>,
}

fn record<C: CheckpointStrategy, const N: usize>(
    operands: [FloatTensor<Autodiff<Flex, C>>; N],
    op: Op,
) -> FloatTensor<Autodiff<Flex, C>> {
    let wanted = op.with_frozen(operands.iter().map(|operand| operand.is_tracked()).collect(), |_| false);
    let load = |operands: [FloatTensor<Autodiff<Flex, C>>; N]| {
        op.with_weight(operands.map(|operand| operand.into_primitive()).into())
    };
    let node = Node.prepare::<C>(operands.each_ref().map(|operand| operand.node())).compute_bound();
    match node.stateful() {
        OpsKind::Tracked(mut node) => {
            let reads = op.without_frozen((0..wanted.len()).map(|index| op.reads(index, &wanted)).collect());
            let read = operands.iter().zip(reads).map(|(operand, is_read)| is_read.then(|| node.checkpoint(operand)));
            let read = read.collect();
            let dtype = operands[0].dtype();
            let (out, kept) = op.forward(load(operands), &wanted);
            node.finish(State { op, dtype, read, kept }, out)
        }
        OpsKind::UnTracked(node) => node.finish(op.forward(load(operands), &wanted).0),
    }
}

impl<const N: usize> Backward<Flex, N> for Node {
    type State = State;

    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let State { op, dtype, read, kept } = ops.state;
        let wanted = op.with_frozen(ops.parents.iter().map(Option::is_some).collect(), |_| false);
        let read = read.into_iter().map(|id| id.map(|id| checkpointer.retrieve_node_output::<Raw>(id))).collect();
        let read = op.with_frozen(read, |frozen| op.reads(1, &wanted).then(|| frozen.load(true)));
        let gradients = op.without_frozen(op.backward(read, kept, gradient, dtype, &wanted));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
