//! Helpers shared by the kernels' tests.

#[path = "../../tests/shared/mod.rs"]
mod shared;

use rayon::ThreadPoolBuilder;

pub(super) use shared::{assert_close, assert_panics, erf, numbers, wide};

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

/// Checks `gradient` against central differences of `loss` at `x`, for up to 40 entries.
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
