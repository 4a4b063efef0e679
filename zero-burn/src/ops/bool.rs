//! Boolean tensors: `B`'s own.

use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::IntTensor;
use burn_backend::{ExecutionError, Scalar, TensorData};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> BoolTensorOps<Self> for Zero<B> {
    recorded! {
        fn bool_into_float(tensor: bool, out_dtype: (FloatDType)) -> float;
    }

    forward! {
        fn bool_empty(shape: (Shape), device: device, dtype: (BoolDType)) -> bool;
        fn bool_zeros(shape: (Shape), device: device, dtype: (BoolDType)) -> bool;
        fn bool_ones(shape: (Shape), device: device, dtype: (BoolDType)) -> bool;
        fn bool_into_data(tensor: bool) -> (impl Future<Output = Result<TensorData, ExecutionError>> + Send);
        fn bool_from_data(data: (TensorData), device: device) -> bool;
        fn bool_into_int(tensor: bool, out_dtype: (IntDType)) -> int;
        fn bool_device(tensor: ref_bool) -> place;
        fn bool_to_device(tensor: bool, device: device) -> bool;
        fn bool_reshape(tensor: bool, shape: (Shape)) -> bool;
        fn bool_slice(tensor: bool, slices: (&[Slice])) -> bool;
        fn bool_slice_assign(tensor: bool, slices: (&[Slice]), value: bool) -> bool;
        fn bool_mask_where(tensor: bool, mask: bool, value: bool) -> bool;
        fn bool_mask_fill(tensor: bool, mask: bool, value: (Scalar)) -> bool;
        fn bool_gather(dim: (usize), tensor: bool, indices: int) -> bool;
        fn bool_scatter_or(dim: (usize), tensor: bool, indices: int, value: bool) -> bool;
        fn bool_select(tensor: bool, dim: (usize), indices: int) -> bool;
        fn bool_select_or(tensor: bool, dim: (usize), indices: int, value: bool) -> bool;
        fn bool_repeat_dim(tensor: bool, dim: (usize), times: (usize)) -> bool;
        fn bool_cat(tensors: vec_bool, dim: (usize)) -> bool;
        fn bool_equal(lhs: bool, rhs: bool) -> bool;
        fn bool_not_equal(lhs: bool, rhs: bool) -> bool;
        fn bool_equal_elem(lhs: bool, rhs: (Scalar)) -> bool;
        fn bool_not_equal_elem(lhs: bool, rhs: (Scalar)) -> bool;
        fn bool_not(tensor: bool) -> bool;
        fn bool_and(lhs: bool, rhs: bool) -> bool;
        fn bool_or(lhs: bool, rhs: bool) -> bool;
        fn bool_xor(lhs: bool, rhs: bool) -> bool;
        fn bool_transpose(tensor: bool) -> bool;
        fn bool_swap_dims(tensor: bool, dim1: (usize), dim2: (usize)) -> bool;
        fn bool_permute(tensor: bool, axes: (&[usize])) -> bool;
        fn bool_flip(tensor: bool, axes: (&[usize])) -> bool;
        fn bool_any(tensor: bool) -> bool;
        fn bool_any_dim(tensor: bool, dim: (usize)) -> bool;
        fn bool_all(tensor: bool) -> bool;
        fn bool_all_dim(tensor: bool, dim: (usize)) -> bool;
        fn bool_argwhere(tensor: bool, out_dtype: (IntDType)) -> (impl Future<Output = IntTensor<B>> + 'static + Send);
        fn bool_expand(tensor: bool, shape: (Shape)) -> bool;
        fn bool_unfold(tensor: bool, dim: (usize), size: (usize), step: (usize)) -> bool;
    }
}
