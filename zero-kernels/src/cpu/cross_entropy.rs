//! A linear layer and the cross-entropy of its result, without ever holding all logits.
//!
//! For each chunk of rows it computes the logits, the softmax in place of these, and the products that are summed to the
//! gradients. The only allocation is the buffer of one chunk, for the duration of a call.

use super::math::{exp, tanh};
use super::operand::Operand;
use super::parallel::spread;
use super::product::{Matrix, Write};
use super::reduce::{largest, replace_and_sum, sum_over};
use super::{buffer, check_rows};
use crate::options::{CrossEntropyOptions, check_cap};

/// Fewest rows per chunk: each chunk reads the weights twice and their gradient once.
const LEAST_ROWS: usize = 64;

/// Sizes of a classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of rows that are classified, n.
    pub rows: usize,
    /// Features per row, d.
    pub width: usize,
    /// Number of classes, v.
    pub vocabulary: usize,
}

/// The buffer for the gradient of the weights.
#[derive(Debug)]
pub enum WeightGradient<'a, T> {
    /// In f32; empty if it is not wanted.
    Sums(&'a mut [f32]),
    /// Rounded to the operands' type, if the rows are one chunk ([`is_one_chunk`]).
    Rounded(&'a mut [T]),
}

impl<T> WeightGradient<'_, T> {
    fn len(&self) -> usize {
        match self {
            Self::Sums(values) => values.len(),
            Self::Rounded(values) => values.len(),
        }
    }
}

/// Returns whether [`forward_backward`] computes all rows at once, so that the gradient of the weights can be rounded as it is written.
pub fn is_one_chunk<T: Operand>(shape: Shape) -> bool {
    shape.rows <= chunk_rows::<T>(shape.vocabulary)
}

/// Returns the most rows of a chunk.
fn chunk_rows<T: Operand>(vocabulary: usize) -> usize {
    (T::CHUNK / vocabulary.max(1)).max(LEAST_ROWS)
}

/// Returns the mean over rows, in nats, of `-ln softmax(x w^T)[target]`, and writes its gradients if `grads` are given.
///
/// The soft cap, if there is one, applies to `x w^T`. Rows whose target is `ignored` do not count. If no row is left, the loss and the
/// gradients are 0. Operands in bfloat16 are multiplied in bfloat16; logits and sums are f32.
///
/// # Shapes
///
/// `x` and the first of `grads`: `[n, d]`; `w` and the second of `grads`: `[v, d]`, or empty, and then not computed;
/// `targets`: `[n]`.
///
/// # Panics
///
/// If the lengths do not match, a target that is not `ignored` is outside of `0..v`, a gradient over several chunks is to be rounded, or the
/// cap is not positive and finite.
pub fn forward_backward<T: Operand>(
    shape: Shape,
    x: &[T],
    w: &[T],
    targets: &[i64],
    options: CrossEntropyOptions,
    grads: Option<(&mut [f32], WeightGradient<'_, T>)>,
) -> f32 {
    let rows = chunk_rows::<T>(shape.vocabulary);
    by_chunks(rows, shape, x, w, targets, options, grads)
}

fn by_chunks<T: Operand>(
    rows: usize,
    shape: Shape,
    x: &[T],
    w: &[T],
    targets: &[i64],
    options: CrossEntropyOptions,
    mut grads: Option<(&mut [f32], WeightGradient<'_, T>)>,
) -> f32 {
    let Shape { rows: n, width: d, vocabulary: v } = shape;
    let ignored = options.ignored;
    check_cap("cross-entropy", options.cap);
    check_rows("cross-entropy", "x", x.len(), n, d);
    check_rows("cross-entropy", "w", w.len(), v, d);
    check_rows("cross-entropy", "targets", targets.len(), n, 1);
    if let Some((dx, dw)) = &grads {
        check_rows("cross-entropy", "dx", dx.len(), n, d);
        if dw.len() > 0 {
            check_rows("cross-entropy", "dw", dw.len(), v, d);
        }
    }
    let count = targets.iter().filter(|target| Some(**target) != ignored).count();
    for (row, target) in targets.iter().enumerate() {
        let inside = Some(*target) == ignored || usize::try_from(*target).is_ok_and(|target| target < v);
        assert!(inside, "cross-entropy: target {target} of row {row} is outside of the vocabulary 0..{v}");
    }
    if count == 0 {
        if let Some((dx, dw)) = grads {
            dx.fill(0.0);
            match dw {
                WeightGradient::Sums(dw) => dw.fill(0.0),
                WeightGradient::Rounded(dw) => dw.fill(T::ZERO),
            }
        }
        return 0.0;
    }
    // Equal chunks: a small last one would make its products slow.
    let chunks = n.div_ceil(rows);
    let rows = n.div_ceil(chunks);
    let is_rounded = matches!(grads, Some((_, WeightGradient::Rounded(_))));
    assert!(chunks == 1 || !is_rounded, "cross-entropy: a gradient over {chunks} chunks of rows is summed in f32");
    let mut logits = buffer(rows * v);
    let mut losses = vec![0f32; n];
    let w = Matrix::new(w, v, d);
    let share = grads.is_some().then_some(1.0 / count as f32);
    for first in (0..n).step_by(rows) {
        let end = n.min(first + rows);
        let here = end - first;
        let logits = &mut logits[..here * v];
        let x = Matrix::new(&x[first * d..end * d], here, d);
        T::product(logits, Write::Over, x, w.transposed());
        softmax::<T>(logits, &targets[first..end], options, &mut losses[first..end], share);
        if let Some((dx, dw)) = &mut grads {
            let p = T::rounded(logits, v);
            T::product(&mut dx[first * d..end * d], Write::Over, p, w);
            match dw {
                WeightGradient::Sums([]) => {}
                WeightGradient::Sums(dw) => T::product(dw, Write::first(first == 0), p.transposed(), x),
                WeightGradient::Rounded(dw) => T::product_rounded(dw, p.transposed(), x),
            }
        }
    }
    (losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / count as f64) as f32
}

/// Writes the rows' losses and, if the `share` of a row in the mean is given, the gradient of the mean for their logits, as operands.
fn softmax<T: Operand>(
    logits: &mut [f32],
    targets: &[i64],
    options: CrossEntropyOptions,
    losses: &mut [f32],
    share: Option<f32>,
) {
    let (elements, cap) = (logits.len(), options.cap.map(|cap| cap as f32));
    let tasks: Vec<_> = (logits.chunks_mut(elements / targets.len()).zip(targets).zip(losses)).collect();
    spread(elements, tasks, |((logits, target), loss)| {
        let target = (Some(*target) != options.ignored).then_some(*target as usize);
        softmax_of_row(logits, target, cap, loss, share);
        if share.is_some() {
            T::round(logits);
        }
    });
}

vectorised! {
    /// A row without a target does not count.
    fn softmax_of_row<'a>(logits: &'a mut [f32], target: Option<usize>, cap: Option<f32>, loss: &'a mut f32, share: Option<f32>) {
        let Some(target) = target else {
            *loss = 0.0;
            if share.is_some() {
                logits.fill(0.0);
            }
            return;
        };
        if let Some(cap) = cap {
            logits.iter_mut().for_each(|value| *value = cap * tanh(*value / cap));
        }
        let max = largest(logits);
        let own = logits[target];
        let sum = match (share, cap) {
            (None, _) => sum_over([logits], |[value], sum| sum + exp(value - max)),
            (Some(share), Some(cap)) => {
                let slope = |value: f32| (value / cap).mul_add(-(value / cap), 1.0);
                let sum = sum_over([logits], |[value], sum| sum + exp(value - max));
                let factor = share / sum;
                logits.iter_mut().for_each(|value| *value = exp(*value - max) * factor * slope(*value));
                logits[target] -= share * slope(own);
                sum
            }
            (Some(share), None) => {
                let sum = replace_and_sum(logits, |value| exp(value - max));
                let factor = share / sum;
                logits.iter_mut().for_each(|value| *value *= factor);
                logits[target] -= share;
                sum
            }
        };
        *loss = sum.ln() + (max - own);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::WeightGradient::Sums;
    use super::*;
    use crate::cpu::half::{narrowed, widened};
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    const IGNORED: Option<i64> = Some(-100);
    const OPTIONS: CrossEntropyOptions = CrossEntropyOptions { ignored: IGNORED, cap: None };

    /// Returns the loss, the gradient of x and the gradient of w.
    fn reference(shape: Shape, x: &[f64], w: &[f64], targets: &[i64], cap: Option<f64>) -> (f64, Vec<f64>, Vec<f64>) {
        let Shape { rows: n, width: d, vocabulary: v } = shape;
        let count = targets.iter().filter(|target| Some(**target) != IGNORED).count().max(1) as f64;
        let (mut loss, mut dx, mut dw) = (0.0, vec![0.0; n * d], vec![0.0; v * d]);
        for row in (0..n).filter(|row| Some(targets[*row]) != IGNORED) {
            let x = &x[row * d..(row + 1) * d];
            let logits: Vec<f64> = w.chunks(d).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
            let tanh: Vec<f64> = logits.iter().map(|z| cap.map_or(0.0, |cap| (z / cap).tanh())).collect();
            let logits: Vec<f64> = cap.map_or(logits, |cap| tanh.iter().map(|tanh| cap * tanh).collect());
            let max = logits.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = logits.iter().map(|z| (z - max).exp()).sum();
            loss += (sum.ln() + max - logits[targets[row] as usize]) / count;
            for (j, z) in logits.iter().enumerate() {
                let p = ((z - max).exp() / sum - f64::from(u8::from(j as i64 == targets[row]))) / count;
                let p = p * (1.0 - tanh[j] * tanh[j]);
                for c in 0..d {
                    dx[row * d + c] += p * w[j * d + c];
                    dw[j * d + c] += p * x[c];
                }
            }
        }
        (loss, dx, dw)
    }

    fn targets(n: usize, v: usize) -> Vec<i64> {
        (0..n).map(|i| if i % 5 == 4 { -100 } else { (i * 31 % v) as i64 }).collect()
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes_and_chunks() {
        for (n, d, v) in [(1, 1, 1), (1, 7, 5), (3, 64, 100), (17, 100, 33), (33, 7, 257)] {
            for (scale, cap) in [(1.0, None), (20.0, None), (1.0, Some(1.5)), (20.0, Some(30.0))] {
                let options = CrossEntropyOptions { cap, ..OPTIONS };
                let shape = Shape { rows: n, width: d, vocabulary: v };
                let x: Vec<f32> = numbers(n * d, 1).into_iter().map(|x| x * scale).collect();
                let (w, targets) = (numbers(v * d, 2), targets(n, v));
                let (loss64, dx64, dw64) = reference(shape, &wide(&x), &wide(&w), &targets, cap);
                for rows in [1, 7, 64] {
                    let (mut dx, mut dw) = (vec![f32::NAN; n * d], vec![f32::NAN; v * d]);
                    let loss = by_chunks(rows, shape, &x, &w, &targets, options, Some((&mut dx, Sums(&mut dw))));
                    assert_close("loss", &[loss], &[loss64], 1e-5);
                    assert_close("dx", &dx, &dx64, 1e-5);
                    assert_close("dw", &dw, &dw64, 1e-5);
                    let alone = by_chunks(rows, shape, &x, &w, &targets, options, None);
                    assert_eq!(alone, loss, "without gradients");
                    let mut dx_alone = vec![f32::NAN; n * d];
                    let grads = Some((&mut dx_alone[..], Sums(&mut [])));
                    assert_eq!(by_chunks(rows, shape, &x, &w, &targets, options, grads), loss, "of a frozen weight");
                    assert_eq!(dx_alone, dx);
                    let tolerable = |x: &[f64], w: &[f64]| reference(shape, x, w, &targets, cap).0;
                    assert_differences("x", &x, &dx, |x| tolerable(x, &wide(&w)));
                    assert_differences("w", &w, &dw, |w| tolerable(&wide(&x), w));
                }
            }
        }
    }

    #[test]
    fn with_every_row_ignored_all_is_zero() {
        let shape = Shape { rows: 2, width: 3, vocabulary: 4 };
        let (mut dx, mut dw) = (vec![f32::NAN; 6], vec![f32::NAN; 12]);
        let grads = Some((&mut dx[..], Sums(&mut dw)));
        assert_eq!(forward_backward(shape, &[1.0; 6], &[1.0; 12], &[-100; 2], OPTIONS, grads), 0.0);
        assert!(dx.iter().chain(&dw).all(|value| *value == 0.0));
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let shape = Shape { rows: 1, width: 1, vocabulary: 3 };
        let (mut dx, mut dw) = ([0.0], [0.0; 3]);
        let loss =
            forward_backward(shape, &[1e4], &[3.0, -3.0, 2.0], &[2], None.into(), Some((&mut dx[..], Sums(&mut dw))));
        assert_eq!((loss, dw), (1e4, [1e4, 0.0, -1e4]));
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (n, d, v) = (97, 100, 1111);
        let shape = Shape { rows: n, width: d, vocabulary: v };
        let (x, w, targets) = (numbers(n * d, 1), numbers(v * d, 2), targets(n, v));
        same_bits(|| {
            let (mut dx, mut dw) = (vec![0.0; n * d], vec![0.0; v * d]);
            let loss = by_chunks(40, shape, &x, &w, &targets, OPTIONS, Some((&mut dx, Sums(&mut dw))));
            [vec![loss], dx, dw].concat()
        });
    }

    #[test]
    fn wrong_targets_and_lengths_are_named() {
        let shape = Shape { rows: 2, width: 3, vocabulary: 4 };
        let run = |x: usize, targets: [i64; 2]| {
            forward_backward(shape, &vec![0.0; x], &[0.0; 12], &targets, OPTIONS, None);
        };
        assert_panics(&["target 4 of row 1", "0..4"], || run(6, [0, 4]));
        assert_panics(&["target -1 of row 0", "0..4"], || run(6, [-1, 0]));
        assert_panics(&["`x` has 5 elements, expected 2 rows of 3"], || run(5, [0, 1]));
        for cap in [0.0, -1.0, 1e-50, 1e39, f64::NAN] {
            let options = CrossEntropyOptions { cap: Some(cap), ..OPTIONS };
            let run = || {
                forward_backward(shape, &[0.0; 6], &[0.0; 12], &[0, 1], options, None);
            };
            assert_panics(&["a soft cap must be positive and finite"], run);
        }
    }

    #[test]
    fn bfloat16_is_as_close_as_its_operands_allow() {
        // Several chunks.
        let shape = Shape { rows: 7, width: 33, vocabulary: 50 };
        let x = numbers(7 * 33, 1);
        let w = numbers(50 * 33, 2);
        let targets = [3, 49, -100, 0, 7, 7, 21];
        let (x16, w16) = (narrowed::<bf16>(&x), narrowed::<bf16>(&w));
        let (x, w) = (widened(&x16), widened(&w16));
        for cap in [None, Some(0.9)] {
            let options = CrossEntropyOptions { cap, ..OPTIONS };
            let (loss, dx, dw) = reference(shape, &wide(&x), &wide(&w), &targets, cap);
            let (mut dx16, mut dw16) = (vec![0f32; dx.len()], vec![0f32; dw.len()]);
            let got = by_chunks(3, shape, &x16, &w16, &targets, options, Some((&mut dx16, Sums(&mut dw16))));
            assert_close("loss", &[got], &[loss], 1e-5);
            // The gradient of the logits is rounded to 8 bits.
            assert_close("dx", &dx16, &dx, 4e-3);
            assert_close("dw", &dw16, &dw, 4e-3);
        }
        // In one chunk, rounded as it is written: the same as sums that are rounded later.
        let (mut dx, mut sums, mut rounded) = (vec![0f32; x.len()], vec![0f32; w.len()], vec![bf16::ZERO; w.len()]);
        by_chunks(7, shape, &x16, &w16, &targets, OPTIONS, Some((&mut dx, Sums(&mut sums))));
        by_chunks(7, shape, &x16, &w16, &targets, OPTIONS, Some((&mut dx, WeightGradient::Rounded(&mut rounded))));
        assert_eq!(rounded, narrowed::<bf16>(&sums));
    }
}
