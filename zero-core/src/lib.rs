//! The foundations of ZeRO, without a tensor library:
//!
//! * flat partitions and a one-sided window for gathers;
//! * collectives, and the engines that run ranks as threads of one process or, with the feature `mpi`, as processes;
//! * collectives on GPU memory, with the feature `nccl`;
//! * exact byte accounting and memory estimates;
//! * sharded checkpoints, and state offloaded to a disk;
//! * the settings of all these, and an allocator that keeps a step's pages.
//!
//! * In: plain buffers ([`Buffer`]) and handles of any type ([`window::Window`]).
//! * Out: reduced or gathered buffers, or a [`CommError`] that names rank, group, operation and sequence number.
//! * Memory: a collective takes its buffer by value and returns one by value; nothing is borrowed across ranks.
//! * Threads: a blocking call runs on the caller; a started call runs on the communicator's named progress thread.
//!
//! The paper: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, Rajbhandari et al. 2020,
//! <https://arxiv.org/abs/1910.02054>.

pub mod accounting;
pub mod alloc;
pub mod checkpoint;
pub mod collective;
pub mod config;
#[cfg(feature = "nccl")]
pub mod copies;
pub mod estimate;
mod exposure;
mod files;
pub mod offload;
mod partition;
pub mod random;
mod stage;
pub mod window;

pub use collective::error::{CommError, LaunchError, LinkError, OperationCall, RankFailure, StartError};
pub use collective::{Buffer, Collective, Pending, ReduceOp, Request};
pub use partition::{Axes, Mesh, Partition};
pub use stage::{InvalidStage, Stage};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
