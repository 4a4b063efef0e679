//! Fused operations of transformers, for which a chain of elementary ones costs more: each with a forward and a backward pass written by
//! hand, as an extension of Burn's backends.
//!
//! - [`FusedBackend`] is the extension. Every method has a body of Burn's own operations, so that a backend needs only
//!   `impl FusedBackend for It {}`. burn-flex has SIMD kernels ([`cpu`]), and [`Autodiff`](burn_autodiff::Autodiff) the backward passes.
//! - Models call the functions [`linear`], [`layer_norm`], [`rms_norm`], [`gelu`], [`swiglu`], [`rotary`], [`attention`],
//!   [`packed_attention`], [`embedding`], [`linear_cross_entropy`] and [`quantized_linear`].
//! - [`parameter_from`] creates a parameter from elements that it requests by range, so that a rank reads only its shard.
//!   [`quantized_parameter`] creates one in 8 or 4 bit ([`quantized`]).
//! - [`checkpoint`] keeps only the inputs and outputs of a block of layers, and recomputes the rest in the backward pass.
//!
//! Activations are rows `[n, d]`: only attention distinguishes sequence and batch.

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
pub use cube::optim::{GradScale, UpdateItem, Updated, fused_update};
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
pub use zero_kernels::options::{AttentionDropout, AttentionOptions, Clip, CrossEntropyOptions, Gelu};
pub use zero_kernels::update::Elements;
pub use zero_kernels::{Rule, cpu, quantized, update};
