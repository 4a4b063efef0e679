//! CubeCL: kernels for the backends on devices (burn-cuda, burn-wgpu), with and without Burn's fusion.
//!
//! What has no kernel here takes the default bodies, made of Burn's operations; with fusion, chains of elementwise ones are
//! compiled into one kernel by Burn, and products go to its autotuned ones on tensor cores.
//!
//! Kernels compute in fp32 whatever their operands are stored in (fp32, fp16, bfloat16), and round once. They use no
//! atomics: every sum has one order of additions, so a step gives the same bits each time on one device.

pub(crate) mod any;
mod attention;
pub(crate) mod column_sums;
#[cfg(all(test, feature = "cuda"))]
mod compiled;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod gelu;
pub(crate) mod layer_norm;
mod many;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod pack;
pub(crate) mod random;
mod rows;
mod tensor;

use burn_backend::TensorMetadata;
use burn_backend::ops::{FloatTensorOps, ModuleOps};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_std::DType;

use crate::backend::{FusedBackend, implement, ty};
use crate::fallback;
use crate::options::{AttentionOptions, Gelu};
use rows::takes;
use tensor::is_float;

/// The same bodies for the bare backend and for the one under fusion, whose tensors both are
/// [`OnCube`](tensor::OnCube).
macro_rules! fused_backends {
    ($($operations:tt)*) => {
        implement! {
            [R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement] CubeBackend<R, F, I, BT>;
            $($operations)*
        }
        implement! {
            [R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement] Fusion<CubeBackend<R, F, I, BT>>;
            $($operations)*
        }
    };
}

fused_backends! {
    fn fused_linear_bias_backward(grad: float) -> float {
        if takes(&grad, []) { column_sums::bias_backward(grad) } else { Self::linear_bias_backward(grad) }
    }

    fn layer_norm_forward(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float_float_float {
        if !takes(&x, [&gamma].into_iter().chain(&beta)) {
            return fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon);
        }
        layer_norm::layer_norm(x, gamma, beta, epsilon)
    }

    fn layer_norm_backward(x: float, gamma: float, mean: float, rstd: float, grad: float) -> float_float_float {
        let are_saved_by_kernel = [&mean, &rstd].iter().all(|saved| saved.dtype() == DType::F32);
        if !takes(&x, [&gamma, &grad]) || !are_saved_by_kernel {
            return fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad);
        }
        layer_norm::layer_norm_backward(x, gamma, mean, rstd, grad)
    }

    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        if takes(&x, &bias) { gelu::gelu(kind, x, bias) } else { fallback::fused_gelu::<Self>(kind, x, bias) }
    }

    fn gelu_backward_fused(kind: (Gelu), x: float, bias: opt_float, grad: float) -> float_opt_float {
        if !takes(&x, [&grad].into_iter().chain(&bias)) {
            return fallback::gelu_backward_fused::<Self>(kind, x, bias, grad);
        }
        gelu::gelu_backward(kind, x, bias, grad)
    }

    fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        if !is_float(q.dtype()) || fallback::is_more_than_square::<Self>(&q, &k, options) {
            return fallback::attention_forward::<Self>(q, k, v, mask, options);
        }
        attention::forward([q, k, v], mask, options)
    }

    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        if !is_float(q.dtype()) || fallback::is_more_than_square::<Self>(&q, &k, options) {
            return fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
        }
        attention::backward([q, k, v], mask, [out, lse, grad], options)
    }

    fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        if !is_float(qkv.dtype()) || options.window.is_some() {
            let [q, k, v] = fallback::unpack::<Self>(qkv);
            return Self::attention_forward(q, k, v, mask, options);
        }
        attention::forward([qkv], mask, options)
    }

    fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float,
                                 options: (AttentionOptions)) -> float {
        if !is_float(qkv.dtype()) || options.window.is_some() {
            let [q, k, v] = fallback::unpack::<Self>(qkv);
            let parts = Self::attention_backward(q, k, v, mask, out, lse, grad, options);
            return Self::float_cat(parts.to_vec(), 1);
        }
        let [gradient] = attention::backward([qkv], mask, [out, lse, grad], options);
        gradient
    }

    fn fused_embedding_backward(ids: int, grad: float, rows: (usize)) -> float {
        if !takes(&grad, []) || !matches!(ids.dtype(), DType::I32 | DType::I64) {
            return fallback::fused_embedding_backward::<Self>(ids, grad, rows);
        }
        embedding::embedding_backward(ids, grad, rows)
    }

    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, ignored: (Option<i64>)) -> float {
        if !takes(&x, [&weight]) {
            return fallback::fused_linear_cross_entropy::<Self>(x, weight, targets, ignored);
        }
        cross_entropy::linear_cross_entropy(x, weight, targets, ignored)
    }

    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int, ignored: (Option<i64>))
                                           -> float_float_float {
        if !takes(&x, [&weight]) {
            return fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, ignored);
        }
        cross_entropy::linear_cross_entropy_with_gradients(x, weight, targets, ignored)
    }
}
