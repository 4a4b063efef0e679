//! The free address ranges: their bounds, the pages already touched, and the choice of the next one to hand out.
//!
//! A live block has no record: its owner gives back its address and its length. Every byte is in one of three states:
//!
//! * live: in no set;
//! * free and kept: in a span of `free`; an earlier owner touched its page (or it is counted so, to be safe);
//! * free and clean: in a clean span of `free`; the system has its page, so it reads as zero.
//!
//! A free *range* consists of adjacent spans, also across arenas that lie next to each other. It may be part kept, part clean, such as the
//! last range of an arena, which runs from the last live block to the arena's end. A new arena is clean; handing out takes spans out of
//! `free`; only giving pages back makes clean spans.

use super::{
    spans::{Span, Spans},
    sys,
};

/// True if the target has enough addresses to keep some.
pub(crate) const AVAILABLE: bool = cfg!(target_pointer_width = "64");

/// Unit of block sizes: 4 KiB pages on x86-64, elsewhere the largest page that a kernel may be built with.
pub(crate) const GRANULE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };

/// Size of a huge page; arenas are aligned to it.
pub(crate) const HUGE: usize = 2 << 20;

/// Step, in bytes, in which huge pages are requested as ranges come into use. Requesting them for a full arena at once would put all of it
/// on the list that the kernel's khugepaged scans.
const ADVICE_STEP: usize = 64 << 20;

const LARGEST_ARENA: usize = if cfg!(miri) { SMALLEST_ARENA } else { (1_u64 << 40) as usize };
const SMALLEST_ARENA: usize = 64 << 20;

/// Maximum number of spans that one call adds to a set itself: a new arena, or the two remainders of a span that was split.
const SPANS_PER_CALL: usize = 2;

/// A block handed out: `[addr, addr + len)` with the requested `len`.
pub(crate) struct Taken {
    pub(crate) addr: usize,
    /// Number of its bytes that were clean.
    pub(crate) fresh: usize,
    /// Number of bytes at its end that read as zero; the bytes before may hold anything.
    pub(crate) zero_tail: usize,
}

pub(crate) struct Space {
    /// Free spans.
    free: Spans,
    /// Ranges that huge pages have not been requested for.
    plain: Spans,
    live_blocks: usize,
}

impl Space {
    pub(crate) const fn new() -> Self {
        Self { free: Spans::new(), plain: Spans::new(), live_blocks: 0 }
    }

    /// Hands out `len` bytes (a multiple of [`GRANULE`]) aligned to `align`, or `None` if the system has no addresses left.
    ///
    /// Best fit, with ties broken by the lowest address, and kept pages before clean ones: a range with clean pages is used only if no
    /// other is large enough. The block comes from its low end, where the range at an arena's end has its kept pages.
    pub(crate) fn take(&mut self, len: usize, align: usize, huge_pages: bool) -> Option<Taken> {
        // Any range of this size holds an aligned block, wherever it starts.
        let want = len + align.saturating_sub(GRANULE);
        if !self.reserve_spans(1) {
            return None;
        }
        let range = match self.fitting(want) {
            Some(found) => found,
            None if self.add_arena(want) => self.fitting(want)?,
            None => return None,
        };
        self.live_blocks += 1;
        Some(self.hand_out(range.start.next_multiple_of(align), len, huge_pages))
    }

    /// Grows the live block `[addr, addr + len)` by `more` bytes if they are free. Returns the number of new bytes that were clean.
    pub(crate) fn grow(&mut self, addr: usize, len: usize, more: usize, huge_pages: bool) -> Option<usize> {
        let end = addr + len;
        let at = self.free.partition_point(|span| span.start < end);
        let behind = ranges(&self.free[at..]).next().filter(|range| range.start == end)?;
        if behind.len() < more || !self.reserve_spans(0) {
            return None;
        }
        Some(self.hand_out(end, more, huge_pages).fresh)
    }

    /// Shrinks a live block by its tail `[addr, addr + len)`, which becomes free. Returns `false` if there is no memory for the record; the
    /// block is then unchanged.
    pub(crate) fn shrink(&mut self, addr: usize, len: usize) -> bool {
        let room = self.reserve_spans(0);
        if room {
            self.free.insert(Span { start: addr, end: addr + len, clean: false });
        }
        room
    }

    /// Takes a block back with its pages.
    pub(crate) fn give(&mut self, addr: usize, len: usize) {
        self.live_blocks -= 1;
        self.free.insert(Span { start: addr, end: addr + len, clean: false });
    }

    /// Takes a block back and gives its pages to the system. Returns `false` if the system refuses; the block is then still live.
    pub(crate) fn give_clean(&mut self, addr: usize, len: usize) -> bool {
        // SAFETY: a block is of whole pages, was mapped by this space, and its owner is about to free it.
        let done = unsafe { sys::give_back(addr, len) };
        if done {
            self.live_blocks -= 1;
            self.free.insert(Span { start: addr, end: addr + len, clean: true });
        }
        done
    }

    /// Gives every kept page back to the system; returns their size in bytes.
    pub(crate) fn trim(&mut self) -> usize {
        let (mut given, mut next) = (0, 0);
        loop {
            let at = self.free.partition_point(|span| span.start < next);
            let Some(kept) = self.free[at..].iter().find(|span| !span.clean).copied() else { return given };
            next = kept.end;
            // SAFETY: free spans are whole pages, mapped by this space and used by nobody.
            if unsafe { sys::give_back(kept.start, kept.len()) } {
                given += kept.len();
                self.free.cut(kept.start, kept.end, |_| {});
                self.free.insert(Span { clean: true, ..kept });
            }
        }
    }

    /// Returns the free ranges by address, `clean` if any span of theirs is.
    fn ranges(&self) -> impl Iterator<Item = Span> {
        ranges(&self.free)
    }

    /// Returns the best range of at least `want` bytes, the first among equals.
    fn fitting(&self, want: usize) -> Option<Span> {
        self.ranges().filter(|range| range.len() >= want).min_by_key(|range| (range.clean, range.len()))
    }

    /// Maps an arena with room for `want` bytes.
    fn add_arena(&mut self, want: usize) -> bool {
        // One huge page more than needed, since the mapping may not start at a multiple of one.
        let need = want.next_multiple_of(HUGE) + HUGE;
        let mut size = need.max(LARGEST_ARENA);
        let mut mapped = sys::map(size);
        while mapped.is_none() && size > need {
            size = if size / 2 >= need.max(SMALLEST_ARENA) { size / 2 } else { need };
            mapped = sys::map(size);
        }
        let Some(mut addr) = mapped else { return false };
        // Where addresses are scarce, half of them would leave too few for the small allocator and thread stacks. More
        // small arenas do no harm: the system mostly puts them side by side, and then they are joined.
        if size < LARGEST_ARENA && size / 4 >= need.max(SMALLEST_ARENA) {
            // SAFETY: the mapping was just made, and no address of it was handed out.
            unsafe { sys::unmap(addr, size) };
            size /= 4;
            match sys::map(size) {
                Some(smaller) => addr = smaller,
                None => return false,
            }
        }
        let arena = Span { start: addr.next_multiple_of(HUGE), end: (addr + size) / HUGE * HUGE, clean: true };
        self.free.insert(arena);
        self.plain.insert(arena);
        true
    }

    /// Reserves room in the sets for this call, and for freeing every live block and `more` others, so that freeing cannot fail.
    fn reserve_spans(&mut self, more: usize) -> bool {
        self.free.reserve(self.live_blocks + more + SPANS_PER_CALL) && self.plain.reserve(SPANS_PER_CALL)
    }

    /// Takes `len` free bytes from `addr` on out of `free`.
    fn hand_out(&mut self, addr: usize, len: usize, huge_pages: bool) -> Taken {
        let end = addr + len;
        let mut taken = Taken { addr, fresh: 0, zero_tail: 0 };
        self.free.cut(addr, end, |span| {
            // The last span decides the tail.
            taken.zero_tail = if span.clean { span.len() } else { 0 };
            taken.fresh += taken.zero_tail;
        });
        if huge_pages && taken.fresh > 0 {
            let (from, to) = (addr / ADVICE_STEP * ADVICE_STEP, end.next_multiple_of(ADVICE_STEP));
            self.plain.cut(from, to, |span| sys::ask_for_huge_pages(span.start, span.len()));
        }
        taken
    }
}

/// Merges adjacent spans into ranges, `clean` if any of their spans is.
fn ranges(mut free: &[Span]) -> impl Iterator<Item = Span> {
    std::iter::from_fn(move || {
        let (first, rest) = free.split_first()?;
        let mut range = *first;
        free = rest;
        while let [next, rest @ ..] = free
            && next.start == range.end
        {
            // Two adjacent spans are never both kept.
            (range.end, range.clean, free) = (next.end, true, rest);
        }
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freeing_in_any_order_leaves_one_range() {
        let mut space = Space::new();
        let len = 16 * GRANULE;
        let mut blocks: Vec<usize> = (0..500).map(|_| space.take(len, GRANULE, true).unwrap().addr).collect();
        let mut seed = 7_usize;
        while !blocks.is_empty() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = blocks.swap_remove((seed >> 33) % blocks.len());
            space.give(block, len);
        }
        assert_eq!(space.ranges().count(), 1);
        assert_eq!(space.take(500 * len, GRANULE, true).unwrap().fresh, 0);
    }

    #[test]
    fn the_smallest_range_that_fits_goes_first_and_kept_before_clean() {
        let mut space = Space::new();
        let mut take = |granules: usize| space.take(granules * GRANULE, GRANULE, false).unwrap().addr;
        let (large, _wall, small, _wall2) = (take(30), take(1), take(20), take(1));
        space.give(large, 30 * GRANULE);
        space.give(small, 20 * GRANULE);
        assert_eq!(space.take(18 * GRANULE, GRANULE, false).unwrap().addr, small);
        assert_eq!(space.take(18 * GRANULE, GRANULE, false).unwrap().addr, large);
        let beyond = space.take(18 * GRANULE, GRANULE, false).unwrap();
        assert_eq!(beyond.fresh, 18 * GRANULE);
        assert_eq!(beyond.zero_tail, 18 * GRANULE);
    }

    #[test]
    fn a_trimmed_hole_is_clean_and_a_kept_one_comes_before_it() {
        let mut space = Space::new();
        let mut take = |granules: usize| space.take(granules * GRANULE, GRANULE, false).unwrap().addr;
        let (first, _wall, second, _wall2) = (take(20), take(1), take(25), take(1));
        space.give(first, 20 * GRANULE);
        assert_eq!(space.trim(), 20 * GRANULE);
        assert_eq!(space.trim(), 0);
        space.give(second, 25 * GRANULE);
        let taken = space.take(20 * GRANULE, GRANULE, false).unwrap();
        assert_eq!((taken.addr, taken.fresh, taken.zero_tail), (second, 0, 0));
        let taken = space.take(20 * GRANULE, GRANULE, false).unwrap();
        assert_eq!((taken.addr, taken.fresh, taken.zero_tail), (first, 20 * GRANULE, 20 * GRANULE));
    }

    #[test]
    fn a_block_that_reaches_into_clean_pages_counts_them_alone_as_fresh() {
        let mut space = Space::new();
        let first = space.take(16 * GRANULE, GRANULE, false).unwrap().addr;
        space.give(first, 16 * GRANULE);
        let taken = space.take(20 * GRANULE, GRANULE, false).unwrap();
        assert_eq!((taken.addr, taken.fresh, taken.zero_tail), (first, 4 * GRANULE, 4 * GRANULE));
    }
}
