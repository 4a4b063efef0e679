//! The product by `vdpbf16ps`: both operands packed, block by block.
//!
//! The operand of fewer lines is packed whole, a few MiB at a time, for all threads to read from the third-level cache.
//! A task then packs a block of the other one into its core's second-level cache, and multiplies each panel of the
//! first by each panel of its block, in registers.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;
use std::thread::LocalKey;

use gemm::Parallelism;

use super::pack::packed_len;
use super::target::Target;
use super::{MatrixBf16, parts, spread};
use crate::cpu::rows::SharedRows;

/// Rows of a tile of the result, and vectors of its columns: 24 sums in registers are enough to hide an addition's
/// latency, and leave room for what is multiplied.
const ROWS: usize = 8;
const VECTORS: usize = 3;
const LANES: usize = 16;
const COLUMNS: usize = VECTORS * LANES;

/// The greatest depth that sums stay in registers for, even. An element's bits depend on it.
const DEPTH: usize = 3072;
/// Bytes of the panels that the threads share: a part of a third-level cache.
const SHARED_BYTES: usize = 4 << 20;
/// Bytes of a task's panels: a part of a second-level cache.
const OWN_BYTES: usize = 640 << 10;
/// Lines of the longer operand in a block that needs partial sums.
const PARTIAL_LINES: usize = 4096;
/// Tasks for a thread to take, where there are enough lines.
const TASKS_PER_THREAD: usize = 4;

/// Leave to use the kernel: only [`Kernel::detect`] gives one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel(());

thread_local! {
    /// Buffers of a thread, taken out while in use: it may run another task meanwhile.
    static SHARED: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
    static OWN: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

/// Sixteen elements, aligned as a vector.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine([u32; LANES]);

/// Which operand the shared panels are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    Rows,
    Columns,
}

impl Shared {
    /// What is of rows and of columns as what is of the shared panels and of the others, or the other way round.
    #[inline(always)]
    fn order<T>(self, a: T, b: T) -> (T, T) {
        match self {
            Self::Rows => (a, b),
            Self::Columns => (b, a),
        }
    }
}

impl Kernel {
    /// The kernel, if this processor has its instructions.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }

    /// `a * b` into `target`.
    pub(super) fn multiply(self, target: Target<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>, threads: Parallelism) {
        let whole = a.columns;
        let depths = whole.div_ceil(DEPTH).max(1);
        let depth = whole.div_ceil(depths).next_multiple_of(2).max(2);
        // Their rows are lines along the depth.
        let (rows, columns) = (a, b.transposed());
        let is_shared = if rows.rows <= columns.rows { Shared::Rows } else { Shared::Columns };
        let (shared, own) = is_shared.order(rows, columns);
        let most = (SHARED_BYTES / (2 * depth)).next_multiple_of(ROWS * COLUMNS);
        for shared_lines in parts(shared.rows, most) {
            for own_lines in parts(own.rows, if depths > 1 { PARTIAL_LINES } else { own.rows }) {
                let (row, column) = is_shared.order(shared_lines.start, own_lines.start);
                let target = target.part(row, column);
                let mut partials = target.partials(shared_lines.len() * own_lines.len(), depths);
                let (_, width) = is_shared.order(shared_lines.len(), own_lines.len());
                let partials = SharedRows::new(&mut partials, width);
                for part in 0..depths {
                    let depth = part * depth..whole.min((part + 1) * depth);
                    let (shared_lines, own_lines) = (shared_lines.clone(), own_lines.clone());
                    let target = target.over(partials, part, depths);
                    let block =
                        Block { kernel: self, target, is_shared, shared, shared_lines, own, own_lines, depth, threads };
                    match is_shared {
                        Shared::Rows => block.multiply::<ROWS, COLUMNS>(),
                        Shared::Columns => block.multiply::<COLUMNS, ROWS>(),
                    }
                }
            }
        }
    }
}

/// A product whose shared panels are in memory at once.
struct Block<'a> {
    kernel: Kernel,
    target: Target<'a>,
    is_shared: Shared,
    shared: MatrixBf16<'a>,
    shared_lines: Range<usize>,
    own: MatrixBf16<'a>,
    own_lines: Range<usize>,
    depth: Range<usize>,
    threads: Parallelism,
}

impl Block<'_> {
    /// Multiplies panels of `S` shared lines by panels of `O` others.
    fn multiply<const S: usize, const O: usize>(&self) {
        let Self { kernel: Kernel(()), target, is_shared, shared, own, threads, .. } = *self;
        let pairs = self.depth.len().div_ceil(2);
        let workers = match threads {
            Parallelism::None => 1,
            Parallelism::Rayon(_) => rayon::current_num_threads(),
        };
        let count = self.shared_lines.len();
        with_buffer(&SHARED, packed_len::<S>(count, pairs), |panels| {
            let some = ROWS * COLUMNS / 8;
            let tasks: Vec<_> =
                parts(count, some).zip(panels.chunks_mut(packed_len::<S>(some, pairs).max(1))).collect();
            // An empty depth has empty panels, and nothing to pack.
            spread(count * pairs, threads, tasks, |(lines, panels)| {
                let lines = self.shared_lines.start + lines.start..self.shared_lines.start + lines.end;
                // SAFETY: a `Kernel` is made only where the processor has the features.
                unsafe { shared.pack::<S>(lines, self.depth.clone(), panels) };
            });
            let panels = &*panels;

            let count_own = self.own_lines.len();
            let most = OWN_BYTES / (4 * O * pairs.max(1));
            let some = O * panels_of_task(count_own.div_ceil(O), most, workers);
            let tasks: Vec<_> = parts(count_own, some).collect();
            spread(count * count_own * pairs, threads, tasks, |lines| {
                let from = self.own_lines.start + lines.start..self.own_lines.start + lines.end;
                with_buffer(&OWN, packed_len::<O>(lines.len(), pairs), |own_panels| {
                    // SAFETY: a `Kernel` is made only where the processor has the features. The lines of a task and all
                    // shared ones meet in elements that no other task has; they lie in the target's matrix, which only
                    // this call knows.
                    unsafe {
                        own.pack::<O>(from, self.depth.clone(), own_panels);
                        let shared = Panels { data: panels, first: 0, count };
                        let own = Panels { data: own_panels, first: lines.start, count: lines.len() };
                        multiply_panels::<S, O>(&target, is_shared, shared, own, pairs);
                    }
                });
            });
        });
    }
}

/// How many panels a task takes: up to `most`, few enough for every worker to have some tasks, and of half that number
/// or more what makes the busiest worker's share smallest.
fn panels_of_task(panels: usize, most: usize, workers: usize) -> usize {
    let most = most.min(panels.div_ceil(workers * TASKS_PER_THREAD)).max(1);
    let share = |some: usize| panels.div_ceil(some).div_ceil(workers) * some;
    (most.div_ceil(2)..=most).rev().min_by_key(|some| share(*some)).unwrap_or(most)
}

/// Packed lines, the number of their first one in the target, and how many they are.
#[derive(Clone, Copy)]
struct Panels<'a> {
    data: &'a [u32],
    first: usize,
    count: usize,
}

impl<'a> Panels<'a> {
    /// One by one.
    fn each<const W: usize>(self, pairs: usize) -> impl Iterator<Item = Self> {
        (0..self.count).step_by(W).map(move |line| Self {
            data: &self.data[line * pairs..(line + W) * pairs],
            first: self.first + line,
            count: W.min(self.count - line),
        })
    }
}

/// Every shared panel by every panel of a task.
///
/// # Safety
///
/// Nothing else reads or writes the elements of the target where their lines meet, and they lie in its matrix.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn multiply_panels<const S: usize, const O: usize>(
    target: &Target<'_>,
    is_shared: Shared,
    shared: Panels<'_>,
    own: Panels<'_>,
    pairs: usize,
) {
    for shared in shared.each::<S>(pairs) {
        for own in own.each::<O>(pairs) {
            let (a, b) = is_shared.order(shared, own);
            // What is written takes a while to arrive, about as long as the sums.
            for row in 0..ROWS {
                for vector in 0..VECTORS {
                    let address = target.address(a.first + row, b.first + vector * LANES);
                    _mm_prefetch::<_MM_HINT_ET0>(address);
                }
            }
            let mut sums = multiply_tile(a.data, b.data);
            for (row, sums) in sums.iter_mut().enumerate().take(a.count) {
                // SAFETY: the row and its columns are where these lines meet.
                unsafe {
                    if b.count == COLUMNS {
                        target.write(a.first + row, b.first, sums);
                    } else {
                        target.write(a.first + row, b.first, &mut sums[..b.count]);
                    }
                }
            }
        }
    }
}

/// The sums over the pairs of a panel of [`ROWS`] rows and one of [`COLUMNS`] columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_tile(a: &[u32], b: &[u32]) -> [[f32; COLUMNS]; ROWS] {
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
    let mut out = [[0f32; COLUMNS]; ROWS];
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            // SAFETY: the array has the sixteen elements that are written.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
    out
}

/// The bits of sixteen pairs as what they are.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs_of(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every pattern of bits is a pair of bfloat16.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}

/// Hands `len` elements of a thread's buffer to `work`, whatever they hold.
fn with_buffer(key: &'static LocalKey<Cell<Vec<CacheLine>>>, len: usize, work: impl FnOnce(&mut [u32])) {
    let mut buffer = key.take();
    let lines = len.div_ceil(LANES);
    if buffer.len() < lines {
        buffer.resize(lines, CacheLine([0; LANES]));
    }
    // SAFETY: a `CacheLine` is sixteen u32 without padding, and the buffer has at least as many as `len` needs.
    work(unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), len) });
    key.set(buffer);
}
