//! In-place access to the elements of a tensor of any backend, if it is burn-flex's.

use std::any::Any;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};
use burn_flex::FlexTensor;
use burn_std::FloatDType;

use super::{are_f32, narrow};
use crate::update::Elements;

/// Returns the sum of squares of a tensor of any backend, in one pass and without a copy, if it is burn-flex's, of 32 or 16 bit, and
/// without gaps.
pub fn sum_of_squares<B: Backend>(x: &FloatTensor<B>) -> Option<f64> {
    elements::<B>(x).map(Elements::sum_of_squares)
}

/// Returns whether tensors of this backend are slices in host memory that this crate can read and write, as burn-flex's are.
pub fn is_host<B: Backend>() -> bool {
    std::any::TypeId::of::<B::FloatTensorPrimitive>() == std::any::TypeId::of::<FlexTensor>()
}

/// Returns the elements of a tensor of any backend, without a copy, if it is burn-flex's, of 32 or 16 bit, and without gaps.
pub fn elements<B: Backend>(x: &FloatTensor<B>) -> Option<Elements<'_>> {
    let x = (x as &dyn Any).downcast_ref::<FlexTensor>()?;
    match x.dtype() {
        DType::F32 => x.as_slice().map(Elements::F32),
        DType::BF16 => x.as_slice().map(Elements::Bf16),
        DType::F16 => x.as_slice().map(Elements::F16),
        _ => None,
    }
}

/// Casts `x` to this type, rounded to nearest even. burn-flex 0.21 converts through f64, of which `half` drops the digits that distinguish
/// a number just above the midpoint of two neighbours from the midpoint.
pub fn cast<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let narrowed = (&x as &dyn Any)
        .downcast_ref::<FlexTensor>()
        .filter(|x| are_f32([*x]) && matches!(dtype, FloatDType::BF16 | FloatDType::F16))
        .map(|x| Box::new(narrow(x.clone(), dtype.into())) as Box<dyn Any>);
    match narrowed {
        Some(narrowed) => *narrowed.downcast().expect("the backend's tensors are burn-flex's"),
        None => B::float_cast(x, dtype),
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::Flex;
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn casts_round_to_nearest_even_just_above_the_middle() {
        // In bfloat16 and in half precision.
        let [a, b] = [0xbcb8_8001, 0x3f80_1001].map(f32::from_bits);
        let of = |value| Flex::float_from_data(TensorData::new(vec![value; 4], [2, 2]), &Default::default());
        // Contiguous, and as a view.
        for x in [of(a), Flex::float_transpose(of(a))] {
            let narrow = cast::<Flex>(x, FloatDType::BF16);
            assert_eq!(narrow.as_slice(), Some(&[bf16::from_bits(0xbcb9); 4][..]));
        }
        assert_eq!(cast::<Flex>(of(b), FloatDType::F16).as_slice(), Some(&[f16::from_bits(0x3c01); 4][..]));
        assert_eq!(cast::<Flex>(of(b), FloatDType::F64).dtype(), DType::F64);
    }
}
