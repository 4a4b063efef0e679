//! Fresh parameters as Hugging Face draws them: normal weights, zero biases, layer norms of one and zero.
//!
//! Burn's initialisers give lazy parameters: nothing is allocated before first use, and then inside
//! `Backend::memory_persistent_allocations`, so that a backend knows that what is created is a parameter. A model
//! whose weights are loaded before first use never allocates what is drawn here.

use burn::module::{Initializer, Param};
use burn::nn::{LayerNorm, LayerNormConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::linear::Linear;

/// A parameter drawn from a normal distribution of mean zero.
pub(crate) fn normal<B: Backend, const D: usize>(
    shape: [usize; D],
    std: f64,
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    Initializer::Normal { mean: 0.0, std }.init(shape, device)
}

/// A parameter of zeros.
pub(crate) fn zeros<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Param<Tensor<B, D>> {
    Initializer::Zeros.init(shape, device)
}

/// A linear layer with normal weights `[d_in, d_out]` and a bias of zeros.
pub(crate) fn linear<B: Backend>(d_in: usize, d_out: usize, std: f64, device: &B::Device) -> Linear<B> {
    Linear {
        weight: normal([d_in, d_out], std, device),
        bias: Some(zeros([d_out], device)),
        adapter: None,
        quantized: None,
    }
}

/// As [`linear`], without a bias.
pub(crate) fn weight<B: Backend>(d_in: usize, d_out: usize, std: f64, device: &B::Device) -> Linear<B> {
    Linear { bias: None, ..linear(d_in, d_out, std, device) }
}

/// The factors of a norm that adds nothing.
pub(crate) fn ones<B: Backend>(width: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
    constant(width, 1.0, device)
}

/// A parameter of one number.
pub(crate) fn constant<B: Backend>(width: usize, value: f64, device: &B::Device) -> Param<Tensor<B, 1>> {
    Initializer::Constant { value }.init([width], device)
}

/// A layer norm of rows of `width`.
pub(crate) fn norm<B: Backend>(width: usize, epsilon: f64, device: &B::Device) -> LayerNorm<B> {
    LayerNormConfig::new(width).with_epsilon(epsilon).init(device)
}
