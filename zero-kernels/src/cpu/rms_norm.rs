//! Normalisation by the root mean square over the last dimension (<https://arxiv.org/abs/1910.07467>), forward and backward.

use super::parallel::{BLOCK, rows_of_task, spread};
use super::reduce::{add_partials, sum_over};
use super::{check, check_rows};

/// Computes `x * rrms * gamma` for every row, with `rrms = 1 / sqrt(mean(x^2) + epsilon)`, which the gradient needs.
///
/// # Shapes
///
/// `x`, `out`: `[n, d]`; `gamma`: `[d]`; `rrms`: `[n]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn forward(x: &[f32], gamma: &[f32], epsilon: f32, out: &mut [f32], rrms: &mut [f32]) {
    let (n, d) = (rrms.len(), gamma.len());
    check_rows("rms norm", "x", x.len(), n, d);
    check_rows("rms norm", "out", out.len(), n, d);
    if x.is_empty() {
        return;
    }
    let rows = rows_of_task(d);
    let tasks: Vec<_> = x.chunks(rows * d).zip(out.chunks_mut(rows * d)).zip(rrms.chunks_mut(rows)).collect();
    spread(x.len(), tasks, |((x, out), rrms)| forward_rows(x, gamma, epsilon, out, rrms));
}

/// Computes the gradients of [`forward`] for the gradient `g` of its result.
///
/// # Shapes
///
/// `x`, `g`, `dx`: `[n, d]`; `gamma`, `dgamma`: `[d]`; `rrms`: `[n]`, as [`forward`] wrote it.
///
/// # Panics
///
/// If the lengths do not match.
pub fn backward(x: &[f32], gamma: &[f32], rrms: &[f32], g: &[f32], dx: &mut [f32], dgamma: &mut [f32]) {
    let (n, d) = (rrms.len(), gamma.len());
    check_rows("rms norm", "x", x.len(), n, d);
    check_rows("rms norm", "g", g.len(), n, d);
    check_rows("rms norm", "dx", dx.len(), n, d);
    check("rms norm", "dgamma", dgamma.len(), d);
    if d == 0 {
        return;
    }
    let mut dgammas = vec![0f32; n.div_ceil(BLOCK) * d];
    let tasks: Vec<_> = (x.chunks(BLOCK * d).zip(g.chunks(BLOCK * d)).zip(dx.chunks_mut(BLOCK * d)))
        .zip(rrms.chunks(BLOCK).zip(dgammas.chunks_mut(d)))
        .collect();
    spread(x.len(), tasks, |(((x, g), dx), (rrms, dgamma))| backward_block(x, gamma, rrms, g, dx, dgamma));
    add_partials(&dgammas, dgamma);
}

vectorised! {
    fn forward_rows<'a>(x: &'a [f32], gamma: &'a [f32], epsilon: f32, out: &'a mut [f32], rrms: &'a mut [f32]) {
        let d = gamma.len();
        let share = 1.0 / d as f32;
        for ((x, out), rrms) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(rrms) {
            let square = sum_over([x], |[x], sum| x.mul_add(x, sum)) * share;
            let r = 1.0 / (square + epsilon).sqrt();
            *rrms = r;
            for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
                *out = x * r * gamma;
            }
        }
    }

    /// `dgamma` is the block's partial sum, zero at first.
    fn backward_block<'a>(
        x: &'a [f32],
        gamma: &'a [f32],
        rrms: &'a [f32],
        g: &'a [f32],
        dx: &'a mut [f32],
        dgamma: &'a mut [f32],
    ) {
        let d = gamma.len();
        let share = 1.0 / d as f32;
        for (((x, g), dx), r) in x.chunks_exact(d).zip(g.chunks_exact(d)).zip(dx.chunks_exact_mut(d)).zip(rrms) {
            let along = sum_over([x, g, gamma], |[x, g, gamma], sum| (g * gamma).mul_add(x * r, sum)) * share;
            for ((((dx, x), g), gamma), dgamma) in dx.iter_mut().zip(x).zip(g).zip(gamma).zip(dgamma.iter_mut()) {
                let normal = x * r;
                *dx = (-normal).mul_add(along, g * gamma) * r;
                *dgamma = g.mul_add(normal, *dgamma);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    const EPSILON: f32 = 1e-5;

    /// Returns result and rrms.
    fn reference(x: &[f64], gamma: &[f64]) -> [Vec<f64>; 2] {
        let d = gamma.len();
        let mut result = [vec![], vec![]];
        for x in x.chunks(d) {
            let rrms = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + f64::from(EPSILON)).sqrt();
            result[0].extend(x.iter().zip(gamma).map(|(x, gamma)| x * rrms * gamma));
            result[1].push(rrms);
        }
        result
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes() {
        for (n, d) in [(1, 1), (1, 7), (3, 64), (17, 100), (33, 7), (65, 100), (70, 768)] {
            let (x, gamma, g) = (numbers(n * d, 1), numbers(d, 2), numbers(n * d, 4));
            let (mut out, mut rrms) = (vec![f32::NAN; n * d], vec![0.0; n]);
            forward(&x, &gamma, EPSILON, &mut out, &mut rrms);
            let [x64, gamma64, g64] = [&x, &gamma, &g].map(|values| wide(values));
            let [out64, rrms64] = reference(&x64, &gamma64);
            assert_close("out", &out, &out64, 1e-5);
            assert_close("rrms", &rrms, &rrms64, 1e-5);

            let (mut dx, mut dgamma) = (vec![f32::NAN; n * d], vec![f32::NAN; d]);
            backward(&x, &gamma, &rrms, &g, &mut dx, &mut dgamma);
            let loss =
                |x: &[f64], gamma: &[f64]| -> f64 { reference(x, gamma)[0].iter().zip(&g64).map(|(y, g)| y * g).sum() };
            assert_differences("gamma", &gamma, &dgamma, |gamma| loss(&x64, gamma));
            // A single element is nearly constant in itself: the difference of large numbers.
            if d > 1 {
                assert_differences("x", &x, &dx, |x| loss(x, &gamma64));
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (n, d) = (333, 129);
        let (x, gamma, g) = (numbers(n * d, 1), numbers(d, 2), numbers(n * d, 4));
        same_bits(|| {
            let (mut out, mut rrms) = (vec![0.0; n * d], vec![0.0; n]);
            forward(&x, &gamma, EPSILON, &mut out, &mut rrms);
            let (mut dx, mut dgamma) = (vec![0.0; n * d], vec![0.0; d]);
            backward(&x, &gamma, &rrms, &g, &mut dx, &mut dgamma);
            [out, rrms, dx, dgamma].concat()
        });
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        let run = |x: usize, out: usize| forward(&vec![0.0; x], &[1.0; 4], 0.0, &mut vec![0.0; out], &mut [0.0; 2]);
        assert_panics(&["`x` has 7 elements, expected 2 rows of 4"], || run(7, 8));
        assert_panics(&["`out` has 9 elements, expected 2 rows of 4"], || run(8, 9));
    }
}
