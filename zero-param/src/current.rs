//! The rank that runs on the current thread.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the rank that runs on this thread, if any.
pub(crate) fn rank() -> Option<usize> {
    CURRENT.get()
}

/// Sets the rank that runs on this thread.
pub(crate) fn set(rank: Option<usize>) {
    CURRENT.set(rank);
}
