//! The rank that a thread runs.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

thread_local! {
    /// The rank of this thread, if it runs one.
    pub static CURRENT: RefCell<Option<Installed>> = const { RefCell::new(None) };
}

/// The rank that a thread runs.
#[derive(Clone)]
pub struct Installed {
    /// Its index in the run.
    pub rank: usize,
    /// A number that no other rank of any launch in this process has.
    pub place: u64,
    /// The inner backend's device.
    pub device: Arc<dyn Any + Send + Sync>,
    /// The adapter's own state for the rank.
    pub context: Arc<dyn Any + Send + Sync>,
}

/// Contexts of the ranks that are running in this process, by their place.
pub static RUNNING: LazyLock<Mutex<HashMap<u64, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);
/// The place of the next rank.
pub static PLACES: AtomicU64 = AtomicU64::new(1);

/// Returns the rank of this thread, and a number that no other rank of any launch has; both are 0 outside of a launch.
pub fn current_place() -> (usize, u64) {
    CURRENT.with_borrow(|current| current.as_ref().map_or((0, 0), |installed| (installed.rank, installed.place)))
}

/// Returns the inner device of this thread's rank, if it has type `D`.
pub fn current_device<D: Clone + 'static>() -> Option<D> {
    CURRENT.with_borrow(|current| current.as_ref()?.device.downcast_ref::<D>().cloned())
}
