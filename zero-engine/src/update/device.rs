//! Updates on devices: a step's arrays stay where they are and are updated in few launches, in place if nothing else holds them.

use zero_kernels::cpu::norm::Squares;
use zero_kernels::update::Norms;

use super::norms::sums_of_squares;
use super::{Array, Averaged, Job};
use crate::abort::stop;
use crate::backend::{Backend, DType, GradScale, UpdateItem, Updated};
use crate::values::part;

/// Runs a pass of a step's updates and returns those that have a second pass. Waits for nothing except the sums of a first pass. If
/// `factor` is given, gradients are multiplied by it instead of the jobs' scale.
pub fn run<B: Backend>(jobs: Vec<Job<B>>, factor: Option<B::Tensor>) -> Vec<Job<B>> {
    // Gradients have a scale, results of first passes have none.
    let (second, other): (Vec<_>, Vec<_>) = jobs.into_iter().partition(Job::is_second_pass);
    [(second, None), (other, factor)].into_iter().flat_map(|(jobs, factor)| run_scaled(jobs, factor)).collect()
}

/// Runs a pass of updates with one scale.
fn run_scaled<B: Backend>(mut jobs: Vec<Job<B>>, factor: Option<B::Tensor>) -> Vec<Job<B>> {
    let Some(scale) = jobs.first().map(|job| job.scale) else { return Vec::new() };
    let item = |job: &mut Job<B>| {
        let (gradient, _) = job.gradient.take().expect("the first pass on a device gives the direction of the second");
        let (is_first, is_second) = (job.is_first_pass(), job.is_second_pass());
        UpdateItem {
            kernel: job.kernel,
            parameter: tensor(job.parameter.take()),
            gradient: tensor(gradient),
            // The first pass has advanced them.
            state_dtype: job.state_dtype,
            first: job.first,
            states: if is_second { Vec::new() } else { job.states.drain(..).map(tensor).collect() },
            copy: job.copy.take_if(|_| !is_first).map(|(copy, _)| tensor(copy)),
        }
    };
    let items = jobs.iter_mut().map(item).collect();
    let updated = B::fused_update(items, factor.map_or(GradScale::Number(scale), GradScale::Tensor));
    let updated = updated.unwrap_or_else(|| stop("the backend's tensors are no longer CubeCL's".into()));
    let (mut halfway, mut waiting, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
    for (mut job, Updated { parameter, states, copy, direction }) in jobs.into_iter().zip(updated) {
        if let Some(direction) = direction {
            job.parameter = Array::Tensor(parameter);
            job.states = states.into_iter().map(Array::Tensor).collect();
            (job.gradient, job.scale) = (Some((Array::Tensor(direction), DType::F32)), 1.0);
            halfway.push(job);
            continue;
        }
        let average = job.average.map(|average| moved::<B>(average, &parameter));
        // In the order of the cells: the states, the average, then the parameter, or its master and its copy.
        let states = job.states.into_iter().map(tensor).chain(states);
        tensors.extend(states.chain(average).chain([parameter]).chain(copy));
        waiting.extend(job.cells);
    }
    if let Some(rank) = waiting.first().map(|cell| cell.rank.clone()) {
        for (cell, tensor) in waiting.into_iter().zip(rank.share_many(tensors)) {
            cell.settle(Ok(tensor));
        }
    }
    measure(&mut halfway);
    halfway
}

/// Returns the average, moved towards the parameter like [`Average`](zero_kernels::update::Average) on the host.
fn moved<B: Backend>(Averaged { array, decay, fresh }: Averaged<B>, parameter: &B::Tensor) -> B::Tensor {
    if fresh {
        return parameter.clone();
    }
    let average = tensor(array);
    let difference = B::sub(parameter.clone(), average.clone());
    B::add(average, B::mul_scalar(difference, 1.0 - decay))
}

/// Sums the squares of parameters and updates, all in few launches.
fn measure<B: Backend>(jobs: &mut [Job<B>]) {
    let mut parts = Vec::new();
    for job in jobs.iter().filter(|job| !job.counted().is_empty()) {
        for array in [&job.parameter].into_iter().chain(job.gradient.as_ref().map(|(direction, _)| direction)) {
            let Array::Tensor(tensor) = array else { unreachable!("it was made on the device") };
            parts.push(part::<B>(tensor.clone(), job.counted()));
        }
    }
    let sums = sums_of_squares::<B>(parts);
    let counted = jobs.iter_mut().filter(|job| !job.counted().is_empty());
    for (job, sums) in counted.zip(sums.chunks_exact(2)) {
        let [parameter, update] = [sums[0], sums[1]].map(|high| Squares { high, low: 0.0 });
        job.norms = Norms { parameter, update };
    }
}

fn tensor<B: Backend>(array: Array<B>) -> B::Tensor {
    match array {
        Array::Tensor(tensor) => tensor,
        Array::Memory(_) | Array::Disk { .. } => unreachable!("the arrays of an update on a device are on the device"),
    }
}
