//! A matrix that several threads write.
//!
//! They write disjoint blocks, whose rows interleave in memory. So the matrix is shared as a pointer, and each block's owner
//! makes slices of its own elements only.

use std::marker::PhantomData;

/// A row-major matrix, or the part of one from some element on, that several threads write.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedRows<'a, T> {
    first: *mut T,
    stride: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` that only `SharedRows::slice` splits, whose callers guarantee that no two slices overlap.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Creates a matrix with rows of `stride` elements.
    pub(super) fn new(data: &'a mut [T], stride: usize) -> Self {
        Self { first: data.as_mut_ptr(), stride, borrow: PhantomData }
    }

    /// Creates a matrix with rows that start `stride` elements apart, from `first` on.
    ///
    /// # Safety
    ///
    /// While it is used, nothing else reads or writes the elements that are written through it.
    pub(super) unsafe fn from_raw(first: *mut T, stride: usize) -> Self {
        Self { first, stride, borrow: PhantomData }
    }

    /// Returns the part from (`row`, `column`) on.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        Self { first: self.first.wrapping_add(row * self.stride + column), ..self }
    }

    /// Returns the distance between rows, in elements.
    pub(super) fn stride(self) -> usize {
        self.stride
    }

    /// Returns the first element and the distance between rows, in elements.
    pub(super) fn raw_parts(self) -> (*mut T, usize) {
        (self.first, self.stride)
    }

    /// Returns elements `column..column + width` of `row`.
    ///
    /// # Safety
    ///
    /// They lie in the matrix, and nothing else reads or writes them while the slice lives.
    pub(super) unsafe fn slice<'b>(self, row: usize, column: usize, width: usize) -> &'b mut [T] {
        // SAFETY: the caller guarantees that the elements exist and are borrowed once.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride + column), width) }
    }
}
