//! The way in: see the programs under `examples/examples`.
