//! State of update rules, in fp32, in bfloat16 or in [blocks](super::blocks) of 8 bits.
//!
//! State in bfloat16 is rounded up or down at random, in proportion to the remainder. Rounded to nearest, a mean that decays
//! by a thousandth per step would never change, since bfloat16 numbers are four thousandths and more apart. The random
//! number is a hash of the step and of the element's position in its parameter, so it is the same however a parameter is
//! sharded, and in a resumed run.

use half::bf16;

use super::blocks;
use crate::cpu::half::wide;

/// A state of a part of a parameter, updated in place.
#[derive(Debug)]
pub enum State<'a> {
    /// In fp32, as it is computed.
    F32(&'a mut [f32]),
    /// In bfloat16: half the bytes, computed in fp32.
    Bf16(&'a mut [bf16]),
    /// In blocks of 8 bits, computed in fp32: consecutive ones of a [`Layout`](super::Layout).
    Blocks(&'a mut [u8]),
}

impl Default for State<'_> {
    fn default() -> Self {
        State::F32(&mut [])
    }
}

impl<'a> State<'a> {
    pub(super) fn chunks(self, len: usize) -> Box<dyn Iterator<Item = State<'a>> + 'a> {
        match self {
            State::F32(all) => Box::new(all.chunks_mut(len).map(State::F32)),
            State::Bf16(all) => Box::new(all.chunks_mut(len).map(State::Bf16)),
            State::Blocks(all) => Box::new(all.chunks_mut(blocks::bytes(len)).map(State::Blocks)),
        }
    }

    /// Returns the elements in bfloat16, none if the state has another form.
    pub(super) fn halves(self) -> &'a mut [bf16] {
        match self {
            State::Bf16(values) => values,
            State::F32(_) | State::Blocks(_) => &mut [],
        }
    }
}

/// Converts `values` to fp32 in the buffer.
#[inline(always)]
pub(super) fn widened<'a>(values: &[bf16], buffer: &'a mut [f32]) -> &'a mut [f32] {
    let values_wide = &mut buffer[..values.len()];
    values_wide.iter_mut().zip(values).for_each(|(to, value)| *to = wide(*value));
    values_wide
}

/// Returns the key of a step, which goes into the random numbers that round states.
#[inline(always)]
pub fn step_key(time: usize) -> u32 {
    (time as u32).wrapping_mul(0x9e37_79b9)
}

/// Rounds two states of a rule, the second possibly empty, and sets the fp32 values to the rounded ones. `first` is the
/// position of the first element in its parameter.
#[inline(always)]
pub(super) fn round_both(
    (a, wide_a): (&mut [bf16], &mut [f32]),
    (b, wide_b): (&mut [bf16], &mut [f32]),
    first: usize,
    time: usize,
) {
    let (first, step) = (first as u32, step_key(time));
    let chance = |index: usize| hash(first.wrapping_add(index as u32) ^ step);
    if b.is_empty() {
        for (index, (a, wide)) in a.iter_mut().zip(wide_a).enumerate() {
            *a = keep(wide, chance(index) & 0xffff);
        }
        return;
    }
    for (index, ((a, wide_a), (b, wide_b))) in a.iter_mut().zip(wide_a).zip(b.iter_mut().zip(wide_b)).enumerate() {
        let chance = chance(index);
        *a = keep(wide_a, chance & 0xffff);
        *b = keep(wide_b, chance >> 16);
    }
}

#[inline(always)]
fn keep(value: &mut f32, chance: u32) -> bf16 {
    let rounded = round(*value, chance);
    *value = wide(rounded);
    rounded
}

/// Rounds `value` towards zero if the bits cut off and `chance`, below 2^16, add up to less than one in the last place, and
/// away from zero otherwise.
#[inline(always)]
fn round(value: f32, chance: u32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(chance) >> 16;
    // A NaN stays a NaN, whichever bits are cut off.
    let kept = if value.is_nan() { bits >> 16 | 0x40 } else { rounded };
    bf16::from_bits(kept as u16)
}

/// Returns a hash whose every bit depends on all bits of `x`, by two multiplications: the least biased of those of
/// <https://github.com/skeeto/hash-prospector>.
#[inline(always)]
fn hash(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x21f0_aaad);
    x = (x ^ x >> 15).wrapping_mul(0xd35a_2d97);
    x ^ x >> 15
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;
    use crate::update::{Chunk, Elements, Kernel, update_chunk};

    #[test]
    fn rounding_is_to_a_neighbour_and_right_in_the_mean() {
        for value in [1.0_f32, 1.001, 3.1e-5, -2.7e-9, 1e-39, 0.0] {
            let below = bf16::from_bits((value.to_bits() >> 16) as u16).to_f32();
            let above = bf16::from_bits((value.to_bits() >> 16) as u16 + 1).to_f32();
            let mut sum = 0.0_f64;
            for chance in 0..1 << 16 {
                let rounded = round(value, chance).to_f32();
                assert!(rounded == below || rounded == above && value != below, "{value} -> {rounded}");
                sum += f64::from(rounded);
            }
            let (mean, gap) = (sum / 65536.0, f64::from((above - below).abs()));
            assert!((mean - f64::from(value)).abs() <= gap / 65536.0, "{value}: {mean}");
        }
        assert_eq!(round(f32::INFINITY, 0xffff), bf16::INFINITY);
        for chance in [0, 0xffff] {
            assert!(round(f32::from_bits(0x7f80_0001), chance).is_nan());
            assert!(round(-f32::NAN, chance).is_nan());
        }
    }

    /// Runs `steps` of AdamW with states in bfloat16, the parameter split into stretches of `cut` elements.
    fn moments(gradient: &[f32], steps: usize, cut: usize) -> (Vec<f32>, Vec<bf16>, Vec<bf16>) {
        let numel = gradient.len();
        let (mut p, mut m, mut v) = (vec![1.0; numel], vec![bf16::ZERO; numel], vec![bf16::ZERO; numel]);
        for time in 1..=steps {
            let kernel = Kernel::new(Rule::adamw(), 1e-3, time);
            for first in (0..numel).step_by(cut) {
                let range = first..numel.min(first + cut);
                let stretch = Chunk {
                    p: &mut p[range.clone()],
                    g: Elements::F32(&gradient[range.clone()]),
                    a: State::Bf16(&mut m[range.clone()]),
                    b: State::Bf16(&mut v[range]),
                    copy: None,
                    average: None,
                    first,
                };
                update_chunk(kernel, 1.0, stretch, 0..0);
            }
        }
        (p, m, v)
    }

    #[test]
    fn the_cut_of_a_parameter_changes_no_bit() {
        let gradient: Vec<f32> = (0..20_000).map(|i| ((i * 37 % 1001) as f32 - 500.0) * 1e-4).collect();
        let whole = moments(&gradient, 3, gradient.len());
        assert_eq!(moments(&gradient, 3, 7_001), whole);
        assert_eq!(moments(&gradient, 3, 24), whole);
    }

    #[test]
    fn slow_means_move() {
        // Squares of 1e-2 at first, then of 1e-3: 300 steps decay the mean of squares to 0.741 of what it was.
        let numel = 4096;
        let (mut p, mut m, mut v) = (vec![0.0; numel], vec![bf16::ZERO; numel], vec![bf16::from_f32(1e-4); numel]);
        for time in 2..302 {
            let (a, b) = (State::Bf16(&mut m), State::Bf16(&mut v));
            let g = vec![1e-3; numel];
            let stretch = Chunk { p: &mut p, g: Elements::F32(&g), a, b, copy: None, average: None, first: 0 };
            update_chunk(Kernel::new(Rule::adamw(), 1e-3, time), 1.0, stretch, 0..0);
        }
        let mean = v.iter().map(|v| f64::from(v.to_f32())).sum::<f64>() / numel as f64;
        let expected = (0..300).fold(f64::from(bf16::from_f32(1e-4).to_f32()), |v, _| v * 0.999 + 1e-6 * 0.001);
        assert!((mean / expected - 1.0).abs() < 2e-3, "{mean}, exactly {expected}");
    }
}
