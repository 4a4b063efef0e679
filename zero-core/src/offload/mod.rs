//! Optimizer state, gradients and parameters on a disk: regions of a file, moved to and from a few buffers.
//!
//! ```text
//! PATH/zero-swap-<host>-<boot>-<pid>-<random>/owner.lock        held by flock for as long as the job lives
//! PATH/zero-swap-<host>-<boot>-<pid>-<random>/rank-00000.swap   one file per rank
//! ```
//!
//! A job removes another folder in PATH only if it has such a name with this machine's host or boot identity, belongs to this
//! user, and nobody holds its lock; and in it only these files.
//!
//! * In: a [`SwapBuffer`] of a [`BufferPool`], moved into [`SwapFile::read`] or [`SwapFile::write`] with a [`Region`].
//! * Out: the same buffer, from [`Ticket::wait`]. [`pipeline()`] does that for a sequence of items: read ahead, compute,
//!   write behind.
//! * Memory: the pool's, which is mapped once, and nothing else that grows with the data. Files are opened with
//!   `O_DIRECT`, so that no page cache is filled; where the file system has none, what was moved is dropped from the
//!   page cache piece by piece.
//! * Threads: a file has its own, named `disk-<rank>-ring-<n>` or `disk-<rank>-io-<n>`, joined when it is dropped. They
//!   only move bytes; [`pipeline()`] computes on its caller.
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
//! # What happens to a buffer
//!
//! A transfer owns its buffer from `read` or `write` until its last piece has ended, whatever becomes of the
//! [`Ticket`]. So the kernel never writes into memory that somebody else has: a ticket that is dropped waits, one
//! whose deadline passes leaves the buffer behind, and it goes back to its pool when the kernel is done with it.
//!
//! Two transfers of overlapping regions have no order unless the first one's ticket was waited for. [`pipeline()`] sees to
//! that for its items.
//!
//! Linux only: `O_DIRECT`, `fallocate` and io_uring are.

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
pub use pipeline::{Access, Item, Part, PipelineOptions, PipelineReport, Work, pipeline, pipeline_with};
pub use regions::Region;
pub use transfer::Ticket;
