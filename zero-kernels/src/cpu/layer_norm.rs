//! Layer normalisation over the last dimension (<https://arxiv.org/abs/1607.06450>), forward and backward.
//!
//! A row is read from memory once: the data for its sums and its result fits the first-level cache.

use super::parallel::{BLOCK, rows_of_task, spread};
use super::reduce::{add_partials, sum_over};
use super::{check, check_rows};

/// Computes `(x - mean) * rstd * gamma + beta` for every row, and the statistics that the gradient needs.
///
/// The variance is that of the population; `rstd` is `1 / sqrt(variance + epsilon)`.
///
/// # Shapes
///
/// `x`, `out`: `[n, d]`; `gamma`, `beta`: `[d]`; `mean`, `rstd`: `[n]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn forward(
    x: &[f32],
    gamma: &[f32],
    beta: Option<&[f32]>,
    epsilon: f32,
    out: &mut [f32],
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let (n, d) = (mean.len(), gamma.len());
    check_rows("layer norm", "x", x.len(), n, d);
    check_rows("layer norm", "out", out.len(), n, d);
    check("layer norm", "rstd", rstd.len(), n);
    check("layer norm", "beta", beta.map_or(d, <[f32]>::len), d);
    if x.is_empty() {
        return;
    }
    let rows = rows_of_task(d);
    let tasks: Vec<_> = (x.chunks(rows * d).zip(out.chunks_mut(rows * d)))
        .zip(mean.chunks_mut(rows).zip(rstd.chunks_mut(rows)))
        .collect();
    spread(x.len(), tasks, |((x, out), (mean, rstd))| forward_rows(x, gamma, beta, epsilon, out, mean, rstd));
}

/// Computes the gradients of [`forward`] for the gradient `g` of its result.
///
/// # Shapes
///
/// `x`, `g`, `dx`: `[n, d]`; `gamma`, `dgamma`, `dbeta`: `[d]`; `mean`, `rstd`: `[n]`, as [`forward`] wrote them.
///
/// # Panics
///
/// If the lengths do not match.
#[allow(clippy::too_many_arguments)] // What the operation reads and writes, each once.
pub fn backward(
    x: &[f32],
    gamma: &[f32],
    mean: &[f32],
    rstd: &[f32],
    g: &[f32],
    dx: &mut [f32],
    dgamma: &mut [f32],
    dbeta: Option<&mut [f32]>,
) {
    let (n, d) = (mean.len(), gamma.len());
    check_rows("layer norm", "x", x.len(), n, d);
    check_rows("layer norm", "g", g.len(), n, d);
    check_rows("layer norm", "dx", dx.len(), n, d);
    check("layer norm", "rstd", rstd.len(), n);
    check("layer norm", "dgamma", dgamma.len(), d);
    check("layer norm", "dbeta", dbeta.as_ref().map_or(d, |dbeta| dbeta.len()), d);
    if d == 0 {
        return;
    }
    let blocks = n.div_ceil(BLOCK);
    let mut dgammas = vec![0f32; blocks * d];
    let mut dbetas = vec![0f32; if dbeta.is_some() { blocks * d } else { 0 }];
    let mut dbeta_rows = dbetas.chunks_mut(d);
    let tasks: Vec<_> = (x.chunks(BLOCK * d).zip(g.chunks(BLOCK * d)).zip(dx.chunks_mut(BLOCK * d)))
        .zip(mean.chunks(BLOCK).zip(rstd.chunks(BLOCK)))
        .zip(dgammas.chunks_mut(d))
        .map(|(rows, dgamma)| (rows, dgamma, dbeta_rows.next().unwrap_or_default()))
        .collect();
    spread(x.len(), tasks, |((((x, g), dx), (mean, rstd)), dgamma, dbeta)| {
        backward_block(x, gamma, mean, rstd, g, dx, dgamma, dbeta);
    });
    add_partials(&dgammas, dgamma);
    if let Some(dbeta) = dbeta {
        add_partials(&dbetas, dbeta);
    }
}

vectorised! {
    fn forward_rows<'a>(
        x: &'a [f32],
        gamma: &'a [f32],
        beta: Option<&'a [f32]>,
        epsilon: f32,
        out: &'a mut [f32],
        mean: &'a mut [f32],
        rstd: &'a mut [f32],
    ) {
        let d = gamma.len();
        let share = 1.0 / d as f32;
        let rows = x.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(mean.iter_mut().zip(rstd));
        for ((x, out), (mean, rstd)) in rows {
            let m = sum_over([x], |[x], sum| sum + x) * share;
            let variance = sum_over([x], |[x], sum| (x - m).mul_add(x - m, sum)) * share;
            let r = 1.0 / (variance + epsilon).sqrt();
            (*mean, *rstd) = (m, r);
            match beta {
                Some(beta) => {
                    for ((out, x), (gamma, beta)) in out.iter_mut().zip(x).zip(gamma.iter().zip(beta)) {
                        *out = ((x - m) * r).mul_add(*gamma, *beta);
                    }
                }
                None => {
                    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
                        *out = (x - m) * r * gamma;
                    }
                }
            }
        }
    }

    /// `dgamma` and `dbeta` are the block's partial sums, zero at first; `dbeta` is empty if not requested.
    #[allow(clippy::too_many_arguments)] // As of `backward`.
    fn backward_block<'a>(
        x: &'a [f32],
        gamma: &'a [f32],
        mean: &'a [f32],
        rstd: &'a [f32],
        g: &'a [f32],
        dx: &'a mut [f32],
        dgamma: &'a mut [f32],
        dbeta: &'a mut [f32],
    ) {
        let d = gamma.len();
        let share = 1.0 / d as f32;
        let rows = x.chunks_exact(d).zip(g.chunks_exact(d)).zip(dx.chunks_exact_mut(d)).zip(mean.iter().zip(rstd));
        for (((x, g), dx), (mean, rstd)) in rows {
            let (m, r) = (*mean, *rstd);
            // Both are means over the normalised value's gradient, g * gamma.
            let average = sum_over([g, gamma], |[g, gamma], sum| g.mul_add(gamma, sum)) * share;
            let along = sum_over([x, g, gamma], |[x, g, gamma], sum| (g * gamma).mul_add((x - m) * r, sum)) * share;
            for ((((dx, x), g), gamma), dgamma) in dx.iter_mut().zip(x).zip(g).zip(gamma).zip(dgamma.iter_mut()) {
                let normal = (x - m) * r;
                *dx = (-normal).mul_add(along, g.mul_add(*gamma, -average)) * r;
                *dgamma = g.mul_add(normal, *dgamma);
            }
            for (dbeta, g) in dbeta.iter_mut().zip(g) {
                *dbeta += g;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    const EPSILON: f32 = 1e-5;

    /// Returns result, mean and rstd.
    fn reference(x: &[f64], gamma: &[f64], beta: &[f64]) -> [Vec<f64>; 3] {
        let d = gamma.len();
        let mut result = [vec![], vec![], vec![]];
        for x in x.chunks(d) {
            let mean = x.iter().sum::<f64>() / d as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
            let rstd = 1.0 / (variance + f64::from(EPSILON)).sqrt();
            result[0].extend((0..d).map(|i| (x[i] - mean) * rstd * gamma[i] + beta[i]));
            result[1].push(mean);
            result[2].push(rstd);
        }
        result
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes() {
        for (n, d) in [(1, 1), (1, 7), (3, 64), (17, 100), (33, 7), (33, 64), (65, 100), (70, 768)] {
            let (x, gamma, beta, g) = (numbers(n * d, 1), numbers(d, 2), numbers(d, 3), numbers(n * d, 4));
            for with_beta in [true, false] {
                let beta = if with_beta { beta.clone() } else { vec![0.0; d] };
                let given = with_beta.then_some(&beta[..]);
                let (mut mean, mut rstd, mut out) = (vec![0.0; n], vec![0.0; n], vec![f32::NAN; n * d]);
                forward(&x, &gamma, given, EPSILON, &mut out, &mut mean, &mut rstd);
                let (x64, gamma64, beta64, g64) = (wide(&x), wide(&gamma), wide(&beta), wide(&g));
                let [out64, mean64, rstd64] = reference(&x64, &gamma64, &beta64);
                assert_close("out", &out, &out64, 1e-5);
                assert_close("mean", &mean, &mean64, 1e-5);
                assert_close("rstd", &rstd, &rstd64, 1e-5);

                let (mut dx, mut dgamma, mut dbeta) = (vec![f32::NAN; n * d], vec![f32::NAN; d], vec![f32::NAN; d]);
                backward(&x, &gamma, &mean, &rstd, &g, &mut dx, &mut dgamma, with_beta.then_some(&mut dbeta));
                let (mut dx64, mut dgamma64, mut dbeta64) = (vec![], vec![0.0; d], vec![0.0; d]);
                for row in 0..n {
                    let normal: Vec<f64> = (0..d).map(|i| (x64[row * d + i] - mean64[row]) * rstd64[row]).collect();
                    let h: Vec<f64> = (0..d).map(|i| g64[row * d + i] * gamma64[i]).collect();
                    let (a, b) = (h.iter().sum::<f64>() / d as f64, dot(&h, &normal) / d as f64);
                    for i in 0..d {
                        dx64.push((h[i] - a - normal[i] * b) * rstd64[row]);
                        dgamma64[i] += g64[row * d + i] * normal[i];
                        dbeta64[i] += g64[row * d + i];
                    }
                }
                assert_close("dx", &dx, &dx64, 1e-5);
                assert_close("dgamma", &dgamma, &dgamma64, 1e-5);
                assert_differences("gamma", &gamma, &dgamma, |gamma| dot(&g64, &reference(&x64, gamma, &beta64)[0]));
                if d > 1 {
                    assert_differences("x", &x, &dx, |x| dot(&g64, &reference(x, &gamma64, &beta64)[0]));
                }
                if with_beta {
                    assert_close("dbeta", &dbeta, &dbeta64, 1e-5);
                    assert_differences("beta", &beta, &dbeta, |beta| dot(&g64, &reference(&x64, &gamma64, beta)[0]));
                }
            }
        }
    }

    #[test]
    fn a_large_mean_does_not_drown_the_variance() {
        let x: Vec<f32> = numbers(4 * 768, 9).into_iter().map(|x| 1000.0 + x).collect();
        let (mut mean, mut rstd, mut out) = (vec![0.0; 4], vec![0.0; 4], vec![0.0; x.len()]);
        forward(&x, &vec![1.0; 768], None, EPSILON, &mut out, &mut mean, &mut rstd);
        let expected = reference(&wide(&x), &vec![1.0; 768], &vec![0.0; 768]);
        assert_close("out", &out, &expected[0], 2e-4);
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (n, d) = (333, 129);
        let (x, gamma, g) = (numbers(n * d, 1), numbers(d, 2), numbers(n * d, 4));
        same_bits(|| {
            let (mut mean, mut rstd, mut all) = (vec![0.0; n], vec![0.0; n], vec![0.0; n * d]);
            forward(&x, &gamma, Some(&gamma), EPSILON, &mut all, &mut mean, &mut rstd);
            let (mut dx, mut dgamma, mut dbeta) = (vec![0.0; n * d], vec![0.0; d], vec![0.0; d]);
            backward(&x, &gamma, &mean, &rstd, &g, &mut dx, &mut dgamma, Some(&mut dbeta));
            [all, mean, rstd, dx, dgamma, dbeta].concat()
        });
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        let run = |x: usize, beta: usize, rstd: usize| {
            let (x, beta, mut rstd) = (vec![0.0; x], vec![0.0; beta], vec![0.0; rstd]);
            forward(&x, &[1.0; 4], Some(&beta), EPSILON, &mut [0.0; 8], &mut [0.0; 2], &mut rstd);
        };
        assert_panics(&["`x` has 7 elements, expected 2 rows of 4"], || run(7, 4, 2));
        assert_panics(&["`beta` has 3 elements, expected 4"], || run(8, 3, 2));
        assert_panics(&["`rstd` has 1 elements, expected 2"], || run(8, 4, 1));
    }
}
