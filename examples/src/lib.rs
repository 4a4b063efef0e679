//! The programs are in `examples/examples`.

/// Compiles and runs the README's program as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Returns the median of a benchmark's measurements.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
