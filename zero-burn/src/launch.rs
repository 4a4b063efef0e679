//! Running ranks as threads of this process.

use std::time::Duration;

use burn_backend::Backend;
use zero_core::CommError;
use zero_core::collective::threads::{ThreadOptions, run};
use zero_core::window::WindowHost;

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
    /// The operating system gave no threads for a rank's compute pool.
    #[error("a rank's pool of {threads} compute threads could not be started: {reason}")]
    Pool {
        /// Threads asked for.
        threads: usize,
        /// The pool's error.
        reason: String,
    },
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
    // Pools are built first, so that a failure comes before any rank has started.
    let pools = (0..world)
        .map(|rank| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |thread| format!("rank-{rank}-compute-{thread}"))
                .build()
                .map_err(|error| LaunchError::Pool { threads, reason: error.to_string() })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let windows = WindowHost::default();
    let results = run(world, &ThreadOptions { deadline: options.deadline }, |comm| {
        let rank = zero_core::Collective::rank(&*comm);
        let window = windows.join(&comm);
        // The rank's own thread is a worker of its pool, so that what it computes in parallel stays inside the pool.
        pools[rank].install(|| {
            let farewell = comm.clone();
            let context = Context::<B>::new(config.clone(), B::Device::default(), comm, window)
                .unwrap_or_else(|error: CommError| crate::context::raise(error));
            let _installed = context.install();
            let result = body(ZeroDevice::here(B::Device::default()));
            if result.is_ok() {
                // Others may still read this rank's pieces.
                farewell.wait_for_others();
            }
            result
        })
    })?;
    Ok(results)
}
