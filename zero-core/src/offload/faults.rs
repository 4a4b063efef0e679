//! Faults that tests inject into transfers. In other builds this is empty, and the calls do nothing.

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
    /// Maximum number of bytes of every request.
    pub(crate) most_bytes: Option<usize>,
    /// Additional delay of every request.
    pub(crate) delay: std::time::Duration,
    /// Number of requests that fail with this error.
    pub(crate) errors: Option<(usize, i32)>,
    /// The thread that serves the file panics at its next request.
    pub(crate) panic: bool,
}

impl Faults {
    /// Returns the fault of a request of `bytes` bytes: the bytes that it may transfer, or its error.
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

    /// Returns no fault.
    #[cfg(not(test))]
    pub(crate) fn before(&self, bytes: usize) -> io::Result<usize> {
        Ok(bytes)
    }
}
