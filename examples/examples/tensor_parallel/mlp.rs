//! GPT-2's feed-forward block split over a tensor axis, as in Megatron-LM (<https://arxiv.org/abs/1909.08053>, section
//! 3): the first layer by its outputs, the second by its inputs, followed by one sum forward and one backward.
//!
//! Shapes: B rows, D the model's width, H = 4 D, T ranks on the axis.

use burn::module::Param;
use burn::nn::{LayerNorm, LayerNormConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use zero_burn::module::{ZeroAutodiff, replicated_along};
use zero_burn::parallel::{Group, GroupBackend, copy_to, reduce_from};
use zero_core::random::Draws;

/// The axis over which a block is split.
pub const TENSOR: &str = "tensor";

/// This rank's part of a block.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    norm: LayerNorm<B>,
    /// [D, H / T]: columns of the full matrix.
    up: Param<Tensor<B, 2>>,
    /// [H / T]
    up_bias: Param<Tensor<B, 1>>,
    /// [H / T, D]: rows of the full matrix.
    down: Param<Tensor<B, 2>>,
    /// [D], added once, after the sum.
    down_bias: Param<Tensor<B, 1>>,
}

impl<B: GroupBackend> Mlp<B> {
    /// Creates part `part` of `parts` of block `number`. The full block does not depend on `parts`.
    pub fn new(width: usize, number: u64, (part, parts): (usize, usize), device: &B::Device) -> Self {
        let hidden = 4 * width;
        let columns = part * hidden / parts..(part + 1) * hidden / parts;
        let whole = |matrix, len| {
            let mut draws = Draws::new(1).fork(number).fork(matrix);
            (0..len).map(|_| (draws.unit() as f32 - 0.5) * 0.07).collect::<Vec<_>>()
        };
        let up = whole(0, width * hidden);
        let up: Vec<f32> = up.chunks_exact(hidden).flat_map(|row| &row[columns.clone()]).copied().collect();
        let down = &whole(1, hidden * width)[columns.start * width..columns.end * width];
        let matrix = |values: &[f32], shape| Tensor::<B, 1>::from_floats(values, device).reshape(shape);
        Self {
            norm: LayerNormConfig::new(width).init(device),
            up: Param::from_tensor(matrix(&up, [width, columns.len()])),
            up_bias: Param::from_tensor(Tensor::zeros([columns.len()], device)),
            down: Param::from_tensor(matrix(down, [columns.len(), width])),
            down_bias: Param::from_tensor(Tensor::zeros([width], device)),
        }
    }

    /// Maps [B, D] to [B, D]; the result is the same on all ranks of `tensor`.
    pub fn forward(&self, x: Tensor<B, 2>, tensor: &Group) -> Tensor<B, 2> {
        let h = copy_to(self.norm.forward(x.clone()), tensor);
        let h = gelu(h.matmul(self.up.val()) + self.up_bias.val().unsqueeze());
        x + reduce_from(h.matmul(self.down.val()), tensor) + self.down_bias.val().unsqueeze()
    }
}

impl<B: GroupBackend + ZeroAutodiff> Mlp<B> {
    /// Marks the parameters that are replicated along the axis, for gradient norms. Call it on a prepared block.
    pub fn tell_replicated(&self) {
        replicated_along::<B, _>(&self.norm, TENSOR);
        replicated_along::<B, _>(&self.down_bias, TENSOR);
    }
}
