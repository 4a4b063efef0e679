//! The backend extension: operations that a backend can implement better than as a chain of elementary ones.
//!
//! Shape suffixes of this crate: `n` rows, `d` width, `f` wider width, `v` vocabulary, `b` sequences of `t` rows each
//! (`n = b * t`), `h` heads.

use std::ops::Range;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{FloatDType, Shape};

use crate::fallback;
pub(crate) use crate::kinds::ty;
use crate::options::{AttentionOptions, CrossEntropyOptions, Gelu};
use crate::quantized::Quantized;

/// Implements the trait, with operations written as in its definition.
macro_rules! implement {
    ([$($generics:tt)*] $backend:ty;
     $($(#[$meta:meta])* fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $body:block)*) => {
        impl<$($generics)*> FusedBackend for $backend {
            $($(#[$meta])* fn $name($($arg: ty!($kind, Self)),*) -> ty!($ret, Self) $body)*
        }
    };
}

pub(crate) use implement;

/// Defines the trait from its operations, and a macro with their signatures for generating delegations.
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

        /// Passes the signatures of all operations of `FusedBackend` except `parameter_from` to a macro, as
        /// `fn name(operand: kind, ..) -> kind;`. A kind is `float`, `opt_float`, `int`, or a type in parentheses; results can also be
        /// `float_float`, `float_float_float`, `float_opt_float` or `three_floats`.
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
    /// [The functions](crate#functions) call the methods `fused_x`. `x_forward` also returns the values that the backward pass,
    /// `x_backward`, needs. The default bodies use Burn's operations. A backend that overrides a forward method must also override its
    /// backward method if the saved values differ.
    ///
    /// # Panics
    ///
    /// If shapes do not match; [the functions](crate#functions) check them and report which.
    pub trait FusedBackend: Backend {
        /// Creates a parameter of `shape` from `elements`, which returns those of a flat, row-major range.
        ///
        /// `elements` is called only for the ranges that are stored here: this body calls it for the full parameter, a backend that shards
        /// parameters for its shard, and perhaps never.
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

        /// Returns whether attention's kernels apply dropout to probabilities ([`AttentionOptions::dropout`](crate::AttentionOptions)) and
        /// this backend has keys for the draws. If not, the mask is drawn as a tensor.
        fn draws_dropout(_device: &Device<Self>) -> bool {
            false
        }

        /// Returns the key of the next draw, the same one that drawing a mask as a tensor would use.
        ///
        /// # Panics
        ///
        /// If [`draws_dropout`](Self::draws_dropout) is false.
        fn next_dropout_key(_device: &Device<Self>) -> u64 {
            panic!("this backend has no dropout keys: check draws_dropout first")
        }

        /// Begins a [checkpointed](crate::checkpoint) block on this thread: tensors computed from here on may be dropped at its end if they
        /// can be recomputed. Returns false if no block begins. With `if_configured` one begins only if the run's configuration asks for
        /// it.
        fn begin_checkpoint(_if_configured: bool) -> bool {
            false
        }

        /// Ends the block, whose `outputs` are kept. Called if [`begin_checkpoint`](Self::begin_checkpoint) returned true.
        fn end_checkpoint(_outputs: Vec<FloatTensor<Self>>) {}
    }

    /// Computes `x weight + bias + residual`.
    ///
    /// `x`: `[n, d]`, `weight`: `[d, f]`, `bias`: `[f]`, `residual`: `[n, f]`; returns `[n, f]`.
    fn fused_linear(x: float, weight: float, bias: opt_float, residual: opt_float) -> float {
        fallback::fused_linear::<Self>(x, weight, bias, residual)
    }

    /// Returns the gradient for `x` of [`fused_linear`](Self::fused_linear), `[n, d]`.
    fn fused_linear_x_backward(weight: float, grad: float) -> float {
        Self::linear_x_backward(weight, grad)
    }

    /// Returns the gradient for `weight` of [`fused_linear`](Self::fused_linear), `[d, f]`.
    fn fused_linear_weight_backward(x: float, grad: float) -> float {
        Self::linear_weight_backward(x, grad)
    }

    /// Returns the gradient for `bias` of [`fused_linear`](Self::fused_linear), `[f]`.
    fn fused_linear_bias_backward(grad: float) -> float {
        Self::linear_bias_backward(grad)
    }

    /// Computes [`fused_linear`](Self::fused_linear) with a weight `[d, f]` stored as quantized rows `[d, words]`, which has no gradient.
    fn quantized_linear(x: float, weight: float, bias: opt_float, residual: opt_float, how: (Quantized)) -> float {
        let dtype = x.dtype().into();
        Self::fused_linear(x, Self::dequantized(weight, how, dtype), bias, residual)
    }

    /// Returns the gradient for `x` of [`quantized_linear`](Self::quantized_linear), `[n, d]`.
    fn quantized_linear_x_backward(weight: float, grad: float, how: (Quantized)) -> float {
        let dtype = grad.dtype().into();
        Self::fused_linear_x_backward(Self::dequantized(weight, how, dtype), grad)
    }

    /// Dequantizes a weight.
    fn dequantized(weight: float, how: (Quantized), dtype: (FloatDType)) -> float {
        fallback::dequantized::<Self>(weight, how, dtype)
    }

    /// Applies layer norm to rows `[n, d]` with `gamma` and `beta` `[d]`, <https://arxiv.org/abs/1607.06450>.
    fn fused_layer_norm(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float {
        Self::layer_norm_forward(x, gamma, beta, epsilon).0
    }

    /// Computes [`fused_layer_norm`](Self::fused_layer_norm), and returns also the mean and the reciprocal standard deviation of each row,
    /// `[n]`.
    fn layer_norm_forward(x: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float_float_float {
        fallback::layer_norm_forward::<Self>(x, gamma, beta, epsilon)
    }

    /// Returns the gradients for `x`, `gamma` and `beta`.
    fn layer_norm_backward(x: float, gamma: float, mean: float, rstd: float, grad: float) -> float_float_float {
        fallback::layer_norm_backward::<Self>(x, gamma, mean, rstd, grad)
    }

    /// Computes `gelu(x + bias)` of rows `[n, f]` with `bias` `[f]`.
    fn fused_gelu(kind: (Gelu), x: float, bias: opt_float) -> float {
        fallback::fused_gelu::<Self>(kind, x, bias)
    }

    /// Returns the gradients for `x`, and for `bias` if there is one.
    fn gelu_backward_fused(kind: (Gelu), x: float, bias: opt_float, grad: float) -> float_opt_float {
        fallback::gelu_backward_fused::<Self>(kind, x, bias, grad)
    }

    /// Divides rows `[n, d]` by their root mean square, and multiplies by `gamma` `[d]`, <https://arxiv.org/abs/1910.07467>.
    fn fused_rms_norm(x: float, gamma: float, epsilon: (f64)) -> float {
        Self::rms_norm_forward(x, gamma, epsilon).0
    }

    /// Computes [`fused_rms_norm`](Self::fused_rms_norm), and returns also the reciprocal of each row's root mean square, `[n]`.
    fn rms_norm_forward(x: float, gamma: float, epsilon: (f64)) -> float_float {
        fallback::rms_norm_forward::<Self>(x, gamma, epsilon)
    }

    /// Returns the gradients for `x` and `gamma`.
    fn rms_norm_backward(x: float, gamma: float, rrms: float, grad: float) -> float_float {
        fallback::rms_norm_backward::<Self>(x, gamma, rrms, grad)
    }

    /// Applies rotary position embedding to rows `x` `[n, d]` by `cos` and `sin` `[t, e / 2]`, <https://arxiv.org/abs/2104.09864>. With
    /// `back` the rotation is inverted, which is the backward pass.
    fn fused_rotary(x: float, cos: float, sin: float, back: (bool)) -> float {
        fallback::fused_rotary::<Self>(x, cos, sin, back)
    }

    /// Computes `silu(gate) * up` of rows `[n, f]`.
    fn fused_swiglu(gate: float, up: float) -> float {
        fallback::fused_swiglu::<Self>(gate, up)
    }

    /// Returns the gradients for `gate` and `up`.
    fn swiglu_backward(gate: float, up: float, grad: float) -> float_float {
        fallback::swiglu_backward::<Self>(gate, up, grad)
    }

    /// Computes attention of rows `q` `[n, d]` over `k` and `v` `[m, c]`, where `c` is `d`, or less if they have fewer heads. `mask`
    /// `[b, m / b]` is added to the scores of each key.
    fn fused_attention(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float {
        Self::attention_forward(q, k, v, mask, options).0
    }

    /// Computes [`fused_attention`](Self::fused_attention), and returns also the logarithm of each row's sum of exponentials, `[b, h, t]`.
    fn attention_forward(q: float, k: float, v: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        fallback::attention_forward::<Self>(q, k, v, mask, options)
    }

    /// Returns the gradients for `q`, `k` and `v`, from the output and the logarithms of sums.
    #[allow(clippy::too_many_arguments)] // What the backward pass reads; a struct would be built and taken apart once.
    fn attention_backward(q: float, k: float, v: float, mask: opt_float, out: float, lse: float, grad: float,
                          options: (AttentionOptions)) -> three_floats {
        fallback::attention_backward::<Self>(q, k, v, mask, out, lse, grad, options)
    }

    /// Computes [`fused_attention`](Self::fused_attention) of rows `[n, 3 d]` that hold query, key and value one after the other.
    fn fused_packed_attention(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float {
        Self::packed_attention_forward(qkv, mask, options).0
    }

    /// Computes [`attention_forward`](Self::attention_forward) of packed rows.
    fn packed_attention_forward(qkv: float, mask: opt_float, options: (AttentionOptions)) -> float_float {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        Self::attention_forward(q, k, v, mask, options)
    }

    /// Returns the gradient of packed rows, `[n, 3 d]`.
    fn packed_attention_backward(qkv: float, mask: opt_float, out: float, lse: float, grad: float,
                                 options: (AttentionOptions)) -> float {
        let [q, k, v] = fallback::unpack::<Self>(qkv);
        let parts = Self::attention_backward(q, k, v, mask, out, lse, grad, options);
        Self::float_cat(parts.to_vec(), 1)
    }

    /// Returns the rows of `table` `[v, d]` at `ids` `[n]`: `[n, d]`.
    fn fused_embedding(table: float, ids: int) -> float {
        Self::float_select(table, 0, ids)
    }

    /// Returns the gradient of a table of `rows` rows.
    fn fused_embedding_backward(ids: int, grad: float, rows: (usize)) -> float {
        fallback::fused_embedding_backward::<Self>(ids, grad, rows)
    }

    /// Returns the mean cross-entropy in nats of predicting `targets` `[n]` by `softmax(x weight^T)`, over the rows whose target is not
    /// [ignored](CrossEntropyOptions::ignored); 0 if there are none. `x`: `[n, d]`, `weight`: `[v, d]`; returns `[1]`.
    fn fused_linear_cross_entropy(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float {
        fallback::fused_linear_cross_entropy::<Self>(x, weight, targets, options)
    }

    /// Computes [`fused_linear_cross_entropy`](Self::fused_linear_cross_entropy), and returns also the gradients of the mean for `x` and
    /// for `weight`. They are computed here because logits exist only now, and never all at once. For fp16 operands they are in fp32: the
    /// loss scale, without which they would vanish, is applied only in the backward pass. For bf16 operands that of `weight` may be in bf16.
    fn linear_cross_entropy_with_gradients(x: float, weight: float, targets: int, options: (CrossEntropyOptions))
                                           -> float_float_float {
        fallback::linear_cross_entropy_with_gradients::<Self>(x, weight, targets, options)
    }

    /// Computes [`linear_cross_entropy_with_gradients`](Self::linear_cross_entropy_with_gradients) for `x` alone, with a frozen weight.
    fn linear_cross_entropy_with_x_gradient(x: float, weight: float, targets: int, options: (CrossEntropyOptions)) -> float_float {
        let (loss, dx, _) = Self::linear_cross_entropy_with_gradients(x, weight, targets, options);
        (loss, dx)
    }

    /// Multiplies `x` `[_, _]` by the one number in `factor`, and rounds once to `dtype`.
    fn scaled_by(x: float, factor: float, dtype: (FloatDType)) -> float {
        fallback::scaled_by::<Self>(x, factor, dtype)
    }
}

#[cfg(feature = "ndarray")]
impl FusedBackend for burn_ndarray::NdArray {}

impl<R: burn_router::RunnerChannel> FusedBackend for burn_router::BackendRouter<R> {}
