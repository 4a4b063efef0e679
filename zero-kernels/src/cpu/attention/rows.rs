//! Where heads lie.

use crate::cpu::rows::SharedRows;

/// Rows of heads: row i of sequence b begins at `data[(b * t + i) * stride]`, for t rows a sequence, with head 0.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// From the first row on; it may end with the last row's d-th element.
    pub data: &'a [f32],
    /// Elements from a row to the next.
    pub stride: usize,
}

/// [`Rows`] that are written; several may take turns in each row of one buffer.
#[derive(Debug)]
pub struct RowsMut<'a> {
    pub(super) rows: SharedRows<'a, f32>,
    /// Elements from the first one to the buffer's end.
    pub(super) len: usize,
    /// Elements of a row that are this one's.
    pub(super) width: usize,
}

impl<'a> RowsMut<'a> {
    /// Rows that begin `stride` elements apart in a buffer of their own.
    pub fn new(buffer: &'a mut [f32], stride: usize) -> Self {
        Self { len: buffer.len(), width: stride, rows: SharedRows::new(buffer, stride) }
    }

    /// The three parts of rows that hold queries, keys and values of `d` elements each.
    ///
    /// # Panics
    ///
    /// When `buffer` is not whole rows of `3 * d`.
    pub fn split_qkv(buffer: &'a mut [f32], d: usize) -> [Self; 3] {
        let (len, stride) = (buffer.len(), 3 * d);
        assert!(
            if d == 0 { len == 0 } else { len.is_multiple_of(stride) },
            "attention: a buffer of {len} elements is not whole rows of 3 x {d}"
        );
        let rows = SharedRows::new(buffer, stride);
        [0, 1, 2].map(|part| {
            let offset = (part * d).min(len);
            // Columns `part * d..(part + 1) * d` of a row are reached through this part only.
            Self { rows: rows.part(0, offset), len: len - offset, width: d }
        })
    }
}
