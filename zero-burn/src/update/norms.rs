//! Sums of squares of gradients, and of parameters and their updates, wherever the elements are.

#[cfg(feature = "cubecl")]
use burn_backend::TensorData;
use burn_backend::{Backend, TensorMetadata};
use burn_std::DType;
use zero_ops::Squares;
use zero_ops::update::Norms;

use super::Job;
use crate::values::read;

pub(crate) fn sum_of_squares<B: Backend>(x: B::FloatTensorPrimitive) -> f64 {
    // One pass over memory if the elements are accessible on the host, otherwise three.
    if let Some(sum) = zero_ops::sum_of_squares::<B>(&x) {
        return sum;
    }
    // In fp32, because squares of 16-bit values may not fit into 16 bits.
    let x = if x.dtype().size() < 4 { B::float_cast(x, DType::F32.into()) } else { x };
    let sum = B::float_sum(B::float_mul(x.clone(), x));
    read::<B>(sum).iter::<f64>().next().expect("a full reduction gives one number")
}

/// Computes the sums of squares of several tensors. With CubeCL, they are read from the device in one transfer.
pub(crate) fn sums_of_squares<B: Backend>(tensors: Vec<B::FloatTensorPrimitive>) -> Vec<f64> {
    #[cfg(feature = "cubecl")]
    if let Some(sums) = zero_ops::sums_of_squares::<B>(&tensors) {
        return of_device(&read::<B>(sums));
    }
    tensors.into_iter().map(sum_of_squares::<B>).collect()
}

/// Returns the sums that a device has computed. The last number is the count of elements that are not finite: with fast-math arithmetic,
/// the sums may not show them.
#[cfg(feature = "cubecl")]
pub(crate) fn of_device(sums: &TensorData) -> Vec<f64> {
    let mut sums: Vec<f64> = sums.iter::<f64>().collect();
    if sums.pop().is_some_and(|odd| odd > 0.0) {
        sums.iter_mut().for_each(|sum| *sum = f64::NAN);
    }
    sums
}

/// Returns this rank's sums of `jobs`, in the order of their numbers below `count`.
pub(crate) fn own_sums<B: Backend>(jobs: &[&mut Job<B>], count: usize) -> Vec<f64> {
    let mut sums = vec![0.0; 4 * count];
    for job in jobs {
        let Norms { parameter, update } = job.norms;
        sums[4 * job.number..][..4].copy_from_slice(&[parameter.high, parameter.low, update.high, update.low]);
    }
    sums
}

/// Prepares `jobs` for their second pass with the sums of all ranks, which are added in rank order.
pub(crate) fn trust<B: Backend>(jobs: Vec<&mut Job<B>>, ranks: &[Vec<f64>]) {
    for job in jobs {
        let of = |sums: &Vec<f64>| {
            let sums = &sums[4 * job.number..];
            let squares = |at: usize| Squares { high: sums[at], low: sums[at + 1] };
            Norms { parameter: squares(0), update: squares(2) }
        };
        let Norms { parameter, update } = ranks.iter().map(of).fold(Norms::default(), Norms::plus);
        job.kernel.trust(parameter.value().sqrt(), update.value().sqrt());
    }
}
