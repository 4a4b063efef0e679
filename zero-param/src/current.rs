//! The rank that runs on a thread.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// This thread's, if one runs on it.
pub(crate) fn rank() -> Option<usize> {
    CURRENT.get()
}

/// Says which does from now on.
pub(crate) fn set(rank: Option<usize>) {
    CURRENT.set(rank);
}
