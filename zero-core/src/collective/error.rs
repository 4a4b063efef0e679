//! Errors of communication and of launching ranks. Each names rank, group, operation and sequence number.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::collective::process::RendezvousError;

/// Exit codes of a rank's process.
pub mod code {
    /// Success.
    pub const SUCCESS: i32 = 0;
    /// A rank failed.
    pub const FAILURE: i32 = 1;
    /// The request or the environment is invalid: trying again does not help.
    pub const BAD_INPUT: i32 = 2;
    /// A deadline passed in a wait for another rank (`EX_TEMPFAIL` of sysexits.h: trying again may help).
    pub const WATCHDOG: i32 = 75;
}

/// An operation, as one rank of its group called it.
///
/// `op` is the operation with its size ("reduce_scatter of 4096 f32"). `seq` counts the operations of that rank in that group
/// from 0, so that the logs of two ranks can be compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationCall {
    /// Group label.
    pub group: String,
    /// Sequence number in the group.
    pub seq: u64,
    /// The rank that called it.
    pub rank: usize,
    /// The operation that it called.
    pub op: String,
}

impl OperationCall {
    /// Describes operation `seq` of `group`, called by `rank`.
    pub fn new(group: &str, seq: u64, rank: usize, op: impl ToString) -> Self {
        Self { group: group.to_string(), seq, rank, op: op.to_string() }
    }
}

/// Error of a collective, a gather or a wait, with the operation in which it occurred.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
pub enum CommError {
    /// Two ranks called different operations at the same place in the sequence.
    #[error(
        "rank {} called {} as operation {} of group '{}', but rank {other_rank} called {other_op}: every rank must call the \
         same collectives in the same order", at.rank, at.op, at.seq, at.group
    )]
    Mismatch {
        /// The operation of the rank that detected the mismatch.
        at: OperationCall,
        /// The rank it differs from.
        other_rank: usize,
        /// The operation that the other rank called.
        other_op: String,
    },
    /// Other ranks did not reach the operation within the deadline.
    #[error(
        "rank {} waited {waited_ms} ms in {} (operation {} of group '{}') for rank(s) {missing:?}, which have not called it, or whose \
         data have not arrived: check that every rank runs the same steps, or raise the deadline", at.rank, at.op, at.seq, at.group
    )]
    Timeout {
        /// The operation that waited.
        at: OperationCall,
        /// Milliseconds waited.
        waited_ms: u64,
        /// Ranks that had not reached the operation.
        missing: Vec<usize>,
    },
    /// Another rank ended before it reached this operation.
    #[error(
        "rank {} cannot finish {} (operation {} of group '{}'): rank {peer} has already ended; every rank must run the same \
         number of steps", at.rank, at.op, at.seq, at.group
    )]
    PeerLeft {
        /// The operation that waited.
        at: OperationCall,
        /// The rank that had ended.
        peer: usize,
    },
    /// Another rank failed.
    #[error(
        "rank {} stopped in {} (operation {} of group '{}') because rank {peer} failed: {reason}",
        at.rank, at.op, at.seq, at.group
    )]
    PeerFailed {
        /// The operation that was stopped.
        at: OperationCall,
        /// The rank that failed first.
        peer: usize,
        /// The reason of its failure.
        reason: Arc<str>,
    },
    /// The disk that holds a rank's data for the operation failed.
    #[error("rank {rank}: {reason}")]
    Disk {
        /// The rank.
        rank: usize,
        /// The disk's error.
        reason: Arc<str>,
    },
    /// A buffer does not fit the operation.
    #[error("rank {}, group '{}', operation {}, {}: expected {expected}, got {got}", at.rank, at.group, at.seq, at.op)]
    Shape {
        /// The operation.
        at: OperationCall,
        /// The input that the operation expects.
        expected: String,
        /// The input that it got.
        got: String,
    },
    /// An operation on the ranks' devices did not finish within the deadline. A device cannot report which rank it waits for.
    #[error(
        "rank {} waited {waited_ms} ms for {} (operation {} of group '{}') to finish on its device; {state}: check \
         that every rank issues the same collectives with the same sizes in the same order (compare the ranks' flight \
         records to find where they diverge), or raise the deadline", at.rank, at.op, at.seq, at.group
    )]
    Stalled {
        /// The operation that did not finish.
        at: OperationCall,
        /// Milliseconds waited since the operation became the first in the queue.
        waited_ms: u64,
        /// The observed state of the device.
        state: String,
    },
    /// The device, or the library that runs collectives on it, reported an error.
    #[error("rank {}, {} (operation {} of group '{}') failed on its device: {reason}", at.rank, at.op, at.seq, at.group)]
    Device {
        /// The operation.
        at: OperationCall,
        /// The library's message, and advice.
        reason: Arc<str>,
    },
    /// A one-sided read requested data that its owner has already replaced.
    #[error(
        "rank {rank} reads {what} of rank {peer}, which has already replaced it: ranks must not update parameters \
         while another still reads them"
    )]
    Gone {
        /// The rank that reads.
        rank: usize,
        /// The data that it reads.
        what: String,
        /// The owner.
        peer: usize,
    },
}

/// The failure of one rank.
#[derive(Debug, thiserror::Error)]
pub enum RankFailure<E> {
    /// Its body returned an error.
    #[error("{0}")]
    Failed(E),
    /// Its body panicked with this message.
    #[error("panicked: {0}")]
    Panicked(String),
    /// A collective that it called failed.
    #[error("{0}")]
    Comm(Box<CommError>),
    /// It called [`crate::Collective::abort`] with this reason.
    #[error("{0}")]
    Aborted(String),
}

/// A call to the link between the ranks' processes, or to a library under it, failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct LinkError {
    /// The call.
    pub call: &'static str,
    /// The error that it returned.
    pub reason: String,
}

/// A process could not become a rank of its job.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// MPI could not be started.
    #[error("MPI cannot be used: {0}")]
    Mpi(LinkError),
    /// An MPI launcher started this process as one of several, but this program was built without MPI.
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
        /// The variable that holds the number of processes.
        variable: &'static str,
    },
    /// The operating system could not create a thread.
    #[error("rank {rank} could not be started: {source}")]
    Thread {
        /// The rank.
        rank: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

impl StartError {
    /// Returns the exit code for this error: 2 for a setup that must be changed, 75 if other ranks were late, 1 otherwise.
    pub fn code(&self) -> i32 {
        match self {
            StartError::Rendezvous(error) if error.is_transient() => code::WATCHDOG,
            StartError::Rendezvous(_) | StartError::WithoutMpi { .. } => code::BAD_INPUT,
            StartError::Mpi(_) | StartError::Thread { .. } => code::FAILURE,
        }
    }
}

/// Error of a run of several ranks: the rank that failed first, and its failure.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError<E: core::fmt::Display + core::fmt::Debug> {
    /// A rank failed; the others were stopped.
    #[error("rank {rank} of {world}: {failure}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// Its failure.
        failure: Box<RankFailure<E>>,
    },
    /// The requested number of ranks is invalid.
    #[error("cannot run {world} ranks: expected at least 1")]
    World {
        /// The requested number.
        world: usize,
    },
    /// This process could not become a rank.
    #[error(transparent)]
    Start(Box<StartError>),
    /// The operating system could not create a thread.
    #[error("rank {rank} could not be started: {source}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's error.
        source: std::io::Error,
    },
}
