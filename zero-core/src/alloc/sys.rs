//! The four system calls. Addresses are plain numbers with exposed provenance; callers turn them into pointers with
//! [`std::ptr::with_exposed_provenance_mut`]. Nothing here allocates.

use std::ptr;

/// Maps `len` readable, writable, zeroed bytes, or returns `None`. The pages cost nothing until they are touched.
pub(crate) fn map(len: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
    // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory in use.
    let addr = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if addr == libc::MAP_FAILED { None } else { Some(addr.expose_provenance()) }
}

/// Unmaps a mapping.
///
/// # Safety
/// `[addr, addr + len)` was mapped here, and nobody uses it any more.
pub(crate) unsafe fn unmap(addr: usize, len: usize) {
    // SAFETY: by this function's contract. A failure (a full table of mappings) only leaves addresses unused.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(addr), len) };
}

/// Grows a mapping and returns its address, which may have changed. Returns `None` if it cannot; the mapping is then unchanged.
///
/// # Safety
/// `[addr, addr + old_len)` is one mapping made here, and no pointer into it is used after this call succeeds.
pub(crate) unsafe fn remap(addr: usize, old_len: usize, new_len: usize) -> Option<usize> {
    let old = ptr::with_exposed_provenance_mut(addr);
    // SAFETY: by this function's contract.
    let new = unsafe { libc::mremap(old, old_len, new_len, libc::MREMAP_MAYMOVE) };
    if new == libc::MAP_FAILED { None } else { Some(new.expose_provenance()) }
}

/// Asks for huge pages. A kernel without them refuses; this affects only speed.
pub(crate) fn ask_for_huge_pages(addr: usize, len: usize) {
    if cfg!(miri) {
        return; // Miri has no madvise.
    }
    // SAFETY: this advice changes no contents, whatever the range.
    unsafe { libc::madvise(ptr::with_exposed_provenance_mut(addr), len, libc::MADV_HUGEPAGE) };
}

/// Gives the pages back; they read as zero afterwards. Returns `false` if the system refuses; they then read as before or as zero.
///
/// # Safety
/// The range is of whole pages, mapped here, and nobody needs its contents.
pub(crate) unsafe fn give_back(addr: usize, len: usize) -> bool {
    if cfg!(miri) {
        // SAFETY: by this function's contract.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(addr).write_bytes(0, len) };
        return true;
    }
    // SAFETY: by this function's contract.
    unsafe { libc::madvise(ptr::with_exposed_provenance_mut(addr), len, libc::MADV_DONTNEED) == 0 }
}
