//! The operations of transformers that are worth more than a chain of elementary ones: each with a forward and a backward
//! pass written by hand, as an extension of Burn's backends.
//!
//! - [`FusedBackend`] is the extension. Every method has a body made of Burn's own operations, so that a backend needs
//!   `impl FusedBackend for It {}` and no more; burn-flex has SIMD kernels ([`cpu`]), [`Autodiff`](burn_autodiff::Autodiff)
//!   the backward passes.
//! - The functions [`linear`], [`layer_norm`], [`rms_norm`], [`gelu`], [`swiglu`], [`rotary`], [`attention`],
//!   [`packed_attention`], [`embedding`], [`linear_cross_entropy`] and [`quantized_linear`] are what a model calls.
//! - [`parameter_from`] makes a parameter of elements that are asked for by range, so that a rank with a piece of it reads
//!   its piece; [`quantized_parameter`] one in 8 or 4 bit ([`quantized`]).
//! - [`checkpoint`] keeps of a block of layers its inputs alone, and computes the rest again in the backward pass.
//!
//! Activations are rows `[n, d]`: what is sequence and what is batch matters to attention only.

mod autodiff;
mod backend;
mod checkpoint;
mod codes;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cubecl")]
pub mod devices;
mod fallback;
#[cfg(feature = "flex")]
mod flex;
mod functions;
mod kinds;
pub mod reductions;
mod shared;

pub use backend::FusedBackend;
pub use checkpoint::{Outputs, checkpoint, checkpoint_block};
pub use codes::{from_codes, to_codes};
#[cfg(feature = "cubecl")]
pub use cube::any::has_cube_tensors as is_cube;
#[cfg(feature = "cuda")]
pub use cube::any::{CudaSpan, End, OnCuda, begin_on_cuda};
#[cfg(feature = "cubecl")]
pub use cube::any::{Read, begin_read, send};
#[cfg(feature = "cubecl")]
pub use cube::clip::clip_factor;
#[cfg(feature = "cubecl")]
pub use cube::norm::sums_of_squares;
#[cfg(feature = "cubecl")]
pub use cube::optim::{GradScale, Update, UpdateItem, Updated, fused_update};
#[cfg(feature = "cubecl")]
pub use cube::pack::{PackItem, SumItem, UnpackItem, pack, sum_parts, unpack};
#[cfg(feature = "cubecl")]
pub use cube::product::matmul;
#[cfg(feature = "cubecl")]
pub use cube::random::{bernoulli, draws_on};
#[cfg(feature = "flex")]
pub use flex::{Lent, cast, elements, is_host, sum_of_squares};
pub use functions::{
    attention, embedding, gelu, layer_norm, linear, linear_cross_entropy, packed_attention, parameter_from,
    quantized_linear, quantized_parameter, rms_norm, rotary, swiglu,
};
pub use shared::Shared;
pub use zero_kernels::cpu::norm::Squares;
use zero_kernels::options;
pub use zero_kernels::options::{AttentionDropout, AttentionOptions, Clip, Gelu};
pub use zero_kernels::update::Elements;
pub use zero_kernels::{Rule, cpu, quantized, update};
