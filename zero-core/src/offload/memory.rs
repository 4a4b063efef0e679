//! One mapping of memory for all buffers of a pool.

use std::io;
use std::ptr::NonNull;

use memmap2::{Advice, MmapMut, MmapRaw};
use rustix::mm::mlock;

use crate::offload::DiskError;

/// A huge page on the systems that have them by default.
pub(crate) const HUGE: usize = 2 << 20;

/// A page on the systems with the smallest ones; a mapping is aligned to it at least.
const PAGE: usize = 4096;

/// Mapped memory, zero at first, given back when dropped. Shared references only give the address away; who may access which
/// part is the pool's to decide.
pub(crate) struct Memory {
    map: MmapRaw,
    /// The first aligned byte's place in the mapping, and the bytes from there on.
    begin: usize,
    bytes: usize,
}

impl Memory {
    /// Maps `bytes` (whole pages) aligned to `alignment`, a power of two.
    pub(crate) fn map(bytes: usize, alignment: usize) -> Result<Self, DiskError> {
        let slack = if alignment > PAGE { alignment } else { 0 };
        let map = MmapMut::map_anon(bytes.saturating_add(slack).max(PAGE))
            .map_err(|source| DiskError::Memory { bytes, source })?;
        let map = MmapRaw::from(map);
        let begin = map.as_mut_ptr().align_offset(alignment);
        Ok(Self { map, begin, bytes })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // `begin` is below `alignment`, which the mapping is longer by, or 0, since it is on a page's boundary.
        let start = self.map.as_mut_ptr().wrapping_add(self.begin);
        NonNull::new(start).expect("a mapping has an address")
    }

    /// Asks for huge pages.
    pub(crate) fn ask_for_huge_pages(&self) -> io::Result<()> {
        self.map.advise_range(Advice::HugePage, self.begin, self.bytes)
    }

    /// Keeps the pages in memory, all of them from now on.
    pub(crate) fn pin(&self) -> io::Result<()> {
        // SAFETY: pages of a mapping of our own; locking changes no contents, and unmapping undoes it.
        unsafe { mlock(self.start().as_ptr().cast(), self.bytes) }.map_err(io::Error::from)
    }
}
