//! Products with a quantized weight (see [`crate::quantized`]).
//!
//! For a few rows, the weight is read once, without a copy, and each block is used for all rows while it is in registers: a
//! token then costs the bytes of the quantized weight. For more rows, the weight is dequantized first.

use std::ops::Range;

use super::check_rows;
use super::parallel::{TASK, spread};
use super::reduce::add;
use crate::quantized::{BLOCK, Quantized};

/// The most rows that [`forward`] accepts.
pub const MAX_ROWS: usize = 16;

/// Blocks of a row of the weight per task.
const PART: usize = 4;

/// Decodes quantized rows into the weight `[_, width]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn dequantized(how: Quantized, rows: &[u8], out: &mut [f32]) {
    let bytes = 2 * how.format.words(how.width);
    let d = rows.len() / bytes.max(1);
    check_rows("dequantized", "rows", rows.len(), d, bytes);
    check_rows("dequantized", "out", out.len(), d, how.width);
    let part = (TASK / how.width.max(1)).max(1);
    let tasks: Vec<_> = rows.chunks(part * bytes).zip(out.chunks_mut(part * how.width.max(1))).collect();
    spread(d * how.width, tasks, |(rows, out)| widen(how, rows, out));
}

/// Computes `x * w + bias + residual` for up to [`MAX_ROWS`] rows.
///
/// # Shapes
///
/// `x`: `[n, d]`; `w`: quantised `[d, f]`; `bias`: `[f]`; `residual`, `out`: `[n, f]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn forward(how: Quantized, x: &[f32], w: &[u8], bias: Option<&[f32]>, residual: Option<&[f32]>, out: &mut [f32]) {
    let f = how.width;
    let n = out.len() / f.max(1);
    let bytes = 2 * how.format.words(f);
    let d = w.len() / bytes.max(1);
    assert!(n <= MAX_ROWS, "quantized: {n} rows, expected at most {MAX_ROWS}");
    check_rows("quantized", "w", w.len(), d, bytes);
    check_rows("quantized", "x", x.len(), n, d);
    check_rows("quantized", "out", out.len(), n, f);
    check_rows("quantized", "bias", bias.map_or(f, <[f32]>::len), 1, f);
    check_rows("quantized", "residual", residual.map_or(n * f, <[f32]>::len), n, f);
    // One task per range of columns, split at blocks; the last range is padded.
    let width = PART * BLOCK;
    let mut parts = vec![0f32; f.div_ceil(width) * n * width];
    let tasks: Vec<_> = parts.chunks_mut((n * width).max(1)).enumerate().collect();
    spread(d * f, tasks, |(part, sums)| {
        let first = part * PART * how.format.block_bytes();
        let last = (first + PART * how.format.block_bytes()).min(bytes);
        add_products(how, x, w, first..last, sums);
    });
    for (part, sums) in parts.chunks_exact((n * width).max(1)).enumerate() {
        let columns = part * width..f.min((part + 1) * width);
        for (row, sums) in sums.chunks_exact(width).enumerate() {
            let out = &mut out[row * f..][columns.clone()];
            out.copy_from_slice(&sums[..columns.len()]);
            if let Some(residual) = residual {
                add(&residual[row * f..][columns.clone()], out);
            }
            if let Some(bias) = bias {
                add(&bias[columns.clone()], out);
            }
        }
    }
}

vectorised! {
    /// Decodes quantized rows.
    fn widen<'a>(how: Quantized, rows: &'a [u8], out: &'a mut [f32]) {
        let mut decoded = [0f32; BLOCK];
        let bytes = 2 * how.format.words(how.width);
        for (row, out) in rows.chunks_exact(bytes).zip(out.chunks_exact_mut(how.width)) {
            for (block, out) in row.chunks_exact(how.format.block_bytes()).zip(out.chunks_mut(BLOCK)) {
                how.format.decode(block, &mut decoded);
                out.copy_from_slice(&decoded[..out.len()]);
            }
        }
    }

    /// Adds the products of the rows of `x` `[n, d]` with the blocks in bytes `part` of each row of `w` to `sums`
    /// `[n, PART * BLOCK]`.
    fn add_products<'a>(
        how: Quantized,
        x: &'a [f32],
        w: &'a [u8],
        part: Range<usize>,
        sums: &'a mut [f32],
    ) {
        let bytes = 2 * how.format.words(how.width);
        let d = w.len() / bytes;
        let mut decoded = [0f32; BLOCK];
        for (i, row) in w.chunks_exact(bytes).enumerate() {
            for (at, block) in row[part.clone()].chunks_exact(how.format.block_bytes()).enumerate() {
                how.format.decode(block, &mut decoded);
                for (x, sums) in x.chunks_exact(d).zip(sums.chunks_exact_mut(PART * BLOCK)) {
                    let (x, sums) = (x[i], &mut sums[at * BLOCK..][..BLOCK]);
                    for j in 0..BLOCK {
                        sums[j] += x * decoded[j];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, numbers, same_bits, wide};
    use crate::quantized::Format;

    #[test]
    fn agrees_with_f64_on_any_number_of_threads() {
        for (_, format) in Format::NAMES {
            for (n, d, f) in [(1, 1, 1), (2, 7, 64), (16, 33, 300), (3, 200, 513)] {
                let (how, x, w) = (Quantized { format, width: f }, numbers(n * d, 1), numbers(d * f, 2));
                let packed = how.encode(0..d * format.words(f), |range| w[range].to_vec());
                let mut weight = vec![f32::NAN; d * f];
                dequantized(how, &packed, &mut weight);
                assert_eq!(weight, how.decode(&packed));
                let (x64, w64) = (wide(&x), wide(&weight));
                let product: Vec<f64> =
                    (0..n * f).map(|i| (0..d).map(|l| x64[i / f * d + l] * w64[l * f + i % f]).sum()).collect();
                let (bias, residual) = (numbers(f, 3), numbers(n * f, 4));
                for (bias, residual) in [(None, None), (Some(&bias), None), (Some(&bias), Some(&residual))] {
                    let got = same_bits(|| {
                        let mut out = vec![f32::NAN; n * f];
                        forward(how, &x, &packed, bias.map(|x| &x[..]), residual.map(|x| &x[..]), &mut out);
                        out
                    });
                    let mut expected = product.clone();
                    for (i, expected) in expected.iter_mut().enumerate() {
                        *expected += bias.map_or(0.0, |bias| f64::from(bias[i % f]));
                        *expected += residual.map_or(0.0, |residual| f64::from(residual[i]));
                    }
                    assert_close("out", &got, &expected, 1e-5);
                }
            }
        }
    }
}
