//! The backend extension: what a backend may do better than a chain of elementary operations.
//!
//! Shape suffixes of this crate: `n` rows, `d` width, `f` wider width, `v` vocabulary, `b` sequences of `t` rows each
//! (`n = b * t`), `h` heads.

use std::ops::Range;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{FloatDType, Shape};

use crate::fallback;
pub(crate) use crate::kinds::ty;
use crate::options::{AttentionOptions, Gelu};
use crate::quantized::Quantized;

/// An implementation of the trait, its operations written as in it.
macro_rules! implement {
    ([$($generics:tt)*] $backend:ty;
     $($(#[$meta:meta])* fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $body:block)*) => {
        impl<$($generics)*> FusedBackend for $backend {
            $($(#[$meta])* fn $name($($arg: ty!($kind, Self)),*) -> ty!($ret, Self) $body)*
        }
    };
}

pub(crate) use implement;

/// The trait, from the operations; and their signatures for macros that make delegations of them.
macro_rules! operations {
    (
        $(#[$about:meta])* pub trait FusedBackend: Backend { $($own:tt)* }
        $($(#[$meta:meta])* fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $body:block)*
    ) => {
        $(#[$about])*
        pub trait FusedBackend: Backend {
            $($(#[$meta])* fn $name($($arg: ty!($kind, Self)),*) -> ty!($ret, Self) $body)*
            $($own)*
        }

        /// Gives the signatures of the operations of `FusedBackend`, but for `parameter_from`, to a macro: as
        /// `fn name(operand: kind, ..) -> kind;`, where a kind is `float`, `opt_float`, `int`, or a type in parentheses, and of
        /// results also `float_float`, `float_float_float`, `float_opt_float` or `three_floats`.
        ///
        /// ```
        /// macro_rules! names {
        ///     ($(fn $name:ident($($operand:ident: $kind:tt),*) -> $result:tt;)*) => { [$(stringify!($name)),*] };
        /// }
        /// assert!(zero_ops::fused_operations!(names).contains(&"fused_linear"));
        /// ```
        #[macro_export]
        macro_rules! fused_operations {
            ($with:ident) => {
                $with! { $(fn $name($($arg: $kind),*) -> $ret;)* }
            };
        }
    };
}

operations! {
    /// A backend with fused operations.
    ///
    /// Methods that are called by [the functions](crate#functions) come as `fused_x`, with what their backward pass needs as
    /// `x_forward` and `x_backward`. The default bodies are made of Burn's operations. A backend that overrides a forward
    /// must override its backward too when what is saved between them differs.
    ///
    /// # Panics
    ///
    /// All of them, when shapes do not fit; [the functions](crate#functions) check and name them.
    pub trait FusedBackend: Backend {
        /// A parameter of `shape` with elements from `elements`, which gives those of a flat range, row-major.
        ///
        /// `elements` is asked for what is kept here and for nothing else: for everything by this body, for a piece by a
        /// backend that shards parameters, and perhaps not at all.
        fn parameter_from(
            shape: Shape,
            device: &Device<Self>,
            dtype: FloatDType,
            elements: &mut dyn FnMut(Range<usize>) -> TensorData,
        ) -> FloatTensor<Self> {
            let data = elements(0..shape.num_elements()).convert_dtype(dtype.into());
            let data = TensorData { shape, ..data };
            Self::memory_persistent_allocations(device, data, |data| Self::float_from_data(data, device))
        }

        /// Whether attention's kernels drop probabilities ([`AttentionOptions::dropout`](crate::AttentionOptions)), and this backend
        /// has keys of draws for that. Elsewhere dropout is drawn as a tensor.
        fn draws_dropout(_device: &Device<Self>) -> bool {
            false
        }

        /// The key of the next draw, as of a mask of dropout that is drawn as a tensor.
        ///
        /// # Panics
        ///
        /// Where [`draws_dropout`](Self::draws_dropout) is false.
        fn next_dropout_key(_device: &Device<Self>) -> u64 {
            panic!("a backend without keys was asked for one: ask draws_dropout first")
        }

        /// A [checkpointed](crate::checkpoint) block begins on this thread: what is made from here on may be dropped at its end, if it
        /// can be made again. False where it is not. `if_configured`: only if the run's configuration asks for it.
        fn begin_checkpoint(_if_configured: bool) -> bool {
            false
        }

        /// It ends, and `outputs` stay. Called if [`begin_checkpoint`](Self::begin_checkpoint) was true.
        fn end_checkpoint(_outputs: Vec<FloatTensor<Self>>) {}
    }

    /// `x weight + bias + residual`.
    ///
    /// `x`: `[n, d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[n, f]`; returns `[n, f]`.
    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        fallback::fused_linear::<Self>(x, weight, bias, residual)
    }

    /// The gradient for `x` of [`fused_linear`](Self::fused_linear), `[n, d]`.
    fn fused_linear_x_backward(weight: float, grad: float) -> float {
        Self::linear_x_backward(weight, grad)
    }

    /// The gradient for `weight` of [`fused_linear`](Self::fused_linear), `[d, f]`.
    fn fused_linear_weight_backward(x: float, grad: float) -> float {
        Self::linear_weight_backward(x, grad)
    }

    /// The gradient for `bias` of [`fused_linear`](Self::fused_linear), `[f]`.
    fn fused_linear_bias_backward(grad: float) -> float {
        Self::linear_bias_backward(grad)
    }

    /// As [`fused_linear`](Self::fused_linear) with the weight `[d, f]` that `weight` stands for, quantised rows `[d, words]`. It has
    /// no gradient.
    fn quantized_linear(x: float, weight: float, bias: opt_float, residual: opt_float, how: (Quantized)) -> float {
        let dtype = x.dtype().into();
        Self::fused_linear(x, Self::dequantized(weight, how, dtype), bias, residual)
    }

    /// The gradient for `x` of [`quantized_linear`](Self::quantized_linear), `[n, d]`.
    fn quantized_linear_x_backward(weight: float, grad: float, how: (Quantized)) -> float {
        let dtype = grad.dtype().into();
        Self::fused_linear_x_backward(Self::dequantized(weight, how, dtype), grad)
    }

    /// The weight that quantised rows stand for.
    fn dequantized(weight: float, how: (Quantized), dtype: (FloatDType)) -> float {
        fallback::dequantized::<Self>(weight, how, dtype)
    }

    /// Layer norm of rows `[n, d]` with `gamma` and `beta` `[d]`, <https://arxiv.org/abs/1607.06450>.
    fn fused_layer_norm(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float {
        Self::layer_norm_forward(x, gamma, beta, epsilon).0
    }

    /// As [`fused_layer_norm`](Self::fused_layer_norm), with the mean and the reciprocal standard deviation of each row, `[n]`.
    fn layer_norm_forward(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float_float_float {
        fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon)
    }

    /// The gradients for `x`, `gamma` and `beta`.
    fn layer_norm_backward(x: float, gamma: float, mean: float, rstd: float, grad: float) -> float_float_float {
        fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad)
    }

    /// `gelu(x + bias)` of rows `[n, f]` with `bias` `[f]`.
    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        fallback::fused_gelu::<Self>(kind, x, bias)
    }

    /// The gradients for `x`, and for `bias` if there is one.
    fn gelu_backward_fused(kind: (Gelu), x: float, bias: opt_float, grad: float) -> float_opt_float {
        fallback::gelu_backward_fused::<Self>(kind, x, bias, grad)
    }

    /// Rows `[n, d]` divided by their root mean square, times `gamma` `[d]`, <https://arxiv.org/abs/1910.07467>.
    fn fused_rms_norm(x: float, gamma: float, epsilon: (f64)) -> float {
        Self::rms_norm_forward(x, gamma, epsilon).0
    }

    /// As [`fused_rms_norm`](Self::fused_rms_norm), with the reciprocal of each row's root mean square, `[n]`.
    fn rms_norm_forward(x: float, gamma: float, epsilon: (f64)) -> float_float {
        fallback::rms_norm_forward::<Self>(x, gamma, epsilon)
    }

    /// The gradients for `x` and `gamma`.
    fn rms_norm_backward(x: float, gamma: float, rrms: float, grad: float) -> float_float {
        fallback::rms_norm_backward::<Self>(x, gamma, rrms, grad)
    }

    /// Rotary positions of rows `x` `[n, d]` by `cos` and `sin` `[t, e / 2]`, <https://arxiv.org/abs/2104.09864>; turned back if
    /// `back`, which is the backward pass.
    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        fallback::fused_rotary::<Self>(x, cos, sin, back)
    }

    /// `silu(gate) * up` of rows `[n, f]`.
    fn fused_swiglu(gate: float, up: float) -> float {
        fallback::fused_swiglu::<Self>(gate, up)
    }

    /// The gradients for `gate` and `up`.
    fn swiglu_backward(gate: float, up: float, grad: float) -> float_float {
        fallback::swiglu_backward::<Self>(gate, up, grad)
    }

    /// Attention of rows `q` `[n, d]` over `k` and `v` `[m, c]`, where `c` is `d` or that of fewer heads; `mask` `[b, m / b]` is
    /// added to the scores of each key.
    fn fused_attention(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float {
        Self::attention_forward(q, k, v, mask, options).0
    }

    /// As [`fused_attention`](Self::fused_attention), with the logarithm of each row's sum of exponentials, `[b, h, t]`.
    fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        fallback::attention_forward::<Self>(q, k, v, mask, options)
    }

    /// The gradients for `q`, `k` and `v`, from the output and the logarithms of sums.
    #[allow(clippy::too_many_arguments)] // What the backward pass reads; a struct would be built and taken apart once.
    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options)
    }

    /// As [`fused_attention`](Self::fused_attention) of rows `[n, 3 d]` that hold query, key and value side by side.
    fn fused_packed_attention(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float {
        Self::packed_attention_forward(qkv, mask, options).0
    }

    /// As [`attention_forward`](Self::attention_forward) of packed rows.
    fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        Self::attention_forward(q, k, v, mask, options)
    }

    /// The gradient of packed rows, `[n, 3 d]`.
    fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float,
                                 options: (AttentionOptions)) -> float {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        let parts = Self::attention_backward(q, k, v, mask, out, lse, grad, options);
        Self::float_cat(parts.to_vec(), 1)
    }

    /// Rows of `table` `[v, d]` by `ids` `[n]`; returns `[n, d]`.
    fn fused_embedding(table: float, ids: int) -> float {
        Self::float_select(table, 0, ids)
    }

    /// The gradient of a table of `rows` rows.
    fn fused_embedding_backward(ids: int, grad: float, rows: (usize)) -> float {
        fallback::fused_embedding_backward::<Self>(ids, grad, rows)
    }

    /// The mean cross-entropy in nats of predicting `targets` `[n]` by `softmax(x weight^T)`, over the rows whose target is
    /// not `ignored`; 0 if there are none. `x`: `[n, d]`, `weight`: `[v, d]`; returns `[1]`.
    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, ignored: (Option<i64>)) -> float {
        fallback::fused_linear_cross_entropy::<Self>(x, weight, targets, ignored)
    }

    /// As [`fused_linear_cross_entropy`](Self::fused_linear_cross_entropy), with the gradients of the mean for `x` and for
    /// `weight`: they are made from logits that are at hand only now, and never are all at hand. Of operands in 16 bit they
    /// are in fp32: a loss scale, without which they vanish in fp16, multiplies them only in the backward pass.
    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int, ignored: (Option<i64>))
                                           -> float_float_float {
        fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, ignored)
    }

    /// As [`linear_cross_entropy_with_gradients`](Self::linear_cross_entropy_with_gradients), for `x` alone: of a frozen weight.
    fn linear_cross_entropy_with_x_gradient(x: float, weight: float, targets: int, ignored: (Option<i64>)) -> float_float {
        let (loss, dx, _) = Self::linear_cross_entropy_with_gradients(x, weight, targets, ignored);
        (loss, dx)
    }

    /// `x` `[_, _]` times the one number in `factor`, rounded once to `dtype`.
    fn scaled_by(x: float, factor: float, dtype: (FloatDType)) -> float {
        fallback::scaled_by::<Self>(x, factor, dtype)
    }
}

#[cfg(feature = "ndarray")]
impl FusedBackend for burn_ndarray::NdArray {}

impl<R: burn_router::RunnerChannel> FusedBackend for burn_router::BackendRouter<R> {}
