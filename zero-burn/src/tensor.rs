//! The float tensor of [`Zero`](crate::Zero).

use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};

use crate::asked;
use crate::cell::Cell;
use crate::context::Context;
use crate::view::{Extent, Views};

/// A float tensor of which this rank may hold only a piece. Every kind reports its logical shape and type.
#[derive(Debug, Clone)]
pub enum ZeroTensor<B: Backend> {
    /// An ordinary tensor: activations, and gradients before they are reduced. Differs from rank to rank.
    Dense(B::FloatTensorPrimitive),
    /// A tensor known to be equal on all ranks: what a full reduction of a shard gives.
    Replicated(B::FloatTensorPrimitive),
    /// A flat piece of a tensor that is cut over the ranks: a parameter, a reduced gradient, optimizer state.
    Shard(Shard<B>),
}

/// A sharded tensor: the cell that holds this rank's piece, and the views to be applied to the gathered whole.
#[derive(Debug, Clone)]
pub struct Shard<B: Backend> {
    pub(crate) cell: Arc<Cell<B>>,
    pub(crate) views: Views<B>,
}

impl<B: Backend> Shard<B> {
    pub(crate) fn new(cell: Arc<Cell<B>>) -> Self {
        let views = Views::none(cell.shape.clone(), cell.dtype);
        Self { cell, views }
    }

    /// Whether this is a version of a parameter as a module holds it.
    pub(crate) fn is_parameter(&self) -> bool {
        self.cell.is_version()
    }

    /// This rank's piece by value, with the recorded elementwise operations applied.
    pub(crate) fn into_piece(self) -> B::FloatTensorPrimitive {
        let extent = Extent::Piece(self.cell.partition, self.cell.place());
        self.views.apply_maps(self.cell.into_local(), extent)
    }
}

impl<B: Backend> ZeroTensor<B> {
    /// The tensor as the inner backend knows it: a gather if it is sharded.
    pub(crate) fn load(self) -> B::FloatTensorPrimitive {
        asked::computed();
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor,
            ZeroTensor::Shard(Shard { cell, views }) => {
                asked::used(cell.key);
                views.apply(Context::load(&cell))
            }
        }
    }

    /// A stand-in with the tensor's shape, for operations that read nothing else of it: no gather, no memory.
    pub(crate) fn shape_only(self) -> B::FloatTensorPrimitive {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor,
            ZeroTensor::Shard(Shard { cell, views }) => {
                let ones = Shape::from(vec![1; views.shape().num_dims()]);
                let scalar = B::float_zeros(ones, &cell.device, views.dtype().into());
                B::float_expand(scalar, views.shape().clone())
            }
        }
    }

    /// Records a view of a shard, or applies it at once to an ordinary tensor.
    pub(crate) fn view(
        self,
        lazily: impl FnOnce(Views<B>) -> Views<B>,
        at_once: impl FnOnce(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
    ) -> Self {
        match self {
            ZeroTensor::Dense(tensor) => ZeroTensor::Dense(at_once(tensor)),
            ZeroTensor::Replicated(tensor) => ZeroTensor::Replicated(at_once(tensor)),
            ZeroTensor::Shard(Shard { cell, views }) => ZeroTensor::Shard(Shard { cell, views: lazily(views) }),
        }
    }
}

impl<B: Backend> TensorMetadata for ZeroTensor<B> {
    fn dtype(&self) -> DType {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor.dtype(),
            ZeroTensor::Shard(shard) => shard.views.dtype(),
        }
    }

    fn shape(&self) -> Shape {
        match self {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => tensor.shape(),
            ZeroTensor::Shard(shard) => shard.views.shape().clone(),
        }
    }
}
