//! Groups of ranks and the collectives that ZeRO uses, as a trait that several engines implement.
//!
//! * [`Collective`]: the members of a group, its collectives on host memory, and the status of its run. Implemented for threads
//!   ([`threads`]) and for processes ([`process`]), over sockets or MPI.
//! * [`InProcess`]: additional operations for ranks of one process.
//! * `nccl::NcclComm`: collectives on device memory, built on top of another group.
//!
//! Every operation takes its buffer by value and returns one, so that no engine ever holds a borrow across ranks.
//! Reductions add in rank order (rank 0 first), so that a result depends on the number of ranks alone: it is
//! bit-reproducible, and a reduce-scatter gives the same bits as the matching shard of an all-reduce.

pub(crate) mod agree;
mod buffer;
mod comm;
pub(crate) mod error;
pub mod exit;
pub mod flight;
mod landing;
pub mod launch;
pub mod launcher;
pub(crate) mod machine;
#[cfg(feature = "nccl")]
pub mod nccl;
pub(crate) mod operation;
pub mod process;
mod progress;
mod rounds;
mod run_first;
mod run_status;
pub mod threads;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

pub use agree::{Difference, agree};
pub use buffer::{Buffer, DType};
pub use comm::Comm;
pub use progress::Pending;
pub use run_first::{RankError, run_first};

use crate::CommError;
use crate::accounting::{WireCounter, WireKind};

/// The reduction that combines the values of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in rank order.
    Sum,
    /// Sum in rank order, times `1 / N`; floats only.
    Mean,
    /// Maximum.
    Max,
}

/// One collective with this rank's contribution.
#[derive(Debug)]
pub enum Request {
    /// Concatenates the ranks' equally long buffers in rank order.
    AllGather(Buffer),
    /// Reduces buffers of `N * k` elements; rank `r` gets elements `[r k, (r + 1) k)` of the result.
    ReduceScatter(Buffer, ReduceOp),
    /// Reduces equally long buffers; every rank gets the full result.
    AllReduce(Buffer, ReduceOp),
    /// Gives every rank `root`'s buffer (the others pass one of the same length).
    Broadcast(Buffer, usize),
    /// Concatenates the ranks' equally long buffers in rank order, for `root` alone; the others get nothing.
    Gather(Buffer, usize),
    /// Gives rank `r` the `r`-th of `N` equal parts of every rank's buffer, in rank order.
    AllToAll(Buffer),
    /// Returns when every rank has called it with the same purpose (a description, may be empty).
    Barrier(&'static str),
}

impl Request {
    /// Returns the operation's name.
    pub fn name(&self) -> &'static str {
        operation::Moved::by(self).map_or("barrier", |moved| moved.kind.name())
    }
}

/// A result that the ranks of one process share.
pub type Joined = Arc<dyn Any + Send + Sync>;

/// Builds a result from its parts, which are in rank order and contiguous.
pub type Join = Box<dyn FnOnce(&[Arc<Buffer>]) -> Joined + Send>;

/// One rank's handle to a group of ranks.
///
/// All ranks must issue the same operations in the same order. If they do not, or if a rank panics, leaves or is late,
/// every other rank gets a [`CommError`] within the deadline. A group that has failed stays failed, and so does every group of
/// its run.
pub trait Collective: Send + Sync + core::fmt::Debug {
    // ---- the group ----

    /// Returns this rank, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world(&self) -> usize;

    /// Returns the ranks of the run that belong to the group, in the group's order.
    fn members(&self) -> &[usize];

    /// Returns this rank in the run, and its place among the machines.
    fn place(&self) -> &launcher::Topology;

    /// Returns this rank's index among the ranks of its machine, from 0.
    fn local_rank(&self) -> usize {
        self.place().local_rank
    }

    /// Returns the group's name, for errors.
    fn label(&self) -> &str;

    /// Creates a second group of the same ranks with its own sequence of operations. A collective operation.
    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError>;

    /// Splits the group: ranks that pass the same `color` form one, ordered by `key`, then by rank. A collective operation.
    fn split_by(&self, label: &str, color: u64, key: u64) -> Result<Arc<dyn Collective>, CommError>;

    /// Splits the group like [`Collective::split_by`], ordered by rank.
    fn split(&self, label: &str, color: u64) -> Result<Arc<dyn Collective>, CommError> {
        self.split_by(label, color, 0)
    }

    // ---- its run ----

    /// Checks that an engine built on this group may keep waiting in `op`, number `seq` of its group `group`. Collectives
    /// on devices cannot see that a rank has failed, and ask here.
    ///
    /// # Errors
    ///
    /// [`CommError::PeerFailed`] if a rank has failed, and [`CommError::PeerLeft`] if one has ended successfully (it may have
    /// done its part of the operation).
    fn check(&self, group: &str, seq: u64, op: &dyn core::fmt::Display) -> Result<(), CommError>;

    /// Makes every other rank's present and future operation fail with `reason`.
    fn abort(&self, reason: &str);

    /// Returns the longest time that any operation may wait for other ranks.
    fn deadline(&self) -> Duration;

    /// Returns this rank's flight recorder; an engine built on this group records to it too.
    fn recorder(&self) -> &flight::Recorder;

    /// Returns the counter of bytes that this rank has received, over all groups of the run.
    fn wire(&self) -> &Arc<WireCounter>;

    /// Counts `bytes` received from the group's other ranks, equally many from each.
    fn count_received(&self, kind: WireKind, bytes: usize) {
        self.wire().add(kind, bytes);
        self.wire().add_from_other_machines(self.place().from_other_machines(bytes, self.members()));
    }

    // ---- collectives ----

    /// Runs `request` on the calling thread, after all operations started before it. `what` names its purpose (such as a
    /// parameter's name). All ranks must pass the same `what`; it appears in errors and flight records, and may be empty.
    ///
    /// # Errors
    ///
    /// [`CommError`] as above; [`CommError::Shape`] for sizes that do not fit.
    fn execute_for(&self, request: Request, what: &str) -> Result<Buffer, CommError>;

    /// Starts `request` on the communicator's own thread; [`Pending::wait`] waits for the result. `what` is as in
    /// [`Collective::execute_for`].
    fn start_for(&self, request: Request, what: &str) -> Pending;

    /// Starts an all-reduce whose result the ranks of one process share: `join` builds it on one of them, and all of them
    /// get that one. The values are those of [`Request::AllReduce`]. `what` is as in [`Collective::execute_for`].
    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined>;

    /// Returns the additional operations of a group whose ranks are threads of one process; `None` for other groups.
    fn in_process(&self) -> Option<&dyn InProcess>;

    /// Runs `request` like [`Collective::execute_for`], with an empty purpose.
    fn execute(&self, request: Request) -> Result<Buffer, CommError> {
        self.execute_for(request, "")
    }

    /// Starts `request` like [`Collective::start_for`], with an empty purpose.
    fn start(&self, request: Request) -> Pending {
        self.start_for(request, "")
    }

    /// See [`Request::AllGather`].
    fn all_gather(&self, shard: Buffer) -> Result<Buffer, CommError> {
        self.execute(Request::AllGather(shard))
    }

    /// Gathers every rank's `values`, equally many, in rank order. A collective operation; it moves 8 bytes per value and rank.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for any collective.
    fn all_gather_values(&self, values: &[f64]) -> Result<Vec<Vec<f64>>, CommError> {
        let all = self.all_gather(Buffer::F64(values.to_vec()))?.into_f64();
        Ok(match values.len() {
            0 => vec![Vec::new(); self.world()],
            len => all.chunks_exact(len).map(<[f64]>::to_vec).collect(),
        })
    }

    /// Gathers every rank's `bytes`, of any length, in rank order. One collective operation, and a second one unless all are empty.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for any collective.
    fn all_gather_bytes(&self, mut bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let lengths = self.all_gather_values(&[bytes.len() as f64])?.concat();
        let longest = lengths.iter().map(|&length| length as usize).max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![bytes; lengths.len()]);
        }
        bytes.resize(longest, 0);
        let all = self.all_gather(Buffer::U8(bytes))?.into_u8();
        Ok(all.chunks_exact(longest).zip(lengths).map(|(rank, length)| rank[..length as usize].to_vec()).collect())
    }

    /// See [`Request::ReduceScatter`].
    fn reduce_scatter(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.execute(Request::ReduceScatter(input, op))
    }

    /// See [`Request::AllReduce`].
    fn all_reduce(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.execute(Request::AllReduce(input, op))
    }

    /// See [`Request::Broadcast`].
    fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Buffer, CommError> {
        self.execute(Request::Broadcast(buffer, root))
    }

    /// See [`Request::AllToAll`].
    fn all_to_all(&self, input: Buffer) -> Result<Buffer, CommError> {
        self.execute(Request::AllToAll(input))
    }

    /// See [`Request::Barrier`]; without a purpose.
    fn barrier(&self) -> Result<(), CommError> {
        self.execute(Request::Barrier("")).map(|_| ())
    }
}

/// A group whose ranks share an address space.
pub trait InProcess {
    /// Gives every rank all ranks' items in rank order, unchanged: handles to memory that all of them can access, such as
    /// tensors on a device. All ranks must pass the same `bytes` (the size of each item) and `what` (as in
    /// [`Collective::execute_for`]). Counts nothing as received: only the caller knows which parts of the items it reads.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for any collective.
    fn exchange(&self, item: Joined, bytes: usize, what: &str) -> Result<Vec<Joined>, CommError>;
}
