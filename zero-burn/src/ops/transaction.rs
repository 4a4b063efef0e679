//! Reading several tensors at once.

use burn_backend::ExecutionError;
use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> TransactionOps<Self> for Zero<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        B::tr_execute(TransactionPrimitive::new(
            transaction.read_floats.into_iter().map(ZeroTensor::load).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
    }
}
