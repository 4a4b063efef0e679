//! One memory mapping for all buffers of a pool.

use std::io;
use std::ptr::NonNull;

use memmap2::{Advice, MmapMut, MmapRaw};
use rustix::mm::mlock;

use crate::offload::DiskError;

/// Size of a huge page on systems that have them by default.
pub(crate) const HUGE: usize = 2 << 20;

/// Size of the smallest page of any system; a mapping is at least aligned to it.
const PAGE: usize = 4096;

/// Mapped memory, zero at first, unmapped when dropped. Shared references only return the address; the pool decides who may access which
/// part.
pub(crate) struct Memory {
    map: MmapRaw,
    /// Offset of the first aligned byte in the mapping, and the number of bytes from there on.
    begin: usize,
    bytes: usize,
}

impl Memory {
    /// Maps `bytes` (a multiple of the page) aligned to `alignment`, a power of two.
    pub(crate) fn map(bytes: usize, alignment: usize) -> Result<Self, DiskError> {
        let slack = if alignment > PAGE { alignment } else { 0 };
        let map = MmapMut::map_anon(bytes.saturating_add(slack).max(PAGE))
            .map_err(|source| DiskError::Memory { bytes, source })?;
        let map = MmapRaw::from(map);
        let begin = map.as_mut_ptr().align_offset(alignment);
        Ok(Self { map, begin, bytes })
    }

    /// Returns the address of the first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // `begin` is less than `alignment`, the extra length of the mapping, or 0, since the mapping starts on a page boundary.
        let start = self.map.as_mut_ptr().wrapping_add(self.begin);
        NonNull::new(start).expect("a mapping has an address")
    }

    /// Asks for huge pages.
    pub(crate) fn ask_for_huge_pages(&self) -> io::Result<()> {
        self.map.advise_range(Advice::HugePage, self.begin, self.bytes)
    }

    /// Locks the pages into memory, all of them from now on.
    pub(crate) fn pin(&self) -> io::Result<()> {
        // SAFETY: pages of a mapping of our own; locking changes no contents, and unmapping undoes it.
        unsafe { mlock(self.start().as_ptr().cast(), self.bytes) }.map_err(io::Error::from)
    }
}
