//! Fused neural-network operations on `f32` slices in host memory.
//!
//! In go row-major slices that the caller owns, out come slices that the caller allocated; every kernel overwrites its
//! outputs (the embedding's gradient alone is added to). Work is spread over the rayon pool that the call is made in,
//! and never over another. The bits of a result depend on the shapes only, not on the number of threads: a sum over
//! rows is made of partial sums over fixed blocks of rows, added in order.
//!
//! Arithmetic is plain scalar loops inside a `pulp::NullaryFnOnce`, whose inlined body the compiler vectorises for the
//! instruction set that the processor is found to have. A closure in its place would be compiled for the baseline.

pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod gelu;
pub mod half;
pub mod layer_norm;
pub mod linear;
pub mod math;
pub mod norm;
pub(crate) mod parallel;
mod product;
pub mod product_bf16;
mod reduce;
#[cfg(test)]
mod testing;

pub use product::Matrix;
