//! The kernel of `vdpbf16ps`.

use std::arch::x86_64::*;

use pulp::NullaryFnOnce;

use super::blocks::{LANES, Strip, Tiles};
use super::pack::run_in_avx512;

/// Rows of a tile of the result.
const ROWS: usize = 8;

/// Permission to use the kernel, for tiles of `COLUMNS` columns; only [`Avx512::detect`] grants it.
///
/// With 48 columns, 24 sums in registers hide an addition's latency, and leave room for the operands. With 32 columns each operand is
/// read more often, but a head of 64 columns has no incomplete tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512<const COLUMNS: usize>(());

impl<const COLUMNS: usize> Avx512<COLUMNS> {
    /// Returns the kernel if this CPU has its instructions.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }
}

macro_rules! tiles_of {
    ($columns:literal) => {
        // SAFETY: `detect` creates one only where the CPU has the instructions.
        unsafe impl Tiles<ROWS, $columns> for Avx512<$columns> {
            const UNIT: usize = 1;
            // Panels of rows are a quarter of AMX's, so deeper ones fit the first-level cache.
            const AT_ONCE: usize = usize::MAX;

            fn run(self, work: impl NullaryFnOnce<Output = ()>) {
                // SAFETY: an `Avx512` exists only where the CPU has the features.
                unsafe { run_in_avx512(work) };
            }

            fn pack(self, strip: Strip<'_>, to: &mut [u32]) {
                let Strip { from, is_rows, lines, depth, pairs } = strip;
                // SAFETY: an `Avx512` exists only where the CPU has the features.
                unsafe {
                    match is_rows {
                        true => from.pack::<ROWS, false>(lines, depth, pairs, to),
                        false => from.pack::<$columns, false>(lines, depth, pairs, to),
                    }
                }
            }

            #[inline(always)]
            unsafe fn multiply(self, a: &[u32], b: &[u32], sums: &mut [[f32; $columns]; ROWS], add: bool) {
                // SAFETY: an `Avx512` exists only where the CPU has the features; the array has these rows.
                unsafe {
                    multiply_tile::<{ $columns / LANES }, $columns>(a, b, sums.as_mut_ptr().cast(), $columns, add)
                }
            }

            const WRITES_ROWS: bool = true;

            #[inline(always)]
            unsafe fn multiply_rows(self, a: &[u32], b: &[u32], out: *mut f32, stride: usize, add: bool) {
                // SAFETY: as above; guaranteed by the caller.
                unsafe { multiply_tile::<{ $columns / LANES }, $columns>(a, b, out, stride, add) }
            }
        }
    };
}

tiles_of!(48);
tiles_of!(32);

/// Computes the sums over the pairs of a panel of [`ROWS`] rows and one of `COLUMNS` columns, in `VECTORS` vectors, and writes them, or adds
/// them if `add` is set, to rows of `out` that are `stride` apart.
///
/// # Safety
///
/// `out` has these rows, which nothing else reads or writes during the call.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_tile<const VECTORS: usize, const COLUMNS: usize>(
    a: &[u32],
    b: &[u32],
    out: *mut f32,
    stride: usize,
    add: bool,
) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b.as_chunks::<COLUMNS>().0) {
        let b = b.as_chunks::<LANES>().0;
        let mut columns = [_mm512_setzero_si512(); VECTORS];
        for (columns, b) in columns.iter_mut().zip(b) {
            // SAFETY: the array has the sixteen elements that are read.
            *columns = unsafe { _mm512_loadu_si512(b.as_ptr().cast()) };
        }
        for (sums, a) in sums.iter_mut().zip(a) {
            let row = pairs_of(_mm512_set1_epi32(a.cast_signed()));
            for (sum, columns) in sums.iter_mut().zip(columns) {
                *sum = _mm512_dpbf16_ps(*sum, row, pairs_of(columns));
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (vector, sum) in sums.into_iter().enumerate() {
            // SAFETY: sixteen elements of a row of `out`, which the caller guarantees.
            unsafe {
                let out = out.add(row * stride + vector * LANES);
                _mm512_storeu_ps(out, if add { _mm512_add_ps(_mm512_loadu_ps(out), sum) } else { sum });
            }
        }
    }
}

/// Converts the bits of sixteen pairs to the type of the pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs_of(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every pattern of bits is a pair of bfloat16.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}
