//! The operations of transformers that are worth more than a chain of elementary ones: each with a forward and a backward
//! pass written by hand, as an extension of Burn's backends.
//!
//! - [`FusedBackend`] is the extension. Every method has a body made of Burn's own operations, so that a backend needs
//!   `impl FusedBackend for It {}` and no more; burn-flex has SIMD kernels (`cpu`), [`Autodiff`](burn_autodiff::Autodiff)
//!   the backward passes.
//! - The functions [`linear`], [`layer_norm`], [`gelu`], [`attention`], [`packed_attention`], [`embedding`] and
//!   [`linear_cross_entropy`] are what a model calls.
//! - [`parameter_from`] makes a parameter of elements that are asked for by range, so that a rank with a piece of it reads
//!   its piece.
//!
//! Activations are rows `[n, d]`: what is sequence and what is batch matters to attention only.

mod autodiff;
mod backend;
#[cfg(feature = "flex")]
pub mod cpu;
mod fallback;
#[cfg(feature = "flex")]
mod flex;
mod functions;

pub use backend::{AttentionOptions, FusedBackend, Gelu};
#[cfg(feature = "flex")]
pub use flex::{Elements, Lent, elements, sum_of_squares};
pub use functions::{
    attention, embedding, gelu, layer_norm, linear, linear_cross_entropy, packed_attention, parameter_from,
};
