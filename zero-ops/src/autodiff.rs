//! The backward passes: nodes of Burn's autodiff graph that call the inner backend's backward methods.
//!
//! What a node saves are handles of the inner backend: under `Zero<B>` a saved parameter is a handle that is gathered
//! again, not its values. Saved activations share the memory of the tensors that the model made.

use std::ops::Range;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_std::{FloatDType, Shape};

use crate::backend::FusedBackend;
use crate::options::{AttentionOptions, Gelu};

/// Registers the gradient of a parent, if it wants one. `$grad` is evaluated only then.
macro_rules! give {
    ($grads:ident, $parents:ident[$index:expr], $grad:expr) => {
        if let Some(parent) = &$parents[$index] {
            let grad = $grad;
            $grads.register::<B>(parent.id, grad);
        }
    };
}

/// `prepare`d nodes become a tensor, with state if any parent wants a gradient.
macro_rules! finish {
    ($prepared:expr, $state:expr, $out:expr) => {
        match $prepared.compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish($state, $out),
            OpsKind::UnTracked(prepared) => prepared.finish($out),
        }
    };
}

/// Parents: `x`, `weight`, then `bias` and `residual` if there are.
#[derive(Debug)]
struct Linear;

#[derive(Clone, Debug)]
struct LinearState<B: Backend> {
    /// `None` where nobody reads it: saving it would keep it in memory.
    x: Option<FloatTensor<B>>,
    weight: Option<FloatTensor<B>>,
    bias: bool,
    residual: bool,
}

impl<B: FusedBackend, const N: usize> Backward<B, N> for Linear {
    type State = LinearState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        if let Some(x) = state.x {
            give!(grads, parents[1], B::fused_linear_weight_backward(x, grad.clone()));
        }
        if state.bias {
            give!(grads, parents[2], B::fused_linear_bias_backward(grad.clone()));
        }
        if let Some(weight) = state.weight {
            give!(grads, parents[0], B::fused_linear_x_backward(weight, grad.clone()));
        }
        if state.residual {
            give!(grads, parents[2 + usize::from(state.bias)], grad);
        }
    }
}

/// Parents: `x`, `gamma`, then `beta` if there is one.
#[derive(Debug)]
struct LayerNorm;

#[derive(Clone, Debug)]
struct LayerNormState<B: Backend> {
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    mean: FloatTensor<B>,
    rstd: FloatTensor<B>,
}

impl<B: FusedBackend, const N: usize> Backward<B, N> for LayerNorm {
    type State = LayerNormState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        let (dx, d_gamma, d_beta) = B::layer_norm_backward(state.x, state.gamma, state.mean, state.rstd, grad);
        give!(grads, parents[0], dx);
        give!(grads, parents[1], d_gamma);
        if N > 2 {
            give!(grads, parents[2], d_beta);
        }
    }
}

/// Parents: `x`, then `bias` if there is one.
#[derive(Debug)]
struct GeluNode;

#[derive(Clone, Debug)]
struct GeluState<B: Backend> {
    kind: Gelu,
    x: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
}

impl<B: FusedBackend, const N: usize> Backward<B, N> for GeluNode {
    type State = GeluState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        let (dx, d_bias) = B::gelu_backward_fused(state.kind, state.x, state.bias, grad);
        give!(grads, parents[0], dx);
        if let Some(d_bias) = d_bias {
            give!(grads, parents[1], d_bias);
        }
    }
}

#[derive(Clone, Debug)]
struct AttentionState<B: Backend, const PARTS: usize> {
    /// Query, key and value, or all three in one.
    parts: [FloatTensor<B>; PARTS],
    mask: Option<FloatTensor<B>>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    options: AttentionOptions,
}

/// Parents: `q`, `k`, `v`.
#[derive(Debug)]
struct Attention;

impl<B: FusedBackend> Backward<B, 3> for Attention {
    type State = AttentionState<B, 3>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        let AttentionState { parts: [q, k, v], mask, out, lse, options } = state;
        let gradients = B::attention_backward(q, k, v, mask, out, lse, grad, options);
        for (i, gradient) in gradients.into_iter().enumerate() {
            give!(grads, parents[i], gradient);
        }
    }
}

/// Parent: the packed rows.
#[derive(Debug)]
struct PackedAttention;

impl<B: FusedBackend> Backward<B, 1> for PackedAttention {
    type State = AttentionState<B, 1>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        let AttentionState { parts: [qkv], mask, out, lse, options } = state;
        give!(grads, parents[0], B::packed_attention_backward(qkv, mask, out, lse, grad, options));
    }
}

/// Parent: the table.
#[derive(Debug)]
struct Embedding;

impl<B: FusedBackend> Backward<B, 1> for Embedding {
    /// The ids, and the number of the table's rows: the table itself is not read again.
    type State = (IntTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state: (ids, rows) } = ops;
        let grad = grads.consume::<B>(&node);
        give!(grads, parents[0], B::fused_embedding_backward(ids, grad, rows));
    }
}

/// Parents: `x`, `weight`.
#[derive(Debug)]
struct LinearCrossEntropy;

impl<B: FusedBackend> Backward<B, 2> for LinearCrossEntropy {
    /// The gradients of the mean, made in the forward pass, and the types of what they are gradients of.
    type State = [(FloatTensor<B>, FloatDType); 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state: [(dx, x_type), (d_weight, weight_type)] } = ops;
        let grad = grads.consume::<B>(&node);
        give!(grads, parents[1], B::scaled_by(d_weight, grad.clone(), weight_type));
        give!(grads, parents[0], B::scaled_by(dx, grad.clone(), x_type));
    }
}

impl<B: FusedBackend, C: CheckpointStrategy> FusedBackend for Autodiff<B, C> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        residual: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let state = LinearState::<B> {
            x: weight.is_tracked().then(|| x.primitive.clone()),
            weight: x.is_tracked().then(|| weight.primitive.clone()),
            bias: bias.is_some(),
            residual: residual.is_some(),
        };
        let (x_node, weight_node) = (x.node, weight.node);
        let bias_node = bias.as_ref().map(|bias| bias.node.clone());
        let residual_node = residual.as_ref().map(|residual| residual.node.clone());
        let out = B::fused_linear(
            x.primitive,
            weight.primitive,
            bias.map(|bias| bias.primitive),
            residual.map(|residual| residual.primitive),
        );
        match (bias_node, residual_node) {
            (Some(bias), Some(residual)) => {
                finish!(Linear.prepare::<C>([x_node, weight_node, bias, residual]), state, out)
            }
            (Some(extra), None) | (None, Some(extra)) => {
                finish!(Linear.prepare::<C>([x_node, weight_node, extra]), state, out)
            }
            (None, None) => finish!(Linear.prepare::<C>([x_node, weight_node]), state, out),
        }
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let beta_node = beta.as_ref().map(|beta| beta.node.clone());
        let beta = beta.map(|beta| beta.primitive);
        let (x_node, gamma_node, x, gamma) = (x.node, gamma.node, x.primitive, gamma.primitive);
        let (out, mean, rstd) = B::layer_norm_forward(x.clone(), gamma.clone(), beta, epsilon);
        let state = LayerNormState::<B> { x, gamma, mean, rstd };
        match beta_node {
            Some(beta) => finish!(LayerNorm.prepare::<C>([x_node, gamma_node, beta]), state, out),
            None => finish!(LayerNorm.prepare::<C>([x_node, gamma_node]), state, out),
        }
    }

    fn fused_gelu(kind: Gelu, x: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        let bias_node = bias.as_ref().map(|bias| bias.node.clone());
        let bias = bias.map(|bias| bias.primitive);
        let (x_node, x) = (x.node, x.primitive);
        let out = B::fused_gelu(kind, x.clone(), bias.clone());
        let state = GeluState::<B> { kind, x, bias };
        match bias_node {
            Some(bias) => finish!(GeluNode.prepare::<C>([x_node, bias]), state, out),
            None => finish!(GeluNode.prepare::<C>([x_node]), state, out),
        }
    }

    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let mask = mask.map(|mask| mask.primitive);
        let nodes = [q.node, k.node, v.node];
        let parts = [q.primitive, k.primitive, v.primitive];
        let [q, k, v] = parts.clone();
        let (out, lse) = B::attention_forward(q, k, v, mask.clone(), options);
        let state = AttentionState::<B, 3> { parts, mask, out: out.clone(), lse, options };
        finish!(Attention.prepare::<C>(nodes), state, out)
    }

    fn fused_packed_attention(
        qkv: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let mask = mask.map(|mask| mask.primitive);
        let (node, qkv) = (qkv.node, qkv.primitive);
        let (out, lse) = B::packed_attention_forward(qkv.clone(), mask.clone(), options);
        let state = AttentionState::<B, 1> { parts: [qkv], mask, out: out.clone(), lse, options };
        finish!(PackedAttention.prepare::<C>([node]), state, out)
    }

    fn fused_embedding(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let rows = table.shape()[0];
        let out = B::fused_embedding(table.primitive, ids.clone());
        finish!(Embedding.prepare::<C>([table.node]), (ids, rows), out)
    }

    fn parameter_from(
        shape: Shape,
        device: &Device<Self>,
        dtype: FloatDType,
        elements: &mut dyn FnMut(Range<usize>) -> Vec<f32>,
    ) -> FloatTensor<Self> {
        <FloatTensor<Self>>::new(B::parameter_from(shape, device, dtype, elements))
    }

    fn fused_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        ignored: Option<i64>,
    ) -> FloatTensor<Self> {
        match LinearCrossEntropy.prepare::<C>([x.node, weight.node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let types: [FloatDType; 2] = [x.primitive.dtype().into(), weight.primitive.dtype().into()];
                let (loss, dx, d_weight) =
                    B::linear_cross_entropy_with_gradients(x.primitive, weight.primitive, targets, ignored);
                prepared.finish([(dx, types[0]), (d_weight, types[1])], loss)
            }
            OpsKind::UnTracked(prepared) => {
                prepared.finish(B::fused_linear_cross_entropy(x.primitive, weight.primitive, targets, ignored))
            }
        }
    }
}
