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
pub(crate) mod cross_entropy;
#[cfg(all(test, feature = "cuda", feature = "vulkan"))]
mod cuda_source;
pub(crate) mod gelu;
pub(crate) mod layer_norm;
mod many;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod pack;
mod rows;
mod tensor;

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_std::{DType, FloatDType};

use crate::backend::FusedBackend;
use crate::fallback;
use crate::options::{AttentionOptions, Gelu};

/// The same bodies for the bare backend and for the one under fusion, whose tensors both are
/// [`OnCube`](tensor::OnCube).
macro_rules! fused_backend {
    ($backend:ty) => {
        impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> FusedBackend for $backend {
            fn fused_linear_bias_backward(grad: FloatTensor<Self>) -> FloatTensor<Self> {
                column_sums::bias_backward(&grad).unwrap_or_else(|| fallback::linear_bias_backward::<Self>(grad))
            }

            fn layer_norm_forward(
                x: FloatTensor<Self>,
                gamma: FloatTensor<Self>,
                beta: Option<FloatTensor<Self>>,
                epsilon: f64,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
                let others: Vec<_> = [&gamma].into_iter().chain(&beta).collect();
                if !rows::takes(&x, &others) {
                    return fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon);
                }
                layer_norm::layer_norm(x, gamma, beta, epsilon)
            }

            fn layer_norm_backward(
                x: FloatTensor<Self>,
                gamma: FloatTensor<Self>,
                mean: FloatTensor<Self>,
                rstd: FloatTensor<Self>,
                grad: FloatTensor<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
                let are_saved_by_kernel = [&mean, &rstd].iter().all(|saved| saved.dtype() == DType::F32);
                if !rows::takes(&x, &[&gamma, &grad]) || !are_saved_by_kernel {
                    return fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad);
                }
                layer_norm::layer_norm_backward(x, gamma, mean, rstd, grad)
            }

            fn fused_gelu(kind: Gelu, x: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
                if !rows::takes(&x, &bias.iter().collect::<Vec<_>>()) {
                    return fallback::gelu::<Self>(kind, x, bias);
                }
                gelu::gelu(kind, x, bias)
            }

            fn gelu_backward_fused(
                kind: Gelu,
                x: FloatTensor<Self>,
                bias: Option<FloatTensor<Self>>,
                grad: FloatTensor<Self>,
            ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
                let others: Vec<_> = [&grad].into_iter().chain(&bias).collect();
                if !rows::takes(&x, &others) {
                    return fallback::gelu_backward::<Self>(kind, x, bias, grad);
                }
                gelu::gelu_backward(kind, x, bias, grad)
            }

            fn attention_forward(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                mask: Option<FloatTensor<Self>>,
                options: AttentionOptions,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                if !attention::takes(q.dtype()) {
                    return fallback::attention_forward::<Self>(q, k, v, mask, options);
                }
                attention::on_tensors::forward(q, k, v, mask, options)
            }

            fn attention_backward(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                mask: Option<FloatTensor<Self>>,
                out: FloatTensor<Self>,
                lse: FloatTensor<Self>,
                grad: FloatTensor<Self>,
                options: AttentionOptions,
            ) -> [FloatTensor<Self>; 3] {
                if !attention::takes(q.dtype()) {
                    return fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
                }
                attention::on_tensors::backward([q, k, v], mask, [out, lse, grad], options)
            }

            fn packed_attention_forward(
                qkv: FloatTensor<Self>,
                mask: Option<FloatTensor<Self>>,
                options: AttentionOptions,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                if !attention::takes(qkv.dtype()) {
                    let [q, k, v] = fallback::unpack::<Self>(qkv);
                    return fallback::attention_forward::<Self>(q, k, v, mask, options);
                }
                attention::on_tensors::packed_forward(qkv, mask, options)
            }

            fn packed_attention_backward(
                qkv: FloatTensor<Self>,
                mask: Option<FloatTensor<Self>>,
                out: FloatTensor<Self>,
                lse: FloatTensor<Self>,
                grad: FloatTensor<Self>,
                options: AttentionOptions,
            ) -> FloatTensor<Self> {
                if !attention::takes(qkv.dtype()) {
                    let [q, k, v] = fallback::unpack::<Self>(qkv);
                    let parts = fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options);
                    return Self::float_cat(parts.to_vec(), 1);
                }
                attention::on_tensors::packed_backward(qkv, mask, [out, lse, grad], options)
            }

            /// Burn's kernel: a unit for each column adds the rows one after another, without atomics. It adds in the
            /// gradient's type, so 16 bit are widened first: a frequent id has thousands of rows.
            fn fused_embedding_backward(
                ids: IntTensor<Self>,
                grad: FloatTensor<Self>,
                rows: usize,
            ) -> FloatTensor<Self> {
                let dtype = grad.dtype();
                if !matches!(dtype, DType::F16 | DType::BF16) {
                    return fallback::embedding_backward::<Self>(ids, grad, rows);
                }
                let table = fallback::embedding_backward::<Self>(ids, Self::float_cast(grad, FloatDType::F32), rows);
                Self::float_cast(table, dtype.into())
            }

            fn fused_linear_cross_entropy(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                targets: IntTensor<Self>,
                ignored: Option<i64>,
            ) -> FloatTensor<Self> {
                if !rows::takes(&x, &[&weight]) {
                    return fallback::linear_cross_entropy::<Self>(x, weight, targets, ignored);
                }
                cross_entropy::linear_cross_entropy(x, weight, targets, ignored)
            }

            fn linear_cross_entropy_with_gradients(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                targets: IntTensor<Self>,
                ignored: Option<i64>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
                if !rows::takes(&x, &[&weight]) {
                    return fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, ignored);
                }
                cross_entropy::linear_cross_entropy_with_gradients(x, weight, targets, ignored)
            }
        }
    };
}

fused_backend!(CubeBackend<R, F, I, BT>);
fused_backend!(Fusion<CubeBackend<R, F, I, BT>>);
