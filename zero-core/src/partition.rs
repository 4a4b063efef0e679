//! How a flat tensor is cut into one piece per rank.

use std::ops::Range;

/// A cut of `numel` elements into `world` consecutive pieces whose lengths differ as little as a common stride allows.
///
/// Rank `r` owns elements `[r * stride, (r + 1) * stride)`, cut at `numel`, where `stride = ceil(numel / world)`. Late
/// ranks may own fewer elements, or none when `numel < world`. A constant stride is what lets one reduce-scatter serve
/// many tensors (each contributes `stride` columns per rank).
///
/// ```
/// use zero_core::Partition;
/// let p = Partition::new(10, 4);
/// assert_eq!(p.stride(), 3);
/// assert_eq!(p.range(3), 9..10);
/// assert_eq!(Partition::new(2, 4).range(3), 2..2);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Partition {
    numel: usize,
    world: usize,
}

impl Partition {
    /// Cuts `numel` elements over `world` ranks.
    ///
    /// # Panics
    ///
    /// When `world` is 0: a group without ranks holds nothing.
    pub fn new(numel: usize, world: usize) -> Self {
        assert!(world > 0, "a partition needs at least one rank");
        Self { numel, world }
    }

    /// Elements of the whole.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Number of pieces.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Elements between the starts of two consecutive pieces: `ceil(numel / world)`.
    pub fn stride(&self) -> usize {
        self.numel.div_ceil(self.world)
    }

    /// The elements that `rank` owns, possibly none.
    pub fn range(&self, rank: usize) -> Range<usize> {
        debug_assert!(rank < self.world);
        let start = (rank * self.stride()).min(self.numel);
        start..(start + self.stride()).min(self.numel)
    }

    /// Number of elements that `rank` owns.
    pub fn len(&self, rank: usize) -> usize {
        self.range(rank).len()
    }

    /// Whether there is nothing to own.
    pub fn is_empty(&self) -> bool {
        self.numel == 0
    }

    /// Whether one rank owns everything, so that no gather is ever needed.
    pub fn is_whole(&self) -> bool {
        self.world == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_disjoint_ordered_and_cover(numel in 0usize..10_000, world in 1usize..70) {
            let p = Partition::new(numel, world);
            let mut next = 0;
            for rank in 0..world {
                let range = p.range(rank);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() <= p.stride());
                next = range.end;
            }
            prop_assert_eq!(next, numel);
        }
    }

    #[test]
    fn nothing_and_less_than_the_world() {
        let none = Partition::new(0, 3);
        assert!((0..3).all(|rank| none.len(rank) == 0));
        let few = Partition::new(2, 5);
        assert_eq!((0..5).map(|rank| few.len(rank)).collect::<Vec<_>>(), [1, 1, 0, 0, 0]);
    }
}
