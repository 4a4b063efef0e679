//! Memory that several transfers fill concurrently, each its own range, before it becomes a buffer.

use std::ptr::NonNull;

use super::{Buffer, DType};

/// A buffer whose elements have not been received yet.
///
/// Whoever fills it holds an `Arc`, so it stays in place for as long as a link may write to it, even if the operation
/// has been abandoned.
#[derive(Debug)]
pub(crate) struct Landing {
    /// Empty, with capacity for all elements.
    buffer: Buffer,
    base: NonNull<u8>,
    elements: usize,
}

// SAFETY: the memory is the buffer's and holds plain numbers. It is reached only through `fill` and `target`, whose callers
// guarantee ranges that do not overlap, and through `into_buffer`, which owns it.
unsafe impl Send for Landing {}
// SAFETY: as above.
unsafe impl Sync for Landing {}

impl Landing {
    /// Allocates memory for `elements` elements.
    pub(crate) fn new(dtype: DType, elements: usize) -> Self {
        let mut buffer = Buffer::with_capacity(dtype, elements);
        let base = NonNull::new(buffer.as_mut_ptr()).expect("a vector's pointer is never null");
        Self { buffer, base, elements }
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.elements * self.buffer.dtype().size()
    }

    /// Copies `from` to byte offset `begin`.
    ///
    /// # Safety
    ///
    /// Nobody else writes to or reads this range meanwhile.
    ///
    /// # Panics
    ///
    /// If it does not fit.
    pub(crate) unsafe fn fill(&self, begin: usize, from: &[u8]) {
        assert!(begin + from.len() <= self.bytes(), "a part lies inside its buffer");
        // SAFETY: the range is inside the allocation (above) and the caller's alone; `from` cannot overlap it, as no
        // reference to this memory exists before `into_buffer`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.base.as_ptr().add(begin), from.len()) }
    }

    /// Returns the address at which a link may write the bytes of `range`.
    ///
    /// # Panics
    ///
    /// If it does not fit.
    pub(crate) fn target(&self, range: &std::ops::Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.bytes(), "a part lies inside its buffer");
        // SAFETY: inside the allocation, or one past its end.
        unsafe { self.base.as_ptr().add(range.start) }
    }

    /// Converts the memory into a buffer.
    ///
    /// # Safety
    ///
    /// Every byte has been written.
    pub(crate) unsafe fn into_buffer(self) -> Buffer {
        let Self { mut buffer, elements, .. } = self;
        // SAFETY: the capacity suffices, the caller guarantees that all have been written, and every bit pattern is a valid number.
        unsafe { buffer.set_len(elements) };
        buffer
    }
}

/// Splits `bytes` bytes into the ranges of messages of at most `chunk` bytes each; there are none for 0 bytes.
pub(crate) fn chunks(bytes: usize, chunk: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..bytes).step_by(chunk.max(1)).map(move |begin| begin..bytes.min(begin.saturating_add(chunk.max(1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_byte_once() {
        for (bytes, chunk) in [(0, 4), (1, 4), (4, 4), (5, 4), (12, 4), (7, 1), (3, usize::MAX)] {
            let mut next = 0;
            for range in chunks(bytes, chunk) {
                assert_eq!(range.start, next);
                assert!(!range.is_empty() && range.len() <= chunk);
                next = range.end;
            }
            assert_eq!(next, bytes);
        }
        assert_eq!(chunks(5 << 30, 1 << 30).count(), 5);
        assert_eq!(chunks((5 << 30) + 1, 1 << 30).last(), Some(5 << 30..(5 << 30) + 1));
    }

    #[test]
    fn what_is_filled_becomes_a_buffer() {
        let landing = Landing::new(DType::F32, 3);
        // SAFETY: one thread; the ranges do not overlap and cover all.
        let buffer = unsafe {
            landing.fill(4, Buffer::F32(vec![2.0, 3.0]).as_bytes());
            landing.fill(0, Buffer::F32(vec![1.0]).as_bytes());
            landing.into_buffer()
        };
        assert_eq!(buffer, Buffer::F32(vec![1.0, 2.0, 3.0]));
        drop(Landing::new(DType::F64, 5));
    }
}
