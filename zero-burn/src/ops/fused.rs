//! The fused operations of [`zero_ops`]: parameters are gathered, and `B`'s kernels run.

use std::ops::Range;

use burn_backend::tensor::{Device, FloatTensor};
use burn_std::{FloatDType, Shape};
use zero_ops::{AttentionOptions, FusedBackend, Gelu};

use crate::birth::{Fill, parameter};

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: FusedBackend> FusedBackend for Zero<B> {
    zero_ops::fused_operations! { forward }

    /// At stage 3 only the elements of this rank's piece are asked for.
    fn parameter_from(
        shape: Shape,
        device: &Device<Self>,
        dtype: FloatDType,
        elements: &mut dyn FnMut(Range<usize>) -> Vec<f32>,
    ) -> FloatTensor<Self> {
        parameter(Fill::Elements(elements), shape, device.inner(), dtype.into())
    }
}
