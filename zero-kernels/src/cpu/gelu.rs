//! The Gaussian error linear unit (<https://arxiv.org/abs/1606.08415>) of a biased input, forward and backward.

use crate::options::Gelu;

use super::check;
use super::half::Number;
use super::math::{erf, exp};
use super::parallel::{BLOCK, rows_of_task, spread};
use super::reduce::add_partials;

/// Computes `gelu(x + bias)`.
///
/// # Shapes
///
/// `x`, `out`: `[n, f]`; `bias`: `[f]`. In bfloat16 each element of `out` is rounded once.
///
/// # Panics
///
/// If the lengths do not match.
pub fn forward<T: Number>(kind: Gelu, x: &[T], bias: Option<&[f32]>, out: &mut [T]) {
    check("gelu", "out", out.len(), x.len());
    if x.is_empty() {
        return;
    }
    // Without a bias, any row length works.
    let f = bias.map_or(x.len().min(1 << 10), <[f32]>::len);
    check_rows(x.len(), f, bias.is_some());
    let rows = rows_of_task(f);
    let tasks: Vec<_> = x.chunks(rows * f).zip(out.chunks_mut(rows * f)).collect();
    spread(x.len(), tasks, |(x, out)| forward_rows(kind, x, bias, f, out));
}

/// Computes the gradients of [`forward`] for the gradient `g` of its result.
///
/// # Shapes
///
/// `x`, `g`, `dx`: `[n, f]`; `bias`, `dbias`: `[f]`. In bfloat16 each element of `dx` is rounded once, and `dbias` sums the
/// unrounded values.
///
/// # Panics
///
/// If the lengths do not match.
pub fn backward<T: Number>(
    kind: Gelu,
    x: &[T],
    bias: Option<&[f32]>,
    g: &[T],
    dx: &mut [T],
    dbias: Option<&mut [f32]>,
) {
    check("gelu", "g", g.len(), x.len());
    check("gelu", "dx", dx.len(), x.len());
    let given = bias.map(<[f32]>::len).or(dbias.as_ref().map(|dbias| dbias.len()));
    if let (Some(f), Some(dbias)) = (given, &dbias) {
        check("gelu", "dbias", dbias.len(), f);
    }
    let f = given.unwrap_or(x.len().min(1 << 10));
    check_rows(x.len(), f, given.is_some());
    if f == 0 {
        return;
    }
    let mut partials = vec![0f32; if dbias.is_some() { x.len().div_ceil(BLOCK * f) * f } else { 0 }];
    let mut partial = partials.chunks_mut(f);
    let tasks: Vec<_> = (x.chunks(BLOCK * f).zip(g.chunks(BLOCK * f)).zip(dx.chunks_mut(BLOCK * f)))
        .map(|rows| (rows, partial.next().unwrap_or_default()))
        .collect();
    spread(x.len(), tasks, |(((x, g), dx), dbias)| backward_block(kind, x, bias, f, g, dx, dbias));
    if let Some(dbias) = dbias {
        add_partials(&partials, dbias);
    }
}

fn check_rows(len: usize, f: usize, biased: bool) {
    let whole = !biased || if f == 0 { len == 0 } else { len.is_multiple_of(f) };
    assert!(whole, "gelu: `x` has {len} elements, expected a whole number of rows of the bias's length {f}");
}

vectorised! {
    /// Without a bias the last row may be shorter.
    fn forward_rows<'a, T: Number>(kind: Gelu, x: &'a [T], bias: Option<&'a [f32]>, f: usize, out: &'a mut [T]) {
        // A function of its own type for each formula, so that each gets a loop without a branch.
        match kind {
            Gelu::Tanh => values(x, bias, f, out, |x| x.max(-LIMIT) * tanh_share(x.clamp(-LIMIT, LIMIT))),
            Gelu::Erf => values(x, bias, f, out, |x| x.max(-LIMIT) * erf_share(x)),
        }
    }

    /// `dbias` is the block's partial sum, zero at first; it is empty if not requested.
    fn backward_block<'a, T: Number>(
        kind: Gelu,
        x: &'a [T],
        bias: Option<&'a [f32]>,
        f: usize,
        g: &'a [T],
        dx: &'a mut [T],
        dbias: &'a mut [f32],
    ) {
        match kind {
            Gelu::Tanh => slopes(x, bias, f, g, dx, dbias, tanh_slope),
            Gelu::Erf => slopes(x, bias, f, g, dx, dbias, erf_slope),
        }
    }
}

#[inline(always)]
fn values<T: Number>(x: &[T], bias: Option<&[f32]>, f: usize, out: &mut [T], gelu: impl Fn(f32) -> f32) {
    for (x, out) in x.chunks(f).zip(out.chunks_mut(f)) {
        match bias {
            Some(bias) => {
                for ((x, bias), out) in x.iter().zip(bias).zip(out) {
                    *out = T::store(gelu(x.load() + bias));
                }
            }
            None => {
                for (x, out) in x.iter().zip(out) {
                    *out = T::store(gelu(x.load()));
                }
            }
        }
    }
}

#[inline(always)]
fn slopes<T: Number>(
    x: &[T],
    bias: Option<&[f32]>,
    f: usize,
    g: &[T],
    dx: &mut [T],
    dbias: &mut [f32],
    slope: impl Fn(f32) -> f32,
) {
    for ((x, g), dx) in x.chunks(f).zip(g.chunks(f)).zip(dx.chunks_mut(f)) {
        let rows = x.iter().zip(g).zip(dx);
        match (bias, dbias.is_empty()) {
            (Some(bias), true) => {
                for (((x, g), dx), bias) in rows.zip(bias) {
                    *dx = T::store(g.load() * slope(x.load() + bias));
                }
            }
            (Some(bias), false) => {
                for ((((x, g), dx), bias), dbias) in rows.zip(bias).zip(dbias.iter_mut()) {
                    let product = g.load() * slope(x.load() + bias);
                    *dx = T::store(product);
                    *dbias += product;
                }
            }
            (None, true) => {
                for ((x, g), dx) in rows {
                    *dx = T::store(g.load() * slope(x.load()));
                }
            }
            (None, false) => {
                for (((x, g), dx), dbias) in rows.zip(dbias.iter_mut()) {
                    let product = g.load() * slope(x.load());
                    *dx = T::store(product);
                    *dbias += product;
                }
            }
        }
    }
}

/// Magnitude from which `gelu(x) / x` is 0 or 1 to the last bit in both formulas; beyond it the cube of a large input would overflow.
const LIMIT: f32 = 16.0;

/// `2 * sqrt(2 / pi)`, and that times 0.044715.
const SCALE: f32 = 1.595_769;
const CUBIC: f32 = 0.071_354_814;

/// Returns `(1 + tanh(u)) / 2` as the logistic function of `2u`, which also keeps its digits near 0.
#[inline(always)]
fn tanh_share(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x * (x * x).mul_add(CUBIC, SCALE)))
}

#[inline(always)]
fn tanh_slope(x: f32) -> f32 {
    let x = x.clamp(-LIMIT, LIMIT);
    let share = tanh_share(x);
    let inner = (x * x).mul_add(3.0 * CUBIC, SCALE);
    (x * share * (1.0 - share)).mul_add(inner, share)
}

#[inline(always)]
fn erf_share(x: f32) -> f32 {
    erf(x * std::f32::consts::FRAC_1_SQRT_2).mul_add(0.5, 0.5)
}

#[inline(always)]
fn erf_slope(x: f32) -> f32 {
    /// `1 / sqrt(2 pi)`
    const DENSITY: f32 = 0.398_942_3;
    let x = x.clamp(-LIMIT, LIMIT);
    (x * DENSITY).mul_add(exp(-0.5 * x * x), erf_share(x))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::testing::{self, assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    const KINDS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];

    /// Returns value and slope.
    fn reference(kind: Gelu, x: f64) -> (f64, f64) {
        use std::f64::consts::{FRAC_1_SQRT_2, PI};
        match kind {
            Gelu::Tanh => {
                let c = (2.0 / PI).sqrt();
                let t = (c * (x + 0.044715 * x.powi(3))).tanh();
                let inner = c * (1.0 + 3.0 * 0.044715 * x * x);
                (x / 2.0 * (1.0 + t), (1.0 + t) / 2.0 + x / 2.0 * (1.0 - t * t) * inner)
            }
            Gelu::Erf => {
                let share = (1.0 + testing::erf(x * FRAC_1_SQRT_2)) / 2.0;
                (x * share, share + x * (-x * x / 2.0).exp() / (2.0 * PI).sqrt())
            }
        }
    }

    fn slopes(kind: Gelu, x: &[f32]) -> Vec<f32> {
        let mut dx = vec![f32::NAN; x.len()];
        backward(kind, x, None, &vec![1.0; x.len()], &mut dx, None);
        dx
    }

    #[test]
    fn values_and_slopes_are_good_to_a_millionth() {
        let x: Vec<f32> = (0..240_001).map(|i| (i - 120_000) as f32 * 1e-4).collect();
        for kind in KINDS {
            let mut y = vec![f32::NAN; x.len()];
            forward(kind, &x, None, &mut y);
            let mut worst = [0f64; 2];
            for ((x, y), slope) in x.iter().zip(&y).zip(slopes(kind, &x)) {
                let x = f64::from(*x);
                let (y64, slope64) = reference(kind, x);
                worst[0] = worst[0].max((f64::from(*y) - y64).abs() / x.abs().max(1.0));
                worst[1] = worst[1].max((f64::from(slope) - slope64).abs() / x.abs().max(1.0));
            }
            println!("{kind:?} {worst:?}");
            assert!(worst[0] < 3e-7 && worst[1] < 4e-7, "{kind:?} {worst:?}");
        }
    }

    #[test]
    fn large_inputs_reach_the_limits() {
        let inf = f32::INFINITY;
        let x = [1e4, -1e4, 3e38, -3e38, inf, -inf, 0.0, 20.0, -20.0];
        for kind in KINDS {
            let mut y = [f32::NAN; 9];
            forward(kind, &x, None, &mut y);
            assert_eq!(y, [1e4, 0.0, 3e38, 0.0, inf, 0.0, 0.0, 20.0, 0.0], "{kind:?}");
            assert_eq!(slopes(kind, &x), [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 1.0, 0.0], "{kind:?}");
            forward(kind, &[f32::NAN; 9], None, &mut y);
            assert!(y.iter().chain(&slopes(kind, &[f32::NAN; 9])).all(|y| y.is_nan()), "{kind:?}");
        }
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes() {
        for (n, f) in [(1, 1), (1, 7), (3, 64), (17, 100), (33, 7), (33, 64), (65, 100), (40, 3072)] {
            let (bias, g) = (numbers(f, 2), numbers(n * f, 4));
            let x: Vec<f32> = numbers(n * f, 1).into_iter().map(|x| 4.0 * x).collect();
            for kind in KINDS {
                let (mut out, mut dx, mut dbias) = (vec![f32::NAN; n * f], vec![f32::NAN; n * f], vec![f32::NAN; f]);
                forward(kind, &x, Some(&bias), &mut out);
                backward(kind, &x, Some(&bias), &g, &mut dx, Some(&mut dbias));
                let at = |i: usize| reference(kind, f64::from(x[i]) + f64::from(bias[i % f]));
                let dx64: Vec<f64> = (0..n * f).map(|i| f64::from(g[i]) * at(i).1).collect();
                let dbias64: Vec<f64> = (0..f).map(|j| (0..n).map(|i| dx64[i * f + j]).sum()).collect();
                assert_close("out", &out, &(0..n * f).map(|i| at(i).0).collect::<Vec<_>>(), 1e-5);
                assert_close("dx", &dx, &dx64, 1e-5);
                assert_close("dbias", &dbias, &dbias64, 1e-5);
                let loss = |x: &[f64], bias: &[f64]| -> f64 {
                    (0..n * f).map(|i| f64::from(g[i]) * reference(kind, x[i] + bias[i % f]).0).sum()
                };
                assert_differences("x", &x, &dx, |x| loss(x, &wide(&bias)));
                assert_differences("bias", &bias, &dbias, |bias| loss(&wide(&x), bias));

                let biased: Vec<f32> = (0..n * f).map(|i| x[i] + bias[i % f]).collect();
                let (mut out2, mut dx2, mut dbias2) = (vec![f32::NAN; n * f], vec![f32::NAN; n * f], vec![f32::NAN; f]);
                forward(kind, &biased, None, &mut out2);
                backward(kind, &biased, None, &g, &mut dx2, Some(&mut dbias2));
                assert_eq!((out, dx, dbias), (out2, dx2, dbias2), "the bias added before");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (n, f) = (333, 129);
        let (x, bias, g) = (numbers(n * f, 1), numbers(f, 2), numbers(n * f, 4));
        same_bits(|| {
            let (mut out, mut dx, mut dbias) = (vec![0.0; n * f], vec![0.0; n * f], vec![0.0; f]);
            forward(Gelu::Tanh, &x, Some(&bias), &mut out);
            backward(Gelu::Erf, &x, Some(&bias), &g, &mut dx, Some(&mut dbias));
            [out, dx, dbias].concat()
        });
    }

    #[test]
    fn in_bfloat16_results_are_those_of_fp32_rounded_once() {
        let (n, f) = (65, 100);
        let [x, g] = [1, 4].map(|seed| numbers(n * f, seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>());
        let bias = numbers(f, 2);
        let [x32, g32] = [&x, &g].map(|half| half.iter().map(|half| half.to_f32()).collect::<Vec<_>>());
        for kind in KINDS {
            let (mut out, mut dx, mut dbias) = (vec![bf16::NAN; n * f], vec![bf16::NAN; n * f], vec![f32::NAN; f]);
            forward(kind, &x, Some(&bias), &mut out);
            backward(kind, &x, Some(&bias), &g, &mut dx, Some(&mut dbias));
            let (mut out32, mut dx32) = (vec![f32::NAN; n * f], vec![f32::NAN; n * f]);
            forward(kind, &x32, Some(&bias), &mut out32);
            let mut dbias32 = vec![f32::NAN; f];
            backward(kind, &x32, Some(&bias), &g32, &mut dx32, Some(&mut dbias32));
            let rounded = |values: &[f32]| values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
            assert_eq!((&out, &dx, &dbias), (&rounded(&out32), &rounded(&dx32), &dbias32), "{kind:?}");
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        let mut out = [0.0; 8];
        assert_panics(&["`out` has 8 elements, expected 7"], || forward(Gelu::Erf, &[0.0; 7], None, &mut out));
        assert_panics(&["8 elements", "rows of the bias's length 3"], || {
            forward(Gelu::Erf, &[0.0; 8], Some(&[0.0; 3]), &mut [0.0; 8]);
        });
        assert_panics(&["`dbias` has 2 elements, expected 4"], || {
            backward(Gelu::Tanh, &[0.0; 8], Some(&[0.0; 4]), &[0.0; 8], &mut [0.0; 8], Some(&mut [0.0; 2]));
        });
    }
}
