//! Typed, owned buffers that collectives move.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use zero_kernels::cpu::half::Half;

use super::ReduceOp;

/// Number of elements reduced at a time: a few arrays of this length fit the L1 cache.
const BLOCK: usize = 1 << 11;

/// Element type of a [`Buffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// IEEE half precision.
    F16,
    /// bfloat16: f32 without its lower 16 bits.
    Bf16,
    /// Bytes: flags, or anything that is moved but not added.
    U8,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 => 8,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }

    /// Returns the lower-case name, as in Rust.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::U8 => "u8",
        }
    }
}

/// Owned elements of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// IEEE half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// Bytes.
    U8(Vec<u8>),
}

/// Runs the same expression on the vector inside one or two buffers of one type.
macro_rules! each {
    ($buffer:expr, $v:ident => $body:expr) => {
        match $buffer {
            Buffer::F32($v) => $body,
            Buffer::F64($v) => $body,
            Buffer::F16($v) => $body,
            Buffer::Bf16($v) => $body,
            Buffer::U8($v) => $body,
        }
    };
}

impl Buffer {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(self, v => v.len())
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Buffer::F32(_) => DType::F32,
            Buffer::F64(_) => DType::F64,
            Buffer::F16(_) => DType::F16,
            Buffer::Bf16(_) => DType::Bf16,
            Buffer::U8(_) => DType::U8,
        }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    fn panic(&self, expected: &str) -> ! {
        panic!("expected {expected} buffer, got {}", self.dtype().name())
    }

    /// Returns the floats of an f32 buffer, or those of a 16-bit float buffer converted to f32.
    ///
    /// # Panics
    ///
    /// If the buffer holds another type: a collective returns the type it was given.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Buffer::F32(v) => v,
            Buffer::F16(v) => widened(&v),
            Buffer::Bf16(v) => widened(&v),
            other => other.panic("an f32"),
        }
    }

    /// Returns the floats of an f64 buffer.
    ///
    /// # Panics
    ///
    /// If the buffer holds another type.
    pub fn into_f64(self) -> Vec<f64> {
        if let Buffer::F64(v) = self { v } else { self.panic("an f64") }
    }

    /// Returns the bytes of a u8 buffer.
    ///
    /// # Panics
    ///
    /// If the buffer holds another type.
    pub fn into_u8(self) -> Vec<u8> {
        if let Buffer::U8(v) = self { v } else { self.panic("a u8") }
    }

    /// Converts `values` to `dtype`, rounding to nearest.
    ///
    /// # Panics
    ///
    /// For [`DType::U8`] and [`DType::F64`]: floats are not sent as these types.
    pub fn from_f32(values: Vec<f32>, dtype: DType) -> Self {
        match dtype {
            DType::F32 => Buffer::F32(values),
            DType::F16 => Buffer::F16(narrowed(&values)),
            DType::Bf16 => Buffer::Bf16(narrowed(&values)),
            DType::F64 | DType::U8 => panic!("cannot convert floats to {}", dtype.name()),
        }
    }

    /// Creates an empty buffer with capacity for `numel` elements.
    pub(super) fn with_capacity(dtype: DType, numel: usize) -> Self {
        match dtype {
            DType::F32 => Buffer::F32(Vec::with_capacity(numel)),
            DType::F64 => Buffer::F64(Vec::with_capacity(numel)),
            DType::F16 => Buffer::F16(Vec::with_capacity(numel)),
            DType::Bf16 => Buffer::Bf16(Vec::with_capacity(numel)),
            DType::U8 => Buffer::U8(Vec::with_capacity(numel)),
        }
    }

    /// Returns the address of its elements, or of the memory reserved for them.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        each!(self, v => v.as_mut_ptr().cast())
    }

    /// Rotates the elements to the right by `by`; the last ones move to the front.
    pub(super) fn rotate_right(&mut self, by: usize) {
        each!(self, v => v.rotate_right(by))
    }

    /// Sets the length to `numel` elements.
    ///
    /// # Safety
    ///
    /// The capacity is at least `numel`, and all these elements have been written.
    pub(super) unsafe fn set_len(&mut self, numel: usize) {
        // SAFETY: guaranteed by the caller.
        each!(self, v => unsafe { v.set_len(numel) })
    }

    /// Returns the elements' bytes in memory.
    pub(super) fn as_bytes(&self) -> &[u8] {
        each!(self, v => {
            // SAFETY: the elements are floats or bytes, so every byte of them is initialised, and `u8` has alignment 1. The
            // borrow of `self` keeps them in place.
            unsafe { std::slice::from_raw_parts(v.as_ptr().cast(), size_of_val(v.as_slice())) }
        })
    }

    /// Reduces elements `range` of the inputs, in the order of the inputs. 16-bit floats are added in f32 and rounded once, at
    /// the end.
    pub(super) fn reduce_range(inputs: &[Arc<Buffer>], range: Range<usize>, op: ReduceOp) -> Buffer {
        let parts: Vec<(&Buffer, usize)> = inputs.iter().map(|input| (&**input, range.start)).collect();
        Self::reduce_parts(&parts, range.len(), op)
    }

    /// Reduces like [`Buffer::reduce_range`], but `len` elements that begin at a separate offset in each input.
    pub(super) fn reduce_parts(inputs: &[(&Buffer, usize)], len: usize, op: ReduceOp) -> Buffer {
        macro_rules! parts {
            ($variant:ident) => {
                inputs.iter().map(|input| match input {
                    (Buffer::$variant(v), begin) => &v[*begin..begin + len],
                    _ => unreachable!("the rendezvous has checked that all ranks sent one type"),
                })
            };
        }
        macro_rules! reduce {
            ($variant:ident, $max:expr, $mean:expr) => {{
                let parts: Vec<_> = parts!($variant).collect();
                let mut out = Vec::with_capacity(len);
                // Block by block, so that all but one pass over a block find it in the cache.
                for begin in (0..len).step_by(BLOCK) {
                    let block = begin..len.min(begin + BLOCK);
                    out.extend_from_slice(&parts[0][block.clone()]);
                    let sum = &mut out[block.clone()];
                    for part in &parts[1..] {
                        let other = &part[block.clone()];
                        match op {
                            ReduceOp::Sum | ReduceOp::Mean => sum.iter_mut().zip(other).for_each(|(a, b)| *a += *b),
                            ReduceOp::Max => sum.iter_mut().zip(other).for_each(|(a, b)| *a = $max(*a, *b)),
                        }
                    }
                    if op == ReduceOp::Mean {
                        sum.iter_mut().for_each(|a| *a = $mean(*a));
                    }
                }
                Buffer::$variant(out)
            }};
        }
        let world = inputs.len();
        match inputs[0].0 {
            Buffer::F32(_) => reduce!(F32, f32::max, |a: f32| a * (1.0 / world as f32)),
            Buffer::F64(_) => reduce!(F64, f64::max, |a: f64| a * (1.0 / world as f64)),
            Buffer::F16(_) => Buffer::F16(reduce_halves(&parts!(F16).collect::<Vec<_>>(), op)),
            Buffer::Bf16(_) => Buffer::Bf16(reduce_halves(&parts!(Bf16).collect::<Vec<_>>(), op)),
            Buffer::U8(_) => reduce!(U8, u8::max, |a: u8| a),
        }
    }

    /// Concatenates elements `range` of every input.
    pub(super) fn concat(inputs: &[Arc<Buffer>], range: Range<usize>) -> Buffer {
        Self::join_parts(inputs.iter().map(|input| (&**input, range.clone())))
    }

    /// Concatenates buffers of one type, of any lengths.
    ///
    /// # Panics
    ///
    /// If there are no buffers, or buffers of several types.
    pub fn join(pieces: &[Arc<Buffer>]) -> Buffer {
        Self::join_parts(pieces.iter().map(|piece| (&**piece, 0..piece.len())))
    }

    fn join_parts<'b>(parts: impl Iterator<Item = (&'b Buffer, Range<usize>)> + Clone) -> Buffer {
        let numel = parts.clone().map(|(_, range)| range.len()).sum();
        let mut out = Self::with_capacity(parts.clone().next().expect("there is at least one buffer").0.dtype(), numel);
        for (part, range) in parts {
            match (&mut out, part) {
                (Buffer::F32(out), Buffer::F32(part)) => out.extend_from_slice(&part[range]),
                (Buffer::F64(out), Buffer::F64(part)) => out.extend_from_slice(&part[range]),
                (Buffer::F16(out), Buffer::F16(part)) => out.extend_from_slice(&part[range]),
                (Buffer::Bf16(out), Buffer::Bf16(part)) => out.extend_from_slice(&part[range]),
                (Buffer::U8(out), Buffer::U8(part)) => out.extend_from_slice(&part[range]),
                (out, part) => panic!("cannot join buffers of {} and {}", out.dtype().name(), part.dtype().name()),
            }
        }
        out
    }
}

fn widened<H: Half>(from: &[H]) -> Vec<f32> {
    let mut to = vec![0.0; from.len()];
    H::widen(from, &mut to);
    to
}

fn narrowed<H: Half>(from: &[f32]) -> Vec<H> {
    let mut to = vec![H::ZERO; from.len()];
    H::narrow(from, &mut to);
    to
}

/// Reduces equally long slices in order and rounds at the end.
fn reduce_halves<H: Half>(inputs: &[&[H]], op: ReduceOp) -> Vec<H> {
    let len = inputs[0].len();
    let mut out = Vec::with_capacity(len);
    let [mut sums, mut others] = [[0f32; BLOCK]; 2];
    for begin in (0..len).step_by(BLOCK) {
        let block = begin..len.min(begin + BLOCK);
        let (sums, others) = (&mut sums[..block.len()], &mut others[..block.len()]);
        H::widen(&inputs[0][block.clone()], sums);
        for input in &inputs[1..] {
            H::widen(&input[block.clone()], others);
            let pairs = sums.iter_mut().zip(&*others);
            match op {
                ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, b)| *a += b),
                ReduceOp::Max => pairs.for_each(|(a, b)| *a = a.max(*b)),
            }
        }
        if op == ReduceOp::Mean {
            sums.iter_mut().for_each(|a| *a *= 1.0 / inputs.len() as f32);
        }
        out.resize(block.end, H::ZERO);
        H::narrow(sums, &mut out[block]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_as_single_numbers_are() {
        let values: Vec<f32> = (0..=u32::MAX).step_by(0x1003).map(f32::from_bits).collect();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let single = |round: fn(f32) -> f32| bits(values.iter().map(|value| round(*value)).collect());
        let sent = |dtype| bits(Buffer::from_f32(values.clone(), dtype).into_f32());
        assert!(sent(DType::Bf16) == single(|value| bf16::from_f32(value).to_f32()));
        assert!(sent(DType::F16) == single(|value| f16::from_f32(value).to_f32()));
    }

    #[test]
    fn halves_are_added_in_f32_and_rounded_once() {
        // More than a block; 1 + 1/256 + 1/256 is 1 if it is rounded on the way.
        let of = |value: f32| Buffer::Bf16(vec![bf16::from_f32(value); BLOCK + 3]);
        let inputs = [of(1.0), of(1.0 / 256.0), of(1.0 / 256.0)];
        let parts: Vec<_> = inputs.iter().map(|input| (input, 1)).collect();
        for (op, expected) in [(ReduceOp::Sum, 1.0078125), (ReduceOp::Max, 1.0), (ReduceOp::Mean, 0.3359375)] {
            let reduced = Buffer::reduce_parts(&parts, BLOCK + 2, op);
            assert_eq!(reduced.into_f32(), vec![expected; BLOCK + 2], "{op:?}");
        }
    }
}
