//! Lazy views of a sharded tensor.
//!
//! A model uses a parameter through views (a tied head transposes it, a linear layer reshapes its bias). Applying them immediately would
//! need the gathered tensor and keep it alive in the autodiff graph. So they are recorded, and applied to the tensor that a load gathers.
//!
//! Elementwise operations on one parameter are recorded too. A forward pass applies them to the gathered tensor, so that other ranks never
//! depend on a temporary of this one. An optimizer's step applies them to the shard.

use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape, Slice};
use zero_core::Partition;

use crate::engine::Cell;

/// The elements of the base tensor that an elementwise operation is applied to: all, or one shard of a partition.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Extent {
    Whole,
    Piece(Partition, usize),
}

/// An elementwise operation on the full tensor or on a shard.
pub(crate) type MapFn<B> = dyn Fn(
        <B as burn_backend::BackendTypes>::FloatTensorPrimitive,
        Extent,
    ) -> <B as burn_backend::BackendTypes>::FloatTensorPrimitive
    + Send
    + Sync;

#[derive(Clone)]
enum View<B: Backend> {
    Map(Arc<MapFn<B>>),
    SwapDims(usize, usize),
    Permute(Vec<usize>),
    Reshape(Shape),
    Expand(Shape),
    Slice(Vec<Slice>),
}

impl<B: Backend> core::fmt::Debug for View<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            View::Map(_) => f.write_str("Map"),
            View::SwapDims(a, b) => write!(f, "SwapDims({a}, {b})"),
            View::Permute(axes) => write!(f, "Permute({axes:?})"),
            View::Reshape(shape) => write!(f, "Reshape({shape:?})"),
            View::Expand(shape) => write!(f, "Expand({shape:?})"),
            View::Slice(slices) => write!(f, "Slice({slices:?})"),
        }
    }
}

/// Views in the order of application, and the resulting shape and type.
#[derive(Debug, Clone)]
pub(crate) struct Views<B: Backend> {
    ops: Vec<View<B>>,
    shape: Shape,
    dtype: DType,
    /// Other versions of the parameter that the recorded operations read.
    others: Vec<Arc<Cell<B>>>,
}

impl<B: Backend> Views<B> {
    /// Creates an empty list of views of a tensor of `shape`.
    pub(crate) fn none(shape: Shape, dtype: DType) -> Self {
        Self { ops: Vec::new(), shape, dtype, others: Vec::new() }
    }

    /// Returns the same views, for operations that also read these versions.
    pub(crate) fn with_others(mut self, others: Vec<Arc<Cell<B>>>) -> Self {
        self.others = others;
        self
    }

    /// Returns the other versions of the parameter that are read.
    pub(crate) fn others(&self) -> &[Arc<Cell<B>>] {
        &self.others
    }

    /// Returns the element type after all views.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the same views of a tensor that has changed its type, or that the last view has cast.
    pub(crate) fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Returns the number of recorded operations.
    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns the logical shape after all views.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns whether only elementwise operations are recorded, so that they can be applied to a shard.
    pub(crate) fn only_maps(&self) -> bool {
        self.ops.iter().all(|view| matches!(view, View::Map(_)))
    }

    pub(crate) fn map(mut self, map: Arc<MapFn<B>>) -> Self {
        self.ops.push(View::Map(map));
        self
    }

    pub(crate) fn swap_dims(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        // Burn's column layout transposes when it saves and again when it loads: the parameter itself remains.
        match self.ops.last() {
            Some(&View::SwapDims(x, y)) if (x, y) == (a, b) || (x, y) == (b, a) => drop(self.ops.pop()),
            _ => self.ops.push(View::SwapDims(a, b)),
        }
        self
    }

    pub(crate) fn permute(mut self, axes: &[usize]) -> Self {
        self.shape = Shape::from(axes.iter().map(|&axis| self.shape[axis]).collect::<Vec<_>>());
        self.ops.push(View::Permute(axes.to_vec()));
        self
    }

    pub(crate) fn reshape(mut self, shape: Shape) -> Self {
        if shape != self.shape {
            self.shape = shape.clone();
            self.ops.push(View::Reshape(shape));
        }
        self
    }

    pub(crate) fn expand(mut self, shape: Shape) -> Self {
        if shape != self.shape {
            self.shape = shape.clone();
            self.ops.push(View::Expand(shape));
        }
        self
    }

    pub(crate) fn slice(mut self, slices: &[Slice]) -> Self {
        let mut dims = self.shape.to_vec();
        for (dim, slice) in dims.iter_mut().zip(slices) {
            *dim = slice.output_size(*dim);
        }
        self.shape = Shape::from(dims);
        self.ops.push(View::Slice(slices.to_vec()));
        self
    }

    /// Applies the recorded elementwise operations, if nothing else is recorded.
    pub(crate) fn apply_maps(&self, tensor: B::FloatTensorPrimitive, extent: Extent) -> B::FloatTensorPrimitive {
        debug_assert!(self.only_maps());
        self.ops.iter().fold(tensor, |tensor, view| match view {
            View::Map(map) => map(tensor, extent),
            _ => tensor,
        })
    }

    /// Applies the views to the gathered tensor.
    pub(crate) fn apply(&self, mut tensor: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
        for view in &self.ops {
            tensor = match view {
                View::Map(map) => map(tensor, Extent::Whole),
                View::SwapDims(a, b) => B::float_swap_dims(tensor, *a, *b),
                View::Permute(axes) => B::float_permute(tensor, axes),
                View::Reshape(shape) => B::float_reshape(tensor, shape.clone()),
                View::Expand(shape) => B::float_expand(tensor, shape.clone()),
                View::Slice(slices) => B::float_slice(tensor, slices),
            };
        }
        debug_assert_eq!(tensor.shape(), self.shape);
        tensor
    }
}
