//! Updates on devices: a step's arrays stay where they lie and are updated in few launches, in place where nobody else holds
//! them.

use std::sync::Arc;

use burn_backend::{Backend, BackendTypes, TensorMetadata};
use burn_std::DType;
use zero_ops::{GradScale, Rule, Update, UpdateItem, Updated, fused_update};

use super::rule::Kernel;
use super::state::{MASTER, States, mismatch};
use crate::shard::{Cell, Template};
use crate::tensor::Shard;
use crate::trouble::stop;

type Float<B> = <B as BackendTypes>::FloatTensorPrimitive;

/// The update of one parameter, and the cells that wait for what it makes.
pub(super) struct Job<B: Backend> {
    item: UpdateItem<Float<B>>,
    states: Vec<Arc<Cell<B>>>,
    /// Of a parameter in 16 bit.
    master: Option<Arc<Cell<B>>>,
    version: Arc<Cell<B>>,
}

/// An update to be run with the others of its step, and the states that come of it, pending.
pub(super) fn job<B: Backend>(
    rule: Rule,
    kernel: Kernel,
    (parameter, gradient): (Shard<B>, Shard<B>),
    mut held: States<B>,
    (templates, updated): (Vec<Template<B>>, Template<B>),
) -> (Job<B>, States<B>) {
    let dtype = parameter.cell.dtype;
    let mut taken = |name: &str| {
        let place = held.iter().position(|(known, _)| known == name)?;
        Some(held.swap_remove(place).1.into_local())
    };
    let names = rule.state_names();
    let states: Vec<Option<Float<B>>> = names.iter().map(|name| taken(name)).collect();
    let master = taken(MASTER);
    // All of them, or they begin anew.
    let states: Vec<Float<B>> = if kernel.is_fresh() { Vec::new() } else { states.into_iter().flatten().collect() };
    let piece = parameter.into_piece();
    let (parameter, copy) = match dtype {
        DType::F32 => (piece, None),
        _ => (master.unwrap_or_else(|| B::float_cast(piece.clone(), DType::F32.into())), Some(piece)),
    };
    let gradient = gradient.into_piece();
    let gradient = match gradient.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => gradient,
        _ => B::float_cast(gradient, DType::F32.into()),
    };
    let elements = gradient.shape().num_elements();
    for array in [Some(&parameter), copy.as_ref()].into_iter().flatten().chain(&states) {
        if array.shape().num_elements() != elements {
            stop(mismatch(array.shape().num_elements(), elements));
        }
    }
    let half = copy.is_some();
    // In the order in which an update in the host's memory makes them: names of cells count on it.
    let kept = names.iter().copied().chain(half.then_some(MASTER));
    let cells = kept.zip(templates).map(|(name, template)| (name.to_string(), Cell::pending(template, DType::F32)));
    let cells: States<B> = cells.collect();
    let version = Cell::pending(updated, dtype);
    let item = UpdateItem { update: Update::from(kernel), parameter, gradient, states, copy };
    let pending = |names: std::ops::Range<usize>| cells[names].iter().map(|(_, cell)| cell.clone());
    let job = Job {
        item,
        states: pending(0..names.len()).collect(),
        master: pending(names.len()..cells.len()).next(),
        version,
    };
    (job, cells)
}

impl<B: Backend> Job<B> {
    /// The parameter's next version.
    pub(super) fn version(&self) -> Arc<Cell<B>> {
        self.version.clone()
    }
}

/// Runs a step's updates, with gradients multiplied by `scale` first. Nothing is waited for.
pub(super) fn run<B: Backend>(jobs: Vec<Job<B>>, scale: f32) {
    let mut items = Vec::with_capacity(jobs.len());
    let mut cells = Vec::with_capacity(jobs.len());
    for Job { item, states, master, version } in jobs {
        items.push(item);
        cells.push((states, master, version));
    }
    let updated = fused_update::<B>(items, GradScale::Number(scale));
    let updated = updated.unwrap_or_else(|_| stop("the backend's tensors are not CubeCL's, though they were".into()));
    let (mut waiting, mut tensors) = (Vec::new(), Vec::new());
    for (Updated { parameter, states, copy }, (state_cells, master, version)) in updated.into_iter().zip(cells) {
        waiting.extend(state_cells);
        tensors.extend(states);
        // The parameter, or its master and its copy.
        waiting.extend(master.into_iter().chain([version]));
        tensors.extend([parameter].into_iter().chain(copy));
    }
    let Some(context) = waiting.first().map(|cell| cell.context.clone()) else { return };
    for (cell, tensor) in waiting.into_iter().zip(context.share_many(tensors)) {
        cell.settle(Ok(tensor));
    }
}
