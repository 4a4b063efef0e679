//! A matrix that several threads write.
//!
//! They write disjoint blocks of it, whose rows interleave in memory, so it is shared as a pointer; each block's owner makes
//! slices of its own elements alone.

use std::marker::PhantomData;

/// A row-major matrix, or a part of one from some element on, that several threads write.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedRows<'a, T> {
    first: *mut T,
    stride: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` that only `SharedRows::slice` takes apart, whose callers vouch that no two slices overlap.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// A matrix of rows of `stride` elements.
    pub(super) fn new(data: &'a mut [T], stride: usize) -> Self {
        Self { first: data.as_mut_ptr(), stride, borrow: PhantomData }
    }

    /// Rows that start `stride` elements apart from `first` on.
    ///
    /// # Safety
    ///
    /// Nothing else reads or writes what is written through it, while it is used.
    pub(super) unsafe fn from_raw(first: *mut T, stride: usize) -> Self {
        Self { first, stride, borrow: PhantomData }
    }

    /// The part from (`row`, `column`) on.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        Self { first: self.first.wrapping_add(row * self.stride + column), ..self }
    }

    /// The distance between its rows, in elements.
    pub(super) fn stride(self) -> usize {
        self.stride
    }

    /// Its first element and the distance between its rows, in elements.
    pub(super) fn raw_parts(self) -> (*mut T, usize) {
        (self.first, self.stride)
    }

    /// Elements `column..column + width` of `row`.
    ///
    /// # Safety
    ///
    /// They lie in the matrix, and nothing else reads or writes them while the slice lives.
    pub(super) unsafe fn slice<'b>(self, row: usize, column: usize, width: usize) -> &'b mut [T] {
        // SAFETY: the caller vouches that the elements exist, and for their being borrowed once.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride + column), width) }
    }
}
