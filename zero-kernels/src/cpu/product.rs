//! Products of strided matrices, on top of the `gemm` crate.

use gemm::Parallelism;
use rayon::prelude::*;

use super::rows::SharedRows;

/// A strided view of a matrix, such as a transpose that was never copied.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T = f32> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Creates a row-major matrix without gaps.
    ///
    /// # Panics
    ///
    /// If `data` does not have `rows * columns` elements.
    pub fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "wrong number of elements for a matrix of {rows} x {columns}");
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Creates a matrix whose element (i, j) is `data[i * row_stride + j * column_stride]`.
    ///
    /// # Panics
    ///
    /// If the last element lies outside of `data`.
    pub fn strided(data: &'a [T], rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> Self {
        if rows > 0 && columns > 0 {
            let last = (rows - 1)
                .checked_mul(row_stride)
                .zip((columns - 1).checked_mul(column_stride))
                .and_then(|(row, column)| row.checked_add(column));
            assert!(
                last.is_some_and(|last| last < data.len()),
                "a matrix of {rows} x {columns} with strides {row_stride} and {column_stride} ends beyond its {} \
                 elements",
                data.len()
            );
        }
        Self { data, rows, columns, row_stride, column_stride }
    }

    /// Returns the transpose, a view of the same elements.
    pub fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }
}

/// Fewest columns per thread. With fewer, gemm may split the depth differently, which changes bits.
const LEAST_COLUMNS: usize = 96;

/// Columns per vector: parts begin at a multiple of it.
const VECTOR: usize = 16;

/// Number of multiplications from which the columns are split.
const WORTH_SPREADING: usize = 1 << 21;

impl<T> Matrix<'_, T> {
    /// Returns `columns` of the columns, from `first` on.
    pub(super) fn columns_from(self, first: usize, columns: usize) -> Self {
        Self { data: &self.data[first * self.column_stride..], columns, ..self }
    }

    /// Returns `rows` of the rows, from `first` on.
    pub(super) fn rows_from(self, first: usize, rows: usize) -> Self {
        Self { data: &self.data[first * self.row_stride..], rows, ..self }
    }
}

impl Matrix<'_> {
    /// Returns whether the columns are contiguous and a multiple of 4 KiB apart.
    pub(super) fn has_columns_pages_apart(&self) -> bool {
        self.row_stride == 1 && self.column_stride.is_multiple_of(1 << 10)
    }
}

/// Treatment of the elements that a product is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// They are overwritten, and may be uninitialised.
    Over,
    /// The product is added to them.
    Add,
}

impl Write {
    /// Returns [`Write::Over`] for the first of several products into the same elements, [`Write::Add`] for the others.
    pub(super) fn first(first: bool) -> Self {
        if first { Self::Over } else { Self::Add }
    }
}

/// Computes `scale * a * b` into `out`, row-major without gaps.
pub(super) fn multiply(out: &mut [f32], write: Write, a: Matrix<'_>, b: Matrix<'_>, scale: f32, threads: Parallelism) {
    assert_eq!(out.len(), a.rows * b.columns, "wrong number of elements for a product of {} x {}", a.rows, b.columns);
    // SAFETY: `out` is borrowed for this call alone and holds every element, by the length just checked.
    unsafe { multiply_into(out.as_mut_ptr(), b.columns, write, a, b, scale, threads) }
}

/// Computes `scale * a * b` into the rows that start `stride` elements apart at `out`.
///
/// gemm swaps and transposes the operands of a row-major result itself, so requesting the transpose would change nothing.
///
/// # Safety
///
/// Elements `i * stride + j` from `out`, for every row i of `a` and column j of `b`, are valid for reads and writes, and
/// nothing else reads or writes them during the call.
pub(super) unsafe fn multiply_into(
    out: *mut f32,
    stride: usize,
    write: Write,
    a: Matrix<'_>,
    b: Matrix<'_>,
    scale: f32,
    threads: Parallelism,
) {
    assert_eq!(a.columns, b.rows, "the width of the left matrix is not the height of the right one");
    if let Parallelism::Rayon(threads) = threads
        && b.column_stride != 1
    {
        // gemm copies them, up to a few hundred of them on one thread.
        let parts = threads.min(b.columns / LEAST_COLUMNS);
        if parts > 1 && a.rows * b.columns * a.columns >= WORTH_SPREADING {
            // SAFETY: guaranteed by the caller; it is used in this call alone.
            let out = unsafe { SharedRows::from_raw(out, stride) };
            let begin = |part: usize| {
                if part < parts { (part * b.columns / parts).next_multiple_of(VECTOR) } else { b.columns }
            };
            (0..parts).into_par_iter().for_each(|part| {
                let first = begin(part);
                let (out, _) = out.part(0, first).raw_parts();
                let columns = b.columns_from(first, begin(part + 1) - first);
                // SAFETY: guaranteed by the caller; parts of the columns do not overlap.
                unsafe { multiply_into(out, stride, write, a, columns, scale, Parallelism::None) }
            });
            return;
        }
    }
    let [stride, a_rs, a_cs, b_rs, b_cs] =
        [stride, a.row_stride, a.column_stride, b.row_stride, b.column_stride].map(|stride| stride as isize);
    // SAFETY: a view's elements lie in its slice, which its constructors checked; the caller guarantees `out`, which is not
    // read under `Write::Over`.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            out,
            1,
            stride,
            write == Write::Add,
            a.data.as_ptr(),
            a_cs,
            a_rs,
            b.data.as_ptr(),
            b_cs,
            b_rs,
            1.0,
            scale,
            false,
            false,
            false,
            threads,
        );
    }
}
