//! Quantization of any backend's rows to 8 or 4 bit ([`crate::quantized`]) for exchange between ranks: on the device with CubeCL, otherwise
//! through the host.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::reader::try_read_sync;
use burn_std::{DType, Shape};

use crate::fallback;
use crate::kinds::STORED_AS;
use crate::quantized::{Format, Quantized};

/// Quantizes rows `[n, width]` to codes `[n, words]`, stored in 16-bit numbers that have no meaning by themselves.
pub fn to_codes<B: Backend>(x: FloatTensor<B>, format: Format) -> FloatTensor<B> {
    let [n, width] = x.shape().dims();
    let shape = Shape::new([n, format.words(width)]);
    #[cfg(feature = "cubecl")]
    if crate::cube::computes::<B>(x.dtype()) {
        let body = crate::cube::quantized::Encode(format);
        return crate::cube::any::run::<B>("quantize", vec![x], vec![(shape, STORED_AS)], body).swap_remove(0);
    }
    let device = B::float_device(&x);
    let data = try_read_sync(B::float_into_data(x)).expect("the backend reads synchronously");
    let data = data.unwrap_or_else(|error| panic!("reading the tensor to quantize failed: {error}"));
    let data = data.convert_dtype(DType::F32);
    let mut bytes = Vec::with_capacity(n * format.bytes(width));
    let rows = data.as_slice::<f32>().expect("it was converted").chunks(width.max(1));
    rows.for_each(|row| format.encode_row(row, &mut bytes));
    B::float_from_data(TensorData::from_bytes_vec(bytes, shape, STORED_AS), &device)
}

/// Dequantizes `codes` to rows `[n, how.width]` of type `dtype`.
pub fn from_codes<B: Backend>(codes: FloatTensor<B>, how: Quantized, dtype: DType) -> FloatTensor<B> {
    #[cfg(feature = "cubecl")]
    if crate::cube::computes::<B>(dtype) && codes.dtype() == STORED_AS {
        let outputs = vec![(Shape::new([codes.shape()[0], how.width]), dtype)];
        let body = crate::cube::quantized::Decode(how, dtype);
        return crate::cube::any::run::<B>("dequantize", vec![codes], outputs, body).swap_remove(0);
    }
    fallback::dequantized::<B>(codes, how, dtype.into())
}
