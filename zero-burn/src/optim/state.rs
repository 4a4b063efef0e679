//! The optimizer state of a parameter.

use std::sync::Arc;

use burn::module::ParamId;
use burn::record::Record;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_std::Shape;

use crate::autodiff::ZeroAutodiff;
use crate::backend::Zero;
use crate::engine::Cell;
use crate::tensor::{Shard, ZeroTensor};

/// Name of the fp32 master of a 16-bit parameter.
pub(super) const MASTER: &str = "fp32_param";

/// The name of the moving average of a parameter ([`ema_decay`](crate::config::ZeroConfig::ema_decay)).
pub const EMA: &str = "ema";

/// A parameter's state: this rank's shards.
#[derive(Clone)]
pub(super) struct ParamState<B: Backend> {
    pub(super) id: ParamId,
    /// Number of steps so far.
    pub(super) time: usize,
    /// In the order of the rule's names, then the average and the master, if there are any.
    pub(super) cells: Vec<(String, Arc<Cell<B>>)>,
}

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
    let Shard { cell, views } = Shard::new(cell.clone());
    let views = views.reshape(Shape::new([cell.partition.numel()]));
    Tensor::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, views })))
}

impl<B: Backend> ParamState<B> {
    pub(super) fn to_record<A: ZeroAutodiff<Base = B>>(&self) -> StateRecord<A> {
        StateRecord {
            id: self.id.serialize(),
            time: self.time,
            names: self.cells.iter().map(|(name, _)| name.clone()).collect(),
            tensors: self.cells.iter().map(|(_, cell)| Tensor::from_inner(flat(cell))).collect(),
        }
    }

    /// Returns the state of a record that was loaded inside [`load_state`](crate::load_state); otherwise the name of a tensor that is not a
    /// shard.
    pub(super) fn from_record<A: ZeroAutodiff<Base = B>>(record: StateRecord<A>) -> Result<Self, String> {
        let tensors = record.tensors.into_iter().map(|tensor| tensor.inner().into_primitive());
        let cells = record.names.into_iter().zip(tensors).map(|(name, tensor)| match tensor {
            TensorPrimitive::Float(ZeroTensor::Shard(shard)) if shard.views.is_empty() => Ok((name, shard.cell)),
            _ => Err(name),
        });
        let cells = cells.collect::<Result<_, String>>()?;
        Ok(Self { id: ParamId::deserialize(&record.id), time: record.time, cells })
    }
}

/// Returns the error message for optimizer state whose size differs from the parameter's.
pub(super) fn mismatch(state: usize, parameter: usize) -> String {
    format!(
        "optimizer state of {state} elements does not belong to a parameter whose shard has {parameter}: the record was made \
         by another model, or was not loaded inside zero_burn::load_state"
    )
}
