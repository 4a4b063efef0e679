//! The kernel for CPUs without an instruction for it: operands are converted to f32 as they are packed, and multiplied in f32.
//!
//! A product of two bfloat16 is exact in f32, so fusing a multiplication and an addition changes no bit.

use std::iter::repeat;

use gemm::Parallelism;
use half::bf16;
use pulp::{Arch, NullaryFnOnce, Scalar, Simd, WithSimd};

use super::MatrixBf16;
use super::blocks::{self, Strip, Tiles};
use super::target::Target;

/// Computes `a * b` into `target` with `vectors`: enough sums to hide an addition's latency, and few enough to leave
/// registers for the operands.
pub(super) fn multiply(vectors: Arch, target: Target<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>, threads: Parallelism) {
    match vectors {
        #[cfg(target_arch = "x86_64")]
        Arch::V4(simd) => blocks::multiply::<8, 48, _>(Widened::<_, 3>(simd), target, a, b, threads),
        #[cfg(target_arch = "x86_64")]
        Arch::V3(simd) => blocks::multiply::<6, 16, _>(Widened::<_, 2>(simd), target, a, b, threads),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon(simd) => blocks::multiply::<6, 16, _>(Widened::<_, 4>(simd), target, a, b, threads),
        _ => blocks::multiply::<2, 4, _>(Widened::<_, 4>(Scalar), target, a, b, threads),
    }
}

/// Tiles of `V` vectors of columns.
#[derive(Clone, Copy)]
struct Widened<S, const V: usize>(S);

// SAFETY: pulp creates an `S` only where the CPU has its instructions.
unsafe impl<S: Simd, const R: usize, const C: usize, const V: usize> Tiles<R, C> for Widened<S, V> {
    const UNIT: usize = 1;
    const AT_ONCE: usize = usize::MAX;
    const WORDS: usize = 2;

    fn run(self, work: impl NullaryFnOnce<Output = ()>) {
        self.0.vectorize(InVectors(work));
    }

    fn pack(self, strip: Strip<'_>, to: &mut [u32]) {
        match strip.is_rows {
            true => Tiles::<R, C>::run(self, Pack::<R>(strip, to)),
            false => Tiles::<R, C>::run(self, Pack::<C>(strip, to)),
        }
    }

    #[inline(always)]
    unsafe fn multiply(self, a: &[u32], b: &[u32], out: &mut [[f32; C]; R], add: bool) {
        debug_assert!(!add, "depth is never parted here");
        const { assert!(C == V * S::F32_LANES, "a tile's columns are its vectors'") };
        let simd = self.0;
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        // One after the other, starting with the odd one of a pair.
        for (rows, columns) in a.as_chunks::<R>().0.iter().zip(b.as_chunks::<C>().0) {
            let columns = S::as_simd_u32s(columns).0;
            for (sums, row) in sums.iter_mut().zip(rows) {
                let row = simd.splat_f32s(f32::from_bits(*row));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = simd.mul_add_e_f32s(row, simd.transmute_f32s_u32s(*column), *sum);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            S::as_mut_simd_f32s(out).0.copy_from_slice(&sums);
        }
    }
}

/// Work that is compiled for vectors but does not use them explicitly.
struct InVectors<W>(W);

impl<W: NullaryFnOnce<Output = ()>> WithSimd for InVectors<W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.0.call();
    }
}

/// Pairs that are packed at a time: their output stays in a first-level cache, line by line.
const BLOCK: usize = 128;

/// Packs lines into panels of `W`, converted to f32: for each pair the odd ones of all lines, then the even ones.
struct Pack<'a, const W: usize>(Strip<'a>, &'a mut [u32]);

impl<const W: usize> NullaryFnOnce for Pack<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self(Strip { from, lines, depth, pairs, .. }, to) = self;
        let bits = |half: &bf16| u32::from(half.to_bits());
        let put =
            |to: &mut [u32], line: usize, [even, odd]: [u32; 2]| (to[line], to[W + line]) = (odd << 16, even << 16);
        for (panel, first) in to.chunks_exact_mut((2 * W * pairs).max(1)).zip(lines.clone().step_by(W)) {
            let count = W.min(lines.end - first);
            for (block, to) in panel.chunks_mut(2 * W * BLOCK).enumerate() {
                let begin = depth.end.min(depth.start + 2 * block * BLOCK);
                let depth = begin..depth.end.min(begin + 2 * BLOCK);
                let at = |line: usize, depth: usize| (first + line) * from.row_stride + depth * from.column_stride;
                if from.column_stride == 1 && !depth.is_empty() {
                    for line in 0..count {
                        let (twos, last) = from.data[at(line, depth.start)..][..depth.len()].as_chunks::<2>();
                        let last = last.iter().map(|even| [bits(even), 0]).chain(repeat([0; 2]));
                        let both = twos.iter().map(|[even, odd]| [bits(even), bits(odd)]).chain(last);
                        to.chunks_exact_mut(2 * W).zip(both).for_each(|(to, both)| put(to, line, both));
                    }
                    continue;
                }
                for (pair, to) in to.chunks_exact_mut(2 * W).enumerate() {
                    let here = depth.start + 2 * pair;
                    let of = |depth: usize| from.data[at(0, depth)..].first_chunk::<W>();
                    if here + 1 < depth.end
                        && from.row_stride == 1
                        && let (true, Some(even), Some(odd)) = (count == W, of(here), of(here + 1))
                    {
                        (0..W).for_each(|line| put(to, line, [bits(&even[line]), bits(&odd[line])]));
                        continue;
                    }
                    for line in 0..count {
                        let of = |here: usize| if here < depth.end { bits(&from.data[at(line, here)]) } else { 0 };
                        put(to, line, [here, here + 1].map(of));
                    }
                }
            }
        }
    }
}
