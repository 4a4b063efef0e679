//! One mapping of memory for all buffers of a pool.

use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};

use crate::offload::DiskError;

/// A huge page on the systems that have them by default.
pub(crate) const HUGE: usize = 2 << 20;

/// A page on the systems with the smallest ones; a mapping is aligned to it at least.
const PAGE: usize = 4096;

/// Mapped memory, zero at first, given back when dropped.
pub(crate) struct Memory {
    mapped: NonNull<u8>,
    mapped_bytes: usize,
    /// The first aligned byte.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is memory that nobody else has the address of; who may access which part is the pool's to decide.
unsafe impl Send for Memory {}
// SAFETY: as above; shared references only give the address away.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `bytes` (whole pages) aligned to `alignment`, a power of two.
    pub(crate) fn map(bytes: usize, alignment: usize) -> Result<Self, DiskError> {
        let too_many = || DiskError::Memory { bytes, source: io::ErrorKind::OutOfMemory.into() };
        let slack = if alignment > PAGE { alignment } else { 0 };
        let mapped_bytes = bytes.checked_add(slack).ok_or_else(too_many)?.max(PAGE);
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory in use.
        let mapped = unsafe {
            mmap_anonymous(ptr::null_mut(), mapped_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mapped = mapped.map_err(|error| DiskError::Memory { bytes, source: error.into() })?.cast::<u8>();
        let mapped = NonNull::new(mapped).ok_or_else(too_many)?;
        let skip = mapped.as_ptr().align_offset(alignment);
        // SAFETY: `skip` is below `alignment`, which the mapping is longer by, or 0, since it is on a page's boundary.
        let start = unsafe { mapped.add(skip) };
        Ok(Self { mapped, mapped_bytes, start, bytes })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Asks for huge pages.
    pub(crate) fn ask_for_huge_pages(&self) -> io::Result<()> {
        // SAFETY: this advice on a mapping of our own changes no contents.
        unsafe { madvise(self.start.as_ptr().cast(), self.bytes, Advice::LinuxHugepage) }.map_err(io::Error::from)
    }

    /// Keeps the pages in memory, all of them from now on.
    pub(crate) fn pin(&self) -> io::Result<()> {
        // SAFETY: pages of a mapping of our own; locking changes no contents, and unmapping undoes it.
        unsafe { mlock(self.start.as_ptr().cast(), self.bytes) }.map_err(io::Error::from)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; whoever has an address of it also has a share of its owner.
        let outcome = unsafe { munmap(self.mapped.as_ptr().cast(), self.mapped_bytes) };
        // A failure leaves addresses unused, and nothing worse.
        if let Err(error) = outcome {
            tracing::warn!("cannot unmap {} bytes of buffers: {error}", self.mapped_bytes);
        }
    }
}
