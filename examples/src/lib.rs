//! The way in: see the programs under `examples/examples`.

/// The README's program is compiled and run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
