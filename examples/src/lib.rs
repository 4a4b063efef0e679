//! The way in: see the programs under `examples/examples`.

/// The README's program is compiled and run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// The middle one of what a benchmark has measured in its rounds.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
