//! The decorator: types, the `Backend` trait, and the gradient hooks of `DistributedBackend`.

use std::collections::HashMap;
use std::marker::PhantomData;

use burn_backend::distributed::{
    CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation, TensorRef,
};
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, BackendTypes, DTypeUsageSet, DeviceId, ExecutionError, TensorData, TensorMetadata};
use burn_std::DType;
use zero_core::ReduceOp;

use crate::abort::stop;
use crate::birth::{Birth, within};
use crate::context::Context;
use crate::device::ZeroDevice;
use crate::engine::Phase;
use crate::tensor::{Shard, ZeroTensor};
use crate::values::read;

/// Any Burn backend `B`, with ZeRO.
///
/// `Autodiff<Zero<B>>` trains; `Zero<B>` alone evaluates. See the crate's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Zero<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Zero<B> {
    type Device = ZeroDevice<B::Device>;
    type FloatTensorPrimitive = ZeroTensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for Zero<B> {
    fn ad_enabled(device: &Device<Self>) -> bool {
        B::ad_enabled(device.inner())
    }

    /// Runs `func` in the scope in which parameters are initialized and loaded: tensors created inside are shards.
    fn memory_persistent_allocations<Output: Send, Input: Send, Func: Fn(Input) -> Output + Send>(
        device: &Device<Self>,
        input: Input,
        func: Func,
    ) -> Output {
        Context::<B>::check_thread(device);
        B::memory_persistent_allocations(device.inner(), input, move |input| within(Birth::Parameter, || func(input)))
    }

    fn memory_cleanup(device: &Device<Self>) {
        B::memory_cleanup(device.inner())
    }

    fn name(device: &Device<Self>) -> String {
        format!("zero<{}>", B::name(device.inner()))
    }

    fn seed(device: &Device<Self>, seed: u64) {
        B::seed(device.inner(), seed);
        Context::<B>::current().draws.reseed(seed);
    }

    fn sync(device: &Device<Self>) -> Result<(), ExecutionError> {
        B::sync(device.inner())
    }

    fn staging<'a, Iter>(data: Iter, device: &Device<Self>)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device.inner())
    }

    fn supports_dtype(device: &Device<Self>, dtype: DType) -> bool {
        B::supports_dtype(device.inner(), dtype)
    }

    fn dtype_usage(device: &Device<Self>, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device.inner(), dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

/// Burn's gradient hooks. Burn's communication server is not used, so there is nothing to start or close.
impl<B: Backend> DistributedBackend for Zero<B> {
    fn start_communication_server(_devices: &[Device<Self>], _config: DistributedConfig) {}

    fn close_communication_server(_device: &Device<Self>) {}

    /// Begins a backward pass. Runs under autodiff's lock: it hands over work and never waits.
    ///
    /// Burn's `detach` copies a parameter's mark, so a parameter may be listed twice, with a gradient each. Modules loaded from one record
    /// share marks. Only `collect_grads` knows which gradient belongs to which parameter, and is left to reduce them.
    fn register_sync_parameters(device: &Device<Self>, params: Vec<DistributedParams>) {
        let context = Context::<B>::of_device(device);
        if context.is_holding_back() {
            return;
        }
        let mut marks: HashMap<u64, usize> = HashMap::new();
        for param in &params {
            if let [slot] = &context.rank.parameters.slots_of(param.param_id)[..] {
                *marks.entry(slot.index).or_default() += 1;
            }
        }
        let once = marks.into_iter().filter(|(_, marks)| *marks == 1).map(|(index, _)| index);
        context.begin_reduction(Phase::Backward, once.collect(), (Vec::new(), None));
    }

    /// Ends the backward pass, after autodiff has released its locks: the rank waits here for its reductions.
    fn submit_sync_collective(device: &Device<Self>) {
        let context = Context::<B>::of_device(device);
        let reduced = if context.is_holding_back() { None } else { context.end_reduction() };
        context.end_backward(reduced.map_or_else(Vec::new, |outcome| outcome.foreign));
        context.end_waits();
    }

    /// Hands a parameter's gradient, which is complete on this rank, to the reducer, and replaces it by a shard that will hold the reduced
    /// gradient. Runs under autodiff's lock: any wait for another rank is short.
    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        // SAFETY: autodiff passes a pointer to the entry of its gradient container that it has just registered, which
        // it does not touch until this call returns.
        let gradient = unsafe { &mut *tensor.0 };
        let context = Context::<B>::current();
        if context.is_holding_back() {
            return;
        }
        let slots = context.rank.parameters.slots_of(params.param_id);
        // A single rank may reduce it in place, whichever parameter it belongs to.
        let Some(slot) = slots.iter().find(|slot| slot.shape[..] == *gradient.shape().as_slice()).or(slots.first())
        else {
            stop(
                "got a gradient for a parameter that was not prepared: call zero_burn::module::prepare on the whole \
                 model before its first forward pass"
                    .into(),
            );
        };
        let is_taken = context.reducer.as_ref().is_none_or(|reducer| slots.len() == 1 && reducer.takes(slot.index));
        if is_taken && matches!(gradient, ZeroTensor::Dense(_) | ZeroTensor::Activation(_)) {
            let cell = context.gradient(slot);
            // The only handle goes to the reducer.
            let dense = std::mem::replace(gradient, ZeroTensor::Shard(Shard::new(cell.clone()))).load();
            context.reduce(dense, &cell);
            if let Some(reducer) = &context.reducer {
                reducer.catch_up(&context.rank);
            }
        }
    }

    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        _device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let context = Context::<B>::current();
        let tensor = tensor.load();
        let device = B::float_device(&tensor);
        let data = read::<B>(tensor);
        let (shape, dtype) = (data.shape.clone(), data.dtype);
        let mut values = context.reduce_scalars(data.iter::<f64>().collect(), ReduceOp::Sum);
        if op == ReduceOperation::Mean {
            values.iter_mut().for_each(|value| *value /= context.rank.world as f64);
        }
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        CollectiveTensor::new(ZeroTensor::Replicated(B::float_from_data(data, &device)))
    }

    /// Does nothing: [`Zero`]'s all-reduce has already waited.
    fn sync_collective(_device: &Device<Self>) {}
}
