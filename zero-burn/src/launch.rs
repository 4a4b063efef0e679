//! Running ranks as threads of this process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use burn_backend::Backend;
use zero_core::collective::threads::{ThreadOptions, panic_reason, run};
use zero_core::window::WindowHost;
use zero_core::{Collective, CommError};

use crate::config::{ConfigError, ZeroConfig};
use crate::context::Context;
use crate::device::ZeroDevice;

/// How ranks are run.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// Compute threads of each rank; 0 shares the machine's cores evenly among the ranks.
    pub threads_per_rank: usize,
    /// The longest that any wait for another rank may take.
    pub deadline: Duration,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self { threads_per_rank: 0, deadline: ThreadOptions::default().deadline }
    }
}

impl LaunchOptions {
    /// Compute threads of each of `world` ranks.
    pub fn threads(&self, world: usize) -> usize {
        match self.threads_per_rank {
            0 => (std::thread::available_parallelism().map_or(1, usize::from) / world.max(1)).max(1),
            threads => threads,
        }
    }
}

/// Why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError<E: core::fmt::Display + core::fmt::Debug> {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A rank failed.
    #[error(transparent)]
    Run(#[from] zero_core::LaunchError<E>),
}

/// Runs `body` once per rank, each on its own thread with its own pool of compute threads, and returns the results in
/// rank order. `body` builds the model on the device it is given; what it returns should be plain data, since sharded
/// tensors are of no use once the other ranks have gone.
///
/// # Errors
///
/// [`LaunchError`]: the first rank's trouble, whether an error, a panic or a failed collective; all others are stopped.
pub fn launch<B, T, E>(
    world: usize,
    config: &ZeroConfig,
    options: &LaunchOptions,
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, LaunchError<E>>
where
    B: Backend,
    T: Send,
    E: core::fmt::Display + core::fmt::Debug + Send,
{
    config.validate(world)?;
    let threads = options.threads(world);
    let windows = WindowHost::default();
    let results = run(world, &ThreadOptions { deadline: options.deadline }, |comm| {
        let rank = comm.rank();
        let window = windows.join(&comm);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |thread| format!("rank-{rank}-compute-{thread}"));
        let rank_body = || {
            let farewell = comm.clone();
            let context = Context::<B>::new(config.clone(), B::Device::default(), comm, window)
                .unwrap_or_else(|error: CommError| crate::context::raise(error));
            let _installed = context.install();
            let result = catch_unwind(AssertUnwindSafe(|| {
                let value = body(ZeroDevice::here(B::Device::default()))?;
                // An update that fails after the body has ended is this rank's error still.
                context.wait_for_updates();
                Ok::<T, E>(value)
            }));
            // The others learn of it before this rank takes down what they may be reading.
            match result {
                Ok(Ok(value)) => {
                    farewell.wait_for_others();
                    Ok(value)
                }
                Ok(Err(error)) => {
                    farewell.abort(&error.to_string());
                    Err(error)
                }
                Err(payload) => {
                    farewell.abort(&panic_reason(&*payload));
                    resume_unwind(payload)
                }
            }
        };
        // The rank runs on a worker of its own pool, so that what it computes in parallel stays inside the pool, whose
        // threads are joined before the rank ends.
        pool.build_scoped(|thread| thread.run(), |pool| pool.install(rank_body))
            .unwrap_or_else(|error| panic!("the operating system gave no {threads} compute thread(s): {error}"))
    })?;
    Ok(results)
}
