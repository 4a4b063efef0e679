//! Elementary functions that vectorise: selects instead of branches, no tables, fused multiply-adds.
//!
//! They are `#[inline(always)]`, so that they are compiled for the instruction set of the dispatched code that calls them.
//! Without hardware fused multiply-add they are correct, but slow.

/// Returns `e^x` to about one unit in the last place; 0 if the result is below the smallest normal number.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Logarithm of the largest number.
    const HIGHEST: f32 = 88.722_83;
    let y = exp_at_most_one(x);
    if x > HIGHEST { f32::INFINITY } else { y }
}

/// Same as [`exp`], for an `x` that is at most 0 but for rounding: it does not check for overflow.
#[inline(always)]
pub fn exp_at_most_one(x: f32) -> f32 {
    /// Logarithm of the smallest normal number.
    const LOWEST: f32 = -87.336_54;
    let (n_bits, p) = reduced_exp(x);
    // 1 + p lies in [0.7, 1.42], and n is added to its exponent: 2^n alone may be out of range where the product is not.
    let y = f32::from_bits((1.0 + p).to_bits().wrapping_add(n_bits << 23));
    if x < LOWEST { 0.0 } else { y }
}

/// Returns the hyperbolic tangent to about two units in the last place, relative to itself.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    /// Beyond this 1 - tanh is under half a unit in the last place.
    const END: f32 = 10.0;
    let a = x.abs();
    let a = if a > END { END } else { a };
    // e^(-2a) - 1, kept apart from 1 so that a small argument loses nothing.
    let (n_bits, p) = reduced_exp(-2.0 * a);
    let scale = f32::from_bits(1f32.to_bits().wrapping_add(n_bits << 23));
    let e = scale.mul_add(p, scale - 1.0);
    (-e / (2.0 + e)).copysign(x)
}

/// Returns the error function, with an error of 1.8e-7 at most.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    /// From here on the function is 1 in f32.
    const END: f32 = 3.93;
    let a = x.abs();
    let a = if a > END { END } else { a };
    // Minimax fit of erf(x) / x in x^2 over [0, 1]: 4e-8 before rounding.
    let s = a * a;
    let mut small = -5.660_199_4e-4f32;
    for c in [4.924_801_6e-3, -2.671_772e-2, 0.112_804_12, -0.376_123_56, std::f32::consts::FRAC_2_SQRT_PI] {
        small = small.mul_add(s, c);
    }
    // Minimax fit of ln(1 - erf(x)) over [1, END], weighted by 1 - erf(x): 1.6e-8 before rounding. The rest that is
    // subtracted from 1 is small, and so is its error.
    let mut rest = -1.150_419_5e-3f32;
    for c in [1.477_81e-2, -8.863_412e-2, -0.654_489_04, -1.117_438_4, -2.671_718e-3] {
        rest = rest.mul_add(a, c);
    }
    let y = if a < 1.0 { a * small } else { 1.0 - exp(rest) };
    y.copysign(x)
}

/// Returns `n` and `p` with `e^x = 2^n (1 + p)`; `n` is in the low bits of an integer whose upper nine bits must be dropped.
///
/// Both are meaningless outside `[-103, 89]`, where the caller selects another value; a NaN stays a NaN.
#[inline(always)]
fn reduced_exp(x: f32) -> (u32, f32) {
    // Adding it rounds to the nearest integer, left in the lowest bits of the sum; its own lowest nine are clear.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough for its product with n to be exact.
    const LN_2_HIGH: f32 = 0.693_145_75;
    const LN_2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    // Minimax fit of (e^r - 1 - r) / r^2 over half of ln 2 either way: 3e-9 before rounding.
    let mut p = 1.381_446_6e-3f32;
    for c in [8.368_78e-3, 4.166_839_4e-2, 0.166_665_2, 0.499_999_93] {
        p = p.mul_add(r, c);
    }
    (shifted.to_bits(), (r * r).mul_add(p, r))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing;

    struct Each<'a>(&'a [f32], &'a mut [[f32; 3]]);

    impl pulp::NullaryFnOnce for Each<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            for (x, y) in self.0.iter().zip(self.1) {
                *y = [exp(*x), tanh(*x), erf(*x)];
            }
        }
    }

    fn values(x: &[f32]) -> Vec<[f32; 3]> {
        let mut y = vec![[0.0; 3]; x.len()];
        pulp::Arch::new().dispatch(Each(x, &mut y));
        y
    }

    #[test]
    fn close_to_the_f64_functions() {
        let x: Vec<f32> = (0..400_001).map(|i| (i - 200_000) as f32 * 4.36e-4).collect();
        let mut worst = [0f64; 3];
        for (x, [e, t, r]) in x.iter().zip(values(&x)) {
            let x = f64::from(*x);
            worst[0] = worst[0].max((f64::from(e) / x.exp() - 1.0).abs());
            if x != 0.0 {
                worst[1] = worst[1].max((f64::from(t) / x.tanh() - 1.0).abs());
            }
            worst[2] = worst[2].max((f64::from(r) - testing::erf(x)).abs());
        }
        println!("{worst:?}");
        assert!(worst[0] < 1.5e-7 && worst[1] < 2.5e-7 && worst[2] < 2e-7, "{worst:?}");
    }

    #[test]
    fn small_arguments_keep_their_digits() {
        for k in 1..120 {
            let x = 0.7f32.powi(k);
            let y = values(&[x])[0];
            assert!((f64::from(y[1]) / f64::from(x).tanh() - 1.0).abs() < 2.5e-7, "tanh {x}");
            assert!((f64::from(y[2]) / testing::erf(f64::from(x)) - 1.0).abs() < 4e-7, "erf {x}");
        }
    }

    #[test]
    fn limits() {
        let inf = f32::INFINITY;
        let y = values(&[inf, -inf, 1e4, -1e4, 88.73, -87.34, 88.72, -87.33, 0.0, f32::NAN]);
        let column = |i: usize| y.iter().map(|y| y[i]).collect::<Vec<_>>();
        assert_eq!(column(0)[..6], [inf, 0.0, inf, 0.0, inf, 0.0]);
        assert!(column(0)[6].is_finite() && column(0)[7] >= f32::MIN_POSITIVE);
        assert_eq!(column(0)[8], 1.0);
        assert_eq!(column(1)[..6], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]);
        assert_eq!(column(2)[..6], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]);
        assert_eq!((column(1)[8], column(2)[8]), (0.0, 0.0));
        assert!(y[9].iter().all(|y| y.is_nan()), "{:?}", y[9]);
    }
}
