//! The partition of a flat tensor into one shard per rank, and the groups of ranks that together hold all shards.

use std::ops::Range;

/// A partition of `numel` elements into `world` consecutive shards, as equal in length as a common stride allows.
///
/// Rank `r` owns elements `[r * stride, (r + 1) * stride)`, clipped to `numel`, where `stride = ceil(numel / world)`. The
/// last ranks may own fewer elements, or none when `numel < world`. The constant stride lets one reduce-scatter serve many
/// tensors (each contributes `stride` columns per rank).
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
    /// Number of equal parts that a shard consists of, except at the end of the tensor: see [`Mesh::partition`].
    parts: usize,
}

impl Partition {
    /// Partitions `numel` elements over `world` ranks.
    ///
    /// # Panics
    ///
    /// When `world` is 0: a group needs at least one rank.
    pub fn new(numel: usize, world: usize) -> Self {
        assert!(world > 0, "a partition needs at least one rank");
        Self { numel, world, parts: 1 }
    }

    /// Returns the number of elements of the full tensor.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns the number of shards.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Returns the number of elements between the starts of consecutive shards: `ceil(numel / world)`, or the next multiple
    /// of the number of parts of a shard.
    pub fn stride(&self) -> usize {
        self.parts * self.numel.div_ceil(self.world * self.parts)
    }

    /// Returns the elements that `rank` owns, possibly none.
    pub fn range(&self, rank: usize) -> Range<usize> {
        debug_assert!(rank < self.world);
        let start = (rank * self.stride()).min(self.numel);
        start..(start + self.stride()).min(self.numel)
    }

    /// Returns the number of elements that `rank` owns.
    pub fn len(&self, rank: usize) -> usize {
        self.range(rank).len()
    }

    /// Returns whether all shards are equally long.
    pub fn is_even(&self) -> bool {
        self.stride() * self.world == self.numel
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.numel == 0
    }

    /// Returns whether one rank owns everything, so that no gather is ever needed.
    pub fn is_whole(&self) -> bool {
        self.world == 1
    }
}

/// Ranks in two dimensions: each group of `shards` consecutive ranks holds the full model state, and there are `replicas`
/// such groups. DeepSpeed calls this MiCS ([Zhang et al. 2022](https://arxiv.org/abs/2205.00119)), PyTorch hybrid sharding.
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
    /// Returns the mesh of `world` ranks in groups of `shards`, or `None` if `world` is not a multiple of `shards`.
    pub fn new(world: usize, shards: usize) -> Option<Self> {
        let is_even = world > 0 && shards > 0 && world.is_multiple_of(shards);
        is_even.then(|| Self { shards, replicas: world / shards })
    }

    /// Returns the number of ranks in a group, which together hold the full model state.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Returns the number of groups, each with the full model state.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the number of all ranks.
    pub fn world(&self) -> usize {
        self.shards * self.replicas
    }

    /// Returns the index of `rank` in its group.
    pub fn shard(&self, rank: usize) -> usize {
        rank % self.shards
    }

    /// Returns the group of `rank`.
    pub fn replica(&self, rank: usize) -> usize {
        rank / self.shards
    }

    /// Returns the rank at index `shard` in the group of `rank`.
    pub fn peer(&self, rank: usize, shard: usize) -> usize {
        self.replica(rank) * self.shards + shard
    }

    /// Returns the partition of a tensor within a group. Each shard consists of consecutive shards of
    /// `Partition::new(numel, world)`.
    pub fn partition(&self, numel: usize) -> Partition {
        Partition { parts: self.replicas, ..Partition::new(numel, self.shards) }
    }

    /// Returns the index of `rank` in a partition over all ranks, chosen so that its shard there lies within its shard of
    /// the group's partition. State that must be counted or saved once then has exactly one owner.
    pub fn place(&self, rank: usize) -> usize {
        self.shard(rank) * self.replicas + self.replica(rank)
    }
}

/// The ranks of a run along named axes, outermost first (the last axis varies fastest), like PyTorch's `DeviceMesh`. ZeRO
/// uses the axis [`Axes::DATA`], which [`Mesh`] divides further; the others (such as tensor and pipeline parallelism) are
/// *foreign*. If there are no axes, all ranks form the data axis.
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
    /// Name of the data-parallel axis.
    pub const DATA: &str = "data";
    /// Name of the axis over which experts are sharded. Its ranks train on different rows, like the ranks of the data axis,
    /// and the gradients of shared parameters are averaged over both axes.
    pub const EXPERT: &str = "expert";

    /// Creates axes from names and sizes.
    pub fn new(axes: &[(&str, usize)]) -> Self {
        Self(axes.iter().map(|&(name, size)| (name.to_string(), size)).collect())
    }

    /// Returns whether there are no axes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names, outermost first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the names of all axes except the data axis.
    pub fn foreign(&self) -> Vec<&str> {
        self.names().filter(|&name| name != Self::DATA).collect()
    }

    /// Returns the size of the data axis in a run of `world` ranks. `None` if there is no data axis, a name is invalid or
    /// used twice, or the sizes do not multiply to `world`.
    pub fn data(&self, world: usize) -> Option<usize> {
        let Some((_, data)) = self.0.iter().find(|(name, _)| name == Self::DATA) else {
            return self.is_empty().then_some(world);
        };
        let is_named = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let are_own = (0..self.0.len()).all(|at| self.0[..at].iter().all(|(name, _)| *name != self.0[at].0));
        let ranks = self.0.iter().try_fold(1usize, |ranks, (_, size)| ranks.checked_mul(*size));
        (self.names().all(is_named) && are_own && ranks == Some(world)).then_some(*data)
    }

    /// Returns an axis's size and its stride: the difference in rank between consecutive coordinates.
    fn stride(&self, name: &str) -> Option<(usize, usize)> {
        let at = self.names().position(|axis| axis == name)?;
        Some((self.0[at].1, self.0[at + 1..].iter().map(|(_, size)| size).product()))
    }

    /// Returns the coordinate of `rank` on an axis, or 0 if there is no such axis.
    pub fn coordinate(&self, name: &str, rank: usize) -> usize {
        self.stride(name).map_or(0, |(size, stride)| rank / stride % size)
    }

    /// Returns the lowest of the ranks that differ from `rank` only in their coordinates on the axes `names`. It identifies
    /// their group.
    pub fn first(&self, names: &[&str], rank: usize) -> usize {
        let along = |name: &&str| self.stride(name).map_or(0, |(size, stride)| rank / stride % size * stride);
        rank - names.iter().map(along).sum::<usize>()
    }

    /// Returns a name for the model state of `rank`, shared along the data axis: `pipeline-0-tensor-1`; empty without
    /// foreign axes.
    pub fn folder(&self, rank: usize) -> String {
        let places = self.foreign().into_iter().map(|name| format!("{name}-{}", self.coordinate(name, rank)));
        places.collect::<Vec<_>>().join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Along each axis, every rank is in one group, whose members differ only in their coordinate on that axis.
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
        // A single group is the same as no groups.
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
