//! Updates on devices: a step's arrays stay where they lie and are updated in few launches, in place where nobody else holds
//! them.

use burn_backend::Backend;
use zero_ops::{GradScale, UpdateItem, Updated, fused_update};

use super::{Array, Job};
use crate::trouble::stop;

/// Runs a step's updates, all with the same scale of gradients. Nothing is waited for.
pub(crate) fn run<B: Backend>(jobs: Vec<Job<B>>) {
    let Some(scale) = jobs.first().map(|job| job.scale) else { return };
    let (mut items, mut waiting) = (Vec::with_capacity(jobs.len()), Vec::new());
    for Job { kernel, parameter, gradient: (gradient, _), states, copy, cells, .. } in jobs {
        items.push(UpdateItem {
            update: kernel.into(),
            parameter: tensor(parameter),
            gradient: tensor(gradient),
            states: states.into_iter().map(tensor).collect(),
            copy: copy.map(|(copy, _)| tensor(copy)),
        });
        waiting.extend(cells);
    }
    let updated = fused_update::<B>(items, GradScale::Number(scale));
    let updated = updated.unwrap_or_else(|_| stop("the backend's tensors are not CubeCL's, though they were".into()));
    // The states, then the parameter, or its master and its copy, as the cells are.
    let made = |Updated { parameter, states, copy }| states.into_iter().chain([parameter]).chain(copy);
    let tensors: Vec<B::FloatTensorPrimitive> = updated.into_iter().flat_map(made).collect();
    let Some(rank) = waiting.first().map(|cell| cell.rank.clone()) else { return };
    for (cell, tensor) in waiting.into_iter().zip(rank.share_many(tensors)) {
        cell.settle(Ok(tensor));
    }
}

fn tensor<B: Backend>(array: Array<B>) -> B::FloatTensorPrimitive {
    match array {
        Array::Tensor(tensor) => tensor,
        Array::Memory(_) | Array::Disk { .. } => unreachable!("an update on a device has its arrays there"),
    }
}
