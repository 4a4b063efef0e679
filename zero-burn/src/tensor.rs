//! The float tensor of [`Zero`](crate::Zero).

use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};

use crate::activations::{Activation, Operands, Recording};
use crate::asked;
use crate::context::Context;
use crate::engine::{Cell, Inner, Operand, burn_dtype, burn_shape};
use crate::view::{Extent, Views};
use zero_engine::update::plan::Edits;

/// A float tensor of which this rank may hold only a shard. Every kind reports its logical shape and type.
#[derive(Debug, Clone)]
pub enum ZeroTensor<B: Backend> {
    /// An ordinary tensor: activations, and gradients before they are reduced. Differs from rank to rank.
    Dense(B::FloatTensorPrimitive),
    /// Same as [`Dense`](Self::Dense), from a checkpointed block: dropped after the block, and recomputed where it is used.
    Activation(Activation<B>),
    /// A tensor known to be equal on all ranks: the result of a full reduction of a shard.
    Replicated(B::FloatTensorPrimitive),
    /// A flat shard of a tensor that is partitioned over the ranks: a parameter, a reduced gradient, optimizer state.
    Shard(Shard<B>),
}

/// A sharded tensor: the cell that holds this rank's shard, and the views to be applied to the gathered tensor.
#[derive(Debug, Clone)]
pub struct Shard<B: Backend> {
    pub(crate) cell: Arc<Cell<B>>,
    pub(crate) views: Views<B>,
}

impl<B: Backend> Shard<B> {
    pub(crate) fn new(cell: Arc<Cell<B>>) -> Self {
        let views = Views::none(burn_shape(&cell.shape), burn_dtype(cell.dtype));
        Self { cell, views }
    }

    /// Returns whether this is a version of a parameter as a module holds it.
    pub(crate) fn is_parameter(&self) -> bool {
        self.cell.is_version()
    }

    /// Returns this rank's shard by value, with the recorded elementwise operations applied.
    pub(crate) fn into_piece(self) -> B::FloatTensorPrimitive {
        let extent = Extent::Piece(self.cell.partition, self.cell.place());
        self.views.apply_maps(self.cell.into_local(), extent)
    }

    /// Returns the shard as an operand of an update.
    pub(crate) fn into_operand(self) -> Operand<B> {
        let Self { cell, views } = self;
        let edits: Option<Edits<Inner<B>>> = match views.is_empty() {
            true => None,
            false => Some(Box::new(move |tensor, partition, place| {
                views.apply_maps(tensor, Extent::Piece(partition, place))
            })),
        };
        Operand { cell, edits }
    }
}

impl<B: Backend> ZeroTensor<B> {
    /// Returns the tensor as the inner backend knows it; gathers it if it is sharded.
    pub(crate) fn load(self) -> B::FloatTensorPrimitive {
        self.whole(Context::load)
    }

    /// Same as [`load`](Self::load), to be read out or saved: exact, even for a parameter that is quantized for use.
    pub(crate) fn load_exact(self) -> B::FloatTensorPrimitive {
        self.whole(Context::load_exact)
    }

    fn whole(self, gather: impl FnOnce(&Arc<Cell<B>>) -> B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
        asked::computed();
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor,
            ZeroTensor::Activation(activation) => activation.load(),
            ZeroTensor::Shard(Shard { cell, views }) => {
                asked::used(cell.key);
                views.apply(gather(&cell))
            }
        }
    }

    /// Returns a placeholder with the tensor's shape, for operations that read nothing else of it: no gather, no memory.
    pub(crate) fn shape_only(self) -> B::FloatTensorPrimitive {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor,
            ZeroTensor::Activation(activation) => {
                stand_in::<B>(activation.shape().clone(), activation.dtype(), activation.device())
            }
            ZeroTensor::Shard(Shard { cell, views }) => {
                stand_in::<B>(views.shape().clone(), views.dtype(), &cell.device)
            }
        }
    }

    /// Records this as the next operand.
    pub(crate) fn record(self, recording: &mut Recording<B>) {
        let outside = match self {
            ZeroTensor::Activation(activation) => match recording.made(activation) {
                Ok(()) => return,
                Err(of_another) => ZeroTensor::Activation(of_another),
            },
            other => other,
        };
        recording.outside(move || outside.clone().load());
    }

    /// Returns the ordinary tensor that `run` computes from `operands`.
    pub(crate) fn ordinary<const N: usize>(
        operands: [Self; N],
        run: impl Fn([B::FloatTensorPrimitive; N]) -> B::FloatTensorPrimitive + Send + 'static,
    ) -> Self {
        let Some(mut recording) = Recording::begin() else { return ZeroTensor::Dense(run(operands.map(Self::load))) };
        operands.into_iter().for_each(|operand| operand.record(&mut recording));
        let run = move |operands: &mut Operands<B>| {
            let operands: Vec<_> = operands.by_ref().take(N).collect();
            vec![run(operands.try_into().expect("as many as were recorded"))]
        };
        let made = run(&mut recording.operands());
        ZeroTensor::Activation(recording.end(made, Box::new(run)).next().expect("one was made"))
    }

    /// Records a view of a shard, or applies it immediately to an ordinary tensor.
    pub(crate) fn view(
        self,
        lazily: impl FnOnce(Views<B>) -> Views<B>,
        at_once: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + 'static,
    ) -> Self {
        match self {
            ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => Self::ordinary([self], move |[tensor]| at_once(tensor)),
            ZeroTensor::Replicated(tensor) => ZeroTensor::Replicated(at_once(tensor)),
            ZeroTensor::Shard(Shard { cell, views }) => ZeroTensor::Shard(Shard { cell, views: lazily(views) }),
        }
    }
}

/// Returns zeros of `shape` in the memory of one element.
fn stand_in<B: Backend>(shape: Shape, dtype: DType, device: &B::Device) -> B::FloatTensorPrimitive {
    let ones = Shape::from(vec![1; shape.num_dims()]);
    B::float_expand(B::float_zeros(ones, device, dtype.into()), shape)
}

impl<B: Backend> TensorMetadata for ZeroTensor<B> {
    fn dtype(&self) -> DType {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor.dtype(),
            ZeroTensor::Activation(activation) => activation.dtype(),
            ZeroTensor::Shard(shard) => shard.views.dtype(),
        }
    }

    fn shape(&self) -> Shape {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor.shape(),
            ZeroTensor::Activation(activation) => activation.shape().clone(),
            ZeroTensor::Shard(shard) => shard.views.shape().clone(),
        }
    }
}
