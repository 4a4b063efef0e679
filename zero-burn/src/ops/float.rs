//! Float tensors: creation by scope, elementwise operations on shards, lazy views, reductions. Other operations load their operands.

use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{FloatTensor, IndexingUpdateOp};
use burn_backend::{Distribution, ExecutionError, Scalar, TensorData, TensorMetadata};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use zero_core::ReduceOp;

use crate::birth::{Fill, create};
use crate::context::Context;
use crate::elementwise;
use crate::random;
use crate::values::empty;

use super::*;

/// Creates a tensor filled with one value; `make` creates it if it is an ordinary tensor.
fn filled<B: Backend>(
    value: Scalar,
    shape: Shape,
    device: &B::Device,
    dtype: FloatDType,
    make: impl Fn(Shape, &B::Device, FloatDType) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ZeroTensor<B> {
    create(Fill::Value(value), shape.clone(), device, dtype, |_| {
        let device = device.clone();
        // Empty tensors are an exception: Burn's fusion launches a kernel without cubes for them, which CUDA rejects.
        ZeroTensor::ordinary([], move |[]| match shape.num_elements() {
            0 => empty::<B>(&shape, dtype.into(), &device),
            _ => make(shape.clone(), &device, dtype),
        })
    })
}

/// Multiplies matrices. CubeCL backends use our own kernels: Burn's tuner takes minutes, rounds fp32 to tf32, and has kernels that read
/// beyond their operands (ADR 26).
fn matmul<B: Backend>(lhs: B::FloatTensorPrimitive, rhs: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    #[cfg(feature = "cubecl")]
    let (lhs, rhs) = match zero_ops::matmul::<B>(lhs, rhs) {
        Ok(made) => return made,
        Err(given) => given,
    };
    B::float_matmul(lhs, rhs)
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> FloatTensorOps<Self> for Zero<B> {
    /// Passes a flat shard as a column. burn-flex 0.21 squares by multiplication, takes two handles on one flat tensor for a row to be
    /// broadcast, and copies before it multiplies.
    fn float_powi_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> {
        elementwise::unary("float_powi_scalar", lhs, move |x| {
            let shape = x.shape();
            if shape.num_dims() != 1 {
                return B::float_powi_scalar(x, rhs);
            }
            let column = B::float_reshape(x, Shape::new([shape.num_elements(), 1]));
            B::float_reshape(B::float_powi_scalar(column, rhs), shape)
        })
    }

    unary! {
        fn float_add_scalar(lhs: float, rhs: (Scalar)) -> float;
        fn float_clamp_min(tensor: float, min: (Scalar)) -> float;
        fn float_clamp_max(tensor: float, max: (Scalar)) -> float;
        fn float_clamp(tensor: float, min: (Scalar), max: (Scalar)) -> float;
        fn float_sub_scalar(lhs: float, rhs: (Scalar)) -> float;
        fn float_mul_scalar(lhs: float, rhs: (Scalar)) -> float;
        fn float_div_scalar(lhs: float, rhs: (Scalar)) -> float;
        fn float_remainder_scalar(lhs: float, rhs: (Scalar)) -> float;
        fn float_neg(tensor: float) -> float;
        fn float_recip(tensor: float) -> float;
        fn float_exp(tensor: float) -> float;
        fn float_log(tensor: float) -> float;
        fn float_log1p(tensor: float) -> float;
        fn float_powi_scalar_impl(lhs: float, rhs: (Scalar)) -> float;
        fn float_powf_scalar(tensor: float, value: (Scalar)) -> float;
        fn float_powf_scalar_impl(tensor: float, value: (Scalar)) -> float;
        fn float_sqrt(tensor: float) -> float;
        fn float_abs(tensor: float) -> float;
        fn float_cos(tensor: float) -> float;
        fn float_sin(tensor: float) -> float;
        fn float_tan(tensor: float) -> float;
        fn float_cosh(tensor: float) -> float;
        fn float_sinh(tensor: float) -> float;
        fn float_tanh(tensor: float) -> float;
        fn float_acos(tensor: float) -> float;
        fn float_acosh(tensor: float) -> float;
        fn float_asin(tensor: float) -> float;
        fn float_asinh(tensor: float) -> float;
        fn float_atan(tensor: float) -> float;
        fn float_atanh(tensor: float) -> float;
        fn float_round(tensor: float) -> float;
        fn float_floor(tensor: float) -> float;
        fn float_ceil(tensor: float) -> float;
        fn float_trunc(tensor: float) -> float;
        fn float_erf(tensor: float) -> float;
        fn float_sign(tensor: float) -> float;
    }

    binary! {
        fn float_add(lhs: float, rhs: float) -> float;
        fn float_sub(lhs: float, rhs: float) -> float;
        fn float_mul(lhs: float, rhs: float) -> float;
        fn float_div(lhs: float, rhs: float) -> float;
        fn float_remainder(lhs: float, rhs: float) -> float;
        fn float_powf(lhs: float, rhs: float) -> float;
        fn float_atan2(lhs: float, rhs: float) -> float;
    }

    recorded! {
        fn float_repeat_dim(tensor: float, dim: (usize), times: (usize)) -> float;
        fn float_matmul(lhs: float, rhs: float) -> float = matmul::<B>;
        fn float_cross(lhs: float, rhs: float, dim: (usize)) -> float;
        fn float_flip(tensor: float, axes: (&[usize])) -> float;
        fn float_gather(dim: (usize), tensor: float, indices: int) -> float;
        fn float_scatter_add(dim: (usize), tensor: float, indices: int, value: float) -> float;
        fn float_scatter_nd(data: float, indices: int, values: float, reduction: (IndexingUpdateOp)) -> float;
        fn float_gather_nd(data: float, indices: int) -> float;
        fn float_select(tensor: float, dim: (usize), indices: int) -> float;
        fn float_select_add(tensor: float, dim: (usize), indices: int, value: float) -> float;
        fn float_slice_assign(tensor: float, slices: (&[Slice]), value: float) -> float;
        fn float_sum_dim(tensor: float, dim: (usize)) -> float = reductions::float_sum_dim::<B>;
        fn float_prod(tensor: float) -> float;
        fn float_prod_dim(tensor: float, dim: (usize)) -> float = reductions::float_prod_dim::<B>;
        fn float_mean_dim(tensor: float, dim: (usize)) -> float = reductions::float_mean_dim::<B>;
        fn float_cumsum(tensor: float, dim: (usize)) -> float;
        fn float_cumprod(tensor: float, dim: (usize)) -> float;
        fn float_cummin(tensor: float, dim: (usize)) -> float;
        fn float_cummax(tensor: float, dim: (usize)) -> float;
        fn float_powi(lhs: float, rhs: int) -> float;
        fn float_cat(tensors: vec_float, dim: (usize)) -> float;
        fn float_topk(tensor: float, dim: (usize), k: (usize)) -> float;
        fn float_max_dim(tensor: float, dim: (usize)) -> float = reductions::float_max_dim::<B>;
        fn float_max_dim_with_indices(tensor: float, dim: (usize), indices_dtype: (IntDType)) -> float_int;
        fn float_min_dim(tensor: float, dim: (usize)) -> float = reductions::float_min_dim::<B>;
        fn float_min_dim_with_indices(tensor: float, dim: (usize), indices_dtype: (IntDType)) -> float_int;
        fn float_max_abs_dim(tensor: float, dim: (usize)) -> float = reductions::float_max_abs_dim::<B>;
        fn float_sort(tensor: float, dim: (usize), descending: (bool)) -> float;
        fn float_sort_with_indices(tensor: float, dim: (usize), descending: (bool), indices_dtype: (IntDType)) -> float_int;
        fn float_grid_sample_2d(tensor: float, grid: float, options: (GridSampleOptions)) -> float;
        fn float_unfold(tensor: float, dim: (usize), size: (usize), step: (usize)) -> float;
    }

    forward! {
        fn float_into_int(tensor: float, out_dtype: (IntDType)) -> int;
        fn float_equal(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_not_equal(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_equal_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_not_equal_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_greater(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_greater_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_greater_equal(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_greater_equal_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_lower(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_lower_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_lower_equal(lhs: float, rhs: float, out_dtype: (BoolDType)) -> bool;
        fn float_lower_equal_elem(lhs: float, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn float_argmax(tensor: float, dim: (usize), out_dtype: (IntDType)) -> int = reductions::float_argmax::<B>;
        fn float_argtopk(tensor: float, dim: (usize), k: (usize), out_dtype: (IntDType)) -> int;
        fn float_argmin(tensor: float, dim: (usize), out_dtype: (IntDType)) -> int = reductions::float_argmin::<B>;
        fn float_any(tensor: float, out_dtype: (BoolDType)) -> bool;
        fn float_any_dim(tensor: float, dim: (usize), out_dtype: (BoolDType)) -> bool = reductions::float_any_dim::<B>;
        fn float_all(tensor: float, out_dtype: (BoolDType)) -> bool;
        fn float_all_dim(tensor: float, dim: (usize), out_dtype: (BoolDType)) -> bool = reductions::float_all_dim::<B>;
        fn float_argsort(tensor: float, dim: (usize), descending: (bool), out_dtype: (IntDType)) -> int;
        fn float_is_nan(tensor: float, out_dtype: (BoolDType)) -> bool;
        fn float_is_inf(tensor: float, out_dtype: (BoolDType)) -> bool;
    }

    fn float_from_data(data: TensorData, device: ty!(device)) -> ty!(float) {
        let (shape, dtype) = (data.shape.clone(), data.dtype.into());
        let inner = device.inner();
        create(Fill::Data(data), shape, inner, dtype, |fill| match fill {
            Fill::Data(data) => ZeroTensor::Dense(B::float_from_data(data, inner)),
            _ => unreachable!("created from data"),
        })
    }

    fn float_random(shape: Shape, distribution: Distribution, device: ty!(device), dtype: FloatDType) -> ty!(float) {
        let inner = device.inner();
        create(Fill::Random(distribution), shape.clone(), inner, dtype, |_| {
            // The inner backend has one generator per process, and ranks would race for its numbers.
            let (drawn, inner) = (Context::<B>::draw(device), inner.clone());
            ZeroTensor::ordinary([], move |[]| {
                random::tensor::<B>(drawn, shape.clone(), distribution, dtype.into(), &inner)
            })
        })
    }

    fn float_zeros(shape: Shape, device: ty!(device), dtype: FloatDType) -> ty!(float) {
        filled(0f32.into(), shape, device.inner(), dtype, B::float_zeros)
    }

    fn float_ones(shape: Shape, device: ty!(device), dtype: FloatDType) -> ty!(float) {
        filled(1f32.into(), shape, device.inner(), dtype, B::float_ones)
    }

    fn float_full(shape: Shape, fill_value: Scalar, device: ty!(device), dtype: FloatDType) -> ty!(float) {
        filled(fill_value, shape, device.inner(), dtype, move |shape, inner, dtype| {
            B::float_full(shape, fill_value, inner, dtype)
        })
    }

    fn float_empty(shape: Shape, device: ty!(device), dtype: FloatDType) -> ty!(float) {
        filled(0f32.into(), shape, device.inner(), dtype, B::float_empty)
    }

    /// Reads the full tensor. For a gradient or optimizer state this is a collective: every rank must call it.
    fn float_into_data(tensor: ty!(float)) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::float_into_data(tensor.load_exact())
    }

    fn float_device(tensor: &ty!(float)) -> ty!(place) {
        elementwise::asked_for_device(tensor);
        crate::ZeroDevice::here(match tensor {
            ZeroTensor::Dense(tensor) | ZeroTensor::Replicated(tensor) => B::float_device(tensor),
            ZeroTensor::Activation(activation) => activation.device().clone(),
            ZeroTensor::Shard(shard) => shard.cell.device.clone(),
        })
    }

    fn float_to_device(tensor: ty!(float), device: ty!(device)) -> ty!(float) {
        match tensor {
            ZeroTensor::Dense(tensor) => ZeroTensor::Dense(B::float_to_device(tensor, device.inner())),
            ZeroTensor::Replicated(tensor) => ZeroTensor::Replicated(B::float_to_device(tensor, device.inner())),
            // Optimizer state passes through here at every step.
            ZeroTensor::Shard(shard) if shard.cell.device == *device.inner() => ZeroTensor::Shard(shard),
            ZeroTensor::Activation(activation) if activation.device() == device.inner() => {
                ZeroTensor::Activation(activation)
            }
            shard => ZeroTensor::Dense(B::float_to_device(shard.load(), device.inner())),
        }
    }

    fn float_detach(tensor: ty!(float)) -> ty!(float) {
        match tensor {
            ZeroTensor::Dense(tensor) => ZeroTensor::Dense(B::float_detach(tensor)),
            other => other,
        }
    }

    fn float_cast(tensor: ty!(float), dtype: FloatDType) -> ty!(float) {
        elementwise::cast(tensor, dtype)
    }

    fn float_set_require_grad(tensor: ty!(float), require_grad: bool) -> ty!(float) {
        match tensor {
            ZeroTensor::Dense(tensor) => ZeroTensor::Dense(B::float_set_require_grad(tensor, require_grad)),
            other => other,
        }
    }

    fn float_is_require_grad(tensor: &ty!(float)) -> bool {
        matches!(tensor, ZeroTensor::Dense(tensor) if B::float_is_require_grad(tensor))
    }

    fn float_transpose(tensor: ty!(float)) -> ty!(float) {
        tensor.view(
            |views| {
                let rank = views.shape().num_dims();
                views.swap_dims(rank - 2, rank - 1)
            },
            B::float_transpose,
        )
    }

    fn float_swap_dims(tensor: ty!(float), dim1: usize, dim2: usize) -> ty!(float) {
        tensor.view(|views| views.swap_dims(dim1, dim2), move |tensor| B::float_swap_dims(tensor, dim1, dim2))
    }

    fn float_permute(tensor: ty!(float), axes: &[usize]) -> ty!(float) {
        let owned = axes.to_vec();
        tensor.view(|views| views.permute(axes), move |tensor| B::float_permute(tensor, &owned))
    }

    fn float_reshape(tensor: ty!(float), shape: Shape) -> ty!(float) {
        let owned = shape.clone();
        tensor.view(|views| views.reshape(shape), move |tensor| B::float_reshape(tensor, owned.clone()))
    }

    fn float_expand(tensor: ty!(float), shape: Shape) -> ty!(float) {
        let owned = shape.clone();
        tensor.view(|views| views.expand(shape), move |tensor| B::float_expand(tensor, owned.clone()))
    }

    fn float_slice(tensor: ty!(float), slices: &[Slice]) -> ty!(float) {
        let owned = slices.to_vec();
        tensor.view(|views| views.slice(slices), move |tensor| B::float_slice(tensor, &owned))
    }

    fn float_mask_where(tensor: ty!(float), mask: ty!(bool), value: ty!(float)) -> ty!(float) {
        elementwise::mask_where(tensor, mask, value)
    }

    fn float_mask_fill(tensor: ty!(float), mask: ty!(bool), value: Scalar) -> ty!(float) {
        elementwise::mask_fill(tensor, mask, value)
    }

    fn float_sum(tensor: ty!(float)) -> ty!(float) {
        elementwise::sum(tensor)
    }

    fn float_mean(tensor: ty!(float)) -> ty!(float) {
        match tensor {
            ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => ZeroTensor::ordinary([tensor], |[x]| B::float_mean(x)),
            alike => {
                let numel = burn_backend::TensorMetadata::shape(&alike).num_elements() as f64;
                elementwise::unary("float_div_scalar", elementwise::sum(alike), move |sum| {
                    B::float_div_scalar(sum, numel.into())
                })
            }
        }
    }

    fn float_max(tensor: ty!(float)) -> ty!(float) {
        elementwise::reduce(tensor, ReduceOp::Max, 1.0, B::float_max, B::float_max)
    }

    fn float_min(tensor: ty!(float)) -> ty!(float) {
        elementwise::reduce(tensor, ReduceOp::Max, -1.0, B::float_min, |piece| B::float_max(B::float_neg(piece)))
    }

    fn float_max_abs(tensor: ty!(float)) -> ty!(float) {
        elementwise::reduce(tensor, ReduceOp::Max, 1.0, B::float_max_abs, B::float_max_abs)
    }
}
