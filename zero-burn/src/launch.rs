//! Launching of ranks: as threads of this process, or with this process as one of the ranks that a launcher has started.

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn_backend::{Backend, DeviceId, StreamId};
use burn_std::DType;
use burn_std::device::Device;
use zero_core::collective::agree;
pub use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::launcher::{EnvironmentError, Start, launched_alone};
use zero_core::collective::process::{self, Failed, ProcessRun};
use zero_core::collective::threads::{Stopped, ThreadOptions, panic_reason, run_recorded, stack_bytes};
use zero_core::window::{Window, WindowHost};
use zero_core::{Collective, CommError, StartError};

use crate::abort::raise;
use crate::config::{ConfigError, Tier, ZeroConfig};
use crate::context::Context;
use crate::device::ZeroDevice;
use crate::engine::{Cell, Runtime};

/// The reason why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError<E: Display + Debug> {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A rank failed.
    #[error(transparent)]
    Run(#[from] zero_core::LaunchError<E>),
    /// The environment of a launcher is incomplete, or contradicts itself.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// A rank failed, or the ranks did not find each other, and this process is one of them. Print this error, then end the process with
    /// [`Failed::end_process`], so that the other ranks can report their errors before the launcher ends them.
    #[error("{0}")]
    Process(Failed<E>),
    /// An MPI launcher has started this process as one of several, but this program was built without MPI.
    #[error(
        "this process was started as rank {rank} of {world} (by {variable}), but the program was built without MPI, \
         so each process would run alone: build it with `--features mpi`, or start it with torchrun's variables; to \
         run a single process (in the shell of a job), unset {variable}"
    )]
    WithoutMpi {
        /// Its rank.
        rank: usize,
        /// Number of processes.
        world: usize,
        /// The environment variable that shows this.
        variable: &'static str,
    },
    /// The program asked for another number of ranks than were started.
    #[error(
        "{asked} ranks were requested, but {started} processes were started (by {variable}): each process is one rank"
    )]
    World {
        /// The number that the program asked for.
        asked: usize,
        /// The number that the launcher started.
        started: usize,
        /// The environment variable that shows this.
        variable: &'static str,
    },
}

/// Runs `body` once per rank, each on its own thread with its own pool of compute threads, and returns the results in rank order. `body`
/// builds the model on the device it is given. It should return plain data: sharded tensors are of no use once the other ranks have ended.
///
/// If a launcher has started this process as one of several (torchrun, or anything that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
/// `MASTER_PORT`; with the feature `mpi` also `mpirun` and `srun`), this process is one rank: `body` runs once, and its result is the only
/// one in the list. `world` must then be the launcher's number of processes, and a process can launch only once.
///
/// # Errors
///
/// [`LaunchError`]: the first rank's failure, whether an error, a panic or a failed collective. All other ranks are stopped.
pub fn launch<B: Backend, T: Send, E: Display + Debug + Send>(
    world: usize,
    config: &ZeroConfig,
    options: &LaunchOptions,
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, LaunchError<E>> {
    config.validate(world)?;
    let start = Start::from_environment()?;
    if let Some(started) = start.world() {
        if started.world != world {
            return Err(LaunchError::World { asked: world, started: started.world, variable: started.variable });
        }
        return as_process::<B, T, E>(config, options, body, &start);
    }
    // Before anything asks CubeCL for a device.
    cache_kernels::<B>(options);
    check_devices::<B>(world)?;
    check_states::<B>(config)?;
    let threads = options.threads(world);
    let windows = WindowHost::default();
    // On devices, all ranks and all their threads share one stream: CubeCL 0.10 does not order a stream's access to memory after another
    // stream's use of it, except for the stream that had it first.
    let stream = StreamId::current();
    let results =
        run_recorded(world, &ThreadOptions { deadline: options.deadline }, options.flight_dir.as_deref(), |comm| {
            let window = windows.join(&comm);
            let ranks = (comm.clone() as Arc<dyn Collective>, window, || comm.wait_for_others());
            stream.executes(|| run_rank::<B, T, E>(config, threads, ranks, &body))
        })?;
    Ok(results)
}

/// Returns the number of ranks of [`launch_auto`]: the number of processes that the launcher has started, otherwise `world`. For planning
/// before the launch.
///
/// # Errors
///
/// [`EnvironmentError`] if the launcher's variables contradict one another.
pub fn launched_ranks(world: usize) -> Result<usize, EnvironmentError> {
    Ok(match Start::from_environment()?.world() {
        Some(started) => started.world,
        None if launched_alone() => 1,
        None => world,
    })
}

/// Same as [`launch`], on as many ranks as the launcher has started processes (even if that is one), otherwise on `world` threads.
///
/// # Errors
///
/// [`LaunchError`].
pub fn launch_auto<B: Backend, T: Send, E: Display + Debug + Send>(
    world: usize,
    config: &ZeroConfig,
    options: &LaunchOptions,
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, LaunchError<E>> {
    launch::<B, T, E>(launched_ranks(world)?, config, options, body)
}

/// Rejects bf16 optimizer state on a device that does not support bf16.
fn check_states<B: Backend>(config: &ZeroConfig) -> Result<(), ConfigError> {
    let stays = config.bf16_optimizer_states && config.offload.optimizer == Tier::Memory && !zero_ops::is_host::<B>();
    if stays && !B::supports_dtype(&B::Device::default(), DType::BF16) {
        return Err(ConfigError::StatesOnDevice);
    }
    Ok(())
}

/// Rejects several ranks of one process on several NVIDIA GPUs: CubeCL 0.10 copies between devices by NCCL calls in an order that two
/// threads do not agree on, and lets the source's memory be reused before the copy.
#[cfg_attr(not(feature = "cuda"), allow(clippy::extra_unused_type_parameters))]
fn check_devices<B: Backend>(ranks: usize) -> Result<(), ConfigError> {
    #[cfg(feature = "cuda")]
    {
        let first = B::Device::default();
        let gpus = B::device_count(first.to_id().type_id);
        if ranks > 1 && gpus > 1 && zero_ops::devices::cuda_ordinal::<B>(&first).is_some() {
            return Err(ConfigError::ThreadsOnGpus { ranks, gpus });
        }
    }
    let _ = ranks;
    Ok(())
}

/// Makes this process cache the kernels that it compiles for CUDA devices.
#[cfg_attr(not(feature = "cuda"), allow(clippy::extra_unused_type_parameters))]
fn cache_kernels<B: Backend>(options: &LaunchOptions) {
    #[cfg(feature = "cuda")]
    if options.kernel_cache
        && zero_ops::devices::cuda_ordinal::<B>(&B::Device::default()).is_some()
        && let Err(why) = zero_ops::devices::cache_kernels()
    {
        eprintln!(
            "warning: compiled kernels are not cached ({why}), so every start compiles them again: set XDG_CACHE_HOME \
             to a writable folder, or pass --no-kernel-cache (LaunchOptions::kernel_cache)"
        );
    }
    let _ = options;
}

fn as_process<B: Backend, T: Send, E: Display + Debug + Send>(
    config: &ZeroConfig,
    options: &LaunchOptions,
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
    start: &Start,
) -> Result<Vec<T>, LaunchError<E>> {
    match process::run(&options.process(), start, |run| launch_on::<B, T, E>(run, config, options, &body)) {
        Ok(result) => Ok(vec![result]),
        Err(failed) => Err(match &failed.error {
            zero_core::LaunchError::Start(error) => match **error {
                StartError::WithoutMpi { rank, world, variable } => LaunchError::WithoutMpi { rank, world, variable },
                _ => LaunchError::Process(failed),
            },
            _ => LaunchError::Process(failed),
        }),
    }
}

/// Runs `body` as the rank of this process, inside of [`process::run`]. For programs that exchange something with the other ranks before
/// they train.
///
/// # Errors
///
/// The error of `body`. Any other failure travels as a panic payload that [`process::run`] recognizes.
pub fn launch_on<B: Backend, T: Send, E: Display + Debug + Send>(
    run: &ProcessRun,
    config: &ZeroConfig,
    options: &LaunchOptions,
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
) -> Result<T, E> {
    let comm = run.comm();
    let threads = options.threads_of(comm).unwrap_or_else(|error| raise(error));
    cache_kernels::<B>(options);
    if let Err(error) = check_states::<B>(config) {
        resume_unwind(Box::new(Stopped(error.to_string())));
    }
    // Threads share one configuration; processes may be different programs. Ranks may keep their disk files in different places.
    let mut compared = config.clone();
    compared.offload.disk = Default::default();
    let lines: Vec<String> = format!("{compared:#?}").lines().map(String::from).collect();
    if let Some(difference) = agree(&**comm, &lines).unwrap_or_else(|error| raise(error)) {
        resume_unwind(Box::new(Stopped(difference.to_string())));
    }
    run_rank::<B, T, E>(
        config,
        threads,
        (comm.clone() as _, Window::join_processes(comm), || comm.wait_for_others()),
        body,
    )
}

/// Returns the device of a rank of this machine: ranks take the backend's devices in turn.
fn device_of<B: Backend>(local_rank: usize) -> B::Device {
    let first = B::Device::default();
    let id = first.to_id();
    match B::device_count(id.type_id) {
        0 | 1 => first,
        count => B::Device::from_id(DeviceId { index_id: (local_rank % count) as u16, ..id }),
    }
}

/// Runs one rank, on a pool of its own. `wait_for_others` keeps everything that the other ranks still read until they have ended too.
fn run_rank<B: Backend, T: Send, E: Display + Debug + Send>(
    config: &ZeroConfig,
    threads: usize,
    (comm, window, wait_for_others): (Arc<dyn Collective>, Window<Cell<B>>, impl Fn() -> Result<(), CommError> + Sync),
    body: impl Fn(ZeroDevice<B::Device>) -> Result<T, E> + Sync,
) -> Result<T, E> {
    let (rank, stream) = (comm.rank(), StreamId::current());
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(stack_bytes())
        .thread_name(move |thread| format!("rank-{rank}-compute-{thread}"));
    let rank_body = || {
        let device = device_of::<B>(comm.local_rank());
        let runtime = Runtime::<B>::new(config.clone(), device.clone(), comm.clone(), window);
        let context = Context::new(runtime.unwrap_or_else(|error| raise(error)));
        let _installed = context.install();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let value = body(ZeroDevice::here(device))?;
            // An update that fails after the body has ended is still this rank's error.
            context.wait_for_updates();
            // Prefetches that are never used still read from ranks that must be running.
            context.gatherer.stop();
            context.gatherer.finish().unwrap_or_else(|error| raise(error));
            Ok::<T, E>(value)
        }));
        // Notify the others before this rank drops what they may be reading.
        match result {
            Ok(Ok(value)) => {
                wait_for_others().unwrap_or_else(|error| raise(error));
                Ok(value)
            }
            Ok(Err(error)) => {
                comm.abort(&error.to_string());
                Err(error)
            }
            Err(payload) => {
                comm.abort(&panic_reason(&*payload));
                resume_unwind(payload)
            }
        }
    };
    // The rank runs on a worker of its own pool, so that what it computes in parallel stays inside the pool, whose
    // threads are joined before the rank ends.
    pool.build_scoped(|thread| thread.run(), |pool| pool.install(|| stream.executes(rank_body)))
        .unwrap_or_else(|error| panic!("cannot start {threads} compute thread(s): {error}"))
}
