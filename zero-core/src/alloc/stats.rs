//! The keeper's counters: written under its lock, read by anyone without it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a [`PageKeeper`](super::PageKeeper) has done so far. Small requests, which it passes on, are not counted.
///
/// All sizes are bytes of whole blocks, that is, of requests rounded up to pages. The fields are read one after the
/// other: while other threads allocate, they need not agree with each other to the byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes handed out whose pages the system had yet to provide: never touched, or given back by a trim since.
    pub fresh_bytes: u64,
    /// Blocks of which at least one page was fresh.
    pub fresh_blocks: u64,
    /// Blocks that lay entirely in kept pages.
    pub reused_blocks: u64,
    /// Bytes handed out and not yet freed.
    pub live_bytes: u64,
    /// The most that `live_bytes` has been.
    pub live_bytes_peak: u64,
    /// Bytes freed whose pages are kept.
    pub kept_bytes: u64,
}

/// [`Stats`] as atomics. Each writer holds the keeper's lock, whose release and acquire order the writers among
/// themselves; so a plain load and store make an addition, and readers need no order at all.
#[derive(Default)]
pub(crate) struct Counters {
    fresh_bytes: AtomicU64,
    fresh_blocks: AtomicU64,
    reused_blocks: AtomicU64,
    live_bytes: AtomicU64,
    live_bytes_peak: AtomicU64,
    kept_bytes: AtomicU64,
}

impl Counters {
    pub(crate) const fn new() -> Self {
        Self {
            fresh_bytes: AtomicU64::new(0),
            fresh_blocks: AtomicU64::new(0),
            reused_blocks: AtomicU64::new(0),
            live_bytes: AtomicU64::new(0),
            live_bytes_peak: AtomicU64::new(0),
            kept_bytes: AtomicU64::new(0),
        }
    }

    pub(crate) fn read(&self) -> Stats {
        Stats {
            fresh_bytes: self.fresh_bytes.load(Relaxed),
            fresh_blocks: self.fresh_blocks.load(Relaxed),
            reused_blocks: self.reused_blocks.load(Relaxed),
            live_bytes: self.live_bytes.load(Relaxed),
            live_bytes_peak: self.live_bytes_peak.load(Relaxed),
            kept_bytes: self.kept_bytes.load(Relaxed),
        }
    }
}

impl Counters {
    /// A block of `len` bytes was handed out, `fresh` of them for the first time. Call it with the lock held.
    pub(crate) fn took_block(&self, len: usize, fresh: usize) {
        add(if fresh > 0 { &self.fresh_blocks } else { &self.reused_blocks }, 1);
        self.took(len, fresh);
    }

    /// A live block grew by `len` bytes, `fresh` of them for the first time. Call it with the lock held.
    pub(crate) fn took(&self, len: usize, fresh: usize) {
        add(&self.fresh_bytes, fresh);
        sub(&self.kept_bytes, len - fresh);
        let live = add(&self.live_bytes, len);
        if live > self.live_bytes_peak.load(Relaxed) {
            self.live_bytes_peak.store(live, Relaxed);
        }
    }

    /// `len` bytes were freed, `kept` of them with their pages. Call it with the lock held.
    pub(crate) fn gave(&self, len: usize, kept: usize) {
        sub(&self.live_bytes, len);
        add(&self.kept_bytes, kept);
    }

    /// The pages of `len` free bytes went back to the system. Call it with the lock held.
    pub(crate) fn trimmed(&self, len: usize) {
        sub(&self.kept_bytes, len);
    }

    pub(crate) fn kept(&self) -> u64 {
        self.kept_bytes.load(Relaxed)
    }
}

fn add(counter: &AtomicU64, amount: usize) -> u64 {
    let sum = counter.load(Relaxed).wrapping_add(amount as u64);
    counter.store(sum, Relaxed);
    sum
}

fn sub(counter: &AtomicU64, amount: usize) {
    counter.store(counter.load(Relaxed).wrapping_sub(amount as u64), Relaxed);
}
