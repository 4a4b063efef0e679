//! Initialization as in Hugging Face: normal weights, zero biases, layer norms of one and zero.
//!
//! Burn's initializers return lazy parameters: nothing is allocated before the first use, and then inside
//! `Backend::memory_persistent_allocations`, which tells a backend that a parameter is created. A model whose weights are loaded before
//! the first use never allocates these values.

use burn::module::{Initializer, Param};
use burn::nn::{LayerNorm, LayerNormConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::linear::Linear;

/// Returns a parameter drawn from a normal distribution with mean zero.
pub(crate) fn normal<B: Backend, const D: usize>(
    shape: [usize; D],
    std: f64,
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    Initializer::Normal { mean: 0.0, std }.init(shape, device)
}

/// Returns a parameter of zeros.
pub(crate) fn zeros<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Param<Tensor<B, D>> {
    Initializer::Zeros.init(shape, device)
}

/// Returns a linear layer with normal weights `[d_in, d_out]` and a bias of zeros.
pub(crate) fn linear<B: Backend>(d_in: usize, d_out: usize, std: f64, device: &B::Device) -> Linear<B> {
    Linear {
        weight: normal([d_in, d_out], std, device),
        bias: Some(zeros([d_out], device)),
        adapter: None,
        quantized: None,
    }
}

/// Same as [`linear`], without a bias.
pub(crate) fn weight<B: Backend>(d_in: usize, d_out: usize, std: f64, device: &B::Device) -> Linear<B> {
    Linear { bias: None, ..linear(d_in, d_out, std, device) }
}

/// Returns the factors of a norm without a bias.
pub(crate) fn ones<B: Backend>(width: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
    constant(width, 1.0, device)
}

/// Returns a parameter whose elements all have this value.
pub(crate) fn constant<B: Backend>(width: usize, value: f64, device: &B::Device) -> Param<Tensor<B, 1>> {
    Initializer::Constant { value }.init([width], device)
}

/// Returns a layer norm for rows of this width.
pub(crate) fn norm<B: Backend>(width: usize, epsilon: f64, device: &B::Device) -> LayerNorm<B> {
    LayerNormConfig::new(width).with_epsilon(epsilon).init(device)
}
