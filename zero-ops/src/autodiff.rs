//! Backward passes: nodes of Burn's autodiff graph that call the inner backend's backward methods.
//!
//! A node saves handles of the inner backend's tensors. Under `Zero<B>` a saved parameter is a handle that is gathered again, not its
//! values. Saved activations share the memory of the model's tensors.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, OpsPrep};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{FloatDType, Shape};

use crate::backend::{FusedBackend, implement, ty};
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu};
use crate::quantized::Quantized;

/// Computes the gradients of the parents from the saved state and the gradient of the output.
#[derive(Debug)]
struct Node<B: Backend, S>(fn(S, FloatTensor<B>, &mut Parents<'_, B>));

/// The parents of a node, with a slot for the gradient of each one that wants it.
struct Parents<'a, B> {
    wanting: Vec<Option<NodeId>>,
    grads: &'a mut Gradients,
    backend: PhantomData<B>,
}

impl<B: Backend> Parents<'_, B> {
    /// Registers the gradient of parent `index` if that parent exists and wants one. Computes it only then.
    fn give(&mut self, index: usize, gradient: impl FnOnce() -> FloatTensor<B>) {
        if let Some(parent) = self.wanting.get(index).copied().flatten() {
            self.grads.register::<B>(parent, gradient());
        }
    }
}

impl<B: Backend, S> Node<B, S> {
    /// Creates a node whose state has the type of `_state`.
    fn of(_state: &S, backward: fn(S, FloatTensor<B>, &mut Parents<'_, B>)) -> Self {
        Self(backward)
    }
}

impl<B: Backend, S: Clone + Send + Debug + 'static, const N: usize> Backward<B, N> for Node<B, S> {
    type State = S;

    fn backward(self, ops: Ops<S, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let grad = grads.consume::<B>(&node);
        let wanting = parents.iter().map(|parent| parent.as_ref().map(|parent| parent.id)).collect();
        (self.0)(state, grad, &mut Parents { wanting, grads, backend: PhantomData });
    }
}

/// Returns the output as a tensor of the graph, with state if any parent wants a gradient.
fn finish<B: Backend, C: CheckpointStrategy, S: Clone + Send + Debug + 'static, const N: usize>(
    prepared: OpsPrep<Node<B, S>, B, S, C, N>,
    state: S,
    out: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(state, out),
        OpsKind::UnTracked(prepared) => prepared.finish(out),
    }
}

implement! {
    [B: FusedBackend, C: CheckpointStrategy] Autodiff<B, C>;

    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        // Operands that the backward pass does not read are `None`: saving one would keep it in memory.
        let state = (
            weight.is_tracked().then(|| x.primitive.clone()),
            x.is_tracked().then(|| weight.primitive.clone()),
            bias.is_some(),
            residual.is_some(),
        );
        let node = Node::<B, _>::of(&state, |(x, weight, has_bias, has_residual), grad, parents| {
            if let Some(x) = x {
                parents.give(1, || B::fused_linear_weight_backward(x, grad.clone()));
            }
            if has_bias {
                parents.give(2, || B::fused_linear_bias_backward(grad.clone()));
            }
            if let Some(weight) = weight {
                parents.give(0, || B::fused_linear_x_backward(weight, grad.clone()));
            }
            if has_residual {
                parents.give(2 + usize::from(has_bias), || grad);
            }
        });
        let (bias_node, bias) = bias.map(|bias| (bias.node, bias.primitive)).unzip();
        let (residual_node, residual) = residual.map(|residual| (residual.node, residual.primitive)).unzip();
        let out = B::fused_linear(x.primitive, weight.primitive, bias, residual);
        match (bias_node, residual_node) {
            (Some(bias), Some(residual)) => {
                finish(node.prepare::<C>([x.node, weight.node, bias, residual]), state, out)
            }
            (Some(extra), None) | (None, Some(extra)) => {
                finish(node.prepare::<C>([x.node, weight.node, extra]), state, out)
            }
            (None, None) => finish(node.prepare::<C>([x.node, weight.node]), state, out),
        }
    }

    fn quantized_linear(x: float, weight: float, bias: opt_float, residual: opt_float, how: (Quantized)) -> float {
        let state = (x.is_tracked().then(|| weight.primitive.clone()), bias.is_some(), how);
        let node = Node::<B, _>::of(&state, |(weight, has_bias, how), grad, parents| {
            if has_bias {
                parents.give(1, || B::fused_linear_bias_backward(grad.clone()));
            }
            if let Some(weight) = weight {
                parents.give(0, || B::quantized_linear_x_backward(weight, grad.clone(), how));
            }
            parents.give(1 + usize::from(has_bias), || grad);
        });
        let (bias_node, bias) = bias.map(|bias| (bias.node, bias.primitive)).unzip();
        let (residual_node, residual) = residual.map(|residual| (residual.node, residual.primitive)).unzip();
        let out = B::quantized_linear(x.primitive, weight.primitive, bias, residual, how);
        match (bias_node, residual_node) {
            (Some(bias), Some(residual)) => finish(node.prepare::<C>([x.node, bias, residual]), state, out),
            (Some(extra), None) | (None, Some(extra)) => finish(node.prepare::<C>([x.node, extra]), state, out),
            (None, None) => finish(node.prepare::<C>([x.node]), state, out),
        }
    }

    fn fused_layer_norm(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float {
        let (beta_node, beta) = beta.map(|beta| (beta.node, beta.primitive)).unzip();
        let (out, mean, rstd) = B::layer_norm_forward(x.primitive.clone(), gamma.primitive.clone(), beta, epsilon);
        let state = (x.primitive, gamma.primitive, mean, rstd);
        let node = Node::<B, _>::of(&state, |(x, gamma, mean, rstd), grad, parents| {
            let (dx, d_gamma, d_beta) = B::layer_norm_backward(x, gamma, mean, rstd, grad);
            parents.give(0, || dx);
            parents.give(1, || d_gamma);
            parents.give(2, || d_beta);
        });
        match beta_node {
            Some(beta) => finish(node.prepare::<C>([x.node, gamma.node, beta]), state, out),
            None => finish(node.prepare::<C>([x.node, gamma.node]), state, out),
        }
    }

    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        let (bias_node, bias) = bias.map(|bias| (bias.node, bias.primitive)).unzip();
        let out = B::fused_gelu(kind, x.primitive.clone(), bias.clone());
        let state = (kind, x.primitive, bias);
        let node = Node::<B, _>::of(&state, |(kind, x, bias), grad, parents| {
            let (dx, d_bias) = B::gelu_backward_fused(kind, x, bias, grad);
            parents.give(0, || dx);
            if let Some(d_bias) = d_bias {
                parents.give(1, || d_bias);
            }
        });
        match bias_node {
            Some(bias) => finish(node.prepare::<C>([x.node, bias]), state, out),
            None => finish(node.prepare::<C>([x.node]), state, out),
        }
    }

    fn fused_rms_norm(x: float, gamma: float, epsilon: (f64)) -> float {
        let (out, rrms) = B::rms_norm_forward(x.primitive.clone(), gamma.primitive.clone(), epsilon);
        let state = (x.primitive, gamma.primitive, rrms);
        let node = Node::<B, _>::of(&state, |(x, gamma, rrms), grad, parents| {
            let (dx, d_gamma) = B::rms_norm_backward(x, gamma, rrms, grad);
            parents.give(0, || dx);
            parents.give(1, || d_gamma);
        });
        finish(node.prepare::<C>([x.node, gamma.node]), state, out)
    }

    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        let state = (cos.primitive, sin.primitive, back);
        let out = B::fused_rotary(x.primitive, state.0.clone(), state.1.clone(), back);
        let node = Node::<B, _>::of(&state, |(cos, sin, back), grad, parents| {
            parents.give(0, || B::fused_rotary(grad, cos, sin, !back));
        });
        finish(node.prepare::<C>([x.node]), state, out)
    }

    fn fused_swiglu(gate: float, up: float) -> float {
        let state = (gate.primitive, up.primitive);
        let out = B::fused_swiglu(state.0.clone(), state.1.clone());
        let node = Node::<B, _>::of(&state, |(gate, up), grad, parents| {
            let (d_gate, d_up) = B::swiglu_backward(gate, up, grad);
            parents.give(0, || d_gate);
            parents.give(1, || d_up);
        });
        finish(node.prepare::<C>([gate.node, up.node]), state, out)
    }

    fn fused_attention(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float {
        let mask = mask.map(|mask| mask.primitive);
        let nodes = [q.node, k.node, v.node];
        let parts = [q.primitive, k.primitive, v.primitive];
        let [q, k, v] = parts.clone();
        let (out, lse) = B::attention_forward(q, k, v, mask.clone(), options);
        let state = (parts, mask, out.clone(), lse, options);
        let node = Node::<B, _>::of(&state, |([q, k, v], mask, out, lse, options), grad, parents| {
            let gradients = B::attention_backward(q, k, v, mask, out, lse, grad, options);
            for (i, gradient) in gradients.into_iter().enumerate() {
                parents.give(i, || gradient);
            }
        });
        finish(node.prepare::<C>(nodes), state, out)
    }

    fn fused_packed_attention(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float {
        let mask = mask.map(|mask| mask.primitive);
        let (out, lse) = B::packed_attention_forward(qkv.primitive.clone(), mask.clone(), options);
        let state = (qkv.primitive, mask, out.clone(), lse, options);
        let node = Node::<B, _>::of(&state, |(qkv, mask, out, lse, options), grad, parents| {
            parents.give(0, || B::packed_attention_backward(qkv, mask, out, lse, grad, options));
        });
        finish(node.prepare::<C>([qkv.node]), state, out)
    }

    fn fused_embedding(table: float, ids: int) -> float {
        // Saves the ids and the number of the table's rows: the backward pass does not read the table.
        let state = (ids.clone(), table.shape()[0]);
        let out = B::fused_embedding(table.primitive, ids);
        let node = Node::<B, _>::of(&state, |(ids, rows), grad, parents| {
            parents.give(0, || B::fused_embedding_backward(ids, grad, rows));
        });
        finish(node.prepare::<C>([table.node]), state, out)
    }

    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float {
        // Gradients of the mean, computed in the forward pass, with the types of their operands. A frozen weight has none.
        let node = Node::<B, [Option<(FloatTensor<B>, FloatDType)>; 2]>(|gradients, grad, parents| {
            // The larger gradient first, so that it is freed first.
            for (parent, gradient) in gradients.into_iter().enumerate().rev() {
                if let Some((gradient, dtype)) = gradient {
                    parents.give(parent, || B::scaled_by(gradient, grad.clone(), dtype));
                }
            }
        });
        let of_weight = weight.is_tracked();
        match node.prepare::<C>([x.node, weight.node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let types: [FloatDType; 2] = [x.primitive.dtype().into(), weight.primitive.dtype().into()];
                let (x, weight) = (x.primitive, weight.primitive);
                let (loss, dx, d_weight) = if of_weight {
                    let (loss, dx, d_weight) = B::linear_cross_entropy_with_gradients(x, weight, targets, options);
                    (loss, dx, Some((d_weight, types[1])))
                } else {
                    let (loss, dx) = B::linear_cross_entropy_with_x_gradient(x, weight, targets, options);
                    (loss, dx, None)
                };
                prepared.finish([Some((dx, types[0])), d_weight], loss)
            }
            OpsKind::UnTracked(prepared) => {
                prepared.finish(B::fused_linear_cross_entropy(x.primitive, weight.primitive, targets, options))
            }
        }
    }

    fn parameter_from(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType),
                      elements: (&mut dyn FnMut(Range<usize>) -> TensorData)) -> float {
        <FloatTensor<Self>>::new(B::parameter_from(shape, device, dtype, elements))
    }

    fn draws_dropout(device: (&Device<Self>)) -> (bool) {
        B::draws_dropout(device)
    }

    fn next_dropout_key(device: (&Device<Self>)) -> (u64) {
        B::next_dropout_key(device)
    }

    fn begin_checkpoint(if_configured: (bool)) -> (bool) {
        B::begin_checkpoint(if_configured)
    }

    fn end_checkpoint(outputs: (Vec<FloatTensor<Self>>)) -> (()) {
        B::end_checkpoint(outputs.into_iter().map(|output| output.primitive).collect())
    }
}
