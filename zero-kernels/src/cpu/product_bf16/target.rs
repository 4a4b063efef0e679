//! The destination of sums, and their conversion on the way.

use half::bf16;

use super::Begin;
use crate::cpu::half::nearest;
use crate::cpu::rows::SharedRows;

/// A destination of sums.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target<'a> {
    /// Sums are written, or added to what is there.
    F32 { out: SharedRows<'a, f32>, add: bool },
    /// Sums are added to those of earlier parts of the depth and to `begin`, then rounded.
    Bf16 { out: SharedRows<'a, bf16>, begin: Begin<'a>, partial: Option<SharedRows<'a, f32>> },
}

impl<'a> Target<'a> {
    /// Returns the part from (`row`, `column`) on, of a target without partial sums.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        match self {
            Self::F32 { out, add } => Self::F32 { out: out.part(row, column), add },
            Self::Bf16 { out, begin: Begin { bias, residual }, .. } => {
                let bias = bias.map(|bias| &bias[column..]);
                let residual = residual.map(|residual| &residual[row * out.stride() + column..]);
                Self::Bf16 { out: out.part(row, column), begin: Begin { bias, residual }, partial: None }
            }
        }
    }

    /// Returns the buffer that a block of `elements` needs for sums over several `parts` of the depth; empty if none is needed.
    pub(super) fn partials(&self, elements: usize, parts: usize) -> Vec<f32> {
        match self {
            Self::Bf16 { .. } if parts > 1 => vec![0.0; elements],
            _ => Vec::new(),
        }
    }

    /// Returns the target of the sums over part `part` of `parts` of the depth; `partial` is [`Target::partials`].
    pub(super) fn over(self, partial: SharedRows<'a, f32>, part: usize, parts: usize) -> Self {
        match self {
            Self::F32 { out, add } => Self::F32 { out, add: add || part > 0 },
            Self::Bf16 { .. } if part + 1 < parts => Self::F32 { out: partial, add: part > 0 },
            Self::Bf16 { out, begin, .. } => Self::Bf16 { out, begin, partial: (parts > 1).then_some(partial) },
        }
    }

    /// Prefetches `rows` of `columns` from an element on for [`Target::write`], on CPUs that can. The elements need not exist.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize, column: usize, rows: usize, columns: usize) {
        #[cfg(target_arch = "x86_64")]
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        let ((first, stride), size): ((*const i8, _), _) = match self {
            Self::F32 { out, .. } => {
                let (first, stride) = out.part(row, column).raw_parts();
                ((first.cast(), stride), size_of::<f32>())
            }
            Self::Bf16 { out, .. } => {
                let (first, stride) = out.part(row, column).raw_parts();
                ((first.cast(), stride), size_of::<bf16>())
            }
        };
        #[cfg(target_arch = "x86_64")]
        for row in 0..rows {
            // The last byte lies in its own cache line if rows are not aligned.
            for byte in (0..columns * size).step_by(64).chain([columns * size - 1]) {
                // SAFETY: every x86-64 has the instruction, which takes any address.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(first.wrapping_add(row * stride * size + byte)) };
            }
        }
    }

    /// Returns the memory of the sums from an element on, the distance of its rows, and whether sums are added to it; `None` if they are
    /// rounded.
    #[inline(always)]
    pub(super) fn rows(&self, row: usize, column: usize) -> Option<(*mut f32, usize, bool)> {
        let Self::F32 { out, add } = self else { return None };
        let (first, stride) = out.part(row, column).raw_parts();
        Some((first, stride, *add))
    }

    /// Writes `sums` to `row`, starting at `column`.
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
                    add(sums, &residual[row * out.stride() + column..][..width]);
                }
                // SAFETY: the caller's promise.
                let out = unsafe { out.slice(row, column, width) };
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = nearest(*sum));
            }
        }
    }
}

#[inline(always)]
fn add(sums: &mut [f32], values: &[bf16]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.to_f32());
}
