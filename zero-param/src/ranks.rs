//! Launching ranks, as threads of this process or with this process as one of several, and a rank's view of the others.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn_std::stream::StreamId;
use parking_lot::Mutex;
use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::process::ProcessRun;
use zero_core::collective::threads::{ThreadOptions, panic_reason, run_recorded};
use zero_core::window::{Window, WindowHost};
use zero_core::{Collective, CommError, LaunchError};
use zero_engine::abort::raise;
use zero_engine::current::{CURRENT, Installed, PLACES};

use crate::engine::{Cell, Runtime, caught, threads_share_tensors};

/// Bit of a parameter's number from which the number of its module begins: modules of one rank share a window.
const MODULE: u32 = 32;

/// The engine's runtimes of a rank: one for each module that it has sharded.
#[derive(Default)]
pub(crate) struct Runtimes(Mutex<(u64, Vec<Arc<Runtime>>)>);

impl core::fmt::Debug for Runtimes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Runtimes({})", self.0.lock().1.len())
    }
}

impl Runtimes {
    /// Adds the runtime of the next module. Numbers are the same on all ranks, as these shard the same modules in the same order.
    pub(crate) fn add(&self, runtime: &Arc<Runtime>) {
        let (modules, runtimes) = &mut *self.0.lock();
        runtime.rank.parameters.number_from(*modules << MODULE);
        *modules += 1;
        runtimes.push(runtime.clone());
    }

    /// Drops, after a fence, what no other rank reads any more, and ends the runtimes of modules that have been dropped.
    pub(crate) fn drop_retired(&self) {
        let runtimes = &mut self.0.lock().1;
        for runtime in runtimes.extract_if(.., |runtime| Arc::strong_count(runtime) == 1) {
            runtime.end();
            runtime.rank.parameters.slots().iter().for_each(|slot| runtime.rank.forget_slot(slot.index));
        }
        runtimes.iter().for_each(|runtime| runtime.rank.drop_retired());
    }

    /// Waits for everything that has begun on threads of this rank.
    fn finish(&self) -> Result<(), CommError> {
        let runtimes = self.0.lock().1.clone();
        runtimes.iter().try_for_each(|runtime| {
            // An update that fails after the body has ended is still this rank's error.
            caught(|| runtime.wait_for_updates())?;
            // Prefetches that are never used still read from ranks that must be running.
            runtime.gatherer.stop();
            runtime.gatherer.finish()
        })
    }
}

impl Drop for Runtimes {
    fn drop(&mut self) {
        self.0.get_mut().1.iter().for_each(|runtime| runtime.end());
    }
}

/// A rank's view of the other ranks.
#[derive(Debug)]
pub struct Ranks {
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) window: Window<Cell>,
    pub(crate) runtimes: Arc<Runtimes>,
}

impl Ranks {
    fn new(comm: Arc<dyn Collective>, window: Window<Cell>) -> Self {
        Self { comm, window, runtimes: Arc::default() }
    }

    /// Returns the group of all ranks.
    pub fn comm(&self) -> &Arc<dyn Collective> {
        &self.comm
    }

    /// Runs the rank's body on a pool of `threads` threads, in this stream of devices. Values that the rank has published stay alive until the others have finished
    /// too.
    fn run<T: Send, E: core::fmt::Display + Send>(
        &self,
        (threads, stream): (usize, StreamId),
        body: impl FnOnce(&Self) -> Result<T, E> + Send,
        wait_for_others: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<T, E> {
        let rank = self.comm.rank();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |thread| format!("rank-{rank}-compute-{thread}"));
        let body = || {
            let place = PLACES.fetch_add(1, Ordering::Relaxed);
            CURRENT.set(Some(Installed { rank, place, device: Arc::new(()), context: Arc::new(()) }));
            let result = catch_unwind(AssertUnwindSafe(|| {
                let value = body(self)?;
                self.runtimes.finish().unwrap_or_else(|error| raise(error));
                Ok::<T, E>(value)
            }));
            CURRENT.set(None);
            result
        };
        let result = pool
            .build_scoped(|thread| thread.run(), |pool| pool.install(|| stream.executes(body)))
            .unwrap_or_else(|error| panic!("cannot start {threads} compute thread(s): {error}"));
        match result {
            Ok(Ok(value)) => {
                wait_for_others().unwrap_or_else(|error| resume_unwind(Box::new(error)));
                Ok(value)
            }
            Ok(Err(error)) => {
                self.comm.abort(&error.to_string());
                Err(error)
            }
            Err(payload) => {
                self.comm.abort(&panic_reason(&*payload));
                resume_unwind(payload)
            }
        }
    }
}

/// Runs `body` once per rank, each on a thread of this process, and returns the results in rank order.
///
/// Each rank builds its own model, or a clone of an existing one, and shards it. Ranks must not share tensors that require gradients:
/// Burn's autodiff would merge the ranks' graphs, and ranks would wait for each other's locks.
///
/// # Errors
///
/// The failure of the first rank that fails, by an error, a panic or a failed collective; all others are stopped.
pub fn run_threads<T, E>(
    world: usize,
    options: impl Into<LaunchOptions>,
    body: impl Fn(&Ranks) -> Result<T, E> + Sync,
) -> Result<Vec<T>, LaunchError<E>>
where
    T: Send,
    E: core::fmt::Display + core::fmt::Debug + Send,
{
    let (host, options) = (WindowHost::default(), options.into());
    let deadline = ThreadOptions { deadline: options.deadline };
    // On devices, all ranks and all their threads share one stream: CubeCL 0.11 orders a kernel only after the stream that allocated its
    // arguments.
    let stream = StreamId::current();
    let stream = || if threads_share_tensors() { stream } else { StreamId::current() };
    run_recorded(world, &deadline, options.flight_dir.as_deref(), |comm| {
        let ranks = Ranks::new(comm.clone(), host.join(&comm));
        ranks.run((options.threads(world), stream()), &body, || comm.wait_for_others())
    })
}

/// Runs `body` as the rank of this process, inside of [`zero_core::collective::process::run`]. Uses only the thread settings of `options`.
///
/// # Errors
///
/// The body's own error. A failed gather unwinds with a panic payload that `process::run` handles.
pub fn run_process<T: Send, E: core::fmt::Display + Send>(
    run: &ProcessRun,
    options: impl Into<LaunchOptions>,
    body: impl FnOnce(&Ranks) -> Result<T, E> + Send,
) -> Result<T, E> {
    let (comm, options) = (run.comm(), options.into());
    let threads = options.threads_of(comm).unwrap_or_else(|error| resume_unwind(Box::new(error)));
    let ranks = Ranks::new(comm.clone(), Window::join_processes(comm));
    ranks.run((threads, StreamId::current()), body, || comm.wait_for_others())
}
