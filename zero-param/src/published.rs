//! Values that a rank has published, which others may read after this rank has dropped them.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

type Anything = Arc<dyn Any + Send + Sync>;

/// Keeps published values until a fence after their last use: by then every rank has finished with them.
#[derive(Default)]
pub(crate) struct Published(Mutex<Vec<Anything>>);

impl core::fmt::Debug for Published {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Published({})", self.0.lock().len())
    }
}

impl Published {
    pub(crate) fn keep(&self, published: impl IntoIterator<Item = Anything>) {
        self.0.lock().extend(published);
    }

    /// Runs `fence`, a wait for all ranks, and then drops the values that nobody else held when it began.
    pub(crate) fn behind<T, E>(&self, fence: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let is_dropped = |published: &Anything| Arc::strong_count(published) == 1;
        let dropped: Vec<Anything> = self.0.lock().extract_if(.., |published| is_dropped(published)).collect();
        let passed = fence();
        drop(dropped);
        passed
    }

    /// Drops everything at the end of the run.
    pub(crate) fn clear(&self) {
        // Dropped after the lock is released: dropping a parameter can call back into here.
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }
}
