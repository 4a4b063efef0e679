//! What the ranks along a foreign axis of a mesh do within a model: Megatron-LM's `f` and `g`
//! ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)), by which layers are cut over an axis
//! (`examples/examples/tensor_parallel.rs`), and the exchange by which rows go to experts and come back
//! ([Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668)).
//!
//! Parameters are drawn the same at every place of such an axis: what is cut is made known by
//! [`module::cut_along`](crate::module::cut_along), what is not by [`module::replicated_along`](crate::module::replicated_along).
//!
//! All wait for the other ranks of their group within a pass, in the backward pass under the lock of the rank's own graph. That is sound for ranks that
//! are threads too: nobody takes that lock but this rank, and those that have ended a pass before (Burn's autodiff then looks at every
//! graph of the process). So ranks that have waited for each other in a pass end it together (`Context::end_waits`), before one can
//! begin the next.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use zero_core::{Buffer, Collective, CommError, ReduceOp};

use crate::backend::Zero;
use crate::context::Context;
use crate::tensor::ZeroTensor;
use crate::trouble::{raise, stop};
use crate::values::{buffer, data, read};

/// A group of ranks, as [`ranks::group`](crate::ranks::group) gives it.
pub type Group = Arc<dyn Collective>;

/// `x` as it is; in the backward pass the sum of the group's gradients. Before a layer whose outputs are cut over the group: Megatron's `f`.
pub fn copy_to<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    in_group(x, group, B::copy_to_group)
}

/// The sum of the group's `x`, in the order of its ranks; in the backward pass the gradient as it is. After a layer whose inputs are cut
/// over the group: Megatron's `g`. Every rank of the group calls it, with as many elements.
pub fn reduce_from<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    in_group(x, group, B::reduce_from_group)
}

/// Row block `i` of `x` [R, ..] goes to place `i` of the group, R a multiple of its ranks; what comes is in the order of places. In the
/// backward pass gradients go the same way back. To the experts of an [expert axis](zero_core::Axes::EXPERT), and home.
///
/// # Panics
///
/// With the launcher's error when the ranks do not divide R.
pub fn all_to_all<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    let (rows, places) = (x.dims()[0], group.world());
    if !rows.is_multiple_of(places) {
        stop(format!("all_to_all: expected rows that the {places} ranks of {} divide, got {rows}", group.label()));
    }
    in_group(x, group, B::all_to_all_group)
}

fn in_group<B: GroupBackend, const D: usize>(
    x: Tensor<B, D>,
    group: &Group,
    run: impl FnOnce(FloatTensor<B>, &Group) -> FloatTensor<B>,
) -> Tensor<B, D> {
    match x.into_primitive() {
        TensorPrimitive::Float(x) if group.world() > 1 => Tensor::from_primitive(TensorPrimitive::Float(run(x, group))),
        other => Tensor::from_primitive(other),
    }
}

/// [`Zero`], with and without autodiff.
pub trait GroupBackend: Backend {
    /// See [`copy_to`].
    #[doc(hidden)]
    fn copy_to_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self>;

    /// See [`reduce_from`].
    #[doc(hidden)]
    fn reduce_from_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self>;

    /// See [`all_to_all`].
    #[doc(hidden)]
    fn all_to_all_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self>;
}

impl<B: Backend> GroupBackend for Zero<B> {
    fn copy_to_group(x: ZeroTensor<B>, _group: &Group) -> ZeroTensor<B> {
        x
    }

    fn reduce_from_group(x: ZeroTensor<B>, group: &Group) -> ZeroTensor<B> {
        together(x, group, |group, x| group.all_reduce(x, ReduceOp::Sum))
    }

    fn all_to_all_group(x: ZeroTensor<B>, group: &Group) -> ZeroTensor<B> {
        together(x, group, |group, x| group.all_to_all(x))
    }
}

/// What a collective makes of a tensor's values: as many.
fn together<B: Backend>(
    x: ZeroTensor<B>,
    group: &Group,
    run: fn(&dyn Collective, Buffer) -> Result<Buffer, CommError>,
) -> ZeroTensor<B> {
    let group = group.clone();
    ZeroTensor::ordinary([x], move |[x]| {
        Context::<B>::current().waits_in(&group);
        let (device, x) = (B::float_device(&x), read::<B>(x));
        let shape = x.shape.clone();
        let result = run(&*group, buffer(x)).unwrap_or_else(|error| raise(error));
        B::float_from_data(data(result, shape), &device)
    })
}

/// The backward pass of each.
#[derive(Debug)]
enum Node {
    Copy,
    Reduce,
    AllToAll,
}

impl<B: Backend> Backward<Zero<B>, 1> for Node {
    type State = Group;

    fn backward(self, ops: Ops<Group, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        unary::<Zero<B>, _>(ops.parents, ops.node, grads, |grad| match self {
            Node::Copy => Zero::<B>::reduce_from_group(grad, &ops.state),
            Node::Reduce => grad,
            Node::AllToAll => Zero::<B>::all_to_all_group(grad, &ops.state),
        });
    }
}

impl<B: Backend, C: CheckpointStrategy> GroupBackend for Autodiff<Zero<B>, C> {
    fn copy_to_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self> {
        tracked::<B, C>(Node::Copy, x, group)
    }

    fn reduce_from_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self> {
        tracked::<B, C>(Node::Reduce, x, group)
    }

    fn all_to_all_group(x: FloatTensor<Self>, group: &Group) -> FloatTensor<Self> {
        tracked::<B, C>(Node::AllToAll, x, group)
    }
}

fn tracked<B: Backend, C: CheckpointStrategy>(
    node: Node,
    x: FloatTensor<Autodiff<Zero<B>, C>>,
    group: &Group,
) -> FloatTensor<Autodiff<Zero<B>, C>> {
    let out = match node {
        Node::Copy => x.primitive,
        Node::Reduce => Zero::<B>::reduce_from_group(x.primitive, group),
        Node::AllToAll => Zero::<B>::all_to_all_group(x.primitive, group),
    };
    match Backward::<Zero<B>, 1>::prepare::<C>(node, [x.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(group.clone(), out),
        OpsKind::UnTracked(prepared) => prepared.finish(out),
    }
}
