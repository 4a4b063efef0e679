//! Errors of creating a communicator.

use crate::{CommError, StartError};

/// Error of creating a communicator. Operations of an existing communicator fail with a [`CommError`].
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// A library cannot be loaded.
    #[error("{library} cannot be used: {reason}; {advice}")]
    Library {
        /// The library.
        library: &'static str,
        /// The loader's error.
        reason: String,
        /// Advice for the user.
        advice: &'static str,
    },
    /// A library is too old.
    #[error("{library} has no {symbol}: {needed} or newer is needed")]
    Symbol {
        /// The library.
        library: &'static str,
        /// The function.
        symbol: &'static str,
        /// The oldest version that has it.
        needed: &'static str,
    },
    /// A call of a library failed.
    #[error("{call}: {reason}")]
    Call {
        /// The call.
        call: &'static str,
        /// The error that it returned.
        reason: String,
    },
    /// A device does not exist.
    #[error(
        "there is no GPU {ordinal}: this process sees {count} GPU(s); start at most one rank per GPU on each machine, \
         and check CUDA_VISIBLE_DEVICES"
    )]
    Device {
        /// Index of the requested device, from 0.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// Two ranks chose the same device.
    #[error(
        "ranks {first} and {second} both use the GPU at {bus} of machine {host}, but NCCL needs one GPU per rank: set \
         a different LOCAL_RANK for each process of a machine (torchrun does), or a different CUDA_VISIBLE_DEVICES, \
         and start at most one rank per GPU"
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
        /// The differing rank's version.
        other: String,
    },
    /// The operating system could not create a thread.
    #[error("cannot create a thread for the communicator: {0}")]
    Thread(std::io::Error),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] StartError),
    /// A rank failed, or a deadline passed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl NcclError {
    /// Returns the exit code for this error: 2 for a setup that must be changed, 75 if another rank failed or was late,
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
