//! How a flat tensor is cut into one piece per rank, and which ranks have one between them.

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
    /// Equal parts of a piece, but for the last elements: see [`Mesh::partition`].
    parts: usize,
}

impl Partition {
    /// Cuts `numel` elements over `world` ranks.
    ///
    /// # Panics
    ///
    /// When `world` is 0: a group without ranks holds nothing.
    pub fn new(numel: usize, world: usize) -> Self {
        assert!(world > 0, "a partition needs at least one rank");
        Self { numel, world, parts: 1 }
    }

    /// Elements of the whole.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Number of pieces.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Elements between the starts of two consecutive pieces: `ceil(numel / world)`, or the next multiple of the parts of a piece.
    pub fn stride(&self) -> usize {
        self.parts * self.numel.div_ceil(self.world * self.parts)
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

/// Ranks in two dimensions: groups of `shards` neighbours hold a whole of model state between them, and `replicas` such groups
/// hold the same. What DeepSpeed calls MiCS ([Zhang et al. 2022](https://arxiv.org/abs/2205.00119)), and PyTorch hybrid sharding.
///
/// ```
/// use zero_core::{Mesh, Partition};
/// let mesh = Mesh::new(4, 2).unwrap();
/// assert_eq!((mesh.shards(), mesh.replicas()), (2, 2));
/// // Rank 3 is the second of the second group.
/// assert_eq!((mesh.shard(3), mesh.replica(3), mesh.peer(3, 0)), (1, 1, 2));
/// // A piece is made of whole pieces of the cut over all ranks, of which each is one rank's own.
/// assert_eq!(mesh.partition(10).range(1), 6..10);
/// assert_eq!(Partition::new(10, 4).range(mesh.place(3)), 9..10);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    shards: usize,
    replicas: usize,
}

impl Mesh {
    /// `world` ranks in groups of `shards`; `None` when that does not come out even.
    pub fn new(world: usize, shards: usize) -> Option<Self> {
        let is_even = world > 0 && shards > 0 && world.is_multiple_of(shards);
        is_even.then(|| Self { shards, replicas: world / shards })
    }

    /// Ranks that hold a whole between them.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Groups that each hold a whole.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// All ranks.
    pub fn world(&self) -> usize {
        self.shards * self.replicas
    }

    /// The place of `rank` in its group.
    pub fn shard(&self, rank: usize) -> usize {
        rank % self.shards
    }

    /// The group of `rank`.
    pub fn replica(&self, rank: usize) -> usize {
        rank / self.shards
    }

    /// The rank that has place `shard` in the group of `rank`.
    pub fn peer(&self, rank: usize, shard: usize) -> usize {
        self.replica(rank) * self.shards + shard
    }

    /// The cut of a tensor within a group. Its pieces are put together from pieces of `Partition::new(numel, world)`.
    pub fn partition(&self, numel: usize) -> Partition {
        Partition { parts: self.replicas, ..Partition::new(numel, self.shards) }
    }

    /// The place of `rank` in a cut over all ranks, whose piece there is within its piece of its group's cut: what is counted or
    /// saved once in all is one rank's that way.
    pub fn place(&self, rank: usize) -> usize {
        self.shard(rank) * self.replicas + self.replica(rank)
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

    proptest! {
        #[test]
        fn each_element_is_one_ranks_own_and_within_its_piece(
            numel in 0usize..1000, shards in 1usize..9, replicas in 1usize..9,
        ) {
            let mesh = Mesh::new(shards * replicas, shards).unwrap();
            let mut owned = vec![false; numel];
            for rank in 0..mesh.world() {
                let piece = mesh.partition(numel).range(mesh.shard(rank));
                let own = Partition::new(numel, mesh.world()).range(mesh.place(rank));
                prop_assert!(own.is_empty() || (piece.start <= own.start && own.end <= piece.end));
                for element in own {
                    prop_assert!(!std::mem::replace(&mut owned[element], true));
                }
            }
            prop_assert!(owned.into_iter().all(|owned| owned));
            let last = mesh.partition(numel).range(shards - 1);
            prop_assert_eq!(last.end, numel);
        }
    }

    #[test]
    fn a_group_has_whole_ranks() {
        assert_eq!(Mesh::new(4, 3), None);
        assert_eq!(Mesh::new(4, 0), None);
        assert_eq!(Mesh::new(0, 1), None);
        // One group is the flat world.
        assert_eq!(Mesh::new(3, 3).unwrap().partition(10), Partition::new(10, 3));
    }

    #[test]
    fn nothing_and_less_than_the_world() {
        let none = Partition::new(0, 3);
        assert!((0..3).all(|rank| none.len(rank) == 0));
        let few = Partition::new(2, 5);
        assert_eq!((0..5).map(|rank| few.len(rank)).collect::<Vec<_>>(), [1, 1, 0, 0, 0]);
    }
}
