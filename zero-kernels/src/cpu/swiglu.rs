//! The gated unit `silu(gate) * up` (<https://arxiv.org/abs/2002.05202>), forward and backward.

use super::check;
use super::math::exp;
use super::parallel::{TASK, spread};

/// Computes `gate / (1 + exp(-gate)) * up`.
///
/// # Panics
///
/// If the lengths differ.
pub fn forward(gate: &[f32], up: &[f32], out: &mut [f32]) {
    check("swiglu", "up", up.len(), gate.len());
    check("swiglu", "out", out.len(), gate.len());
    let tasks: Vec<_> = gate.chunks(TASK).zip(up.chunks(TASK)).zip(out.chunks_mut(TASK)).collect();
    spread(gate.len(), tasks, |((gate, up), out)| forward_part(gate, up, out));
}

/// Computes the gradients of [`forward`] for the gradient `g` of its result.
///
/// # Panics
///
/// If the lengths differ.
pub fn backward(gate: &[f32], up: &[f32], g: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    for (name, len) in [("up", up.len()), ("g", g.len()), ("dgate", dgate.len()), ("dup", dup.len())] {
        check("swiglu", name, len, gate.len());
    }
    let tasks: Vec<_> = (gate.chunks(TASK).zip(up.chunks(TASK)).zip(g.chunks(TASK)))
        .zip(dgate.chunks_mut(TASK).zip(dup.chunks_mut(TASK)))
        .collect();
    spread(gate.len(), tasks, |(((gate, up), g), (dgate, dup))| backward_part(gate, up, g, dgate, dup));
}

/// Returns `1 / (1 + exp(-x))`, which is 0 if the exponential is infinite.
#[inline(always)]
fn share(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

vectorised! {
    fn forward_part<'a>(gate: &'a [f32], up: &'a [f32], out: &'a mut [f32]) {
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            *out = gate * share(*gate) * up;
        }
    }

    fn backward_part<'a>(gate: &'a [f32], up: &'a [f32], g: &'a [f32], dgate: &'a mut [f32], dup: &'a mut [f32]) {
        for (((gate, up), g), (dgate, dup)) in gate.iter().zip(up).zip(g).zip(dgate.iter_mut().zip(dup)) {
            let share = share(*gate);
            let silu = gate * share;
            *dgate = g * up * (1.0 - share).mul_add(silu, share);
            *dup = g * silu;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    fn reference(gate: &[f64], up: &[f64]) -> Vec<f64> {
        gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
    }

    fn run(gate: &[f32], up: &[f32], g: &[f32]) -> [Vec<f32>; 3] {
        let [mut out, mut dgate, mut dup] = [(); 3].map(|()| vec![f32::NAN; gate.len()]);
        forward(gate, up, &mut out);
        backward(gate, up, g, &mut dgate, &mut dup);
        [out, dgate, dup]
    }

    #[test]
    fn agrees_with_f64() {
        for n in [1, 7, 100, 9000] {
            let gate: Vec<f32> = numbers(n, 1).into_iter().map(|x| 8.0 * x).collect();
            let (up, g) = (numbers(n, 2), numbers(n, 3));
            let [out, dgate, dup] = run(&gate, &up, &g);
            let [gate64, up64, g64] = [&gate, &up, &g].map(|values| wide(values));
            assert_close("out", &out, &reference(&gate64, &up64), 1e-6);
            let loss =
                |gate: &[f64], up: &[f64]| -> f64 { reference(gate, up).iter().zip(&g64).map(|(y, g)| y * g).sum() };
            assert_differences("gate", &gate, &dgate, |gate| loss(gate, &up64));
            assert_differences("up", &up, &dup, |up| loss(&gate64, up));
        }
    }

    #[test]
    fn large_inputs_reach_the_limits() {
        let [out, dgate, dup] = run(&[1e4, -1e4, 0.0, f32::NAN], &[2.0; 4], &[1.0; 4]);
        assert_eq!(out[..3], [2e4, 0.0, 0.0]);
        assert_eq!(dgate[..3], [2.0, 0.0, 1.0]);
        assert_eq!(dup[..3], [1e4, 0.0, 0.0]);
        assert!(out[3].is_nan() && dgate[3].is_nan() && dup[3].is_nan());
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let [gate, up, g] = [1, 2, 3].map(|seed| numbers(70_001, seed));
        same_bits(|| run(&gate, &up, &g).concat());
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        assert_panics(&["`up` has 3 elements, expected 4"], || forward(&[0.0; 4], &[0.0; 3], &mut [0.0; 4]));
    }
}
