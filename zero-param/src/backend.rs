//! The gather as an autodiff operation. Forward it assembles a full parameter from its shards; backward it passes the gradient on.
//!
//! Its result is not kept for the backward pass, which gathers again, whatever the user's checkpointing strategy is: in host memory its storage is
//! released ([`storage`]), and on a device the operation is run again.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, DispatchDevice, DispatchTensor, DispatchTensorKind, Flex,
};
use burn::tensor::Tensor;

use crate::activations::{self, Use};
use crate::clock;
use crate::device::{Target, moved};
use crate::fused::{Op, plain};
use crate::parameter::{Parameter, Recorded};
use crate::storage;
use crate::tensors::{Raw, floats};

/// Loads the full parameter in its own shape, or only these rows of it. In the second case the gradient is that of the rows, and
/// the full parameter is not kept.
fn load<B: Target>(
    base: &Raw,
    parameter: &Arc<Parameter>,
    rows: Option<Arc<[i64]>>,
    device: &B::Device,
    again: bool,
) -> FloatTensor<B> {
    match rows {
        None => parameter.load::<B>(base, device, again),
        Some(ids) if parameter.shared.is_on_host() => {
            // Rows are picked in host memory, and they alone go to the device.
            let full = parameter.load::<Flex>(base, &Default::default(), again);
            let (rows, _) = Op::Embedding { ids, rows: parameter.shape[0] }.forward(vec![full], &[false]);
            B::put(floats(rows), device)
        }
        Some(ids) => {
            let table = Tensor::from_dispatch(B::floats(parameter.load::<B>(base, device, again)));
            B::put(plain::embedding(table, &ids).into_dispatch(), device)
        }
    }
}

#[derive(Debug)]
struct Gather<B>(PhantomData<B>);

impl<B: Target, const N: usize> Backward<B, N> for Gather<B> {
    /// The gather, or `None` if no gradient is wanted, and the rows that were read, if not the full parameter was.
    type State = (Option<Arc<Recorded>>, Option<Arc<[i64]>>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        storage::release();
        let gradient = grads.consume::<B>(&ops.node);
        if let (Some(recorded), rows) = ops.state {
            recorded.hand_over(B::floats(gradient), rows);
        }
    }
}

#[derive(Debug)]
struct GatherAgain<B: Target> {
    base: NodeId,
    token: Option<NodeId>,
    parameter: Arc<Parameter>,
    device: B::Device,
}

impl<B: Target> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        if let Some(token) = &self.token {
            // Count it as used, so that its state is dropped.
            drop(states.get_state::<Raw>(token));
        }
        let base = states.get_state::<Raw>(&self.base);
        states.save(out, self.parameter.load::<B>(&base, &self.device, true));
    }
}

/// Runs [`load`] and records it in autodiff's graph.
fn record<B: Target>(
    base: FloatTensor<Autodiff<Flex>>,
    parameter: &Arc<Parameter>,
    rows: Option<Arc<[i64]>>,
    device: &B::Device,
) -> FloatTensor<Autodiff<B>> {
    let wanted = base.is_tracked() && !parameter.slot.partition.is_empty();
    // For rows the backward pass needs only their ids.
    let is_again = parameter.is_gathered_for_each_use() && rows.is_none();
    let used = activations::begin_use(parameter, wanted);
    let Some(Use { recorded, again }) = used.filter(|_| wanted || is_again) else {
        let again = activations::runs_again();
        return Autodiff::<B>::from_inner(load::<B>(&base.into_primitive(), parameter, rows, device, again));
    };
    // With an untracked parent Burn would save the full parameter, so a frozen shard becomes a leaf whose gradient is dropped.
    let base = match wanted && !again {
        true => base,
        false => Autodiff::<Flex>::float_set_require_grad(Autodiff::<Flex>::from_inner(base.into_primitive()), true),
    };
    let token = clock::tick();
    // Operations may save such a tensor; any other is gathered again before an operation is differentiated.
    let is_released = is_again && B::IS_HOST && storage::is_in_pass();
    let gather_again = GatherAgain::<B> {
        base: base.id(),
        token: token.as_ref().map(|token| token.id()),
        parameter: parameter.clone(),
        device: device.clone(),
    };
    macro_rules! record {
        ($($parent:expr),*) => {{
            let op = Gather::<B>(PhantomData).prepare::<BalancedCheckpointing>([$($parent.node()),*]);
            let op = match is_again && !is_released {
                true => op.memory_bound().retro_forward(gather_again).parents([$(&$parent),*]),
                false => op.compute_bound(),
            };
            let base = base.into_primitive();
            let full = match is_released {
                true => B::put(floats(storage::full(parameter, &base, again)), device),
                false => load::<B>(&base, parameter, rows.clone(), device, again),
            };
            match op.stateful() {
                OpsKind::Tracked(op) => op.finish((recorded, rows), full),
                OpsKind::UnTracked(op) => op.finish(full),
            }
        }};
    }
    match token {
        Some(token) => record!(base, token),
        None => record!(base),
    }
}

/// Gathers the full parameter whose shard is `base`, or rows of it, on the parameter's device.
pub(crate) fn gather<const D: usize>(
    base: Tensor<D>,
    parameter: &Arc<Parameter>,
    rows: Option<Arc<[i64]>>,
) -> Tensor<D> {
    let DispatchTensor { kind, autodiff } = base.into_dispatch();
    macro_rules! on {
        ($backend:ident, $device:expr) => {
            match kind {
                DispatchTensorKind::Flex(base) => {
                    let full = load::<burn::backend::$backend>(&base.float(), parameter, rows, $device, false);
                    DispatchTensorKind::$backend(BackendTensor::Float(full))
                }
                DispatchTensorKind::Autodiff(base) => {
                    let DispatchTensorKind::Flex(base) = *base else { moved() };
                    let full = record::<burn::backend::$backend>(base.autodiff(), parameter, rows, $device);
                    DispatchTensorKind::Autodiff(Box::new(DispatchTensorKind::$backend(BackendTensor::Autodiff(full))))
                }
                #[allow(unreachable_patterns)]
                _ => moved(),
            }
        };
    }
    let kind = match parameter.device.as_dispatch() {
        DispatchDevice::Flex(device) => on!(Flex, device),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => on!(Cube, device),
        #[allow(unreachable_patterns)]
        _ => unreachable!("`shard` refuses other devices"),
    };
    Tensor::from_dispatch(DispatchTensor { kind, autodiff })
}
