//! The elements of a tensor of any backend where they lie, if it is burn-flex's.

use std::any::Any;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};
use burn_flex::FlexTensor;

use crate::update::Elements;

/// The sum of the squares of a tensor of any backend, in one pass over it and without a copy, if it is burn-flex's, of 32 or
/// 16 bit, and without gaps.
pub fn sum_of_squares<B: Backend>(x: &FloatTensor<B>) -> Option<f64> {
    elements::<B>(x).map(Elements::sum_of_squares)
}

/// Whether tensors of this backend lie in the host's memory as slices that this crate can read and write: burn-flex's do.
pub fn is_host<B: Backend>() -> bool {
    std::any::TypeId::of::<B::FloatTensorPrimitive>() == std::any::TypeId::of::<FlexTensor>()
}

/// The elements of a tensor of any backend, without a copy, if it is burn-flex's, of 32 or 16 bit, and without gaps.
pub fn elements<B: Backend>(x: &FloatTensor<B>) -> Option<Elements<'_>> {
    let x = (x as &dyn Any).downcast_ref::<FlexTensor>()?;
    match x.dtype() {
        DType::F32 => x.as_slice().map(Elements::F32),
        DType::BF16 => x.as_slice().map(Elements::Bf16),
        DType::F16 => x.as_slice().map(Elements::F16),
        _ => None,
    }
}
