//! The store of tree nodes: a growing array in a mapping of its own, owned by [`Nodes`], with a list of free slots.
//!
//! The allocator must not allocate through itself, and a free range must not carry its own record (writing it would
//! touch a page that was given back). Slots are named by index, since growing may move the array.

use std::{
    ops::{Index, IndexMut},
    ptr, slice,
};

use super::sys;

/// No node; slot 0 is never handed out.
pub(crate) const NONE: u32 = 0;

/// The first mapping: room for 2048 nodes.
const FIRST_BYTES: usize = 64 << 10;

/// An element of a [`Tree`](super::tree::Tree). All zero bytes are a valid node, as new pages are.
#[derive(Clone, Copy)]
pub(crate) struct Node {
    pub(crate) key: (usize, usize),
    pub(crate) left: u32,
    pub(crate) right: u32,
    /// The random number by which a treap stays balanced: none below has a greater one.
    pub(crate) rank: u32,
}

pub(crate) struct Nodes {
    /// The exposed address of the mapping; meaningless while `bytes` is 0.
    addr: usize,
    bytes: usize,
    /// Slots from here on have never been used.
    unused: u32,
    /// The first of the freed slots, chained by `left`.
    freed: u32,
    in_use: usize,
    seed: u32,
}

impl Nodes {
    pub(crate) const fn new() -> Self {
        Self { addr: 0, bytes: 0, unused: 1, freed: NONE, in_use: 0, seed: 0x9E37_79B9 }
    }

    /// Makes sure that `spare` more calls of `add` succeed; false: the system gave no memory.
    pub(crate) fn reserve(&mut self, spare: usize) -> bool {
        while self.slots().len() < self.in_use + spare + 1 {
            let bytes = if self.bytes == 0 { FIRST_BYTES } else { self.bytes * 2 };
            if bytes / size_of::<Node>() > u32::MAX as usize {
                return false;
            }
            let grown = if self.bytes == 0 {
                sys::map(bytes)
            } else {
                // SAFETY: the mapping is this store's own, and `&mut self` shows that no slice of it is alive.
                unsafe { sys::remap(self.addr, self.bytes, bytes) }
            };
            let Some(addr) = grown else { return false };
            (self.addr, self.bytes) = (addr, bytes);
        }
        true
    }

    /// A new leaf with this key, or `None` where `reserve` did not see to its slot.
    pub(crate) fn add(&mut self, key: (usize, usize)) -> Option<u32> {
        let slot = if self.freed != NONE {
            let slot = self.freed;
            self.freed = self[slot].left;
            slot
        } else if (self.unused as usize) < self.slots().len() {
            self.unused += 1;
            self.unused - 1
        } else {
            return None;
        };
        // xorshift32: any cheap sequence without a pattern in step with the addresses will do.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 17;
        self.seed ^= self.seed << 5;
        self.in_use += 1;
        self[slot] = Node { key, left: NONE, right: NONE, rank: self.seed };
        Some(slot)
    }

    /// Takes a node back that no tree holds any more.
    pub(crate) fn release(&mut self, slot: u32) {
        self[slot].left = self.freed;
        self.freed = slot;
        self.in_use -= 1;
    }

    fn slots(&self) -> &[Node] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the mapping holds this many nodes, page-aligned and initialised (zero is a valid node); it is this
        // store's alone, so it changes only through `&mut self`.
        unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(self.addr), self.bytes / size_of::<Node>()) }
    }

    fn slots_mut(&mut self) -> &mut [Node] {
        if self.bytes == 0 {
            return &mut [];
        }
        let first = ptr::with_exposed_provenance_mut(self.addr);
        // SAFETY: as in `slots`, and `&mut self` makes this the only slice.
        unsafe { slice::from_raw_parts_mut(first, self.bytes / size_of::<Node>()) }
    }
}

impl Index<u32> for Nodes {
    type Output = Node;

    fn index(&self, slot: u32) -> &Node {
        &self.slots()[slot as usize]
    }
}

impl IndexMut<u32> for Nodes {
    fn index_mut(&mut self, slot: u32) -> &mut Node {
        &mut self.slots_mut()[slot as usize]
    }
}
