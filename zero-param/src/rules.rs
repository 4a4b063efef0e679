//! The engine's update rules by Burn's operations, for shards on a device.
//!
//! Each rule has the order of operations of [`zero_kernels::update::Kernel`]. A device may round divisions and square roots differently.

use burn::tensor::{DType, Tensor};
use zero_engine::backend::{DType as EngineDType, UpdateItem, Updated};
use zero_kernels::Rule;
use zero_kernels::update::{Kernel, Sweep};

use crate::tensors::Floats;

type Flat = Tensor<1>;

/// The result of a pass.
struct Stepped {
    parameter: Flat,
    states: Vec<Flat>,
    direction: Option<Flat>,
}

/// Returns `mean beta + x (1 - beta)`; without `mean` it begins with zeros.
fn moved(mean: Option<&Flat>, x: Flat, beta: f32) -> Flat {
    let rest = x * (1.0 - beta);
    match mean {
        Some(mean) => mean.clone() * beta + rest,
        None => rest,
    }
}

/// Runs one pass of a rule on parameter `p` with gradient `g`, in fp32. `states` is empty if they begin with this step.
fn step(kernel: Kernel, p: Flat, g: Flat, states: &[Flat]) -> Stepped {
    let lr = kernel.lr as f32;
    let kept = |p: Flat, weight_decay: f32| p * (1.0 - kernel.lr * f64::from(weight_decay)) as f32;
    let stepped = |parameter, states| Stepped { parameter, states, direction: None };
    // Returns the means of gradients and of their squares, and the direction of the step.
    let adam = |g: Flat, beta_1: f32, beta_2: f32, epsilon: f32, bias_correction: bool| {
        let (m, v) = (moved(states.first(), g.clone(), beta_1), moved(states.get(1), g.clone() * g, beta_2));
        let correction = |beta: f32| if bias_correction { 1.0 - beta.powi(kernel.time as i32) } else { 1.0 };
        let direction = m.clone() / correction(beta_1) / ((v.clone() / correction(beta_2)).sqrt() + epsilon);
        (vec![m, v], direction)
    };
    if let Sweep::Second { trust } = kernel.pass {
        return stepped(p - g * (kernel.lr * f64::from(trust)) as f32, Vec::new());
    }
    match kernel.rule {
        Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
            let (states, direction) = adam(g, beta_1, beta_2, epsilon, bias_correction);
            stepped(kept(p, weight_decay) - direction * lr, states)
        }
        Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
            let (states, direction) = adam(g + p.clone() * weight_decay, beta_1, beta_2, epsilon, bias_correction);
            stepped(p - direction * lr, states)
        }
        Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } => {
            let (states, direction) = adam(g, beta_1, beta_2, epsilon, bias_correction);
            Stepped { direction: Some(direction + p.clone() * weight_decay), parameter: p, states }
        }
        Rule::Sgd { momentum, nesterov, weight_decay } => {
            let g = g + p.clone() * weight_decay;
            if momentum == 0.0 {
                return stepped(p - g * lr, Vec::new());
            }
            let m = states.first().map_or_else(|| g.clone(), |m| m.clone() * momentum + g.clone());
            let along = if nesterov { g + m.clone() * momentum } else { m.clone() };
            stepped(p - along * lr, vec![m])
        }
        Rule::Lion { beta_1, beta_2, weight_decay } => {
            let sign = moved(states.first(), g.clone(), beta_1).sign();
            stepped(kept(p, weight_decay) - sign * lr, vec![moved(states.first(), g, beta_2)])
        }
        Rule::Adagrad { epsilon, weight_decay } => {
            let g = g + p.clone() * weight_decay;
            let square = g.clone() * g.clone();
            let sum = states.first().map_or_else(|| square.clone(), |sum| sum.clone() + square.clone());
            stepped(p - g / (sum.clone().sqrt() + epsilon) * lr, vec![sum])
        }
        Rule::Muon { .. } => unreachable!("the host computes Muon's updates"),
    }
}

/// Updates a parameter on its device.
pub(crate) fn updated(item: UpdateItem<Floats, EngineDType>, scale: f32) -> Updated<Floats> {
    let UpdateItem { kernel, parameter, gradient, states, copy, .. } = item;
    let states: Vec<Flat> = match kernel.fresh {
        true => Vec::new(),
        false => states.into_iter().map(Flat::from_dispatch).collect(),
    };
    let gradient = Flat::from_dispatch(gradient).cast(DType::F32);
    let gradient = if scale == 1.0 { gradient } else { gradient * scale };
    let Stepped { parameter, states, direction } = step(kernel, Flat::from_dispatch(parameter), gradient, &states);
    let copy = copy.map(|copy| parameter.clone().cast(Flat::from_dispatch(copy).dtype()).into_dispatch());
    Updated {
        parameter: parameter.into_dispatch(),
        states: states.into_iter().map(Flat::into_dispatch).collect(),
        copy,
        direction: direction.map(Flat::into_dispatch),
    }
}

/// Returns the sum of squares of each tensor in fp32, then the number of elements of all that are not finite.
pub(crate) fn sums_of_squares(tensors: &[Floats]) -> Floats {
    let (mut sums, mut odd) = (Vec::with_capacity(tensors.len() + 1), None);
    for x in tensors {
        // In fp32, because squares of 16-bit values may not fit into 16 bits.
        let x = Flat::from_dispatch(x.clone()).cast(DType::F32);
        sums.push((x.clone() * x.clone()).sum());
        let more = x.clone().is_nan().bool_or(x.is_inf()).float().cast(DType::F32).sum();
        odd = Some(match odd {
            Some(odd) => odd + more,
            None => more,
        });
    }
    Tensor::cat(sums.into_iter().chain(odd).collect(), 0).into_dispatch()
}
