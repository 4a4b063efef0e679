//! What the kernels' tests share: numbers, comparisons, pools, f64 functions.

use rayon::ThreadPoolBuilder;

/// `len` numbers in `[-1, 1)`, the same for the same seed.
pub(super) fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Panics unless every value is within `tolerance` of what is expected, relative to the largest (or to 1 if smaller).
pub(super) fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1f64, |scale, value| scale.max(value.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * scale, "{what}[{i}]: {got}, expected {expected}");
    }
}

/// Runs `work` in a pool of one thread and in one of two, and panics unless the bits agree.
pub(super) fn same_bits(work: impl Fn() -> Vec<f32> + Send + Sync) -> Vec<f32> {
    let [one, two] = [1, 2].map(|threads| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&work)
    });
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&one), bits(&two), "one thread against two");
    two
}

/// Panics unless `work` panics with a message that contains each of `parts`.
pub(super) fn assert_panics(parts: &[&str], work: impl FnOnce()) {
    let error = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).expect_err("it should panic");
    let message = error.downcast_ref::<String>().cloned();
    let message = message.or_else(|| error.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

/// Central differences of `loss` at `x`, for up to 40 of its entries, against `gradient`.
pub(super) fn assert_differences(what: &str, x: &[f32], gradient: &[f32], loss: impl Fn(&[f64]) -> f64) {
    let scale = gradient.iter().fold(1f64, |scale, value| scale.max(f64::from(value.abs())));
    let mut x = wide(x);
    for i in (0..x.len()).step_by(x.len().div_ceil(40).max(1)) {
        let at = x[i];
        let h = 1e-5;
        x[i] = at + h;
        let above = loss(&x);
        x[i] = at - h;
        let below = loss(&x);
        x[i] = at;
        let expected = (above - below) / (2.0 * h);
        assert!(
            (f64::from(gradient[i]) - expected).abs() <= 1e-5 * scale,
            "d {what}[{i}]: {}, {expected}",
            gradient[i]
        );
    }
}

/// The error function to about 1e-15: its series where that converges, else the continued fraction of its complement.
pub(super) fn erf(x: f64) -> f64 {
    let a = x.abs();
    let y = if a < 3.0 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
            if term == 0.0 {
                break;
            }
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..=80).rev().fold(0.0, |f, k| f64::from(k) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / std::f64::consts::PI.sqrt() / (a + fraction)
    };
    y.copysign(x)
}
