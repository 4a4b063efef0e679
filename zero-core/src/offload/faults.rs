//! What tests make go wrong in transfers. In any other build there is nothing here, and the calls are empty.

use std::io;

/// Faults of one file, none at first.
#[derive(Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    pub(crate) set: parking_lot::Mutex<Set>,
}

#[cfg(test)]
#[derive(Default)]
pub(crate) struct Set {
    /// No request moves more.
    pub(crate) most_bytes: Option<usize>,
    /// Every request takes this much longer.
    pub(crate) delay: std::time::Duration,
    /// How many requests are answered with this error.
    pub(crate) errors: Option<(usize, i32)>,
    /// The thread that serves the file panics at its next request.
    pub(crate) panic: bool,
}

impl Faults {
    /// The fault of a request of `bytes` bytes: how many it may move, or the error it is answered with.
    #[cfg(test)]
    pub(crate) fn before(&self, bytes: usize) -> io::Result<usize> {
        let mut set = self.set.lock();
        assert!(!set.panic, "injected panic");
        if let Some((left, error)) = &mut set.errors
            && *left > 0
        {
            *left -= 1;
            return Err(io::Error::from_raw_os_error(*error));
        }
        let (delay, most_bytes) = (set.delay, set.most_bytes.unwrap_or(bytes));
        drop(set);
        std::thread::sleep(delay);
        Ok(bytes.min(most_bytes))
    }

    /// No fault.
    #[cfg(not(test))]
    pub(crate) fn before(&self, bytes: usize) -> io::Result<usize> {
        Ok(bytes)
    }
}
