//! Sums of squares of long vectors, for norms.

use super::half::Half;
use super::parallel::spread;
use super::reduce::sum_over;

/// Elements per partial sum. Fixed, so that a sum's bits do not depend on the number of threads.
const BLOCK: usize = 1 << 14;

/// Elements whose squares are added in f32 before their sums are added in f64.
const SHORT: usize = 1 << 10;

/// Returns the sum of the squares of `x`: short parts in f32, their sums in f64, in the order of the elements.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    by_blocks(x, squares)
}

/// Returns the [`sum_of_squares`] of 16-bit numbers, converted to f32 first.
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
    // A loop: an iterator adapter's closure would be compiled for the baseline CPU, where a fused multiply-add is a function call.
    fn squares<'a>(x: &'a [f32]) -> f64 {
        let mut total = 0.0;
        for short in x.chunks(SHORT) {
            total += f64::from(sum_over([short], |[x], sum| x.mul_add(x, sum)));
        }
        total
    }
}

/// A sum of squares in twice double precision. The terms are exact, and the error of their sum is far too small to change an
/// f32 computed from it. Hence that f32 has the same bits however the elements are split.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Squares {
    /// The sum, rounded to double precision.
    pub high: f64,
    /// The rounding error of `high`.
    pub low: f64,
}

/// Number of independent sums.
const LANES: usize = 32;

impl Squares {
    /// Returns the sum of the squares of `x`, with the instruction set that the caller is compiled for.
    // Loops, as in `squares`, over two arrays, which become vectors of sums.
    #[inline(always)]
    pub fn of(x: &[f32]) -> Self {
        let (mut high, mut low) = ([0f64; LANES], [0f64; LANES]);
        for x in x.chunks(LANES) {
            for ((high, low), x) in high.iter_mut().zip(&mut low).zip(x) {
                let x = f64::from(*x);
                let sum = Self { high: *high, low: *low }.plus(Self { high: x * x, low: 0.0 });
                (*high, *low) = (sum.high, sum.low);
            }
        }
        let mut sum = Self::default();
        for (high, low) in high.into_iter().zip(low) {
            sum = sum.plus(Self { high, low });
        }
        sum
    }

    /// Returns the sum of both: D. Knuth, *The Art of Computer Programming*, volume 2, section 4.2.2, theorem B.
    #[inline(always)]
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let high = self.high + other.high;
        let part = high - self.high;
        let low = (self.high - (high - part)) + (other.high - part);
        Self { high, low: self.low + other.low + low }
    }

    /// Returns the sum in double precision.
    pub fn value(self) -> f64 {
        self.high + self.low
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
    fn squares_in_pieces_have_the_bits_of_the_whole() {
        // Of many sizes, so that in double precision the order of additions would be seen.
        let x: Vec<f32> =
            numbers(50_001, 9).iter().enumerate().map(|(i, x)| x * 10f32.powi(i as i32 % 16 - 8)).collect();
        let whole = Squares::of(&x).value();
        let plain: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((whole - plain).abs() <= 1e-12 * plain && whole != plain, "{whole}, {plain} in double precision");
        for pieces in [2, 3, 7, 1000, 50_001] {
            let parts = x.chunks(x.len().div_ceil(pieces)).map(Squares::of);
            assert_eq!(parts.fold(Squares::default(), Squares::plus).value().to_bits(), whole.to_bits(), "{pieces}");
        }
        assert_eq!(Squares::of(&[]).value(), 0.0);
        assert_eq!(Squares::of(&[3.0, -4.0]), Squares { high: 25.0, low: 0.0 });
        // 2^60 + 1 is no number of double precision.
        assert_eq!(Squares::of(&[f32::powi(2.0, 30), 1.0]), Squares { high: 2f64.powi(60), low: 1.0 });
        assert!(Squares::of(&[1.0, f32::NAN]).value().is_nan() && !Squares::of(&[f32::INFINITY]).value().is_finite());
    }

    #[test]
    fn keeps_infinities_and_nan() {
        assert_eq!(sum_of_squares(&[1.0, f32::INFINITY]), f64::INFINITY);
        assert!(sum_of_squares(&[f32::NAN; 40]).is_nan());
        assert_eq!(sum_of_squares(&[f32::MAX; 40]), f64::INFINITY);
    }
}
