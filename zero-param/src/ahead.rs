//! What is gathered ahead of its use: the gathers of the last pass say which parameter comes next.
//!
//! * Where ranks are processes: while a parameter is used, a thread asks the other ranks for the next one's pieces. Ranks that
//!   are threads have them in their own memory, and one joins them for all.
//! * Memory: one whole more, of at most `ZeroConfig::prefetch_bucket_size` elements.
//! * Threads: one at a time, `rank-N-prefetch`, whose gather has a deadline. It is waited for by the gather that it is for, by the
//!   next one where a pass takes another way, and by the end of the pass: nothing is read of a version that is being replaced.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use zero_core::CommError;
use zero_core::window::Key;

use crate::piece::Raw;

/// A parameter, whose next gather may be begun.
pub(crate) trait Planned: core::fmt::Debug + Send + Sync {
    fn begin_ahead(self: Arc<Self>);
}

#[derive(Debug, Default)]
struct Trace {
    /// Of the pass that runs.
    is_running: bool,
    recorded: Vec<Weak<dyn Planned>>,
    /// Of the last one.
    plan: Vec<Weak<dyn Planned>>,
    /// Where this one has got to in it.
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
    /// A forward and backward pass begins.
    pub(crate) fn begin_pass(&self) {
        let mut trace = self.0.lock();
        (trace.is_running, trace.cursor) = (true, 0);
        trace.recorded.clear();
    }

    /// It has ended: its gathers are the plan of the next.
    pub(crate) fn end_pass(&self) {
        let mut trace = self.0.lock();
        trace.is_running = false;
        trace.plan = std::mem::take(&mut trace.recorded);
        let begun = trace.begun.take();
        drop(trace);
        drop(begun.map(Begun::wait));
    }

    /// Records a gather. Gives the parameter that comes next, if this pass goes the way of the last.
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

    /// The whole of a version, if it was begun; an error there is met again by who gathers it now.
    pub(crate) fn take(&self, key: Key) -> Option<Raw> {
        let begun = self.0.lock().begun.take()?;
        let is_it = begun.key == key;
        begun.wait().filter(|_| is_it)
    }

    /// Begins `gather`, of a version.
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
