//! The keeper's counters.

/// What a [`PageKeeper`](super::PageKeeper) has done so far. Small requests, which it passes on, are not counted.
///
/// All sizes are bytes of whole blocks, that is, of requests rounded up to pages.
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

impl Stats {
    pub(crate) const NONE: Self =
        Self { fresh_bytes: 0, fresh_blocks: 0, reused_blocks: 0, live_bytes: 0, live_bytes_peak: 0, kept_bytes: 0 };

    /// A block of `len` bytes was handed out, `fresh` of them for the first time.
    pub(crate) fn took_block(&mut self, len: usize, fresh: usize) {
        let blocks = if fresh > 0 { &mut self.fresh_blocks } else { &mut self.reused_blocks };
        *blocks += 1;
        self.took(len, fresh);
    }

    /// A live block grew by `len` bytes, `fresh` of them for the first time.
    pub(crate) fn took(&mut self, len: usize, fresh: usize) {
        self.fresh_bytes += fresh as u64;
        self.kept_bytes -= (len - fresh) as u64;
        self.live_bytes += len as u64;
        self.live_bytes_peak = self.live_bytes_peak.max(self.live_bytes);
    }

    /// `len` bytes were freed, `kept` of them with their pages.
    pub(crate) fn gave(&mut self, len: usize, kept: usize) {
        self.live_bytes -= len as u64;
        self.kept_bytes += kept as u64;
    }

    /// Whether `len` freed bytes more would be within `limit`.
    pub(crate) fn may_keep(&self, len: usize, limit: u64) -> bool {
        self.kept_bytes.saturating_add(len as u64) <= limit
    }
}
