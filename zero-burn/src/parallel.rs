//! Operations within a model between the ranks along a foreign axis of a mesh. Megatron-LM's `f` and `g` ([Shoeybi et al.
//! 2019](https://arxiv.org/abs/1909.08053)) split layers over an axis (`examples/examples/tensor_parallel.rs`). An all-to-all sends rows to
//! experts and back ([Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668)).
//!
//! Parameters are drawn the same at every place of such an axis. Declare those that are split with
//! [`module::sharded_along`](crate::module::sharded_along), and the others with [`module::replicated_along`](crate::module::replicated_along).
//!
//! All operations wait for the other ranks of their group within a pass, in the backward pass under the lock of the rank's own graph. That
//! is sound for ranks that are threads, too: the lock is taken only by this rank, and by ranks that have ended a pass before it (Burn's
//! autodiff then visits every graph of the process). So ranks that have waited for each other in a pass end it together
//! (`Context::end_waits`), before one can begin the next.

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

use crate::abort::{raise, stop};
use crate::backend::Zero;
use crate::context::Context;
use crate::tensor::ZeroTensor;
use crate::values::{buffer, data, read};

/// A group of ranks, from [`ranks::group`](crate::ranks::group).
pub type Group = Arc<dyn Collective>;

/// Returns `x` unchanged; the backward pass sums the group's gradients. Used before a layer whose outputs are split over the group:
/// Megatron's `f`.
pub fn copy_to<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    in_group(x, group, Exchange::Copy)
}

/// Sums the group's `x`, in the order of its ranks; the backward pass leaves the gradient unchanged. Used after a layer whose inputs are
/// split over the group: Megatron's `g`. Every rank of the group calls it, with equally many elements.
pub fn reduce_from<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    in_group(x, group, Exchange::Reduce)
}

/// Sends row block `i` of `x` [R, ..] to place `i` of the group, where R is a multiple of its ranks. The received blocks are in the order
/// of places. The backward pass sends gradients back the same way. Used to send rows to the experts of an [expert
/// axis](zero_core::Axes::EXPERT), and back.
///
/// # Panics
///
/// If the number of ranks does not divide R; the launcher reports the error.
pub fn all_to_all<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group) -> Tensor<B, D> {
    let (rows, places) = (x.dims()[0], group.world());
    if !rows.is_multiple_of(places) {
        stop(format!(
            "all_to_all: expected a number of rows divisible by the {places} ranks of {}, got {rows}",
            group.label()
        ));
    }
    in_group(x, group, Exchange::AllToAll)
}

fn in_group<B: GroupBackend, const D: usize>(x: Tensor<B, D>, group: &Group, exchange: Exchange) -> Tensor<B, D> {
    Tensor::from_primitive(match x.into_primitive() {
        TensorPrimitive::Float(x) if group.world() > 1 => TensorPrimitive::Float(B::in_group(x, group, exchange)),
        other => other,
    })
}

/// A collective operation within a model.
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
    /// Returns the result of `exchange` for `x`, in a group of several ranks.
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

/// Runs a collective on a tensor's values; the result has equally many.
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
