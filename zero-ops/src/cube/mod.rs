//! CubeCL: kernels for the backends on devices (burn-cuda, burn-wgpu), with and without Burn's fusion.
//!
//! Operations without a kernel here use the default bodies of Burn's operations. With fusion, Burn compiles chains of elementwise ones into
//! one kernel, and products run its autotuned kernels on tensor cores. (CubeCL's cubes, planes and units are CUDA's blocks, warps and
//! threads.)
//!
//! Kernels compute in fp32 whatever their operands are stored in (fp32, fp16, bfloat16), and round once. They use no atomics: every sum has
//! a fixed order of additions, so a step gives the same bits each time on one device.

/// Defines the test that compiles a file's kernels, see `compiled.rs`.
macro_rules! compiled {
    ($($launches:tt)*) => {
        #[test]
        #[cfg(feature = "cuda")]
        #[ignore = "bench/gpu/dry.sh kernels runs it"]
        fn compiled() {
            use crate::cube::compiled::*;
            $($launches)*
            check();
        }
    };
}

pub(crate) mod any;
mod attention;
pub(crate) mod clip;
pub(crate) mod column_sums;
#[cfg(all(test, feature = "cuda"))]
mod compiled;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod gelu;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod many;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod pack;
pub(crate) mod product;
pub(crate) mod quantized;
pub(crate) mod random;
mod rotary;
mod rows;
mod swiglu;
pub(crate) mod tensor;
#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tested;

use burn_backend::TensorMetadata;
use burn_backend::ops::{FloatTensorOps, ModuleOps};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_std::{DType, FloatDType};

use crate::backend::{FusedBackend, implement, ty};
use crate::fallback;
use crate::kinds::STORED_AS;
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu};
use crate::quantized::Quantized;
use rows::takes;
use tensor::is_float;

/// Returns whether tensors of `B` are CubeCL's and kernels compute in `dtype`.
pub(crate) fn computes<B: burn_backend::Backend>(dtype: DType) -> bool {
    any::has_cube_tensors::<B>() && is_float(dtype)
}

/// Implements the same bodies for the bare backend and for the one with fusion, as the tensors of both are [`OnCube`](tensor::OnCube).
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
    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        if !takes(&x, [&weight].into_iter().chain(&bias).chain(&residual)) {
            return fallback::fused_linear::<Self>(x, weight, bias, residual);
        }
        linear::linear(x, weight, bias, residual)
    }

    fn fused_linear_x_backward(weight: float, grad: float) -> float {
        if takes(&grad, [&weight]) { linear::x_backward(weight, grad) } else { Self::linear_x_backward(weight, grad) }
    }

    fn fused_linear_weight_backward(x: float, grad: float) -> float {
        if takes(&grad, [&x]) { linear::weight_backward(x, grad) } else { Self::linear_weight_backward(x, grad) }
    }

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

    fn rms_norm_forward(x: float, gamma: float, epsilon: (f64)) -> float_float {
        if !takes(&x, [&gamma]) {
            return fallback::rms_norm_forward::<Self>(x, gamma, epsilon);
        }
        layer_norm::rms_norm(x, gamma, epsilon)
    }

    fn rms_norm_backward(x: float, gamma: float, rrms: float, grad: float) -> float_float {
        if !takes(&x, [&gamma, &grad]) || rrms.dtype() != DType::F32 {
            return fallback::rms_norm_backward::<Self>(x, gamma, rrms, grad);
        }
        layer_norm::rms_norm_backward(x, gamma, rrms, grad)
    }

    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        if !takes(&x, [&cos, &sin]) {
            return fallback::fused_rotary::<Self>(x, cos, sin, back);
        }
        rotary::rotary(x, cos, sin, back)
    }

    fn fused_swiglu(gate: float, up: float) -> float {
        if takes(&gate, [&up]) { swiglu::swiglu(gate, up) } else { fallback::fused_swiglu::<Self>(gate, up) }
    }

    fn swiglu_backward(gate: float, up: float, grad: float) -> float_float {
        if !takes(&gate, [&up, &grad]) {
            return fallback::swiglu_backward::<Self>(gate, up, grad);
        }
        swiglu::swiglu_backward(gate, up, grad)
    }

    fn dequantized(weight: float, how: (Quantized), dtype: (FloatDType)) -> float {
        match is_float(dtype.into()) && weight.dtype() == STORED_AS {
            true => quantized::dequantized(weight, how, dtype.into()),
            false => fallback::dequantized::<Self>(weight, how, dtype),
        }
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
        if !is_float(q.dtype()) {
            return fallback::attention_forward::<Self>(q, k, v, mask, options);
        }
        attention::forward([q, k, v], mask, options)
    }

    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        if !is_float(q.dtype()) {
            return fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
        }
        attention::backward([q, k, v], mask, [out, lse, grad], options)
    }

    fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        if !is_float(qkv.dtype()) {
            let [q, k, v] = fallback::unpack::<Self>(qkv);
            return Self::attention_forward(q, k, v, mask, options);
        }
        attention::forward([qkv], mask, options)
    }

    fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float,
                                 options: (AttentionOptions)) -> float {
        if !is_float(qkv.dtype()) {
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

    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float {
        if !takes(&x, [&weight]) {
            return fallback::fused_linear_cross_entropy::<Self>(x, weight, targets, options);
        }
        cross_entropy::linear_cross_entropy(x, weight, targets, options)
    }

    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int, options: (CrossEntropyOptions))
                                           -> float_float_float {
        if !takes(&x, [&weight]) {
            return fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, options);
        }
        cross_entropy::linear_cross_entropy_with_gradients(x, weight, targets, options)
    }

    fn linear_cross_entropy_with_x_gradient(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float_float {
        if !takes(&x, [&weight]) {
            let (loss, dx, _) = fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, options);
            return (loss, dx);
        }
        cross_entropy::linear_cross_entropy_with_x_gradient(x, weight, targets, options)
    }
}
