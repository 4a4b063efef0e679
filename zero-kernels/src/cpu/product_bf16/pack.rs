//! Copies of an operand in the order that the kernel reads it.
//!
//! Both operands are lines along the depth: rows of the left matrix, and rows of the transposed right one. A panel has `W`
//! lines. It holds, for each pair of neighbours in depth, that pair of every line, as one u32 with the first one in its low
//! half; or, for each 16 pairs, these of every line. Missing depth is padded with zeros. Missing lines hold stale data, and
//! the columns computed from them are dropped.

use std::arch::x86_64::*;
use std::ops::Range;

use pulp::NullaryFnOnce;

use super::MatrixBf16;

/// Lines and pairs per tile that is transposed in registers.
const TILE: usize = 16;
/// Prefetch distance for lines that are contiguous across the depth: the CPU does not predict the jumps from depth to depth.
const AHEAD: usize = 16;

/// Runs `work`, inlined, compiled for the instructions that packing and the kernels need.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn run_in_avx512(work: impl NullaryFnOnce<Output = ()>) {
    work.call();
}

/// An operand as lines along the depth, which are its rows.
impl MatrixBf16<'_> {
    /// Returns the element of line `line` at `depth`.
    fn at(&self, line: usize, depth: usize) -> u32 {
        u32::from(self.data[line * self.row_stride + depth * self.column_stride].to_bits())
    }

    /// Returns a pointer to that element.
    ///
    /// # Safety
    ///
    /// The element exists.
    unsafe fn pointer(&self, line: usize, depth: usize) -> *const i16 {
        // SAFETY: the constructors of a matrix checked that its elements lie in its slice.
        unsafe { self.data.as_ptr().add(line * self.row_stride + depth * self.column_stride).cast() }
    }

    /// Packs `lines` over `depth` into `panels` of `W` lines and `pairs` pairs, all of which it overwrites. With `BY_LINE`,
    /// 16 pairs of a line are adjacent, otherwise a pair of all lines.
    ///
    /// `W` must be a multiple of half a tile, with `BY_LINE` of a tile: this is checked at compile time.
    ///
    /// # Panics
    ///
    /// If `panels` has another length or, with `BY_LINE`, `pairs` is not a multiple of a tile.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) fn pack<const W: usize, const BY_LINE: bool>(
        &self,
        lines: Range<usize>,
        depth: Range<usize>,
        pairs: usize,
        panels: &mut [u32],
    ) {
        assert!(
            lines.end <= self.rows && depth.end <= self.columns,
            "lines {lines:?} or depth {depth:?} are outside of {self:?}"
        );
        assert!(pairs >= depth.len().div_ceil(2), "{pairs} pairs are too few for a depth of {depth:?}");
        let mut panels = Panels::<W, BY_LINE>::new(panels, lines.len(), pairs);
        for line in (0..lines.len()).step_by(TILE) {
            let count = TILE.min(lines.len() - line);
            if self.column_stride == 1 {
                for pair in (0..pairs).step_by(TILE) {
                    let width = (2 * TILE).min(depth.len().saturating_sub(2 * pair));
                    let mut tile = [_mm512_setzero_si512(); TILE];
                    for (i, tile) in tile.iter_mut().enumerate().take(if width > 0 { count } else { 0 }) {
                        // SAFETY: `width` elements from that one on are in the line, contiguous, and the mask leaves
                        // out all others.
                        *tile = unsafe {
                            let from = self.pointer(lines.start + line + i, depth.start + 2 * pair);
                            // The next tile's: the CPU does not predict the jump from line to line.
                            _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(self.row_stride.wrapping_mul(TILE)).cast());
                            _mm512_maskz_loadu_epi16(u32::MAX >> (2 * TILE - width), from)
                        };
                    }
                    if BY_LINE {
                        panels.store_lines(line, pair, tile);
                    } else {
                        for (i, lines) in transpose(tile).into_iter().enumerate().take(pairs - pair) {
                            panels.store(line, pair + i, lines);
                        }
                    }
                }
            }
        }
        if self.column_stride == 1 {
            return;
        }
        if BY_LINE {
            for pair in (0..pairs).step_by(TILE) {
                for line in (0..lines.len()).step_by(TILE) {
                    let mut tile = [_mm512_setzero_si512(); TILE];
                    for (i, tile) in tile.iter_mut().enumerate() {
                        *tile = self.pair_of_lines(&lines, line, &depth, pair + i);
                    }
                    panels.store_lines(line, pair, transpose(tile));
                }
            }
            return;
        }
        // Groups of lines from which two full vectors of pairs are made at once.
        let twice = if self.row_stride == 1 && W.is_multiple_of(2 * TILE) { lines.len() / (2 * TILE) } else { 0 };
        for pair in 0..pairs {
            for line in (0..twice).map(|two| two * 2 * TILE) {
                let [first, second] = self.pair_of_twice(lines.start + line, &depth, pair);
                panels.store(line, pair, first);
                panels.store(line + TILE, pair, second);
            }
            for line in (twice * 2 * TILE..lines.len()).step_by(TILE) {
                panels.store(line, pair, self.pair_of_lines(&lines, line, &depth, pair));
            }
        }
    }

    /// Returns one pair in depth of each of twice [`TILE`] contiguous lines, from `first` on; zeros beyond `depth`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn pair_of_twice(&self, first: usize, depth: &Range<usize>, pair: usize) -> [__m512i; 2] {
        let at = depth.start + 2 * pair;
        self.fetch_ahead(first, at);
        let [even, odd] = [at, at + 1].map(|at| {
            if at >= depth.end {
                return _mm512_setzero_si512();
            }
            // SAFETY: so many elements from that one on are in the matrix, contiguous at this depth.
            let lines = unsafe { _mm512_loadu_si512(self.pointer(first, at).cast()) };
            // Interleaving takes four lines of each quarter of a register.
            _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), lines)
        });
        [_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)]
    }

    /// Prefetches the pair of lines [`AHEAD`] after `at`.
    #[inline(always)]
    fn fetch_ahead(&self, first: usize, at: usize) {
        let ahead = self.data.as_ptr().wrapping_add((at + AHEAD).wrapping_mul(self.column_stride).wrapping_add(first));
        for ahead in [ahead, ahead.wrapping_add(self.column_stride)] {
            // SAFETY: every x86-64 has the instruction, which takes any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
        }
    }

    /// Returns one pair in depth of each of up to [`TILE`] lines, from `line` of `lines` on; zeros beyond `depth`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn pair_of_lines(&self, lines: &Range<usize>, line: usize, depth: &Range<usize>, pair: usize) -> __m512i {
        let at = depth.start + 2 * pair;
        if at >= depth.end {
            return _mm512_setzero_si512();
        }
        let second = at + 1 < depth.end;
        let count = TILE.min(lines.len() - line);
        let first = lines.start + line;
        if self.row_stride == 1 {
            self.fetch_ahead(first, at);
            let mask = u16::MAX >> (TILE - count);
            // SAFETY: `count` elements from that one on are in the matrix, contiguous at this depth, and the mask leaves out all
            // others; there is an odd neighbour unless the depth ends before it.
            let (even, odd) = unsafe {
                let even = _mm256_maskz_loadu_epi16(mask, self.pointer(first, at));
                let mask = if second { mask } else { 0 };
                (even, _mm256_maskz_loadu_epi16(mask, self.pointer(first, at + usize::from(second))))
            };
            let [even, odd] = [even, odd].map(|half| _mm512_cvtepu16_epi32(half));
            return _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
        }
        let mut packed = [0u32; TILE];
        for (i, packed) in packed.iter_mut().enumerate().take(count) {
            let odd = if second { self.at(first + i, at + 1) } else { 0 };
            *packed = self.at(first + i, at) | odd << 16;
        }
        // SAFETY: the array is as large as what is read.
        unsafe { _mm512_loadu_si512(packed.as_ptr().cast()) }
    }
}

/// Panels that are written.
struct Panels<'a, const W: usize, const BY_LINE: bool> {
    data: &'a mut [u32],
    pairs: usize,
}

impl<'a, const W: usize, const BY_LINE: bool> Panels<'a, W, BY_LINE> {
    fn new(data: &'a mut [u32], lines: usize, pairs: usize) -> Self {
        const { assert!(W.is_multiple_of(TILE / 2), "half a tile of lines would lie in two panels") };
        const { assert!(!BY_LINE || W.is_multiple_of(TILE), "a tile of lines would lie in two panels") };
        assert_eq!(
            data.len(),
            lines.next_multiple_of(W) * pairs,
            "wrong size of panels of {lines} lines of {pairs} pairs"
        );
        assert!(!BY_LINE || pairs.is_multiple_of(TILE), "{pairs} pairs are not a whole number of tiles of {TILE}");
        Self { data, pairs }
    }

    /// Writes one pair in depth of each of up to [`TILE`] lines, from `line` on; lines beyond the last panel are dropped.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(&mut self, line: usize, pair: usize, lines: __m512i) {
        if W.is_multiple_of(TILE) {
            let at = (line / W * self.pairs + pair) * W + line % W;
            let to = &mut self.data[at..at + TILE];
            // SAFETY: the slice has the sixteen elements that are written.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), lines) };
            return;
        }
        let halves = [_mm512_castsi512_si256(lines), _mm512_extracti64x4_epi64::<1>(lines)];
        for (i, half) in halves.into_iter().enumerate() {
            let line = line + i * TILE / 2;
            let at = (line / W * self.pairs + pair) * W + line % W;
            if let Some(to) = self.data.get_mut(at..at + TILE / 2) {
                // SAFETY: the slice has the eight elements that are written.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), half) };
            }
        }
    }

    /// Writes [`TILE`] pairs of as many lines, starting at `line` and `pair`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store_lines(&mut self, line: usize, pair: usize, tile: [__m512i; TILE]) {
        let at = (line / W * self.pairs + pair) * W + line % W * TILE;
        let to = &mut self.data[at..at + TILE * TILE];
        for (to, line) in to.as_chunks_mut::<TILE>().0.iter_mut().zip(tile) {
            // SAFETY: the array has the sixteen elements that are written.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
        }
    }
}

/// Transposes a square of u32.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; TILE]) -> [__m512i; TILE] {
    let r = rows;
    let mut t = r;
    for i in 0..TILE / 2 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // Now the quarters of register 4 g + c hold column c of each quarter, of rows 4 g to 4 g + 3.
    let mut q = t;
    for g in 0..TILE / 4 {
        let [a, b, c, d] = [t[4 * g], t[4 * g + 1], t[4 * g + 2], t[4 * g + 3]];
        q[4 * g] = _mm512_unpacklo_epi64(a, c);
        q[4 * g + 1] = _mm512_unpackhi_epi64(a, c);
        q[4 * g + 2] = _mm512_unpacklo_epi64(b, d);
        q[4 * g + 3] = _mm512_unpackhi_epi64(b, d);
    }
    let mut columns = q;
    for c in 0..TILE / 4 {
        let [a, b, e, f] = [q[c], q[4 + c], q[8 + c], q[12 + c]];
        let even = [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(e, f)];
        let odd = [_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(e, f)];
        columns[c] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}
