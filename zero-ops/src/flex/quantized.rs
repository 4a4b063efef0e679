//! Weights in 8 or 4 bit.

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use burn_std::FloatDType;

use super::{are_f32, dims, packed, packed_of, tensor, values};
use crate::FusedBackend;
use crate::cpu::{buffer, quantized};
use crate::fallback;
use crate::kinds::STORED_AS;
use crate::quantized::Quantized;

/// Returns the bytes of quantized rows.
fn bytes(rows: &FlexTensor) -> &[u8] {
    bytemuck::cast_slice(values::<half::f16>(rows))
}

/// Multiplies few fp32 rows by the codes directly, and more rows by the dequantized weight: for one token, reading the weight is the cost.
pub(super) fn linear(
    x: FlexTensor,
    weight: FlexTensor,
    bias: Option<FlexTensor>,
    residual: Option<FlexTensor>,
    how: Quantized,
) -> FlexTensor {
    let _span = tracing::trace_span!("linear, quantized").entered();
    let [n, _] = dims(&x);
    if n > quantized::MAX_ROWS
        || !are_f32([&x].into_iter().chain(&bias).chain(&residual))
        || weight.dtype() != STORED_AS
    {
        let dtype = x.dtype().into();
        return Flex::fused_linear(x, Flex::dequantized(weight, how, dtype), bias, residual);
    }
    let (x, weight) = (packed(x), packed_of::<half::f16>(weight));
    let (bias, residual) = (bias.map(packed), residual.map(packed));
    let mut out = buffer(n * how.width);
    let [b, r] = [&bias, &residual].map(|x| x.as_ref().map(values));
    quantized::forward(how, values(&x), bytes(&weight), b, r, &mut out);
    tensor(out, [n, how.width])
}

pub(super) fn dequantized(weight: FlexTensor, how: Quantized, dtype: FloatDType) -> FlexTensor {
    let _span = tracing::trace_span!("dequantise").entered();
    if weight.dtype() != STORED_AS {
        return fallback::dequantized::<Flex>(weight, how, dtype);
    }
    let weight = packed_of::<half::f16>(weight);
    let [d, _] = dims(&weight);
    let mut out = buffer(d * how.width);
    quantized::dequantized(how, bytes(&weight), &mut out);
    let out = tensor(out, [d, how.width]);
    match DType::from(dtype) {
        DType::F32 => out,
        _ => <Flex as burn_backend::ops::FloatTensorOps<Flex>>::float_cast(out, dtype),
    }
}
