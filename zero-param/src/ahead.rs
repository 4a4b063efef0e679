//! Prefetch: the gathers of the previous pass tell which parameter comes next.
//!
//! * Ranks that are processes: while a parameter is used, a thread requests the other ranks' shards of the next one. Ranks that are threads
//!   share memory and do not prefetch: the first rank that needs a parameter assembles it for all.
//! * Memory: one more full parameter, of at most `ZeroConfig::prefetch_bucket_size` elements.
//! * Threads: one at a time, named `rank-N-prefetch`, whose gather has a deadline. It is joined by the gather that it serves, by the next
//!   gather if the pass diverges from the plan, and at the end of the pass. So no thread reads a version while it is replaced.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use zero_core::CommError;
use zero_core::window::Key;

use crate::piece::Raw;

/// A parameter that can be prefetched.
pub(crate) trait Planned: core::fmt::Debug + Send + Sync {
    fn begin_ahead(self: Arc<Self>);
}

#[derive(Debug, Default)]
struct Trace {
    /// A forward and backward pass is running.
    is_running: bool,
    recorded: Vec<Weak<dyn Planned>>,
    /// Gathers of the previous pass.
    plan: Vec<Weak<dyn Planned>>,
    /// Index in `plan` of the next expected gather.
    cursor: usize,
    begun: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    key: Key,
    gather: JoinHandle<Result<Raw, CommError>>,
}

#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<Trace>);

impl Ahead {
    /// Begins a forward and backward pass.
    pub(crate) fn begin_pass(&self) {
        let mut trace = self.0.lock();
        (trace.is_running, trace.cursor) = (true, 0);
        trace.recorded.clear();
    }

    /// Ends the pass. Its gathers are the plan for the next one.
    pub(crate) fn end_pass(&self) {
        let mut trace = self.0.lock();
        trace.is_running = false;
        trace.plan = std::mem::take(&mut trace.recorded);
        let begun = trace.begun.take();
        drop(trace);
        drop(begun.map(Begun::wait));
    }

    /// Records a gather. Returns the parameter that comes next if this pass has followed the previous one so far.
    pub(crate) fn record(&self, parameter: Weak<dyn Planned>) -> Option<Arc<dyn Planned>> {
        let mut trace = self.0.lock();
        if !trace.is_running {
            return None;
        }
        let is_it = |planned: &Weak<dyn Planned>| std::ptr::addr_eq(planned.as_ptr(), parameter.as_ptr());
        let is_planned = trace.plan.get(trace.cursor).is_some_and(is_it);
        trace.recorded.push(parameter);
        // Behind the end of the plan nothing is planned.
        trace.cursor = if is_planned { trace.cursor + 1 } else { usize::MAX };
        trace.plan.get(trace.cursor)?.upgrade()
    }

    /// Returns the prefetched full parameter of this version, if there is one. If the prefetch failed, the caller's own gather meets the
    /// error again.
    pub(crate) fn take(&self, key: Key) -> Option<Raw> {
        let begun = self.0.lock().begun.take()?;
        let is_it = begun.key == key;
        begun.wait().filter(|_| is_it)
    }

    /// Begins `gather`, the prefetch of one version.
    pub(crate) fn begin(
        &self,
        rank: usize,
        key: Key,
        gather: impl FnOnce() -> Result<Raw, CommError> + Send + 'static,
    ) {
        let thread = std::thread::Builder::new().name(format!("rank-{rank}-prefetch"));
        // Without a thread it is gathered when it is used.
        if let Ok(gather) = thread.spawn(gather) {
            self.0.lock().begun = Some(Begun { key, gather });
        }
    }
}

impl Begun {
    fn wait(self) -> Option<Raw> {
        self.gather.join().ok()?.ok()
    }
}
