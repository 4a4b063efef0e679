//! In place of the free ranges where the keeper has no system calls to manage them with: it serves no request, so
//! none of these functions is called.

pub(crate) const AVAILABLE: bool = false;
pub(crate) const GRANULE: usize = 64 << 10;
pub(crate) const HUGE: usize = 2 << 20;

pub(crate) struct Taken {
    pub(crate) addr: usize,
    pub(crate) fresh: usize,
    pub(crate) zero_tail: usize,
}

pub(crate) struct Space;

impl Space {
    pub(crate) const fn new() -> Self {
        Self
    }

    pub(crate) fn take(&mut self, _: usize, _: usize, _: bool) -> Option<Taken> {
        None
    }

    pub(crate) fn take_clean(&mut self, _: usize, _: bool) -> Option<usize> {
        None
    }

    pub(crate) fn grow(&mut self, _: usize, _: usize, _: usize, _: bool) -> Option<usize> {
        None
    }

    pub(crate) fn shrink(&mut self, _: usize, _: usize) -> bool {
        false
    }

    pub(crate) fn give(&mut self, _: usize, _: usize) {}

    pub(crate) fn clean(&mut self, _: usize, _: usize) -> bool {
        false
    }

    pub(crate) fn trim(&mut self) -> usize {
        0
    }
}
