//! Where sums go, and what becomes of them on the way.

use half::bf16;

use super::Begin;
use crate::cpu::rows::SharedRows;

/// What becomes of sums.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target<'a> {
    /// They are written, or added to what is there.
    F32 { out: SharedRows<'a, f32>, add: bool },
    /// With those over the depth before and what the product begins with, they are rounded.
    Bf16 { out: SharedRows<'a, bf16>, begin: Begin<'a>, partial: Option<SharedRows<'a, f32>> },
}

impl<'a> Target<'a> {
    /// The part from (`row`, `column`) on, of a target without partial sums.
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

    /// The elements that sums over several parts of the depth need in between, of a block of so many.
    pub(super) fn partials(&self, elements: usize, parts: usize) -> Vec<f32> {
        match self {
            Self::Bf16 { .. } if parts > 1 => vec![0.0; elements],
            _ => Vec::new(),
        }
    }

    /// The target of the sums over part number `part` of `parts` of the depth, `partial` being [`Target::partials`].
    pub(super) fn over(self, partial: SharedRows<'a, f32>, part: usize, parts: usize) -> Self {
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
            Self::F32 { out, .. } => out.part(row, column).raw_parts().0.cast(),
            Self::Bf16 { out, .. } => out.part(row, column).raw_parts().0.cast(),
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
                    add(sums, &residual[row * out.stride() + column..][..width]);
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
