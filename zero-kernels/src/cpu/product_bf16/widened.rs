//! The product where the processor has no instruction for it: block by block, widened to f32 and multiplied by `gemm`.

use std::ops::Range;

use gemm::Parallelism;

use super::target::Target;
use super::{MatrixBf16, parts, spread};
use crate::cpu::product::{Matrix, Write, multiply_into};

/// Rows, columns and depth of a block: three of them widened are 12 MiB.
const BLOCK: usize = 1024;

/// `a * b` into `target`.
pub(super) fn multiply(target: Target<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>, threads: Parallelism) {
    let depth_parts = a.columns.div_ceil(BLOCK).max(1);
    let (mut wide_a, mut wide_b, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for rows in parts(a.rows, BLOCK) {
        for columns in parts(b.columns, BLOCK) {
            let (n, m) = (rows.len(), columns.len());
            let target = target.part(rows.start, columns.start);
            let (out, stride, add) = match target {
                Target::F32 { out, add } => (out.raw_parts().0, out.raw_parts().1, add),
                Target::Bf16 { .. } => {
                    sums.resize(n * m, 0f32);
                    (sums.as_mut_ptr(), m, false)
                }
            };
            for part in 0..depth_parts {
                let depth = part * BLOCK..a.columns.min((part + 1) * BLOCK);
                let a = widen(a, rows.clone(), depth.clone(), &mut wide_a, threads);
                let b = widen(b, depth, columns.clone(), &mut wide_b, threads);
                // SAFETY: the block lies in the target's matrix, or in `sums`, which is as large; both are borrowed by
                // this function alone.
                unsafe { multiply_into(out, stride, Write::first(!add && part == 0), a, b, 1.0, threads) };
            }
            if let Target::Bf16 { .. } = target {
                let rows: Vec<_> = sums[..n * m].chunks_exact_mut(m).enumerate().collect();
                // SAFETY: every row is written by one task, and only this function knows the target.
                spread(n * m, threads, rows, |(row, sums)| unsafe { target.write(row, 0, sums) });
            }
        }
    }
}

/// A block of `from` in f32, in `buffer`, its contiguous dimension kept.
fn widen<'a>(
    from: MatrixBf16<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
    buffer: &'a mut Vec<f32>,
    threads: Parallelism,
) -> Matrix<'a> {
    if from.row_stride == 1 && from.column_stride != 1 {
        return widen(from.transposed(), columns, rows, buffer, threads).transposed();
    }
    let (n, m) = (rows.len(), columns.len());
    buffer.resize(n * m, 0.0);
    let lines: Vec<_> = buffer.chunks_exact_mut(m.max(1)).enumerate().collect();
    spread(n * m, threads, lines, |(row, line)| {
        let begin = (rows.start + row) * from.row_stride + columns.start * from.column_stride;
        if from.column_stride == 1 {
            line.iter_mut().zip(&from.data[begin..]).for_each(|(wide, value)| *wide = value.to_f32());
        } else {
            let at = |column| from.data[begin + column * from.column_stride];
            line.iter_mut().enumerate().for_each(|(column, wide)| *wide = at(column).to_f32());
        }
    });
    Matrix::new(buffer, n, m)
}
