//! Borrowed numbers of 32 or 16 bits.

use crate::cpu::half::Half;
use crate::cpu::norm;

/// Borrowed elements of a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [half::f16]),
    /// bfloat16.
    Bf16(&'a [half::bf16]),
}

impl Elements<'_> {
    /// Returns the elements `range`.
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Elements::F32(x) => Elements::F32(&x[range]),
            Elements::F16(x) => Elements::F16(&x[range]),
            Elements::Bf16(x) => Elements::Bf16(&x[range]),
        }
    }

    /// Converts the elements to fp32 in `to`, which has the same length.
    pub fn widen_into(self, to: &mut [f32]) {
        match self {
            Elements::F32(x) => to.copy_from_slice(x),
            Elements::F16(x) => Half::widen(x, to),
            Elements::Bf16(x) => Half::widen(x, to),
        }
    }

    /// Returns the sum of the elements' squares, in one pass.
    pub fn sum_of_squares(self) -> f64 {
        match self {
            Elements::F32(x) => norm::sum_of_squares(x),
            Elements::F16(x) => norm::sum_of_squares_of(x),
            Elements::Bf16(x) => norm::sum_of_squares_of(x),
        }
    }
}
