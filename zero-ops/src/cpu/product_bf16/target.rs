//! Where sums go, and what becomes of them on the way.
//!
//! Threads write disjoint blocks of one matrix, whose rows interleave in memory, so it is shared as a pointer; each
//! block's owner makes slices of its own elements alone.

use std::marker::PhantomData;

use half::bf16;

use super::Begin;

/// A row-major matrix, or a part of one from some element on, that several threads write.
#[derive(Debug)]
pub(super) struct Rows<'a, T> {
    first: *mut T,
    stride: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

// SAFETY: it is a `&mut [T]` that only `Rows::slice` takes apart, whose callers vouch that no two slices overlap.
unsafe impl<T: Send> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// A matrix of rows of `stride` elements.
    pub(super) fn new(data: &'a mut [T], stride: usize) -> Self {
        Self { first: data.as_mut_ptr(), stride, borrow: PhantomData }
    }

    /// The part from (`row`, `column`) on.
    fn part(self, row: usize, column: usize) -> Self {
        Self { first: self.first.wrapping_add(row * self.stride + column), ..self }
    }

    /// Its first element and the distance between its rows, in elements.
    pub(super) fn as_raw(self) -> (*mut T, usize) {
        (self.first, self.stride)
    }

    /// Elements `column..column + width` of `row`.
    ///
    /// # Safety
    ///
    /// They lie in the matrix, and nothing else reads or writes them while the slice lives.
    unsafe fn slice<'b>(self, row: usize, column: usize, width: usize) -> &'b mut [T] {
        // SAFETY: the caller vouches that the elements exist, and for their being borrowed once.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride + column), width) }
    }
}

/// What becomes of sums.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target<'a> {
    /// They are written, or added to what is there.
    F32 { out: Rows<'a, f32>, add: bool },
    /// With those over the depth before and what the product begins with, they are rounded.
    Bf16 { out: Rows<'a, bf16>, begin: Begin<'a>, partial: Option<Rows<'a, f32>> },
}

impl<'a> Target<'a> {
    /// The part from (`row`, `column`) on, of a target without partial sums.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        match self {
            Self::F32 { out, add } => Self::F32 { out: out.part(row, column), add },
            Self::Bf16 { out, begin: Begin { bias, residual }, .. } => {
                let bias = bias.map(|bias| &bias[column..]);
                let residual = residual.map(|residual| &residual[row * out.stride + column..]);
                Self::Bf16 { out: out.part(row, column), begin: Begin { bias, residual }, partial: None }
            }
        }
    }

    /// The elements that sums over several parts of the depth need in between, of a block of so many.
    pub(super) fn partials(&self, elements: usize, parts: usize) -> Vec<f32> {
        match self {
            Self::Bf16 { .. } if parts > 1 => vec![0.0; elements],
            _ => Vec::new(),
        }
    }

    /// The target of the sums over part number `part` of `parts` of the depth, `partial` being [`Target::partials`].
    pub(super) fn over(self, partial: Rows<'a, f32>, part: usize, parts: usize) -> Self {
        match self {
            Self::F32 { out, add } => Self::F32 { out, add: add || part > 0 },
            Self::Bf16 { .. } if part + 1 < parts => Self::F32 { out: partial, add: part > 0 },
            Self::Bf16 { out, begin, .. } => Self::Bf16 { out, begin, partial: (parts > 1).then_some(partial) },
        }
    }

    /// The address of an element, to fetch ahead; it need not exist.
    #[inline(always)]
    pub(super) fn address(&self, row: usize, column: usize) -> *const i8 {
        match self {
            Self::F32 { out, .. } => out.part(row, column).first.cast(),
            Self::Bf16 { out, .. } => out.part(row, column).first.cast(),
        }
    }

    /// Writes `sums` to `row`, from `column` on.
    ///
    /// # Safety
    ///
    /// The elements lie in the matrix, and nothing else reads or writes them during the call.
    #[inline(always)]
    pub(super) unsafe fn write(&self, row: usize, column: usize, sums: &mut [f32]) {
        let width = sums.len();
        match *self {
            Self::F32 { out, add } => {
                // SAFETY: the caller's promise.
                let out = unsafe { out.slice(row, column, width) };
                if add {
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += *sum);
                } else {
                    out.copy_from_slice(sums);
                }
            }
            Self::Bf16 { out, begin, partial } => {
                if let Some(partial) = partial {
                    // SAFETY: the caller's promise; partial sums have the rows and columns of the matrix.
                    let partial = unsafe { partial.slice(row, column, width) };
                    sums.iter_mut().zip(partial).for_each(|(sum, partial)| *sum += *partial);
                }
                if let Some(bias) = begin.bias {
                    add(sums, &bias[column..][..width]);
                }
                if let Some(residual) = begin.residual {
                    add(sums, &residual[row * out.stride + column..][..width]);
                }
                // SAFETY: the caller's promise.
                let out = unsafe { out.slice(row, column, width) };
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = bf16::from_f32(*sum));
            }
        }
    }
}

#[inline(always)]
fn add(sums: &mut [f32], values: &[bf16]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.to_f32());
}
