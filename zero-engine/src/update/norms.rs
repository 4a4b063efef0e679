//! Sums of squares of gradients, and of parameters and their updates, wherever the elements are.

use std::sync::Arc;

use zero_kernels::cpu::norm::Squares;
use zero_kernels::update::Norms;

use super::Job;
use crate::backend::{Backend, HostData};
use crate::cell::Cell;
use crate::values::numbers_of;

/// Computes the sums of squares of several tensors. Kernels for many tensors take one transfer from the device.
pub fn sums_of_squares<B: Backend>(tensors: Vec<B::Tensor>) -> Vec<f64> {
    match B::sums_of_squares(&tensors) {
        Some(sums) => of_device(&B::read(sums)),
        None => tensors.into_iter().map(B::sum_of_squares).collect(),
    }
}

/// Returns, for each cell, the sum of squares of the elements that this rank counts, with one transfer from a device; 0 for `None`.
pub fn own_squares<B: Backend>(cells: &[Option<Arc<Cell<B>>>]) -> Vec<f64> {
    let (mut sums, mut places, mut tensors) = (vec![0.0; cells.len()], Vec::new(), Vec::new());
    for (place, cell) in cells.iter().enumerate() {
        match cell.as_ref().map_or(Ok(0.0), |cell| cell.own_squares()) {
            Ok(sum) => sums[place] = sum,
            Err(tensor) => {
                places.push(place);
                tensors.push(tensor);
            }
        }
    }
    places.into_iter().zip(sums_of_squares::<B>(tensors)).for_each(|(place, sum)| sums[place] = sum);
    sums
}

/// Returns the sums that a device has computed. The last number is the count of elements that are not finite: with fast-math arithmetic,
/// the sums may not show them.
pub fn of_device<D: HostData>(sums: &D) -> Vec<f64> {
    let mut sums: Vec<f64> = numbers_of(sums).collect();
    if sums.pop().is_some_and(|odd| odd > 0.0) {
        sums.iter_mut().for_each(|sum| *sum = f64::NAN);
    }
    sums
}

/// Returns this rank's sums of `jobs`, in the order of their numbers below `count`.
pub fn own_sums<B: Backend>(jobs: &[&mut Job<B>], count: usize) -> Vec<f64> {
    let mut sums = vec![0.0; 4 * count];
    for job in jobs {
        let Norms { parameter, update } = job.norms;
        sums[4 * job.number..][..4].copy_from_slice(&[parameter.high, parameter.low, update.high, update.low]);
    }
    sums
}

/// Prepares `jobs` for their second pass with the sums of all ranks, which are added in rank order.
pub fn trust<B: Backend>(jobs: Vec<&mut Job<B>>, ranks: &[Vec<f64>]) {
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
