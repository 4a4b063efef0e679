//! Why a communicator could not be made.

use crate::{CommError, StartError};

/// What making a communicator ran into. An operation of one that is made fails with a [`CommError`].
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// A library is not there.
    #[error("{library} cannot be used: {reason}; {advice}")]
    Library {
        /// The library.
        library: &'static str,
        /// What the loader said.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// A library is too old.
    #[error("{library} has no {symbol}: {needed} or newer is needed")]
    Symbol {
        /// The library.
        library: &'static str,
        /// The function.
        symbol: &'static str,
        /// What has it.
        needed: &'static str,
    },
    /// A call of a library failed.
    #[error("{call}: {reason}")]
    Call {
        /// The call.
        call: &'static str,
        /// What it said.
        reason: String,
    },
    /// A device that is not there.
    #[error(
        "there is no device {ordinal}: this process sees {count}; start no more ranks on a machine than it has GPUs, and \
         look at CUDA_VISIBLE_DEVICES"
    )]
    Device {
        /// The device asked for, from 0.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// Two ranks chose one device.
    #[error(
        "ranks {first} and {second} have both chosen the GPU at {bus} of machine {host}, but NCCL needs one for each rank: \
         set LOCAL_RANK to a number of its own for each process of a machine (torchrun does), or give each its own \
         CUDA_VISIBLE_DEVICES, and start no more ranks than there are GPUs"
    )]
    Duplicate {
        /// The lower of the two ranks.
        first: usize,
        /// The other.
        second: usize,
        /// The device's address on the bus.
        bus: String,
        /// The machine.
        host: String,
    },
    /// Two ranks have different libraries.
    #[error("rank {rank} has NCCL {other}, but rank 0 has {first}: install the same version for all ranks")]
    Versions {
        /// The rank that differs from rank 0.
        rank: usize,
        /// Rank 0's version.
        first: String,
        /// That rank's.
        other: String,
    },
    /// The operating system gave no thread.
    #[error("no thread to watch the communicator: {0}")]
    Thread(std::io::Error),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] StartError),
    /// A rank failed, or a deadline passed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl NcclError {
    /// The exit code that tells of it: 2 for what has to be set up differently, 75 where another rank is in trouble or late,
    /// 1 otherwise.
    pub fn code(&self) -> i32 {
        match self {
            NcclError::Comm(CommError::Shape { .. } | CommError::Device { .. } | CommError::Mismatch { .. }) => 1,
            NcclError::Comm(_) => 75,
            NcclError::Rendezvous(error) => error.code(),
            NcclError::Call { .. } | NcclError::Thread(_) => 1,
            _ => 2,
        }
    }
}
