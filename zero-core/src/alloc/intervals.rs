//! A set of addresses as disjoint ranges that do not meet: neighbours are joined as they come in.
//!
//! Where the node store has no room a range is left out. Each user reads "not in the set" as the careful answer
//! (a page not known to be clean is cleared), so that this costs time at worst.

use super::{
    nodes::Nodes,
    tree::{Pair, Tree},
};

pub(crate) struct Intervals {
    /// (address, bytes)
    ranges: Tree,
}

impl Intervals {
    pub(crate) const fn new() -> Self {
        Self { ranges: Tree::new() }
    }

    /// Adds `[start, end)`, of which no address is in the set.
    pub(crate) fn insert(&mut self, nodes: &mut Nodes, start: usize, end: usize) {
        let (mut first, mut last) = (start, end);
        if let Some((addr, len)) = self.ranges.below(nodes, (start, 0)).filter(|(addr, len)| addr + len == start) {
            self.ranges.remove(nodes, (addr, len));
            first = addr;
        }
        if let Some((addr, len)) = self.ranges.at_least(nodes, (end, 0)).filter(|(addr, _)| *addr == end) {
            self.ranges.remove(nodes, (addr, len));
            last = addr + len;
        }
        self.ranges.insert(nodes, (first, last - first));
    }

    /// The part of `[start, end)` with the highest addresses that is in the set, in one piece.
    pub(crate) fn last_within(&self, nodes: &Nodes, start: usize, end: usize) -> Option<(usize, usize)> {
        let (addr, len) = self.ranges.below(nodes, (end, 0))?;
        if addr + len > start { Some((addr.max(start), (addr + len).min(end))) } else { None }
    }

    /// Takes `last_within` out of the set and returns it.
    pub(crate) fn take_last_within(&mut self, nodes: &mut Nodes, start: usize, end: usize) -> Option<(usize, usize)> {
        let (from, to) = self.last_within(nodes, start, end)?;
        let (addr, len): Pair = self.ranges.below(nodes, (end, 0))?;
        self.ranges.remove(nodes, (addr, len));
        if addr < from {
            self.ranges.insert(nodes, (addr, from - addr));
        }
        if to < addr + len {
            self.ranges.insert(nodes, (to, addr + len - to));
        }
        Some((from, to))
    }

    /// The part of `[start, end)` with the lowest addresses that is not in the set.
    pub(crate) fn first_gap(&self, nodes: &Nodes, start: usize, end: usize) -> Option<(usize, usize)> {
        let from = match self.ranges.below(nodes, (start + 1, 0)) {
            Some((addr, len)) => start.max(addr + len),
            None => start,
        };
        if from >= end {
            return None;
        }
        let to = self.ranges.at_least(nodes, (from, 0)).map_or(end, |(addr, _)| end.min(addr));
        Some((from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_neighbours_cuts_pieces_and_finds_gaps() {
        let mut nodes = Nodes::new();
        assert!(nodes.reserve(8));
        let mut set = Intervals::new();
        set.insert(&mut nodes, 10, 20);
        set.insert(&mut nodes, 30, 40);
        assert_eq!(set.first_gap(&nodes, 5, 50), Some((5, 10)));
        assert_eq!(set.first_gap(&nodes, 10, 50), Some((20, 30)));
        assert_eq!(set.first_gap(&nodes, 32, 40), None);
        set.insert(&mut nodes, 20, 30);
        assert_eq!(set.last_within(&nodes, 0, 100), Some((10, 40)));
        assert_eq!(set.take_last_within(&mut nodes, 15, 25), Some((15, 25)));
        assert_eq!(set.take_last_within(&mut nodes, 0, 30), Some((25, 30)));
        assert_eq!(set.take_last_within(&mut nodes, 0, 30), Some((10, 15)));
        assert_eq!(set.take_last_within(&mut nodes, 0, 30), None);
        assert_eq!(set.last_within(&nodes, 0, 100), Some((30, 40)));
    }
}
