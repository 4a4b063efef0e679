//! A set of address ranges: a sorted array in a mapping of its own. The allocator must not allocate through itself, and a free range must
//! not hold its own record (writing the record would touch a page that was given back).
//!
//! There are as many spans as holes between blocks, some hundred. A lookup is a binary search, an insertion moves the later spans, and all
//! of them fit in a CPU's L1 cache.

use std::{
    ops::{Deref, Range},
    ptr, slice,
};

use super::sys;

/// Size of the first mapping: room for 2730 spans.
const FIRST_BYTES: usize = 64 << 10;

/// The non-empty range `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Set if the system has its pages, so that it reads as zero.
    pub(crate) clean: bool,
}

impl Span {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }
}

/// Disjoint spans sorted by address; adjacent spans differ in `clean`.
pub(crate) struct Spans {
    /// The exposed address of the mapping; meaningless while `bytes` is 0.
    addr: usize,
    bytes: usize,
    len: usize,
}

impl Spans {
    pub(crate) const fn new() -> Self {
        Self { addr: 0, bytes: 0, len: 0 }
    }

    /// Ensures room for `more` spans; returns `false` if the system has no memory left.
    pub(crate) fn reserve(&mut self, more: usize) -> bool {
        while self.bytes / size_of::<Span>() < self.len + more {
            let bytes = if self.bytes == 0 { FIRST_BYTES } else { self.bytes * 2 };
            let grown = if self.bytes == 0 {
                sys::map(bytes)
            } else {
                // SAFETY: the mapping is this set's own, and `&mut self` shows that no slice of it is alive.
                unsafe { sys::remap(self.addr, self.bytes, bytes) }
            };
            let Some(addr) = grown else { return false };
            (self.addr, self.bytes) = (addr, bytes);
        }
        true
    }

    /// Adds a span that overlaps no span of the set. Adds at most one record.
    pub(crate) fn insert(&mut self, mut new: Span) {
        let at = self.partition_point(|span| span.start < new.start);
        let (mut from, mut to) = (at, at);
        if let Some(before) = self[..at].last()
            && (before.end, before.clean) == (new.start, new.clean)
        {
            (from, new.start) = (at - 1, before.start);
        }
        if let Some(after) = self.get(at)
            && (after.start, after.clean) == (new.end, new.clean)
        {
            (to, new.end) = (at + 1, after.end);
        }
        self.replace(from..to, &[new]);
    }

    /// Removes the part of the set within `[start, end)` and calls `piece` with each removed part, lowest first. Adds at most one record.
    pub(crate) fn cut(&mut self, start: usize, end: usize, mut piece: impl FnMut(Span)) {
        let from = self.partition_point(|span| span.end <= start);
        let to = self.partition_point(|span| span.start < end);
        if from >= to {
            return;
        }
        let (first, last) = (self[from], self[to - 1]);
        for span in &self[from..to] {
            piece(Span { start: span.start.max(start), end: span.end.min(end), ..*span });
        }
        // The remainder of the first span on its low side, and of the last on its high side.
        let rest = [Span { end: start, ..first }, Span { start: end, ..last }];
        let (skip, until) = (usize::from(first.start >= start), 1 + usize::from(last.end > end));
        self.replace(from..to, &rest[skip..until]);
    }

    /// Replaces `records` by `with`. Panics if no room for them was reserved: otherwise a span could be lost, or handed out twice.
    fn replace(&mut self, records: Range<usize>, with: &[Span]) {
        let len = self.len - records.len() + with.len();
        let first = ptr::with_exposed_provenance_mut(self.addr);
        let room = self.bytes / size_of::<Span>();
        // SAFETY: as in `deref`, for the whole mapping; zero, as new pages are, is a valid span. `&mut self` makes this the
        // only slice.
        let slots: &mut [Span] = if room == 0 { &mut [] } else { unsafe { slice::from_raw_parts_mut(first, room) } };
        slots.copy_within(records.end..self.len, records.start + with.len());
        slots[records.start..][..with.len()].copy_from_slice(with);
        self.len = len;
    }
}

impl Deref for Spans {
    type Target = [Span];

    fn deref(&self) -> &[Span] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the mapping is page-aligned and holds this many spans that have been written; it is this set's alone, so it
        // changes only through `&mut self`.
        unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(self.addr), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, end: usize, clean: bool) -> Span {
        Span { start, end, clean }
    }

    #[test]
    fn joins_neighbours_of_a_kind_and_cuts_pieces() {
        let mut set = Spans::new();
        assert!(set.reserve(8));
        set.insert(span(10, 20, true));
        set.insert(span(30, 40, true));
        set.insert(span(40, 50, false));
        set.insert(span(20, 30, true));
        assert_eq!(*set, [span(10, 40, true), span(40, 50, false)]);
        let mut pieces = Vec::new();
        set.cut(15, 25, |piece| pieces.push(piece));
        set.cut(35, 60, |piece| pieces.push(piece));
        set.cut(15, 25, |piece| pieces.push(piece));
        assert_eq!(pieces, [span(15, 25, true), span(35, 40, true), span(40, 50, false)]);
        assert_eq!(*set, [span(10, 15, true), span(25, 35, true)]);
    }

    #[test]
    fn agrees_with_a_map_of_every_address() {
        const ADDRESSES: usize = 400;
        let mut set = Spans::new();
        let mut expected = [None; ADDRESSES];
        let mut seed = 1_u64;
        for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (seed >> 40) as usize % (ADDRESSES - 20);
            let end = start + 1 + (seed >> 33) as usize % 19;
            let clean = (seed >> 32) & 1 == 0;
            assert!(set.reserve(1));
            if expected[start..end].iter().all(Option::is_none) {
                set.insert(span(start, end, clean));
                expected[start..end].fill(Some(clean));
            } else {
                let mut got = [None; ADDRESSES];
                set.cut(start, end, |piece| got[piece.start..piece.end].fill(Some(piece.clean)));
                assert_eq!(got[start..end], expected[start..end]);
                expected[start..end].fill(None);
            }
            let mut got = [None; ADDRESSES];
            set.iter().for_each(|span| got[span.start..span.end].fill(Some(span.clean)));
            assert_eq!(got, expected);
            let apart =
                |two: &[Span]| two[0].end < two[1].start || two[0].end == two[1].start && two[0].clean != two[1].clean;
            assert!(set.windows(2).all(apart) && set.iter().all(|span| span.start < span.end));
        }
    }

    #[test]
    fn the_array_grows_and_keeps_what_it_holds() {
        let (mut set, count) = (Spans::new(), if cfg!(miri) { 3_000 } else { 10_000 });
        for number in 0..count {
            assert!(set.reserve(1));
            set.insert(span(2 * number, 2 * number + 1, false));
        }
        assert!(set.iter().enumerate().all(|(number, span)| span.start == 2 * number));
        assert_eq!(set.len, count);
    }
}
