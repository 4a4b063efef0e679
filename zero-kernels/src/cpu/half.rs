//! Conversions of slices between f32 and 16 bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::parallel::{TASK, spread};
use super::{buffer, buffer_of};

/// A float type for which any bits are a valid value, so that uninitialised memory can be used.
///
/// # Safety
///
/// Any bits must be a valid value.
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    /// Zero.
    #[doc(hidden)]
    const ZERO: Self;
}

// SAFETY: any bits are a 32-bit float.
unsafe impl Plain for f32 {
    const ZERO: Self = 0.0;
}

// SAFETY: any bits are a bfloat16.
unsafe impl Plain for bf16 {
    const ZERO: Self = bf16::ZERO;
}

// SAFETY: any bits are a half-precision float.
unsafe impl Plain for f16 {
    const ZERO: Self = f16::ZERO;
}

/// A float that loops load and store one by one, and compute with in fp32. The compiler vectorises such loops, but not for f16.
pub trait Number: Plain {
    /// Converts to fp32.
    fn load(self) -> f32;
    /// Converts from fp32, rounding to nearest even.
    fn store(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        wide(self)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        nearest(value)
    }
}

/// A 16-bit float.
pub trait Half: Plain {
    /// Converts equally long slices.
    #[doc(hidden)]
    fn widen(from: &[Self], to: &mut [f32]);
    /// Converts equally long slices, rounding to nearest even.
    #[doc(hidden)]
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Half for bf16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        widen_bf16(from, to);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        narrow_bf16(from, to);
    }
}

impl Half for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

vectorised! {
    fn widen_bf16<'a>(from: &'a [bf16], to: &'a mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = wide(*from));
    }

    fn narrow_bf16<'a>(from: &'a [f32], to: &'a mut [bf16]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = nearest(*from));
    }
}

/// Converts like [`bf16::to_f32`], without its branches.
#[inline(always)]
pub(crate) fn wide(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Converts like [`bf16::from_f32`], without its branches, so that loops are vectorised.
#[inline(always)]
pub(crate) fn nearest(value: f32) -> bf16 {
    let bits = value.to_bits();
    // Half of the last place that is kept, less one if that place is even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A quiet NaN: rounding could turn a NaN into an infinity.
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { nan } else { rounded } as u16)
}

/// Converts `from` into a new vector.
pub fn widened<H: Half>(from: &[H]) -> Vec<f32> {
    let mut to = buffer(from.len());
    let tasks = from.chunks(TASK).zip(to.chunks_mut(TASK)).collect();
    spread(from.len(), tasks, |(from, to)| H::widen(from, to));
    to
}

/// Converts `from` into `to`, rounding to nearest even.
///
/// # Panics
///
/// If the lengths differ.
pub fn narrow_into<H: Half>(from: &[f32], to: &mut [H]) {
    assert_eq!(from.len(), to.len(), "conversion: input and output differ in length");
    let tasks = from.chunks(TASK).zip(to.chunks_mut(TASK)).collect();
    spread(from.len(), tasks, |(from, to)| H::narrow(from, to));
}

/// Converts `from` into a new vector, rounding to nearest even.
pub fn narrowed<H: Half>(from: &[f32]) -> Vec<H> {
    let mut to = buffer_of(from.len());
    narrow_into(from, &mut to);
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trips<H: Half>(from_f32: fn(f32) -> H, to_f32: fn(H) -> f32) {
        let mut values = vec![0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, 1e-40, f32::MAX, 65504.0, 3.0e-8];
        values.extend((0..70_000).map(|i| (i as f32 - 35_000.0) * 0.001_37));
        // Halfway cases, on both sides of even.
        values.extend((0..64).map(|i| f32::from_bits(0x3f80_0000 + i * 0x8000)));
        let narrow: Vec<H> = narrowed(&values);
        for (value, got) in values.iter().zip(&narrow) {
            assert_eq!(to_f32(*got).to_bits(), to_f32(from_f32(*value)).to_bits(), "{value}");
        }
        for (half, got) in narrow.iter().zip(widened(&narrow)) {
            assert_eq!(got.to_bits(), to_f32(*half).to_bits());
        }
        assert!(to_f32(narrowed::<H>(&[f32::NAN])[0]).is_nan());
        assert!(to_f32(narrowed::<H>(&[f32::from_bits(0x7f80_0001)])[0]).is_nan());
    }

    #[test]
    fn conversions_are_those_of_single_numbers() {
        round_trips(bf16::from_f32, bf16::to_f32);
        round_trips(f16::from_f32, f16::to_f32);
    }
}
