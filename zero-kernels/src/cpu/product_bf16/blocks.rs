//! The product by a kernel for tiles: both operands are packed, block by block.
//!
//! The operand with fewer lines is packed in full, a few MiB at a time, for all threads to read from the third-level cache.
//! A task then packs a block of the other one into its core's second-level cache, and multiplies each panel of the first by
//! each panel of its block, in registers.

use std::cell::Cell;
use std::ops::Range;
use std::thread::LocalKey;

use gemm::Parallelism;
use pulp::NullaryFnOnce;

use super::target::Target;
use super::{MatrixBf16, parts, spread};
use crate::cpu::rows::SharedRows;

/// Lanes per vector.
pub(super) const LANES: usize = 16;
/// The greatest depth over which sums stay in registers, a multiple of every [`Tiles::UNIT`] of pairs. An element's bits depend on it.
const DEPTH: usize = 3072;
/// Bytes of the panels that the threads share: a part of a third-level cache.
const SHARED_BYTES: usize = 4 << 20;
/// Bytes of a task's panels: a part of a second-level cache.
const OWN_BYTES: usize = 640 << 10;
/// Lines of the longer operand per block that needs partial sums.
const PARTIAL_LINES: usize = 4096;
/// Shared panels that are multiplied by all panels of a task before the next pairs in depth.
const GROUP: usize = 4;
/// Lines per task that packs shared lines, unless a panel has more.
const PACKED_LINES: usize = 64;
/// Tasks per thread, if there are enough lines.
const TASKS_PER_THREAD: usize = 4;

/// Lines along the depth: rows of the left operand, or columns of the right one.
pub(super) struct Strip<'a> {
    pub(super) from: MatrixBf16<'a>,
    pub(super) is_rows: bool,
    pub(super) lines: Range<usize>,
    pub(super) depth: Range<usize>,
    /// Pairs in depth, including padding.
    pub(super) pairs: usize,
}

/// A kernel that multiplies a panel of `R` rows by a panel of `C` columns, in registers. A value is the permission to use it.
///
/// # Safety
///
/// A value must exist only where the CPU has the instructions that the kernel uses.
pub(super) unsafe trait Tiles<const R: usize, const C: usize>: Copy + Send + Sync {
    /// The number of pairs in depth is padded with zeros to a multiple of this.
    const UNIT: usize;

    /// Pairs in depth that are multiplied at once, a multiple of the unit: as many of two panels as fit the first-level cache.
    const AT_ONCE: usize;

    /// Elements of a panel per pair.
    const WORDS: usize = 1;

    /// Runs `work`, inlined, compiled for the CPU's instructions.
    fn run(self, work: impl NullaryFnOnce<Output = ()>);

    /// Packs lines into panels of `R` rows or `C` columns.
    fn pack(self, strip: Strip<'_>, to: &mut [u32]);

    /// Prepares a thread for calls of [`Tiles::multiply`]; the caller drops the result after them.
    fn begin(self) -> impl Sized {}

    /// Computes the sums over the pairs of a panel of rows and one of columns, added to those in `sums` if `add` is set.
    ///
    /// # Safety
    ///
    /// This thread holds the result of [`Tiles::begin`].
    unsafe fn multiply(self, a: &[u32], b: &[u32], sums: &mut [[f32; C]; R], add: bool);

    /// True if [`Tiles::multiply_rows`] is implemented.
    const WRITES_ROWS: bool = false;

    /// Same as [`Tiles::multiply`], with rows of sums that are `stride` apart.
    ///
    /// # Safety
    ///
    /// Same as [`Tiles::multiply`]; `out` has these rows, and nothing else reads or writes them during the call.
    unsafe fn multiply_rows(self, _a: &[u32], _b: &[u32], _out: *mut f32, _stride: usize, _add: bool) {
        unreachable!("these tiles do not write rows")
    }
}

thread_local! {
    /// A thread's buffers, taken out while in use: the thread may run another task meanwhile.
    static SHARED: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
    static OWN: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

/// Sixteen elements, aligned like a vector.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine([u32; LANES]);

/// The operand whose panels are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    Rows,
    Columns,
}

impl Shared {
    /// Converts (rows, columns) to (shared, other), or back.
    #[inline(always)]
    fn order<T>(self, a: T, b: T) -> (T, T) {
        match self {
            Self::Rows => (a, b),
            Self::Columns => (b, a),
        }
    }
}

/// Computes `a * b` into `target`.
pub(super) fn multiply<const R: usize, const C: usize, T: Tiles<R, C>>(
    tiles: T,
    target: Target<'_>,
    a: MatrixBf16<'_>,
    b: MatrixBf16<'_>,
    threads: Parallelism,
) {
    let whole = a.columns;
    let depths = whole.div_ceil(DEPTH).max(1);
    let unit = 2 * T::UNIT;
    let depth = whole.div_ceil(depths).next_multiple_of(unit).max(unit);
    // The rows of both are lines along the depth.
    let (rows, columns) = (a, b.transposed());
    let is_shared = if rows.rows <= columns.rows { Shared::Rows } else { Shared::Columns };
    let (shared, own) = is_shared.order(rows, columns);
    let most = (SHARED_BYTES / (2 * T::WORDS * depth)).next_multiple_of(R * C);
    for shared_lines in parts(shared.rows, most) {
        for own_lines in parts(own.rows, if depths > 1 { PARTIAL_LINES } else { own.rows }) {
            let (row, column) = is_shared.order(shared_lines.start, own_lines.start);
            let target = target.part(row, column);
            let mut partials = target.partials(shared_lines.len() * own_lines.len(), depths);
            let (_, width) = is_shared.order(shared_lines.len(), own_lines.len());
            let partials = SharedRows::new(&mut partials, width);
            for part in 0..depths {
                let depth = whole.min(part * depth)..whole.min((part + 1) * depth);
                let (shared_lines, own_lines) = (shared_lines.clone(), own_lines.clone());
                let target = target.over(partials, part, depths);
                Block { tiles, target, is_shared, shared, shared_lines, own, own_lines, depth, threads }.multiply();
            }
        }
    }
}

/// A product whose shared panels are in memory at the same time.
struct Block<'a, T> {
    tiles: T,
    target: Target<'a>,
    is_shared: Shared,
    shared: MatrixBf16<'a>,
    shared_lines: Range<usize>,
    own: MatrixBf16<'a>,
    own_lines: Range<usize>,
    depth: Range<usize>,
    threads: Parallelism,
}

impl<T> Block<'_, T> {
    /// Multiplies the panels of the shared lines by those of the others.
    fn multiply<const R: usize, const C: usize>(&self)
    where
        T: Tiles<R, C>,
    {
        let Self { tiles, target, is_shared, shared, own, threads, .. } = *self;
        let (width_shared, width_own) = is_shared.order(R, C);
        let pairs = self.depth.len().div_ceil(2).next_multiple_of(T::UNIT);
        let pack = |from, is_rows, lines, panels: &mut [u32]| {
            tiles.pack(Strip { from, is_rows, lines, depth: self.depth.clone(), pairs }, panels);
        };
        let shares_rows = is_shared == Shared::Rows;
        let workers = match threads {
            Parallelism::None => 1,
            Parallelism::Rayon(_) => rayon::current_num_threads(),
        };
        let count = self.shared_lines.len();
        let words = |pairs: usize| T::WORDS * pairs;
        let packed_shared = |lines: usize| lines.next_multiple_of(width_shared) * words(pairs);
        let packed_own = |lines: usize| lines.next_multiple_of(width_own) * words(pairs);
        with_buffer(&SHARED, packed_shared(count), |panels| {
            let some = width_shared * (PACKED_LINES / width_shared).max(1);
            let tasks: Vec<_> = parts(count, some).zip(panels.chunks_mut(packed_shared(some).max(1))).collect();
            // An empty depth has empty panels, and nothing to pack.
            spread(count * pairs, threads, tasks, |(lines, panels)| {
                let lines = self.shared_lines.start + lines.start..self.shared_lines.start + lines.end;
                pack(shared, shares_rows, lines, panels);
            });
            let panels = &*panels;

            let count_own = self.own_lines.len();
            let most = OWN_BYTES / (4 * width_own * words(pairs.max(1)));
            let some = width_own * panels_of_task(count_own.div_ceil(width_own), most, workers);
            let tasks: Vec<_> = parts(count_own, some).collect();
            let at_once = pairs_at_once(pairs, T::AT_ONCE, T::UNIT);
            spread(count * count_own * pairs, threads, tasks, |lines| {
                let from = self.own_lines.start + lines.start..self.own_lines.start + lines.end;
                let packed = packed_own(lines.len());
                let squares = if at_once < pairs { GROUP * lines.len().div_ceil(width_own) } else { 1 };
                with_buffer(&OWN, packed.next_multiple_of(LANES) + squares * R * C, |buffer| {
                    let (own_panels, sums) = buffer.split_at_mut(packed.next_multiple_of(LANES));
                    let own_panels = &mut own_panels[..packed];
                    pack(own, !shares_rows, from, own_panels);
                    let shared = Panels { data: panels, width: width_shared, first: 0, count };
                    let own = Panels { data: own_panels, width: width_own, first: lines.start, count: lines.len() };
                    // The task's lines and all shared ones meet in elements of the target's matrix that no other task has
                    // and only this call knows.
                    tiles.run(Square {
                        tiles,
                        target,
                        is_shared,
                        shared,
                        own,
                        depth: [words(pairs), words(at_once)],
                        sums,
                    });
                });
            });
        });
    }
}

/// Returns the number of panels per task: at most `most`, and few enough for every worker to get several tasks. Among the
/// numbers from half of that limit up, it makes the busiest worker's share smallest.
fn panels_of_task(panels: usize, most: usize, workers: usize) -> usize {
    let most = most.min(panels.div_ceil(workers * TASKS_PER_THREAD)).max(1);
    let share = |some: usize| panels.div_ceil(some).div_ceil(workers) * some;
    (most.div_ceil(2)..=most).rev().min_by_key(|some| share(*some)).unwrap_or(most)
}

/// Returns how many of `pairs` in depth are multiplied at once: equal parts, or all of them if they exceed `most` by half at most.
fn pairs_at_once(pairs: usize, most: usize, unit: usize) -> usize {
    if pairs / 3 <= most / 2 {
        return pairs.max(1);
    }
    pairs.div_ceil(pairs.div_ceil(most)).next_multiple_of(unit)
}

/// Packed lines, the number of the first one in the target, and their count.
#[derive(Clone, Copy)]
struct Panels<'a> {
    data: &'a [u32],
    /// Lines per panel.
    width: usize,
    first: usize,
    count: usize,
}

impl<'a> Panels<'a> {
    /// Returns a part of the depth of one panel.
    fn part(self, depth: &Range<usize>) -> &'a [u32] {
        &self.data[depth.start * self.width..depth.end * self.width]
    }

    /// Returns `lines` of the lines from `first` on; both are multiples of the width, except at the end.
    fn some(self, first: usize, lines: usize, depth: usize) -> Self {
        Self {
            data: &self.data[first * depth..self.data.len().min((first + lines) * depth)],
            first: self.first + first,
            count: lines.min(self.count - first),
            ..self
        }
    }

    /// Returns one panel.
    fn panel(self, number: usize, depth: usize) -> Self {
        self.some(number * self.width, self.width, depth)
    }

    /// Iterates over groups of `lines`, a multiple of the width.
    fn each(self, lines: usize, depth: usize) -> impl Iterator<Item = Self> {
        (0..self.count).step_by(lines).map(move |line| self.some(line, lines, depth))
    }
}

/// Multiplies every shared panel by every panel of a task. The elements of the target where their lines meet lie in its
/// matrix, and nothing else reads or writes them.
struct Square<'a, T, const R: usize, const C: usize> {
    tiles: T,
    target: Target<'a>,
    is_shared: Shared,
    shared: Panels<'a>,
    own: Panels<'a>,
    /// Elements per line, and how many of them are multiplied at once.
    depth: [usize; 2],
    sums: &'a mut [u32],
}

impl<const R: usize, const C: usize, T: Tiles<R, C>> NullaryFnOnce for Square<'_, T, R, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { tiles, target, is_shared, shared, own, depth: [whole, at_once], sums } = self;
        let _begun = tiles.begin();
        // SAFETY: every pattern of bits is a float.
        let (_, sums, _) = unsafe { sums.align_to_mut::<[[f32; C]; R]>() };
        let is_parted = at_once < whole;
        let own_panels = own.count.div_ceil(own.width);
        for group in shared.each(GROUP * shared.width, whole) {
            let group_panels = group.count.div_ceil(group.width);
            for begin in (0..whole.max(1)).step_by(at_once) {
                let depth = begin..whole.min(begin + at_once);
                let is_last = depth.end == whole;
                for at in 0..group_panels * own_panels {
                    // A part of a shared panel stays in the first-level cache. A full panel might not, and it is faster to
                    // write neighbours in the target one after the other.
                    let (i, j) = if is_parted {
                        (at / own_panels, at % own_panels)
                    } else {
                        (at % group_panels, at / group_panels)
                    };
                    let (a, b) = is_shared.order(group.panel(i, whole), own.panel(j, whole));
                    if is_last {
                        // The target's memory takes about as long to arrive as the sums.
                        target.prefetch(a.first, b.first, R, C);
                    }
                    if T::WRITES_ROWS
                        && !is_parted
                        && (a.count, b.count) == (R, C)
                        && let Some((out, stride, add)) = target.rows(a.first, b.first)
                    {
                        // SAFETY: begun above; these elements are where the lines of the two panels meet.
                        unsafe { tiles.multiply_rows(a.data, b.data, out, stride, add) };
                        continue;
                    }
                    let sums = &mut sums[if is_parted { at } else { 0 }];
                    // SAFETY: begun above.
                    unsafe { tiles.multiply(a.part(&depth), b.part(&depth), sums, begin > 0) };
                    if !is_last {
                        continue;
                    }
                    for (row, sums) in sums.iter_mut().enumerate().take(a.count) {
                        // SAFETY: the row and its columns are where these lines meet.
                        unsafe {
                            if b.count == C {
                                target.write(a.first + row, b.first, sums);
                            } else {
                                target.write(a.first + row, b.first, &mut sums[..b.count]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Passes `len` elements of a thread's buffer, with arbitrary contents, to `work`.
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
