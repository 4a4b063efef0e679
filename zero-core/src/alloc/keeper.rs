//! [`PageKeeper`]: decides which allocator serves a request and how long a block is, and does the work under the lock.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr,
    sync::{Mutex, PoisonError},
};

use super::{
    space::{AVAILABLE, GRANULE, HUGE, Space},
    stats::Stats,
};

/// The smallest request, in bytes, that the keeper serves itself.
pub const THRESHOLD: usize = 64 << 10;

/// The largest alignment, in bytes, that the keeper serves itself.
pub const MAX_ALIGN: usize = HUGE;

/// Period in bytes that the length of a block must not be a multiple of: see [`block_len`].
const COLOUR_PERIOD: usize = 16 * GRANULE;

/// Settings of a [`PageKeeper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Maximum number of freed bytes to keep. A block whose freeing would exceed it goes back to the system at once.
    pub keep_bytes: u64,
    /// Asks the kernel for huge pages (`madvise`); otherwise the system's own setting decides.
    pub huge_pages: bool,
}

impl Settings {
    /// Keeps everything that is freed, and asks for huge pages.
    pub const DEFAULT: Self = Self { keep_bytes: u64::MAX, huge_pages: true };
}

/// An allocator that serves large blocks from ranges whose pages it keeps, and passes the rest on to `A`. Use it as a static: what it maps
/// is never unmapped, not even when it is dropped. See the module's documentation for an example.
pub struct PageKeeper<A = System> {
    small: A,
    settings: Settings,
    state: Mutex<State>,
}

struct State {
    space: Space,
    stats: Stats,
}

impl<A> std::fmt::Debug for PageKeeper<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageKeeper").field("settings", &self.settings).field("stats", &self.stats()).finish()
    }
}

impl<A> PageKeeper<A> {
    /// Creates a keeper with [`Settings::DEFAULT`] that passes small requests on to `small`.
    pub const fn new(small: A) -> Self {
        Self::with_settings(small, Settings::DEFAULT)
    }

    /// Creates a keeper that passes small requests on to `small`.
    pub const fn with_settings(small: A, settings: Settings) -> Self {
        Self { small, settings, state: Mutex::new(State { space: Space::new(), stats: Stats::NONE }) }
    }

    /// Gives all free pages back to the system and returns their size in bytes. Large requests of other threads wait meanwhile. If the
    /// kernel has put free and live pages into one huge page, it may take the free ones only when memory becomes scarce.
    pub fn trim(&self) -> usize {
        self.locked(|State { space, stats }| {
            let given = space.trim();
            stats.kept_bytes -= given as u64;
            given
        })
    }

    /// Returns the counters so far.
    pub fn stats(&self) -> Stats {
        self.locked(|state| state.stats)
    }

    fn locked<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        // An allocator must not unwind, and a half-changed space must not be used again.
        let bomb = AbortOnUnwind;
        let result = work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        std::mem::forget(bomb);
        result
    }

    /// Takes a block; returns it with the number of zero bytes at its end.
    fn take(&self, layout: Layout) -> (*mut u8, usize) {
        let len = block_len(layout.size());
        let taken = self.locked(|State { space, stats }| {
            let taken = space.take(len, layout.align().max(GRANULE), self.settings.huge_pages)?;
            stats.took_block(len, taken.fresh);
            Some(taken)
        });
        match taken {
            Some(taken) => (ptr::with_exposed_provenance_mut(taken.addr), taken.zero_tail),
            None => (ptr::null_mut(), 0),
        }
    }

    fn give(&self, block: *mut u8, layout: Layout) {
        let (addr, len) = (block.expose_provenance(), block_len(layout.size()));
        self.locked(|State { space, stats }| {
            if !stats.may_keep(len, self.settings.keep_bytes) && space.give_clean(addr, len) {
                return stats.gave(len, 0);
            }
            space.give(addr, len);
            stats.gave(len, len);
        });
    }

    /// Changes a block's size in place. Returns `false` if it does not fit there; the block is then unchanged.
    fn resize(&self, block: *mut u8, old_size: usize, new_size: usize) -> bool {
        let (addr, old, new) = (block.expose_provenance(), block_len(old_size), block_len(new_size));
        if new == old {
            return true;
        }
        self.locked(|State { space, stats }| {
            if new < old {
                let done = stats.may_keep(old - new, self.settings.keep_bytes) && space.shrink(addr + new, old - new);
                if done {
                    stats.gave(old - new, old - new);
                }
                return done;
            }
            let fresh = space.grow(addr, old, new - old, self.settings.huge_pages);
            if let Some(fresh) = fresh {
                stats.took(new - old, fresh);
            }
            fresh.is_some()
        })
    }
}

/// Aborts the process if a panic unwinds through it.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// Returns whether the keeper serves such requests itself. The answer never changes during a block's life.
fn serves(size: usize, align: usize) -> bool {
    AVAILABLE && size >= THRESHOLD && align <= MAX_ALIGN
}

/// Returns the length of a block for `size` bytes: `size` rounded up to granules, plus one granule if blocks of this size, placed side by
/// side, would all begin at the same address modulo [`COLOUR_PERIOD`] and so contend for the same cache sets.
fn block_len(size: usize) -> usize {
    let len = size.next_multiple_of(GRANULE);
    if len.is_multiple_of(COLOUR_PERIOD) { len + GRANULE } else { len }
}

// SAFETY: `serves` depends on the layout alone, so a block goes back to the allocator that it came from. Own blocks
// come from `Space`, which hands out no byte twice before it is given back, and are at least as long and as aligned
// as asked: `block_len` rounds up, and `Space::take` aligns. Nothing unwinds (`locked` aborts).
unsafe impl<A: GlobalAlloc> GlobalAlloc for PageKeeper<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if serves(layout.size(), layout.align()) {
            return self.take(layout).0;
        }
        // SAFETY: the caller's promises are the ones that `small` asks for.
        unsafe { self.small.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if serves(layout.size(), layout.align()) {
            let (block, zero_tail) = self.take(layout);
            if !block.is_null() {
                let used = (block_len(layout.size()) - zero_tail).min(layout.size());
                // SAFETY: the block is this caller's alone and has at least `layout.size()` bytes.
                unsafe { block.write_bytes(0, used) };
            }
            return block;
        }
        // SAFETY: the caller's promises are the ones that `small` asks for.
        unsafe { self.small.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if serves(layout.size(), layout.align()) {
            return self.give(block, layout);
        }
        // SAFETY: by `serves` the block came from `small`; the caller promises the rest.
        unsafe { self.small.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        match (serves(layout.size(), layout.align()), serves(new_size, layout.align())) {
            // SAFETY: by `serves` the block came from `small` and would again; the caller promises the rest.
            (false, false) => return unsafe { self.small.realloc(block, layout, new_size) },
            (true, true) if self.resize(block, layout.size(), new_size) => return block,
            _ => {}
        }
        // SAFETY: the caller promises that `new_size` rounded up to the alignment does not overflow `isize`.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: the caller promises that `new_size` is not zero.
        let new_block = unsafe { self.alloc(new_layout) };
        if !new_block.is_null() {
            // SAFETY: both blocks are live, distinct and have that many bytes; the old one is freed once, with the
            // layout that it was allocated with.
            unsafe {
                ptr::copy_nonoverlapping(block, new_block, layout.size().min(new_size));
                self.dealloc(block, layout);
            }
        }
        new_block
    }
}
