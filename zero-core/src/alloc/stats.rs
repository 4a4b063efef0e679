//! The keeper's counters.

/// Counters of a [`PageKeeper`](super::PageKeeper) since it was created. Small requests, which it passes on, are not counted.
///
/// All sizes are in bytes of whole blocks, that is, of requests rounded up to pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes allocated whose pages the system had yet to provide: never touched, or trimmed since.
    pub fresh_bytes: u64,
    /// Number of allocated blocks with at least one fresh page.
    pub fresh_blocks: u64,
    /// Number of allocated blocks that lay entirely in kept pages.
    pub reused_blocks: u64,
    /// Bytes allocated and not yet freed.
    pub live_bytes: u64,
    /// The peak of `live_bytes`.
    pub live_bytes_peak: u64,
    /// Freed bytes whose pages are kept.
    pub kept_bytes: u64,
}

impl Stats {
    pub(crate) const NONE: Self =
        Self { fresh_bytes: 0, fresh_blocks: 0, reused_blocks: 0, live_bytes: 0, live_bytes_peak: 0, kept_bytes: 0 };

    /// Records an allocated block of `len` bytes, of which `fresh` are fresh.
    pub(crate) fn took_block(&mut self, len: usize, fresh: usize) {
        let blocks = if fresh > 0 { &mut self.fresh_blocks } else { &mut self.reused_blocks };
        *blocks += 1;
        self.took(len, fresh);
    }

    /// Records that a live block grew by `len` bytes, of which `fresh` are fresh.
    pub(crate) fn took(&mut self, len: usize, fresh: usize) {
        self.fresh_bytes += fresh as u64;
        self.kept_bytes -= (len - fresh) as u64;
        self.live_bytes += len as u64;
        self.live_bytes_peak = self.live_bytes_peak.max(self.live_bytes);
    }

    /// Records `len` freed bytes, of which `kept` keep their pages.
    pub(crate) fn gave(&mut self, len: usize, kept: usize) {
        self.live_bytes -= len as u64;
        self.kept_bytes += kept as u64;
    }

    /// Returns whether keeping `len` more freed bytes stays within `limit`.
    pub(crate) fn may_keep(&self, len: usize, limit: u64) -> bool {
        self.kept_bytes.saturating_add(len as u64) <= limit
    }
}
