//! Integer tensors: `B`'s own, with random numbers from the rank's stream.

use std::ops::Range;

use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Distribution, ExecutionError, Scalar, TensorData};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use crate::context::Context;
use crate::random;

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> IntTensorOps<Self> for Zero<B> {
    recorded! {
        fn int_into_float(tensor: int, out_dtype: (FloatDType)) -> float;
    }

    forward! {
        fn int_empty(shape: (Shape), device: device, dtype: (IntDType)) -> int;
        fn int_into_data(tensor: int) -> (impl Future<Output = Result<TensorData, ExecutionError>> + Send);
        fn int_from_data(data: (TensorData), device: device) -> int;
        fn int_device(tensor: ref_int) -> place;
        fn int_to_device(tensor: int, device: device) -> int;
        fn int_reshape(tensor: int, shape: (Shape)) -> int;
        fn int_slice(tensor: int, slices: (&[Slice])) -> int;
        fn int_slice_assign(tensor: int, slices: (&[Slice]), value: int) -> int;
        fn int_mask_where(tensor: int, mask: bool, value: int) -> int;
        fn int_mask_fill(tensor: int, mask: bool, value: (Scalar)) -> int;
        fn int_gather(dim: (usize), tensor: int, indices: int) -> int;
        fn int_scatter_add(dim: (usize), tensor: int, indices: int, value: int) -> int;
        fn int_scatter_nd(data: int, indices: int, values: int, reduction: (IndexingUpdateOp)) -> int;
        fn int_gather_nd(data: int, indices: int) -> int;
        fn int_select(tensor: int, dim: (usize), indices: int) -> int;
        fn int_select_add(tensor: int, dim: (usize), indices: int, value: int) -> int;
        fn int_repeat_dim(tensor: int, dim: (usize), times: (usize)) -> int;
        fn int_cat(tensors: vec_int, dim: (usize)) -> int;
        fn int_equal(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_not_equal(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_equal_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_not_equal_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_greater(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_greater_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_greater_equal(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_greater_equal_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_lower(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_lower_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_lower_equal(lhs: int, rhs: int, out_dtype: (BoolDType)) -> bool;
        fn int_lower_equal_elem(lhs: int, rhs: (Scalar), out_dtype: (BoolDType)) -> bool;
        fn int_add(lhs: int, rhs: int) -> int;
        fn int_add_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_powi(lhs: int, rhs: int) -> int;
        fn int_powi_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_powi_scalar_impl(lhs: int, rhs: (Scalar)) -> int;
        fn int_clamp_min(tensor: int, min: (Scalar)) -> int;
        fn int_clamp_max(tensor: int, max: (Scalar)) -> int;
        fn int_clamp(tensor: int, min: (Scalar), max: (Scalar)) -> int;
        fn int_sub(lhs: int, rhs: int) -> int;
        fn int_sub_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_mul(lhs: int, rhs: int) -> int;
        fn int_mul_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_div(lhs: int, rhs: int) -> int;
        fn int_div_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_remainder(lhs: int, rhs: int) -> int;
        fn int_remainder_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_matmul(lhs: int, rhs: int) -> int;
        fn int_neg(tensor: int) -> int;
        fn int_zeros(shape: (Shape), device: device, dtype: (IntDType)) -> int;
        fn int_ones(shape: (Shape), device: device, dtype: (IntDType)) -> int;
        fn int_full(shape: (Shape), fill_value: (Scalar), device: device, dtype: (IntDType)) -> int;
        fn int_sum(tensor: int) -> int;
        fn int_sum_dim(tensor: int, dim: (usize)) -> int = reductions::int_sum_dim::<B>;
        fn int_prod(tensor: int) -> int;
        fn int_prod_dim(tensor: int, dim: (usize)) -> int = reductions::int_prod_dim::<B>;
        fn int_mean(tensor: int) -> int;
        fn int_mean_dim(tensor: int, dim: (usize)) -> int = reductions::int_mean_dim::<B>;
        fn int_cumsum(tensor: int, dim: (usize)) -> int;
        fn int_cumprod(tensor: int, dim: (usize)) -> int;
        fn int_cummin(tensor: int, dim: (usize)) -> int;
        fn int_cummax(tensor: int, dim: (usize)) -> int;
        fn int_argmax(tensor: int, dim: (usize)) -> int = reductions::int_argmax::<B>;
        fn int_argtopk(tensor: int, dim: (usize), k: (usize)) -> int;
        fn int_topk(tensor: int, dim: (usize), k: (usize)) -> int;
        fn int_argmin(tensor: int, dim: (usize)) -> int = reductions::int_argmin::<B>;
        fn int_max(tensor: int) -> int;
        fn int_max_dim(tensor: int, dim: (usize)) -> int = reductions::int_max_dim::<B>;
        fn int_max_dim_with_indices(tensor: int, dim: (usize)) -> int_int;
        fn int_max_abs(tensor: int) -> int;
        fn int_max_abs_dim(tensor: int, dim: (usize)) -> int = reductions::int_max_abs_dim::<B>;
        fn int_min(tensor: int) -> int;
        fn int_min_dim(tensor: int, dim: (usize)) -> int = reductions::int_min_dim::<B>;
        fn int_min_dim_with_indices(tensor: int, dim: (usize)) -> int_int;
        fn int_abs(tensor: int) -> int;
        fn int_transpose(tensor: int) -> int;
        fn int_swap_dims(tensor: int, dim1: (usize), dim2: (usize)) -> int;
        fn int_permute(tensor: int, axes: (&[usize])) -> int;
        fn int_flip(tensor: int, axes: (&[usize])) -> int;
        fn int_arange_step(range: (Range<i64>), step: (usize), device: device, dtype: (IntDType)) -> int;
        fn int_arange(range: (Range<i64>), device: device, dtype: (IntDType)) -> int;
        fn int_any(tensor: int, out_dtype: (BoolDType)) -> bool;
        fn int_any_dim(tensor: int, dim: (usize), out_dtype: (BoolDType)) -> bool = reductions::int_any_dim::<B>;
        fn int_all(tensor: int, out_dtype: (BoolDType)) -> bool;
        fn int_all_dim(tensor: int, dim: (usize), out_dtype: (BoolDType)) -> bool = reductions::int_all_dim::<B>;
        fn int_sign(tensor: int) -> int;
        fn int_expand(tensor: int, shape: (Shape)) -> int;
        fn int_sort(tensor: int, dim: (usize), descending: (bool)) -> int;
        fn int_sort_with_indices(tensor: int, dim: (usize), descending: (bool)) -> int_int;
        fn int_argsort(tensor: int, dim: (usize), descending: (bool)) -> int;
        fn bitwise_and(lhs: int, rhs: int) -> int;
        fn bitwise_and_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn bitwise_or(lhs: int, rhs: int) -> int;
        fn bitwise_or_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn bitwise_xor(lhs: int, rhs: int) -> int;
        fn bitwise_xor_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn bitwise_not(tensor: int) -> int;
        fn bitwise_left_shift(lhs: int, rhs: int) -> int;
        fn bitwise_left_shift_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn bitwise_right_shift(lhs: int, rhs: int) -> int;
        fn bitwise_right_shift_scalar(lhs: int, rhs: (Scalar)) -> int;
        fn int_cast(tensor: int, dtype: (IntDType)) -> int;
        fn int_unfold(tensor: int, dim: (usize), size: (usize), step: (usize)) -> int;
    }

    fn int_random(shape: Shape, distribution: Distribution, device: ty!(device), dtype: IntDType) -> ty!(int) {
        let elements = 0..shape.num_elements();
        let data = random::data(Context::<B>::draw(device), elements, distribution, shape, dtype.into());
        B::int_from_data(data, device.inner())
    }
}
