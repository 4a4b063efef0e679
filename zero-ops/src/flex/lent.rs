//! Tensors lent within the same process for as long as their owner keeps them.

use std::any::Any;
use std::sync::Weak;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;

/// A tensor that its owner may drop at any time.
#[derive(Debug, Clone)]
pub struct Lent {
    data: Weak<Bytes>,
    layout: Layout,
    dtype: DType,
}

impl Lent {
    /// Lends a tensor of any backend, if its memory can be lent: burn-flex's can.
    pub fn of<B: Backend>(x: &FloatTensor<B>) -> Option<Self> {
        let x = (x as &dyn Any).downcast_ref::<FlexTensor>()?;
        // The strong handle that `data_arc` creates is dropped at the end of this line: the owner's stays the only one.
        Some(Self { data: std::sync::Arc::downgrade(&x.data_arc()), layout: x.layout().clone(), dtype: x.dtype() })
    }

    /// Returns the tensor, if it still exists. Nobody writes to it meanwhile: burn-flex computes in place only if it holds the sole strong
    /// handle, and then moves the memory away from weak ones (`Arc::make_mut`), which ends the loan.
    pub fn borrow<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let x = FlexTensor::from_arc(self.data.upgrade()?, self.layout.clone(), self.dtype);
        let x: Box<dyn Any> = Box::new(x);
        x.downcast::<FloatTensor<B>>().ok().map(|x| *x)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use burn_flex::Flex;

    use super::*;

    fn primitive(x: Tensor<Flex, 1>) -> FlexTensor {
        x.into_primitive().tensor()
    }

    #[test]
    fn what_is_lent_is_the_same_memory_until_it_is_dropped() {
        let owned = primitive(Tensor::from_floats([1.0, 2.0, 3.0], &Default::default()));
        let lent = Lent::of::<Flex>(&owned).expect("burn-flex lends");
        let borrowed = lent.borrow::<Flex>().expect("the owner is there");
        assert_eq!(borrowed.as_slice::<f32>().unwrap().as_ptr(), owned.as_slice::<f32>().unwrap().as_ptr());
        drop(owned);
        assert_eq!(borrowed.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0], "a borrower keeps it");
        drop(borrowed);
        assert!(lent.borrow::<Flex>().is_none());
    }

    #[test]
    fn an_owner_who_computes_in_place_changes_nothing_for_borrowers() {
        let owned = primitive(Tensor::from_floats([1.0, 2.0], &Default::default()));
        let lent = Lent::of::<Flex>(&owned).expect("burn-flex lends");
        let before = lent.borrow::<Flex>();
        let wrapped = Tensor::<Flex, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(owned));
        let doubled = wrapped * 2.0;
        assert_eq!(before.unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0]);
        // Without a borrower the owner may have reused the memory; then it is no longer lent.
        drop(doubled);
        assert!(lent.borrow::<Flex>().is_none_or(|x| x.as_slice::<f32>().unwrap() == [1.0, 2.0]));
    }
}
