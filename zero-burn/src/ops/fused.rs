//! The fused operations of [`zero_ops`]: parameters are gathered, and `B`'s kernels run.

use std::ops::Range;

use burn_backend::TensorData;
use burn_backend::tensor::{Device, FloatTensor};
use burn_std::{FloatDType, Shape};
use zero_ops::quantized::Quantized;
use zero_ops::{AttentionOptions, CrossEntropyOptions, FusedBackend, Gelu};

use crate::activations;
use crate::birth::{Fill, parameter};
use crate::context::Context;

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: FusedBackend> FusedBackend for Zero<B> {
    zero_ops::fused_operations! { recorded }

    /// At stage 3, `elements` is called only for the elements of this rank's shard.
    fn parameter_from(
        shape: Shape,
        device: &Device<Self>,
        dtype: FloatDType,
        elements: &mut dyn FnMut(Range<usize>) -> TensorData,
    ) -> FloatTensor<Self> {
        parameter(Fill::Elements(elements), shape, device.inner(), dtype.into())
    }

    /// Attention masks are those of a drawn tensor: they have the same numbers, and take one draw of the rank.
    fn draws_dropout(device: &Device<Self>) -> bool {
        #[cfg(feature = "cubecl")]
        return zero_ops::draws_on::<B>(device.inner());
        #[cfg(not(feature = "cubecl"))]
        {
            let _ = device;
            false
        }
    }

    fn next_dropout_key(device: &Device<Self>) -> u64 {
        Context::<B>::draw(device).key()
    }

    fn begin_checkpoint(if_configured: bool) -> bool {
        if activations::is_recording() {
            return false;
        }
        let context = Context::<B>::current();
        let begins = !if_configured || context.next_block();
        if begins {
            activations::begin(context.offloader.clone());
        }
        begins
    }

    fn end_checkpoint(outputs: Vec<FloatTensor<Self>>) {
        let of_block = |tensor: &FloatTensor<Self>| match tensor {
            ZeroTensor::Activation(activation) => Some(activation.clone()),
            _ => None,
        };
        activations::end::<B>(&outputs.iter().filter_map(of_block).collect::<Vec<_>>());
    }
}
