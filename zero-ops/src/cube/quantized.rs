//! Quantization to rows in 8 or 4 bit ([`crate::quantized`]), and dequantization.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::any::Body;
use super::rows::{address_type, cubes, dims};
use super::tensor::{OnCube, empty, launch, packed, run};
use crate::kinds::STORED_AS;
use crate::quantized::{BLOCK, Format, NF4, Quantized};

/// Number of units of a cube.
const UNITS: usize = 256;

/// Returns the number that a 4-bit code represents, relative to the scale.
#[cube]
fn of_four_bits(code: u32, #[comptime] format: Format) -> f32 {
    let mut value = 0.0f32;
    if comptime!(format == Format::Nf4) {
        #[unroll]
        for k in 0..16u32 {
            let at = comptime!(NF4[k as usize]);
            value = select(code == k, at.runtime(), value);
        }
    } else {
        value = f32::cast_from(code) - 8.0f32;
    }
    value
}

/// `rows`: words of 32 bit, blocks of `words` each; `out`: `[_, width]`. A unit decodes one word of a block's codes.
#[cube(launch_unchecked, address_type = "dynamic")]
fn dequantize_kernel<E: Float>(
    rows: &Array<u32>,
    out: &mut Array<E>,
    blocks: usize,
    blocks_per_row: usize,
    width: usize,
    #[comptime] format: Format,
    #[define(E)] _dtype: StorageType,
) {
    let words = comptime!(format.block_bytes() / 4);
    let each = comptime!(words - 1);
    let mut unit = CUBE_POS * UNITS.comptime() + UNIT_POS as usize;
    while unit < blocks * each {
        let (block, word) = (unit / each, unit % each);
        let scale = f32::reinterpret(rows[block * words]);
        let codes = rows[block * words + 1 + word];
        let column = block % blocks_per_row * BLOCK.comptime();
        let start = block / blocks_per_row * width;
        #[unroll]
        for i in 0..4u32 {
            let byte = (codes >> comptime!(8 * i)) & 255u32;
            let at = column + word * 4 + comptime!(i as usize);
            if comptime!(format == Format::Int8) {
                if at < width {
                    // Sign extension of 8 bit.
                    let value = f32::cast_from(byte) - select(byte > 127u32, 256.0f32, 0.0f32);
                    out[start + at] = E::cast_from(value * scale);
                }
            } else {
                if at < width {
                    out[start + at] = E::cast_from(of_four_bits(byte & 15u32, format) * scale);
                }
                let above = at + comptime!(BLOCK / 2);
                if above < width {
                    out[start + above] = E::cast_from(of_four_bits(byte >> 4u32, format) * scale);
                }
            }
        }
        unit += CUBE_COUNT * UNITS.comptime();
    }
}

/// Returns a launch of `wanted` units or, if that is too many, of the maximum, with several items per unit.
fn units(wanted: usize) -> (CubeCount, CubeDim) {
    (CubeCount::new_1d(cubes(wanted.div_ceil(UNITS)) as u32), CubeDim::new_1d(UNITS as u32))
}

fn made<R: CubeRuntime>(rows: CubeTensor<R>, how: Quantized, dtype: DType) -> CubeTensor<R> {
    let ([d, _], width) = (dims(&rows), how.width);
    let out = empty(&rows, [d, width], dtype);
    if d * width == 0 {
        return out;
    }
    let rows = packed(rows);
    let (per_row, words) = (width.div_ceil(BLOCK), how.format.block_bytes() / 4);
    let (count, dim) = units(d * per_row * (words - 1));
    let address = address_type(&[&rows, &out]);
    // SAFETY: units read the blocks of `d` rows, and write columns below `width` of rows below `d`. The 16-bit numbers in which rows are
    // stored have no meaning: they are read as 32-bit words, and blocks are multiples of these.
    unsafe {
        launch! {
            dequantize_kernel on rows.client, (count, dim, address),
            [rows, out.clone()],
            d * per_row, per_row, width, how.format, dtype.into()
        }
    }
    out
}

/// Returns the code of a number relative to its block's scale.
#[cube]
fn code_of(at: f32, #[comptime] format: Format) -> u32 {
    let mut code = 0u32;
    if comptime!(format == Format::Nf4) {
        #[unroll]
        for k in 1..16u32 {
            let middle = comptime!((NF4[k as usize - 1] + NF4[k as usize]) / 2.0);
            code += select(at > middle.runtime(), 1u32, 0u32);
        }
    } else {
        // The addition leaves no bits for a fraction: it rounds to nearest, ties to even.
        let most = if comptime!(format == Format::Int8) { 127.0f32 } else { 7.0f32 };
        let shifted = clamp(at, -most, most) + SHIFT.runtime();
        let mask = if comptime!(format == Format::Int8) { 255u32 } else { 15u32 };
        let from = if comptime!(format == Format::Int8) { 0u32 } else { 8u32 };
        code = (u32::reinterpret(shifted) + from - SHIFT.comptime().to_bits()) & mask;
    }
    code
}

/// 1.5 * 2^23.
const SHIFT: f32 = 12_582_912.0;
/// The bits of infinity. Those of finite magnitudes are smaller and in the same order.
const INFINITE: u32 = 0x7f80_0000;

/// `x`: `[_, width]`; `rows`: words of 32 bit, blocks of `words` each. A unit encodes one block.
#[cube(launch_unchecked, address_type = "dynamic")]
fn quantize_kernel<E: Float>(
    x: &Array<E>,
    rows: &mut Array<u32>,
    blocks: usize,
    blocks_per_row: usize,
    width: usize,
    #[comptime] format: Format,
    #[define(E)] _dtype: StorageType,
) {
    let mut block = CUBE_POS * UNITS.comptime() + UNIT_POS as usize;
    while block < blocks {
        let column = block % blocks_per_row * BLOCK.comptime();
        let start = block / blocks_per_row * width + column;
        let length = min(width - column, BLOCK.comptime());
        let mut largest = 0u32;
        for i in 0..length {
            largest = max(largest, u32::reinterpret(f32::cast_from(x[start + i])) & 0x7fff_ffffu32);
        }
        let steps = match format {
            Format::Int8 => 127.0f32,
            Format::Int4 => 7.0f32,
            Format::Nf4 => 1.0f32,
        };
        let not_finite = largest >= INFINITE.comptime();
        let scale = f32::reinterpret(largest) / steps;
        let words = comptime!(format.block_bytes() / 4);
        rows[block * words] = select(not_finite, 0x7fc0_0000u32, u32::reinterpret(scale));
        // Nothing is divided by a scale of zero or NaN.
        let divides = !not_finite && scale > 0.0f32;
        for word in 0..comptime!(words - 1) {
            let mut codes = 0u32;
            #[unroll]
            for i in 0..4u32 {
                let at = word * 4 + comptime!(i as usize);
                let mut value = 0.0f32;
                if divides && at < length {
                    value = f32::cast_from(x[start + at]) / scale;
                }
                codes |= code_of(value, format) << comptime!(8 * i);
                if comptime!(format != Format::Int8) {
                    let above = at + comptime!(BLOCK / 2);
                    let mut value = 0.0f32;
                    if divides && above < length {
                        value = f32::cast_from(x[start + above]) / scale;
                    }
                    codes |= code_of(value, format) << comptime!(8 * i + 4);
                }
            }
            rows[block * words + 1 + word] = codes;
        }
        block += CUBE_COUNT * UNITS.comptime();
    }
}

fn rows_of<R: CubeRuntime>(x: CubeTensor<R>, format: Format) -> CubeTensor<R> {
    let [n, width] = dims(&x);
    let out = empty(&x, [n, format.words(width)], STORED_AS);
    if n * width == 0 {
        return out;
    }
    let (dtype, x, per_row) = (x.dtype, packed(x), width.div_ceil(BLOCK));
    let ((count, dim), address) = (units(n * per_row), address_type(&[&x, &out]));
    // SAFETY: units read columns below `width` of rows below `n`, and write the blocks of the same rows.
    unsafe {
        launch! {
            quantize_kernel on x.client, (count, dim, address),
            [x, out.clone()],
            n * per_row, per_row, width, format, dtype.into()
        }
    }
    out
}

/// [`to_codes`](crate::to_codes) on a device.
pub(crate) struct Encode(pub(crate) Format);

impl Body for Encode {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        inputs.into_iter().map(|x| rows_of(x, self.0)).collect()
    }
}

/// [`from_codes`](crate::from_codes) on a device.
pub(crate) struct Decode(pub(crate) Quantized, pub(crate) DType);

impl Body for Decode {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        inputs.into_iter().map(|rows| made(rows, self.0, self.1)).collect()
    }
}

/// Implements [`dequantized`](crate::FusedBackend::dequantized).
pub(crate) fn dequantized<T: OnCube>(rows: T, how: Quantized, dtype: DType) -> T {
    let outputs = [(Shape::from([rows.shape()[0], how.width]), dtype)];
    let [out] = run("dequantize", [rows], None, outputs, move |[rows], _| [made(rows, how, dtype)]);
    out
}

compiled! {
    for (dtype, (_, format)) in TYPES.into_iter().flat_map(|dtype| Format::NAMES.map(|named| (dtype, named))) {
        let how = Quantized { format, width: 1600 };
        made(tensor([64, format.words(1600)], STORED_AS), how, dtype);
        rows_of(tensor([64, 1600], dtype), format);
    }
}
