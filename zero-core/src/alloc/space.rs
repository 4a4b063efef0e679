//! The free address ranges: which there are, which of their pages have been touched, and which to hand out.
//!
//! A live block has no record: its owner gives back its address and its length. A free range is joined with its free
//! neighbours at once, across arenas too where two lie next to each other. Every byte is in one of three states:
//!
//! * live: in no set;
//! * free and kept: in a range of `by_addr`, its page touched by an earlier owner (or counted so, to be careful);
//! * free and clean: in a range of `by_addr` and in `clean`, its page with the system, so that it reads as zero.
//!
//! A new arena is clean; handing out takes bytes out of `clean`; only giving pages back puts bytes into it. A range
//! may be part kept, part clean, such as the last one of an arena, which runs from the last live block to the end.

use super::{intervals::Intervals, nodes::Nodes, sys, tree::Tree};

pub(crate) const AVAILABLE: bool = true;

/// The unit of a block: 4 KiB pages on x86-64, elsewhere the largest page that a kernel may be built with.
pub(crate) const GRANULE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };

/// A huge page; arenas start at one.
pub(crate) const HUGE: usize = 2 << 20;

/// Huge pages are asked for in steps of this many bytes, as the ranges come into use. Asking for a whole arena at once
/// would put all of it on the list that the kernel's khugepaged walks through.
const ADVICE_STEP: usize = 64 << 20;

const LARGEST_ARENA: usize = 1 << 40;
const SMALLEST_ARENA: usize = 64 << 20;

/// The most nodes that freeing one block adds: its range (by address, by size), and a range of clean pages.
const NODES_PER_FREE: usize = 3;

/// The most nodes that one `take`, `grow` or `shrink` adds itself, rounded up: two ranges more than before, a new
/// arena in all four trees, and a cut in `clean` and in `plain`.
const NODES_PER_CALL: usize = 16;

/// A block handed out: `[addr, addr + len)` with the `len` asked for.
pub(crate) struct Taken {
    pub(crate) addr: usize,
    /// How many of its bytes were clean.
    pub(crate) fresh: usize,
    /// How many bytes at its end read as zero; the ones before may hold anything.
    pub(crate) zero_tail: usize,
}

pub(crate) struct Space {
    nodes: Nodes,
    /// Every free range: (address, bytes).
    by_addr: Tree,
    /// The free ranges without a clean byte: (bytes, address).
    kept: Tree,
    /// The other free ranges: (bytes, address).
    mixed: Tree,
    clean: Intervals,
    /// Where huge pages have not been asked for.
    plain: Intervals,
    live_blocks: usize,
}

impl Space {
    pub(crate) const fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            by_addr: Tree::new(),
            kept: Tree::new(),
            mixed: Tree::new(),
            clean: Intervals::new(),
            plain: Intervals::new(),
            live_blocks: 0,
        }
    }

    /// Hands out `len` bytes (whole granules) aligned to `align`, or `None` where the system has no addresses left.
    ///
    /// Best fit, the lowest address among equals, and kept pages before clean ones: a range that has clean pages is
    /// cut only if no other is large enough, and from its low end, where a range at an arena's end has its kept pages.
    pub(crate) fn take(&mut self, len: usize, align: usize, huge_pages: bool) -> Option<Taken> {
        // Any range of this size holds an aligned block, wherever it starts.
        let want = len + align.saturating_sub(GRANULE);
        if !self.reserve_nodes(1) {
            return None;
        }
        let (free_len, free_addr) = match self.fitting(want) {
            Some(found) => found,
            None if self.add_arena(want) => self.fitting(want)?,
            None => return None,
        };
        let addr = free_addr.next_multiple_of(align);
        self.unlink(free_addr, free_len);
        self.link(free_addr, addr);
        self.link(addr + len, free_addr + free_len);
        self.live_blocks += 1;
        let (fresh, zero_tail) = self.use_pages(addr, addr + len, huge_pages);
        Some(Taken { addr, fresh, zero_tail })
    }

    /// Hands out `len` clean bytes (whole granules) beside the kept pages at the low end of the largest free range, or
    /// `None` where that has no clean piece as long.
    pub(crate) fn take_clean(&mut self, len: usize, huge_pages: bool) -> Option<usize> {
        if !self.reserve_nodes(1) {
            return None;
        }
        let (free_len, free_addr) = self.mixed.below(&self.nodes, (usize::MAX, 0))?;
        let end = free_addr + free_len;
        let (addr, to) = self.clean.last_within(&self.nodes, free_addr, end)?;
        if to - addr < len {
            return None;
        }
        self.unlink(free_addr, free_len);
        self.link(free_addr, addr);
        self.link(addr + len, end);
        self.live_blocks += 1;
        self.use_pages(addr, addr + len, huge_pages);
        Some(addr)
    }

    /// Makes the live block `[addr, addr + len)` longer by `more` bytes, if they are free; returns how many of those
    /// were clean.
    pub(crate) fn grow(&mut self, addr: usize, len: usize, more: usize, huge_pages: bool) -> Option<usize> {
        let end = addr + len;
        let (_, free_len) = self.by_addr.at_least(&self.nodes, (end, 0)).filter(|(free, _)| *free == end)?;
        if free_len < more || !self.reserve_nodes(0) {
            return None;
        }
        self.unlink(end, free_len);
        self.link(end + more, end + free_len);
        Some(self.use_pages(end, end + more, huge_pages).0)
    }

    /// Makes a live block shorter: `[addr, addr + len)` is its end, and free from now on. False: no memory for the
    /// record, and the block is as it was.
    pub(crate) fn shrink(&mut self, addr: usize, len: usize) -> bool {
        let room = self.reserve_nodes(0);
        if room {
            self.join(addr, len);
        }
        room
    }

    /// Takes a block back with its pages.
    pub(crate) fn give(&mut self, addr: usize, len: usize) {
        self.live_blocks -= 1;
        self.join(addr, len);
    }

    /// Gives the pages of a live block back to the system, for `give` to follow; false: the system refused.
    pub(crate) fn clean(&mut self, addr: usize, len: usize) -> bool {
        // SAFETY: a block is of whole pages, was mapped by this space, and its owner is about to free it.
        let done = unsafe { sys::give_back(addr, len) };
        if done {
            self.clean.insert(&mut self.nodes, addr, addr + len);
        }
        done
    }

    /// Gives every kept page back to the system; returns their bytes.
    pub(crate) fn trim(&mut self) -> usize {
        let mut given = 0;
        let mut next = 0;
        while let Some((addr, len)) = self.by_addr.at_least(&self.nodes, (next, 0)) {
            next = addr + len;
            // One range of `clean` for the free range, and its own two nodes again.
            if !self.reserve_nodes(0) {
                break;
            }
            self.unlink(addr, len);
            let mut from = addr;
            while let Some((start, end)) = self.clean.first_gap(&self.nodes, from, next) {
                // SAFETY: free ranges and what is clean of them are whole pages, mapped by this space and used by
                // nobody.
                if unsafe { sys::give_back(start, end - start) } {
                    self.clean.insert(&mut self.nodes, start, end);
                    given += end - start;
                }
                from = end;
            }
            self.link(addr, next);
        }
        given
    }

    /// The best range of at least `want` bytes: (bytes, address).
    fn fitting(&self, want: usize) -> Option<(usize, usize)> {
        self.kept.at_least(&self.nodes, (want, 0)).or_else(|| self.mixed.at_least(&self.nodes, (want, 0)))
    }

    /// Maps an arena with room for `want` bytes.
    fn add_arena(&mut self, want: usize) -> bool {
        // One huge page more than needed, since the mapping may start off their grid.
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
        let start = addr.next_multiple_of(HUGE);
        let end = (addr + size) / HUGE * HUGE;
        self.clean.insert(&mut self.nodes, start, end);
        self.plain.insert(&mut self.nodes, start, end);
        self.join(start, end - start);
        true
    }

    /// Room in the node store for this call, and for freeing every live block and `more`: freeing cannot fail.
    fn reserve_nodes(&mut self, more: usize) -> bool {
        self.nodes.reserve((self.live_blocks + more) * NODES_PER_FREE + NODES_PER_CALL)
    }

    /// Takes `[start, end)` out of `clean`: how many bytes of it were there, and how many of them in one piece at its
    /// end.
    fn use_pages(&mut self, start: usize, end: usize, huge_pages: bool) -> (usize, usize) {
        let (mut fresh, mut zero_tail) = (0, 0);
        while let Some((from, to)) = self.clean.take_last_within(&mut self.nodes, start, end) {
            if to == end {
                zero_tail = to - from;
            }
            fresh += to - from;
        }
        if huge_pages && fresh > 0 {
            let (from, to) = (start / ADVICE_STEP * ADVICE_STEP, end.next_multiple_of(ADVICE_STEP));
            while let Some((from, to)) = self.plain.take_last_within(&mut self.nodes, from, to) {
                sys::ask_for_huge_pages(from, to - from);
            }
        }
        (fresh, zero_tail)
    }

    /// Makes `[addr, addr + len)` free, as one range with the free ranges on both sides.
    fn join(&mut self, addr: usize, len: usize) {
        let (mut start, mut end) = (addr, addr + len);
        if let Some((before, before_len)) = self.by_addr.below(&self.nodes, (addr, 0))
            && before + before_len == addr
        {
            self.unlink(before, before_len);
            start = before;
        }
        if let Some((after, after_len)) = self.by_addr.at_least(&self.nodes, (end, 0))
            && after == end
        {
            self.unlink(after, after_len);
            end += after_len;
        }
        self.link(start, end);
    }

    /// Records the free range `[start, end)`, unless it is empty.
    fn link(&mut self, start: usize, end: usize) {
        if start == end {
            return;
        }
        let len = end - start;
        let clean = self.clean.last_within(&self.nodes, start, end).is_some();
        let by_size = if clean { &mut self.mixed } else { &mut self.kept };
        // Both have nodes, by `reserve_nodes`; without them the range would be lost, and nothing worse.
        if self.by_addr.insert(&mut self.nodes, (start, len)) {
            by_size.insert(&mut self.nodes, (len, start));
        }
    }

    /// Forgets a free range.
    fn unlink(&mut self, addr: usize, len: usize) {
        self.by_addr.remove(&mut self.nodes, (addr, len));
        if !self.kept.remove(&mut self.nodes, (len, addr)) {
            self.mixed.remove(&mut self.nodes, (len, addr));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_ranges(space: &Space) -> usize {
        let (mut count, mut next) = (0, 0);
        while let Some((addr, len)) = space.by_addr.at_least(&space.nodes, (next, 0)) {
            count += 1;
            next = addr + len;
        }
        count
    }

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
        assert_eq!(free_ranges(&space), 1);
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
