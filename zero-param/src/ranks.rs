//! Launching ranks, as threads of this process or with this process as one of several, and a rank's view of the others.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::process::ProcessRun;
use zero_core::collective::threads::{ThreadOptions, panic_reason, run_recorded};
use zero_core::window::{Window, WindowHost};
use zero_core::{Collective, CommError, LaunchError};

use crate::current;
use crate::error::raise;
use crate::piece::Piece;
use crate::published::Published;

/// A rank's view of the other ranks.
#[derive(Debug)]
pub struct Ranks {
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) window: Window<Piece>,
    objects: AtomicU64,
    pub(crate) published: Arc<Published>,
}

impl Ranks {
    fn new(comm: Arc<dyn Collective>, window: Window<Piece>) -> Self {
        Self { comm, window, objects: AtomicU64::new(0), published: Arc::default() }
    }

    /// Returns the group of all ranks.
    pub fn comm(&self) -> &Arc<dyn Collective> {
        &self.comm
    }

    /// Returns a number for a published object. It is the same on all ranks, as these shard the same modules in the same order.
    pub(crate) fn next_object(&self) -> u64 {
        self.objects.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs the rank's body on a pool of `threads` threads. Values that the rank has published stay alive until the others have finished
    /// too.
    fn run<T: Send, E: core::fmt::Display + Send>(
        &self,
        threads: usize,
        body: impl FnOnce(&Self) -> Result<T, E> + Send,
        wait_for_others: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<T, E> {
        let rank = self.comm.rank();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |thread| format!("rank-{rank}-compute-{thread}"));
        let body = || {
            current::set(Some(rank));
            let result = catch_unwind(AssertUnwindSafe(|| body(self)));
            current::set(None);
            result
        };
        let result = pool
            .build_scoped(|thread| thread.run(), |pool| pool.install(body))
            .unwrap_or_else(|error| panic!("cannot start {threads} compute thread(s): {error}"));
        match result {
            Ok(Ok(value)) => {
                wait_for_others().unwrap_or_else(|error| raise(error));
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

impl Drop for Ranks {
    fn drop(&mut self) {
        self.published.clear();
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
    run_recorded(world, &deadline, options.flight_dir.as_deref(), |comm| {
        let ranks = Ranks::new(comm.clone(), host.join(&comm));
        ranks.run(options.threads(world), &body, || comm.wait_for_others())
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
    let threads = options.threads_of(comm).unwrap_or_else(|error| raise(error));
    let ranks = Ranks::new(comm.clone(), Window::join_processes(comm));
    ranks.run(threads, body, || comm.wait_for_others())
}
