//! A rank's position among the others, for code that differs between ranks. The functions are named after Accelerate's
//! (<https://huggingface.co/docs/accelerate/package_reference/accelerator>), so that scripts are easy to port.
//!
//! They work alike for ranks that are threads, ranks that are processes, and a single rank outside of a launch.
//!
//! ```
//! use burn_flex::Flex;
//! use zero_burn::{config::ZeroConfig, launch::launch, ranks};
//! use zero_core::Stage;
//!
//! let file = std::env::temp_dir().join(format!("vocabulary-{}", std::process::id()));
//! let read = launch::<Flex, _, std::io::Error>(3, &ZeroConfig::new(Stage::DataParallel), &Default::default(), |_| {
//!     // Rank 0 makes what the others then find.
//!     ranks::main_process_first::<Flex, _>(|| {
//!         if ranks::is_main_process::<Flex>() {
//!             std::fs::write(&file, "a b c")?;
//!         }
//!         std::fs::read_to_string(&file)
//!     })
//! })
//! .unwrap();
//! assert_eq!(read, ["a b c"; 3]);
//! # std::fs::remove_file(&file).unwrap();
//! ```

use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn_backend::Backend;

use zero_core::Request;
use zero_core::checkpoint::{Check, CheckpointError, Found, Manifest, find_latest_together};
use zero_core::collective::{self, Difference, RankError};

use crate::abort::raise;
use crate::config::ZeroConfig;
use crate::context::Context;
use crate::parallel::Group;

/// Returns the configuration of the current thread's rank over inner backend `B`.
pub fn config<B: Backend>() -> ZeroConfig {
    Context::<B>::current().rank.config.clone()
}

/// Returns this rank's number, from 0. On a mesh, it counts along the data axis: ranks that differ there train on different data and draw
/// different random numbers.
pub fn process_index<B: Backend>() -> usize {
    Context::<B>::current().rank.index
}

/// Returns the number of ranks; on a mesh, along its data axis.
pub fn num_processes<B: Backend>() -> usize {
    Context::<B>::current().rank.world
}

/// Returns the group of ranks along an axis of the [mesh](ZeroConfig::axes); this rank's place on the axis is its rank in the group. For
/// collectives on the rank's own thread, which all ranks of the group call in the same order.
///
/// # Panics
///
/// If the mesh has no such axis; the launcher reports the error.
pub fn group<B: Backend>(axis: &str) -> Group {
    Context::<B>::current().group(axis)
}

/// Returns the folder in `dir` for the checkpoints of this rank's model, where the engine saves them. Each part along foreign axes of the
/// [mesh](ZeroConfig::axes) has its own, such as `tensor-1`; without foreign axes it is `dir` itself.
pub fn folder<B: Backend>(dir: &Path) -> PathBuf {
    let context = Context::<B>::current();
    folder_of(&context, context.rank.place.rank, dir)
}

fn folder_of<B: Backend>(context: &Context<B>, rank: usize, dir: &Path) -> PathBuf {
    match &*context.rank.config.axes.folder(rank) {
        "" => dir.into(),
        part => dir.join(part),
    }
}

/// Finds the checkpoint to resume from: the newest sound one of this rank's model in [`folder(dir)`](folder), of the same step for all
/// parts of the model. The ranks of a part search together, like [`find_latest_together`]. A collective.
///
/// # Errors
///
/// Same as [`find_latest_together`]. Also [`CheckpointError::Unlike`] if parts have found different steps, or only some have found a
/// checkpoint.
pub fn find_latest<B: Backend>(dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let context = Context::<B>::current();
    let found = find_latest_together(&*context.collective(), &folder::<B>(dir), check);
    let step = |found: &Found| found.checkpoint.as_ref().map(|path| Manifest::read(path)).transpose();
    let told = match found.as_ref().map(step) {
        Ok(Ok(None)) => "no checkpoint".to_string(),
        Ok(Ok(Some(manifest))) => format!("the checkpoint of step {}", manifest.step),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    match agree::<B>(&[told]) {
        Some(unlike) if found.is_ok() => {
            let shown = |told: String, rank| format!("{told} in {}", folder_of(&context, rank, dir).display());
            let (first, other) = (shown(unlike.first, 0), shown(unlike.other, unlike.rank));
            Err(CheckpointError::Unlike(Difference { first, other, ..unlike }))
        }
        _ => found,
    }
}

/// Returns whether this is the run's rank 0, which prints and writes what all ranks share.
pub fn is_main_process<B: Backend>() -> bool {
    Context::<B>::current().rank.place.rank == 0
}

/// Returns this rank's number among the ranks of its machine, from 0.
pub fn local_process_index<B: Backend>() -> usize {
    Context::<B>::current().collective().local_rank()
}

/// Returns whether this is the first rank of its machine.
pub fn is_local_main_process<B: Backend>() -> bool {
    local_process_index::<B>() == 0
}

/// Waits until every rank has called it. A collective.
pub fn wait_for_everyone<B: Backend>() {
    barrier::<B>("wait_for_everyone");
}

/// Compares the ranks' `lines`. Returns, on every rank, the first line in which a rank differs from rank 0. For settings that must be the
/// same. A collective.
pub fn agree<B: Backend>(lines: &[String]) -> Option<Difference> {
    collective::agree(&*Context::<B>::current().everyone(), lines).unwrap_or_else(|error| raise(error))
}

/// Runs `f` on rank 0, then on the others: for something that the first creates and the others find, such as a download or a cache. A
/// collective.
pub fn main_process_first<B: Backend, R>(f: impl FnOnce() -> R) -> R {
    first::<B, R>(is_main_process::<B>(), f)
}

/// Same as [`main_process_first`], with the first rank of each machine, for files on a machine's own disk. A collective.
pub fn local_main_process_first<B: Backend, R>(f: impl FnOnce() -> R) -> R {
    first::<B, R>(is_local_main_process::<B>(), f)
}

/// Same as [`main_process_first`], for an `f` that may fail: an error on one rank becomes every rank's, and if rank 0 fails, the others do
/// not run `f`. Ranks wait until the run's deadline at most. A collective.
///
/// # Errors
///
/// The error of `f` on this rank, or the message of another rank's.
///
/// ```
/// use burn_flex::Flex;
/// use zero_burn::{config::ZeroConfig, launch::launch, ranks};
/// use zero_core::Stage;
///
/// let told = launch::<Flex, _, String>(2, &ZeroConfig::new(Stage::DataParallel), &Default::default(), |_| {
///     let made = ranks::try_main_process_first::<Flex, u32, _>(|| Err("the disk is full"));
///     Ok(made.unwrap_err().to_string())
/// });
/// assert_eq!(told.unwrap(), ["the disk is full", "rank 0: the disk is full"]);
/// ```
pub fn try_main_process_first<B: Backend, R, E: Display>(f: impl FnOnce() -> Result<R, E>) -> Result<R, RankError<E>> {
    try_first::<B, R, E>(is_main_process::<B>(), f)
}

/// Same as [`try_main_process_first`], with the first rank of each machine. A collective.
///
/// # Errors
///
/// Same as [`try_main_process_first`].
pub fn try_local_main_process_first<B: Backend, R, E: Display>(
    f: impl FnOnce() -> Result<R, E>,
) -> Result<R, RankError<E>> {
    try_first::<B, R, E>(is_local_main_process::<B>(), f)
}

fn try_first<B: Backend, R, E: Display>(is_first: bool, f: impl FnOnce() -> Result<R, E>) -> Result<R, RankError<E>> {
    let collective = Context::<B>::current().everyone();
    collective::run_first(&*collective, is_first, f).unwrap_or_else(|error| raise(error))
}

fn barrier<B: Backend>(purpose: &'static str) {
    Context::<B>::current().everyone().execute(Request::Barrier(purpose)).unwrap_or_else(|error| raise(error));
}

fn first<B: Backend, R>(is_first: bool, f: impl FnOnce() -> R) -> R {
    let wait = || barrier::<B>("main_process_first");
    if is_first {
        let result = f();
        wait();
        result
    } else {
        wait();
        f()
    }
}
