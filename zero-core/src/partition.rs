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

    /// Whether all pieces are equally long.
    pub fn is_even(&self) -> bool {
        self.stride() * self.world == self.numel
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

/// The ranks of a run by named axes, from the outermost to that of neighbours, as PyTorch's `DeviceMesh` has them. [`Axes::DATA`] is ZeRO's,
/// and cut by [`Mesh`]; the others (tensor and pipeline parallelism) are *foreign*. No axes: all ranks are the data axis.
///
/// ```
/// use zero_core::Axes;
/// let axes = Axes::new(&[("data", 2), ("tensor", 3)]);
/// assert_eq!((axes.data(6), axes.data(4)), (Some(2), None));
/// assert_eq!((axes.coordinate("data", 4), axes.coordinate("tensor", 4)), (1, 1));
/// // Rank 4 shares its place on the tensor axis with rank 1, whose group this is.
/// assert_eq!(axes.first(&["data"], 4), 1);
/// assert_eq!(axes.folder(4), "tensor-1");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Axes(Vec<(String, usize)>);

impl core::fmt::Display for Axes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let axes: Vec<String> = self.0.iter().map(|(name, size)| format!("{name}={size}")).collect();
        f.write_str(&axes.join(" x "))
    }
}

impl Axes {
    /// The axis of data parallelism.
    pub const DATA: &str = "data";
    /// The axis over which experts are cut. Its places train on rows of their own, as those on the data axis do; what all of them have
    /// is averaged over both.
    pub const EXPERT: &str = "expert";

    /// Axes of these names and numbers of ranks.
    pub fn new(axes: &[(&str, usize)]) -> Self {
        Self(axes.iter().map(|&(name, size)| (name.to_string(), size)).collect())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names, from the outermost.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Those that are not ZeRO's.
    pub fn foreign(&self) -> Vec<&str> {
        self.names().filter(|&name| name != Self::DATA).collect()
    }

    /// Ranks on the data axis of a run of `world`; `None` if the axes do not have a data axis, names of their own and as many ranks.
    pub fn data(&self, world: usize) -> Option<usize> {
        let Some((_, data)) = self.0.iter().find(|(name, _)| name == Self::DATA) else {
            return self.is_empty().then_some(world);
        };
        let is_named = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let are_own = (0..self.0.len()).all(|at| self.0[..at].iter().all(|(name, _)| *name != self.0[at].0));
        let ranks = self.0.iter().try_fold(1usize, |ranks, (_, size)| ranks.checked_mul(*size));
        (self.names().all(is_named) && are_own && ranks == Some(world)).then_some(*data)
    }

    /// The size of an axis, and how many ranks there are from one place on it to the next.
    fn stride(&self, name: &str) -> Option<(usize, usize)> {
        let at = self.names().position(|axis| axis == name)?;
        Some((self.0[at].1, self.0[at + 1..].iter().map(|(_, size)| size).product()))
    }

    /// The place of `rank` on an axis; 0 on one that is not there.
    pub fn coordinate(&self, name: &str, rank: usize) -> usize {
        self.stride(name).map_or(0, |(size, stride)| rank / stride % size)
    }

    /// The first of the ranks that differ from `rank` in their places on the axes `names` alone: it names their group.
    pub fn first(&self, names: &[&str], rank: usize) -> usize {
        let along = |name: &&str| self.stride(name).map_or(0, |(size, stride)| rank / stride % size * stride);
        rank - names.iter().map(along).sum::<usize>()
    }

    /// A name for the model state of `rank`, which it shares along the data axis: `pipeline-0-tensor-1`; empty without foreign axes.
    pub fn folder(&self, rank: usize) -> String {
        let places = self.foreign().into_iter().map(|name| format!("{name}-{}", self.coordinate(name, rank)));
        places.collect::<Vec<_>>().join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Along each axis every rank is in one group, whose members differ there alone.
    #[test]
    fn groups_of_axes_part_the_ranks() {
        let axes = Axes::new(&[("pipeline", 2), ("data", 3), ("tensor", 4)]);
        assert_eq!(axes.data(24), Some(3));
        for (name, size) in [("pipeline", 2), ("data", 3), ("tensor", 4)] {
            for rank in 0..24 {
                let first = axes.first(&[name], rank);
                let group: Vec<usize> = (0..24).filter(|&other| axes.first(&[name], other) == first).collect();
                assert_eq!((group.len(), group[0]), (size, first));
                let places: Vec<usize> = group.iter().map(|&rank| axes.coordinate(name, rank)).collect();
                assert_eq!(places, (0..size).collect::<Vec<_>>());
                for other in ["pipeline", "data", "tensor"].into_iter().filter(|&other| other != name) {
                    assert!(group.iter().all(|&of| axes.coordinate(other, of) == axes.coordinate(other, rank)));
                }
            }
        }
        assert_eq!(axes.first(&axes.foreign(), 17), axes.coordinate("data", 17) * 4);
        assert_eq!(axes.folder(17), "pipeline-1-tensor-1");
        for wrong in
            [&[("tensor", 4)][..], &[("data", 2), ("data", 2)], &[("data", 3), ("", 1)], &[("data", 2), ("a/b", 2)]]
        {
            assert_eq!(Axes::new(wrong).data(4), None, "{wrong:?}");
        }
    }

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
