//! Weights in 8 or 4 bit.

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use burn_std::FloatDType;

use super::{are_f32, dims, narrow, packed, packed_of, tensor, values};
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
        dtype => narrow(out, dtype),
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::quantized::Format;

    #[test]
    fn a_weight_in_16_bit_is_that_in_32_rounded_once() {
        const ROWS: usize = 1024;
        let numbers: Vec<f32> = (0..ROWS * 64).map(|i| ((i * 37 + 11) as f32 * 0.618).sin() * 0.03).collect();
        let how = Quantized { format: Format::Int8, width: 64 };
        let words = how.format.words(64);
        let codes = how.encode(0..ROWS * words, |part| numbers[part].to_vec());
        let codes: Vec<f16> = codes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect();
        let decoded = |dtype| dequantized(tensor(codes.clone(), [ROWS, words]), how, dtype);
        let exact = decoded(FloatDType::F32);
        let rounded: Vec<bf16> = values(&exact).iter().map(|&x| bf16::from_f32(x)).collect();
        assert!(values::<bf16>(&decoded(FloatDType::BF16)) == rounded);
        // burn-flex's own cast rounds some of these numbers wrongly.
        let cast = <Flex as burn_backend::ops::FloatTensorOps<Flex>>::float_cast(exact, FloatDType::BF16);
        assert!(values::<bf16>(&cast) != rounded, "the numbers have a case that distinguishes the casts");
    }
}
