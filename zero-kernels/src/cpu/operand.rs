//! Operand types of products with results in f32, for kernels that round what they have computed to operands.

use gemm::Parallelism;
use half::bf16;

use super::half::{Half, Number};
use super::linear::multiply_rows;
use super::parallel::gemm_threads;
use super::product::{Matrix, Write, multiply};
use super::product_bf16::{self, MatrixBf16, Out};

/// An operand type of products.
pub trait Operand: Number {
    /// Computes `a b`, and adds it to `out` or overwrites `out`.
    #[doc(hidden)]
    fn product(out: &mut [f32], write: Write, a: Matrix<'_, Self>, b: Matrix<'_, Self>);
    /// Computes `a b`, rounded to operands.
    #[doc(hidden)]
    fn product_rounded(out: &mut [Self], a: Matrix<'_, Self>, b: Matrix<'_, Self>);
    /// Computes `a b` on this thread. Returns a factor, by which the caller multiplies the result to get that of `scale a b`.
    #[doc(hidden)]
    fn product_here(out: &mut [f32], write: Write, a: Matrix<'_, Self>, b: Matrix<'_, Self>, scale: f32) -> f32;
    /// Most logits of cross-entropy per chunk, unless that gives too few rows.
    #[doc(hidden)]
    const CHUNK: usize;
    /// Converts numbers to operands in place, at the start of the row's memory.
    #[doc(hidden)]
    fn round(row: &mut [f32]);
    /// Returns the rows of `columns` operands that [`Operand::round`] has made.
    #[doc(hidden)]
    fn rounded(rows: &[f32], columns: usize) -> Matrix<'_, Self>;
}

impl Operand for f32 {
    // 32 MiB. Twice that was 7 % faster for 255 rows and a vocabulary of 50257, half of it 14 % slower.
    const CHUNK: usize = 8 << 20;

    fn product(out: &mut [f32], write: Write, a: Matrix<'_>, b: Matrix<'_>) {
        multiply_rows(out, write, a, b);
    }

    fn product_rounded(out: &mut [f32], a: Matrix<'_>, b: Matrix<'_>) {
        Self::product(out, Write::Over, a, b);
    }

    fn product_here(out: &mut [f32], write: Write, a: Matrix<'_>, b: Matrix<'_>, scale: f32) -> f32 {
        multiply(out, write, a, b, scale, Parallelism::None);
        1.0
    }

    fn round(_: &mut [f32]) {}

    fn rounded(rows: &[f32], columns: usize) -> Matrix<'_> {
        Matrix::new(rows, rows.len() / columns, columns)
    }
}

impl Operand for bf16 {
    // 52 MiB: 256 rows and a vocabulary of 50257. Each chunk reads and writes the gradient of the weights, which takes
    // longer than its products.
    const CHUNK: usize = 13 << 20;

    fn product(out: &mut [f32], write: Write, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
        product_bf16::multiply(Out::F32 { data: out, add: write == Write::Add }, a, b, gemm_threads());
    }

    fn product_rounded(out: &mut [bf16], a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
        product_bf16::multiply(Out::Bf16 { data: out, begin: None }, a, b, gemm_threads());
    }

    fn product_here(out: &mut [f32], write: Write, a: MatrixBf16<'_>, b: MatrixBf16<'_>, scale: f32) -> f32 {
        product_bf16::multiply(Out::F32 { data: out, add: write == Write::Add }, a, b, Parallelism::None);
        scale
    }

    fn round(row: &mut [f32]) {
        let mut rounded = [bf16::ZERO; 256];
        for begin in (0..row.len()).step_by(rounded.len()) {
            let block = begin..row.len().min(begin + rounded.len());
            let rounded = &mut rounded[..block.len()];
            Half::narrow(&row[block], rounded);
            // SAFETY: the row has twice the bytes that its numbers have when rounded, and those that are overwritten have been read.
            unsafe {
                row.as_mut_ptr().cast::<bf16>().add(begin).copy_from_nonoverlapping(rounded.as_ptr(), rounded.len())
            };
        }
    }

    fn rounded(rows: &[f32], columns: usize) -> MatrixBf16<'_> {
        // SAFETY: a number has the memory of two operands and a stricter alignment, and every pattern of bits is an operand.
        let halves = unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<bf16>(), 2 * rows.len()) };
        MatrixBf16::strided(halves, rows.len() / columns, columns, 2 * columns, 1)
    }
}
