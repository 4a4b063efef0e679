//! Communication patterns of groups of many ranks, in which no rank exchanges messages with all others.
//!
//! Places are written in base [`RADIX`]. A gather has one round per digit: in the round of digit `k`, every place receives
//! from up to `RADIX - 1` others, at the distances `j * RADIX^k`, all parts that they hold so far (Bruck et al.,
//! "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", 1997). A broadcast goes down a
//! tree in which a place's parent is that place with its lowest nonzero digit set to 0. Groups of up to `RADIX` ranks have one
//! round, in which each rank communicates with every other, and a flat tree.

use std::ops::Range;

/// Largest group in which each rank communicates with every other. A rank receives at most 7 messages per factor of 8 in ranks.
pub(super) const RADIX: usize = 8;

/// The largest result, in bytes, of a gather in rounds. Larger results are sent directly from each rank to every other, as data.
pub(super) const LARGEST: usize = 256 << 10;

/// One receive of a place in one round. It sends as many parts to the place at the same distance on the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Take {
    /// Distance from the receiver forward to the sender.
    pub(super) distance: usize,
    /// The places, counted from the receiver, whose parts it receives. The sender counts them from itself, so they begin at 0 there.
    pub(super) parts: Range<usize>,
}

/// Returns the rounds, at least one, of a gather among `world` places. In each, a place receives from fewer than `radix` others.
pub(super) fn gather(world: usize, radix: usize) -> Vec<Vec<Take>> {
    let (mut rounds, mut held) = (Vec::new(), 1);
    while held < world || rounds.is_empty() {
        let distances = (1..radix).map(|digit| digit * held).take_while(|&distance| distance < world);
        rounds.push(distances.map(|distance| Take { distance, parts: distance..world.min(distance + held) }).collect());
        held *= radix;
    }
    rounds
}

/// Returns `true` if ranks gather a result of `bytes` in more than one round.
pub(super) fn are_for(world: usize, bytes: usize) -> bool {
    world > RADIX && bytes <= LARGEST
}

/// A place in the tree of a broadcast.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// `None` for the root.
    pub(super) parent: Option<usize>,
    /// Child places. Counted from the root, a child's subtree extends up to the next child, or to the end of this node's own.
    pub(super) children: Vec<usize>,
    /// Steps from the root.
    pub(super) depth: u8,
    /// Number of places in its subtree, including itself.
    pub(super) size: usize,
}

/// Returns the node of `place` in the broadcast tree from `root` to all of `world` places.
pub(super) fn node(place: usize, root: usize, world: usize) -> Node {
    let own = (place + world - root) % world;
    let (mut parent, mut children, mut depth, mut size, mut digit) = (None, Vec::new(), 0, world, 1);
    while digit < world {
        let value = own / digit % RADIX;
        if value == 0 && parent.is_none() {
            let below = (1..RADIX).map(|value| own + value * digit).take_while(|&child| child < world);
            children.extend(below.map(|child| (child + root) % world));
        }
        if value > 0 {
            depth += 1;
            if parent.is_none() {
                parent = Some((own - value * digit + root) % world);
                size = digit.min(world - own);
            }
        }
        digit *= RADIX;
    }
    Node { parent, children, depth, size }
}

/// Returns the places that `place` of `world` communicates with in a gather, ascending. It notifies them of its end or failure directly.
pub(super) fn neighbours(place: usize, world: usize) -> Vec<usize> {
    let distances = gather(world, RADIX).into_iter().flatten().map(|take| take.distance);
    let mut both: Vec<usize> =
        distances.flat_map(|far| [(place + far) % world, (place + world - far) % world]).collect();
    both.sort_unstable();
    both.dedup();
    both
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORLDS: [usize; 14] = [1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200, 1_024];

    #[test]
    fn rounds_bring_every_part_once_to_every_place() {
        for (world, radix) in WORLDS.into_iter().flat_map(|world| [(world, RADIX), (world, 2), (world, world.max(2))]) {
            let mut held = vec![0];
            for round in gather(world, radix) {
                let given = held.len();
                for Take { distance, parts } in round {
                    assert!(parts.len() <= given && parts.start == distance, "the giver, {distance} ahead, holds them");
                    held.extend(parts);
                }
            }
            held.sort_unstable();
            assert_eq!(held, (0..world).collect::<Vec<_>>(), "{world} places, radix {radix}");
        }
    }

    #[test]
    fn every_place_is_once_in_the_tree_and_its_parent_knows_it() {
        for (world, root) in WORLDS.into_iter().flat_map(|world| [(world, 0), (world, world / 2), (world, world - 1)]) {
            let tree: Vec<Node> = (0..world).map(|place| node(place, root, world)).collect();
            assert_eq!((tree[root].parent, tree[root].depth, tree[root].size), (None, 0, world));
            assert_eq!(tree.iter().map(|node| node.children.len()).sum::<usize>(), world - 1);
            for (place, node) in tree.iter().enumerate() {
                let mut below = place + 1;
                for &child in &node.children {
                    assert_eq!((tree[child].parent, tree[child].depth), (Some(place), node.depth + 1));
                    assert_eq!(child, below % world, "what is below one child comes before the next");
                    below += tree[child].size;
                }
                assert_eq!(below, place + node.size);
            }
        }
    }

    #[test]
    fn a_place_speaks_to_few() {
        let spoken = |world| (0..world).map(|place| neighbours(place, world).len()).max().unwrap();
        assert_eq!([1, 2, 8, 9, 64, 256, 1_024].map(spoken), [0, 1, 7, 8, 21, 31, 43]);
        // Its tree's edges are among them, whoever hears of an end hears of it both ways.
        for world in WORLDS {
            for place in 0..world {
                let near = neighbours(place, world);
                let Node { parent, children, .. } = node(place, 0, world);
                assert!(parent.iter().chain(&children).all(|other| near.contains(other)));
                assert!(near.iter().all(|&other| other != place && neighbours(other, world).contains(&place)));
            }
        }
    }
}
