//! A counting allocator: `#[global_allocator] static ALLOCATOR: Counting = Counting;`

#![allow(dead_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts per thread the current, peak and largest allocations, so that concurrent tests do not disturb each other.
pub struct Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn took(bytes: usize) {
    let now = NOW.get().wrapping_add(bytes);
    NOW.set(now);
    LARGEST.set(LARGEST.get().max(bytes));
    // A thread may free what another took, and be below 0.
    if now as isize > PEAK.get() as isize {
        PEAK.set(now);
    }
}

fn gave(bytes: usize) {
    NOW.set(NOW.get().wrapping_sub(bytes));
}

// SAFETY: the system's allocator does everything; the counters have neither destructors nor allocations of their own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        gave(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there while the bytes move.
        took(size);
        gave(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// Measured allocations.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Most bytes allocated at one time.
    pub peak: usize,
    /// Bytes of the largest allocation.
    pub largest: usize,
}

/// Returns the result of `body`, and what it allocated.
pub fn taken<T>(body: impl FnOnce() -> T) -> (T, Taken) {
    let before = NOW.get();
    PEAK.set(before);
    LARGEST.set(0);
    let result = body();
    (result, Taken { peak: PEAK.get().wrapping_sub(before), largest: LARGEST.get() })
}

/// Returns the result of `body`, and the most bytes it had allocated at one time.
pub fn peak<T>(body: impl FnOnce() -> T) -> (T, usize) {
    let (result, taken) = taken(body);
    (result, taken.peak)
}
