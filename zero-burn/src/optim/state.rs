//! The optimizer state of a parameter.

use std::sync::Arc;

use burn::module::ParamId;
use burn::record::Record;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_std::Shape;

use crate::autodiff::ZeroAutodiff;
use crate::backend::Zero;
use crate::engine::{Cell, ParamState};
use crate::tensor::{Shard, ZeroTensor};

/// A parameter's state as it is saved: full tensors, flat.
#[derive(Record, Clone)]
pub struct StateRecord<B: burn::tensor::backend::Backend> {
    /// The parameter's identity, as in the module's record.
    pub id: String,
    /// Number of steps so far.
    pub time: usize,
    /// Names of the tensors.
    pub names: Vec<String>,
    /// `[elements of the parameter]` each, in fp32, or in bf16 with
    /// [`bf16_optimizer_states`](crate::config::ZeroConfig::bf16_optimizer_states).
    pub tensors: Vec<Tensor<B, 1>>,
}

/// Returns the tensor of `cell`, flat. Reading its data is a collective.
pub(super) fn flat<B: Backend>(cell: &Arc<Cell<B>>) -> Tensor<Zero<B>, 1> {
    let Shard { cell, views } = Shard::new(cell.in_fp32());
    let views = views.reshape(Shape::new([cell.partition.numel()]));
    Tensor::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, views })))
}

/// Returns the record of the state of parameter `id`.
pub(super) fn to_record<A: ZeroAutodiff>(id: ParamId, state: &ParamState<A::Base>) -> StateRecord<A> {
    StateRecord {
        id: id.serialize(),
        time: state.time,
        names: state.cells.iter().map(|(name, _)| name.clone()).collect(),
        tensors: state.cells.iter().map(|(_, cell)| Tensor::from_inner(flat(cell))).collect(),
    }
}

/// Returns the state of a record that was loaded inside [`load_state`](crate::load_state), and its parameter; otherwise the name of a
/// tensor that is not a shard.
pub(super) fn from_record<A: ZeroAutodiff>(record: StateRecord<A>) -> Result<(ParamId, ParamState<A::Base>), String> {
    let tensors = record.tensors.into_iter().map(|tensor| tensor.inner().into_primitive());
    let cells = record.names.into_iter().zip(tensors).map(|(name, tensor)| match tensor {
        TensorPrimitive::Float(ZeroTensor::Shard(shard)) if shard.views.is_empty() => Ok((name, shard.cell)),
        _ => Err(name),
    });
    let cells = cells.collect::<Result<_, String>>()?;
    Ok((ParamId::deserialize(&record.id), ParamState { time: record.time, cells }))
}
