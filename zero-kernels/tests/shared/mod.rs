//! Helpers shared by this crate's tests and benchmarks: numbers, comparisons, f64 functions.

#![allow(dead_code)] // Each takes what it needs.

/// Returns `len` numbers in `[-1, 1)`, the same for the same seed.
pub fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Panics unless every value is within `tolerance` of the expected one, relative to the largest (or to 1 if smaller).
pub fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1f64, |scale, value| scale.max(value.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * scale, "{what}[{i}]: {got}, expected {expected}");
    }
}

/// Panics unless `work` panics with a message that contains each of `parts`.
pub fn assert_panics(parts: &[&str], work: impl FnOnce()) {
    let error = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).expect_err("it should panic");
    let message = error.downcast_ref::<String>().cloned();
    let message = message.or_else(|| error.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

/// Returns the error function to about 1e-15: its series where that converges, else the continued fraction of its complement.
pub fn erf(x: f64) -> f64 {
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
