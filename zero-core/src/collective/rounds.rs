//! Who speaks to whom in a group of many ranks, so that nobody speaks to all.
//!
//! Places are written in base [`RADIX`]. A gather goes in rounds, one for each digit: in the round of digit `k` every place
//! takes from up to `RADIX - 1` others, at the distances `j * RADIX^k`, all that they have come to hold (Bruck et al.,
//! "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", 1997). A broadcast goes down a
//! tree in which a place's parent is that place without its lowest digit that is not 0. Groups of up to `RADIX` ranks have one
//! round, in which each speaks to each, and a flat tree.

use std::ops::Range;

/// The most ranks of a group in which each speaks to each. It costs a rank at most 7 messages for each factor of 8 in ranks.
pub(super) const RADIX: usize = 8;

/// The largest result, in bytes, of a gather in rounds: what is larger goes from each to each at once, as data.
pub(super) const LARGEST: usize = 256 << 10;

/// What a place takes in one round, and from whom. As much of its own goes to the place as far on the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Take {
    /// How far its giver is ahead.
    pub(super) distance: usize,
    /// The ranks, counted from the taker, whose parts it takes; the giver's count from the giver, so they begin at 0 there.
    pub(super) parts: Range<usize>,
}

/// The rounds of a gather among `world` places, in each of which a place speaks to less than `radix` others. One at least.
pub(super) fn gather(world: usize, radix: usize) -> Vec<Vec<Take>> {
    let (mut rounds, mut held) = (Vec::new(), 1);
    while held < world || rounds.is_empty() {
        let distances = (1..radix).map(|digit| digit * held).take_while(|&distance| distance < world);
        rounds.push(distances.map(|distance| Take { distance, parts: distance..world.min(distance + held) }).collect());
        held *= radix;
    }
    rounds
}

/// Whether ranks gather a result of `bytes` in more than one round.
pub(super) fn are_for(world: usize, bytes: usize) -> bool {
    world > RADIX && bytes <= LARGEST
}

/// A place in the tree of a broadcast.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// None of the root.
    pub(super) parent: Option<usize>,
    /// Each with the places from it up to the next, or to the end of this one's own, counted from the root.
    pub(super) children: Vec<usize>,
    /// Steps from the root.
    pub(super) depth: u8,
    /// How many places there are from it downwards, itself among them.
    pub(super) size: usize,
}

/// Where `place` is in the tree from `root` to all of `world` places.
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

/// The places that `place` of `world` speaks to in a gather of all, ascending: those to hear of its end or failure at once.
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
