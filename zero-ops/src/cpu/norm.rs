//! The sum of squares of a long vector, for norms of gradients.

use super::half::Half;
use super::parallel::spread;
use super::reduce::sum_over;

/// Elements of a partial sum. Fixed, so that a sum's bits do not depend on the number of threads.
const BLOCK: usize = 1 << 14;

/// Elements whose squares are added in f32 before their sums are added in f64.
const SHORT: usize = 1 << 10;

/// The sum of the squares of `x`: short stretches in f32, their sums in f64, in the order of the elements.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    by_blocks(x, squares)
}

/// As [`sum_of_squares`] of numbers in 16 bit, whose squares are those of the f32 that they are.
pub fn sum_of_squares_of<H: Half>(x: &[H]) -> f64 {
    by_blocks(x, |x| {
        let mut wide = [0f32; SHORT];
        let mut sum = 0.0;
        for short in x.chunks(SHORT) {
            let wide = &mut wide[..short.len()];
            H::widen(short, wide);
            sum += squares(wide);
        }
        sum
    })
}

fn by_blocks<T: Sync>(x: &[T], squares: impl Fn(&[T]) -> f64 + Sync + Send) -> f64 {
    let mut partials = vec![0f64; x.len().div_ceil(BLOCK)];
    let tasks: Vec<_> = x.chunks(BLOCK).zip(&mut partials).collect();
    spread(x.len(), tasks, |(x, sum)| *sum = squares(x));
    partials.iter().sum()
}

vectorised! {
    // A loop: the closure of an iterator's adapter would be compiled for the baseline processor, where a fused
    // multiplication is a call.
    fn squares<'a>(x: &'a [f32]) -> f64 {
        let mut total = 0.0;
        for short in x.chunks(SHORT) {
            total += f64::from(sum_over([short], |[x], sum| x.mul_add(x, sum)));
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{numbers, same_bits};

    #[test]
    fn is_the_sum_in_double_precision() {
        for len in [0, 1, 15, 16, 17, 1023, 1025, 100_003] {
            let x = numbers(len, 7);
            let expected: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let got = sum_of_squares(&x);
            assert!((got - expected).abs() <= 1e-6 * expected.max(1e-30), "{len}: {got}, expected {expected}");
        }
    }

    #[test]
    fn has_the_same_bits_on_any_number_of_threads() {
        let x = numbers(200_001, 3);
        same_bits(|| vec![sum_of_squares(&x) as f32]);
    }

    #[test]
    fn sixteen_bits_are_widened_first() {
        let x = numbers(40_001, 5);
        let half = crate::cpu::half::narrowed::<half::bf16>(&x);
        assert_eq!(sum_of_squares_of(&half), sum_of_squares(&crate::cpu::half::widened(&half)));
    }

    #[test]
    fn keeps_infinities_and_nan() {
        assert_eq!(sum_of_squares(&[1.0, f32::INFINITY]), f64::INFINITY);
        assert!(sum_of_squares(&[f32::NAN; 40]).is_nan());
        assert_eq!(sum_of_squares(&[f32::MAX; 40]), f64::INFINITY);
    }
}
