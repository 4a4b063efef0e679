//! An ordered set of pairs of numbers: a treap whose nodes lie in a [`Nodes`] that several trees share and that the
//! caller passes to each call. Every operation takes O(log n) expected time; recursion goes as deep as the tree.

use super::nodes::{NONE, Nodes};

/// (address, bytes) or (bytes, address), ordered by the first, then by the second.
pub(crate) type Pair = (usize, usize);

pub(crate) struct Tree {
    root: u32,
}

impl Tree {
    pub(crate) const fn new() -> Self {
        Self { root: NONE }
    }

    /// Adds a pair that is not in the set. False: there was no node for it, and the set is as before.
    pub(crate) fn insert(&mut self, nodes: &mut Nodes, pair: Pair) -> bool {
        let Some(new) = nodes.add(pair) else { return false };
        self.root = insert(nodes, self.root, new);
        true
    }

    /// Removes a pair; false: it was not in the set.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, pair: Pair) -> bool {
        let mut parent = NONE;
        let mut at = self.root;
        while at != NONE && nodes[at].key != pair {
            parent = at;
            at = if pair < nodes[at].key { nodes[at].left } else { nodes[at].right };
        }
        if at == NONE {
            return false;
        }
        let (left, right) = (nodes[at].left, nodes[at].right);
        let joined = join(nodes, left, right);
        if parent == NONE {
            self.root = joined;
        } else if nodes[parent].left == at {
            nodes[parent].left = joined;
        } else {
            nodes[parent].right = joined;
        }
        nodes.release(at);
        true
    }

    /// The least pair that is not less than `pair`.
    pub(crate) fn at_least(&self, nodes: &Nodes, pair: Pair) -> Option<Pair> {
        let mut found = None;
        let mut at = self.root;
        while at != NONE {
            let node = &nodes[at];
            if node.key >= pair {
                found = Some(node.key);
                at = node.left;
            } else {
                at = node.right;
            }
        }
        found
    }

    /// The greatest pair that is less than `pair`.
    pub(crate) fn below(&self, nodes: &Nodes, pair: Pair) -> Option<Pair> {
        let mut found = None;
        let mut at = self.root;
        while at != NONE {
            let node = &nodes[at];
            if node.key < pair {
                found = Some(node.key);
                at = node.right;
            } else {
                at = node.left;
            }
        }
        found
    }
}

/// Puts the single node `new` into the tree `at`; returns the root of the result.
fn insert(nodes: &mut Nodes, at: u32, new: u32) -> u32 {
    if at == NONE {
        return new;
    }
    let key = nodes[new].key;
    if nodes[new].rank > nodes[at].rank {
        let (left, right) = split(nodes, at, key);
        nodes[new].left = left;
        nodes[new].right = right;
        return new;
    }
    if key < nodes[at].key {
        let left = nodes[at].left;
        nodes[at].left = insert(nodes, left, new);
    } else {
        let right = nodes[at].right;
        nodes[at].right = insert(nodes, right, new);
    }
    at
}

/// Parts the tree `at` into the keys less than `key` and the others.
fn split(nodes: &mut Nodes, at: u32, key: Pair) -> (u32, u32) {
    if at == NONE {
        return (NONE, NONE);
    }
    if nodes[at].key < key {
        let right = nodes[at].right;
        let (less, others) = split(nodes, right, key);
        nodes[at].right = less;
        (at, others)
    } else {
        let left = nodes[at].left;
        let (less, others) = split(nodes, left, key);
        nodes[at].left = others;
        (less, at)
    }
}

/// One tree of two, every key of the first being less than every key of the second.
fn join(nodes: &mut Nodes, first: u32, second: u32) -> u32 {
    if first == NONE {
        return second;
    }
    if second == NONE {
        return first;
    }
    if nodes[first].rank > nodes[second].rank {
        let right = nodes[first].right;
        nodes[first].right = join(nodes, right, second);
        first
    } else {
        let left = nodes[second].left;
        nodes[second].left = join(nodes, first, left);
        second
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn agrees_with_a_btree_set() {
        let mut nodes = Nodes::new();
        let mut tree = Tree::new();
        let mut expected = BTreeSet::new();
        let mut seed = 1_u64;
        for _ in 0..40_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pair = ((seed >> 40) as usize % 300, (seed >> 33) as usize % 10);
            assert!(nodes.reserve(1));
            if expected.contains(&pair) {
                assert!(tree.remove(&mut nodes, pair));
                expected.remove(&pair);
            } else {
                assert!(!tree.remove(&mut nodes, pair));
                assert!(tree.insert(&mut nodes, pair));
                expected.insert(pair);
            }
            let probe = ((seed >> 20) as usize % 300, 5);
            assert_eq!(tree.at_least(&nodes, probe), expected.range(probe..).next().copied());
            assert_eq!(tree.below(&nodes, probe), expected.range(..probe).next_back().copied());
        }
    }

    #[test]
    fn without_a_node_the_set_stays_as_it_was() {
        let mut nodes = Nodes::new();
        let mut tree = Tree::new();
        assert!(!tree.insert(&mut nodes, (1, 1)));
        assert_eq!(tree.at_least(&nodes, (0, 0)), None);
    }
}
