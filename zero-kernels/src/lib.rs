//! CPU kernels on slices, shared by the adapters for both versions of Burn, and the options of fused operations.
//!
//! Nothing here depends on Burn, tensors or ranks: `zero-ops` calls it with tensors of Burn 0.21, `zero-param` with tensors of 0.22.
//!
//! - [`cpu`]: operations of transformers, forward and backward.
//! - [`quantized`]: numbers in 8 or 4 bits. [`options`]: options of fused operations.
//! - [`update`]: optimizers' rules over a parameter, its gradient and its state.

#[macro_use]
mod vectorised;

pub mod cpu;
pub mod device;
pub mod options;
pub mod quantized;
mod rule;
pub mod update;

pub use rule::{NewtonSchulz, Rule};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
