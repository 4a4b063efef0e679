//! The memory layout of heads.

use crate::cpu::rows::SharedRows;

/// Rows of heads: row i of sequence b begins at `data[(b * t + i) * stride]`, with head 0; sequences have t rows.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T = f32> {
    /// The elements from the first row on; they may end with the last row's d-th element.
    pub data: &'a [T],
    /// Elements between the starts of consecutive rows.
    pub stride: usize,
}

/// Output [`Rows`]; several may interleave in each row of one buffer.
#[derive(Debug)]
pub struct RowsMut<'a, T = f32> {
    pub(super) rows: SharedRows<'a, T>,
    /// Elements from the first one to the buffer's end.
    pub(super) len: usize,
    /// Elements of a row that belong to this part.
    pub(super) width: usize,
}

impl<'a, T: Copy> RowsMut<'a, T> {
    /// Creates rows that begin `stride` elements apart in their own buffer.
    pub fn new(buffer: &'a mut [T], stride: usize) -> Self {
        Self { len: buffer.len(), width: stride, rows: SharedRows::new(buffer, stride) }
    }

    /// Splits rows that hold queries, keys and values of `d` elements each into three parts.
    ///
    /// # Panics
    ///
    /// If the length of `buffer` is not a multiple of `3 * d`.
    pub fn split_qkv(buffer: &'a mut [T], d: usize) -> [Self; 3] {
        let (len, stride) = (buffer.len(), 3 * d);
        assert!(
            if d == 0 { len == 0 } else { len.is_multiple_of(stride) },
            "attention: a buffer of {len} elements is not a whole number of rows of 3 x {d}"
        );
        let rows = SharedRows::new(buffer, stride);
        [0, 1, 2].map(|part| {
            let offset = (part * d).min(len);
            // Columns `part * d..(part + 1) * d` of a row are accessed through this part only.
            Self { rows: rows.part(0, offset), len: len - offset, width: d }
        })
    }
}
