//! What both fronts compute with on the processor: kernels on slices, and the words in which operations are told.
//!
//! Nothing here knows of Burn, of tensors or of ranks: `zero-ops` calls it with tensors of Burn 0.21, `zero-param` with those of 0.22.
//!
//! - [`cpu`]: operations of transformers, forward and backward.
//! - [`quantized`]: numbers in 8 or 4 bit. [`options`]: what operations may be told.
//! - [`update`]: optimizers' rules over a parameter, its gradient and its state.

#[macro_use]
mod vectorised;

pub mod cpu;
pub mod options;
pub mod quantized;
mod rule;
pub mod update;

pub use rule::Rule;
