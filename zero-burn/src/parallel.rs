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
    in_group(x, group, Exchange::Copy)
}

/// The sum of the group's `x`, in the order of its ranks; in the backward pass the gradient as it is. After a layer whose inputs are cut
/// over the group: Megatron's `g`. Every rank of the group calls it, with as many elements.
pub fn reduce_from<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    in_group(x, group, Exchange::Reduce)
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
    in_group(x, group, Exchange::AllToAll)
}

fn in_group<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group, exchange: Exchange) -> Tensor<B, D> {
    Tensor::from_primitive(match x.into_primitive() {
        TensorPrimitive::Float(x) if group.world() > 1 => TensorPrimitive::Float(B::in_group(x, group, exchange)),
        other => other,
    })
}

/// What ranks do together.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub enum Exchange {
    /// See [`copy_to`].
    Copy,
    /// See [`reduce_from`].
    Reduce,
    /// See [`all_to_all`].
    AllToAll,
}

/// [`Zero`], with and without autodiff.
pub trait GroupBackend: Backend {
    /// What comes of `x`, in a group of several ranks.
    #[doc(hidden)]
    fn in_group(x: FloatTensor<Self>, group: &Group, exchange: Exchange) -> FloatTensor<Self>;
}

impl<B: Backend> GroupBackend for Zero<B> {
    fn in_group(x: ZeroTensor<B>, group: &Group, exchange: Exchange) -> ZeroTensor<B> {
        match exchange {
            Exchange::Copy => x,
            Exchange::Reduce => together(x, group, |group, x| group.all_reduce(x, ReduceOp::Sum)),
            Exchange::AllToAll => together(x, group, |group, x| group.all_to_all(x)),
        }
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

impl<B: Backend> Backward<Zero<B>, 1> for Exchange {
    type State = Group;

    fn backward(self, ops: Ops<Group, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let back = match self {
            Exchange::Copy => Exchange::Reduce,
            Exchange::Reduce => Exchange::Copy,
            Exchange::AllToAll => Exchange::AllToAll,
        };
        unary::<Zero<B>, _>(ops.parents, ops.node, grads, |grad| Zero::<B>::in_group(grad, &ops.state, back));
    }
}

impl<B: Backend, C: CheckpointStrategy> GroupBackend for Autodiff<Zero<B>, C> {
    fn in_group(x: FloatTensor<Self>, group: &Group, exchange: Exchange) -> FloatTensor<Self> {
        let out = Zero::<B>::in_group(x.primitive, group, exchange);
        match Backward::<Zero<B>, 1>::prepare::<C>(exchange, [x.node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(group.clone(), out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }
}
