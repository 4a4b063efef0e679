//! Offload of optimizer state, gradients and parameters to a disk: regions of a file, transferred to and from a few buffers.
//!
//! ```text
//! PATH/zero-swap-<host>-<boot>-<pid>-<random>/owner.lock        held by flock for as long as the job lives
//! PATH/zero-swap-<host>-<boot>-<pid>-<random>/rank-00000.swap   one file per rank
//! ```
//!
//! A job removes another folder in PATH only if its name has this format with this machine's host or boot identity, it belongs to this
//! user, and nobody holds its lock. It removes only the files named above.
//!
//! * In: a [`SwapBuffer`] of a [`BufferPool`], moved into [`SwapFile::read`] or [`SwapFile::write`] with a [`Region`].
//! * Out: the same buffer, from [`PendingTransfer::wait`]. [`pipeline()`] does this for a sequence of items: it reads ahead, computes, and writes
//!   behind.
//! * Memory: the pool, which is mapped once; nothing else grows with the data. Files are opened with `O_DIRECT` to bypass the page cache.
//!   If the file system does not support it, each chunk is dropped from the page cache after its transfer.
//! * Threads: each file has its own, named `disk-<rank>-ring-<n>` or `disk-<rank>-io-<n>`, which are joined when the file is dropped. They
//!   only transfer bytes; [`pipeline()`] computes on the calling thread.
//!
//! ```
//! use std::time::Duration;
//! use zero_core::offload::{BufferPool, PoolOptions, SwapDir, SwapFileOptions};
//! # let nvme = tempfile::tempdir().unwrap();
//! # let nvme_path = nvme.path();
//! let dir = SwapDir::open(nvme_path)?;
//! let file = dir.create_file(0, &SwapFileOptions::default())?;
//! file.require(1 << 20)?;
//! let pool = BufferPool::new(&PoolOptions { count: 2, bytes: 1 << 16, alignment: file.alignment(), ..PoolOptions::default() })?;
//! let limit = Duration::from_secs(60);
//!
//! let region = file.alloc(1000 * size_of::<f32>())?;
//! let mut buffer = pool.take(limit)?;
//! buffer.view_mut::<f32>()[..1000].fill(0.5);
//! drop(file.write(region, buffer)?.wait(limit)?);
//! let buffer = file.read(region, pool.take(limit)?)?.wait(limit)?;
//! assert_eq!(buffer.view::<f32>(), [0.5; 1000]);
//! # Ok::<(), zero_core::offload::DiskError>(())
//! ```
//!
//! # Ownership of buffers
//!
//! A transfer owns its buffer from `read` or `write` until its last chunk has ended, whatever happens to the [`PendingTransfer`]. So the kernel
//! never writes into memory that another owner uses. Dropping a ticket waits for its transfer. If a ticket's deadline passes, the transfer
//! keeps the buffer, which returns to its pool when the kernel is done with it.
//!
//! Two transfers of overlapping regions are unordered unless the first one's ticket has been waited for. [`pipeline()`] ensures this order
//! for its items.
//!
//! Linux only: `O_DIRECT`, `fallocate` and io_uring are Linux interfaces.

mod backing;
mod buffer;
mod counters;
mod direction;
mod engine;
mod error;
mod faults;
mod file;
mod folder;
mod memory;
mod options;
mod pipeline;
mod regions;
mod sweep;
mod transfer;

pub use buffer::{BufferPool, Element, PoolOptions, SwapBuffer};
pub use counters::DiskStats;
pub use engine::EngineKind;
pub use error::DiskError;
pub use file::{SwapFile, SwapFileOptions};
pub use folder::{SwapDir, free_bytes};
pub use options::{AioOptions, EngineChoice};
pub use pipeline::{Access, EarlyReads, Item, Part, PipelineOptions, PipelineReport, Work, pipeline, pipeline_with};
pub use regions::Region;
pub use transfer::PendingTransfer;
