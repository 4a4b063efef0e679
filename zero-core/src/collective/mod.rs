//! Groups of ranks and the collectives that ZeRO uses, as a trait that several engines implement.
//!
//! * [`Collective`]: who is in a group, its collectives on the memory of the host, and what becomes of its run. Of threads
//!   ([`threads`]) and of processes ([`process`]), over sockets or MPI.
//! * [`InProcess`]: what only ranks of one process can do besides.
//! * `nccl::NcclComm`: collectives on the memory of devices, of a group that it stands on.
//!
//! Every operation takes its buffer by value and gives one back, so that no engine ever holds a borrow across ranks.
//! Reductions add in rank order (rank 0 first), so that a result depends on the number of ranks alone: it is
//! bit-reproducible, and a reduce-scatter gives the same bits as the matching piece of an all-reduce.

pub(crate) mod agree;
mod buffer;
mod comm;
pub(crate) mod error;
pub mod exit;
mod first;
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
mod standing;
pub mod threads;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

pub use agree::{Difference, agree};
pub use buffer::{Buffer, DType};
pub use comm::Comm;
pub use first::{Failed, first_then};
pub use progress::Pending;

use crate::CommError;
use crate::accounting::{WireCounter, WireKind};

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in rank order.
    Sum,
    /// The sum, in rank order, times `1 / N`; of floats only.
    Mean,
    /// Largest.
    Max,
}

/// One collective with this rank's contribution.
#[derive(Debug)]
pub enum Request {
    /// Concatenates the ranks' equally long buffers in rank order.
    AllGather(Buffer),
    /// Reduces buffers of `N * k` elements and gives rank `r` elements `[r k, (r + 1) k)` of the result.
    ReduceScatter(Buffer, ReduceOp),
    /// Reduces equally long buffers and gives every rank the whole result.
    AllReduce(Buffer, ReduceOp),
    /// Gives every rank `root`'s buffer (the others pass one of the same length).
    Broadcast(Buffer, usize),
    /// Concatenates the ranks' equally long buffers in rank order, for `root` alone; the others get nothing.
    Gather(Buffer, usize),
    /// Gives rank `r` the `r`-th of `N` equal pieces of every rank's buffer, in rank order.
    AllToAll(Buffer),
    /// Returns when every rank has called it with the same purpose (empty, or what it is for).
    Barrier(&'static str),
}

impl Request {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        operation::Moved::by(self).map_or("barrier", |moved| moved.kind.name())
    }
}

/// What ranks of one process share of a result.
pub type Joined = Arc<dyn Any + Send + Sync>;

/// Makes a result of its pieces, which are in rank order and follow each other without a gap.
pub type Join = Box<dyn FnOnce(&[Arc<Buffer>]) -> Joined + Send>;

/// A group of ranks, as one of them sees it.
///
/// All ranks must issue the same operations in the same order. When they do not, when one panics, leaves or is late,
/// every other rank gets a [`CommError`] within the deadline; a group that has failed stays failed, and with it every group of
/// its run.
pub trait Collective: Send + Sync + core::fmt::Debug {
    // ---- the group ----

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// The ranks of the run that belong to the group, in its order.
    fn members(&self) -> &[usize];

    /// This rank in the run, and its place among the machines.
    fn place(&self) -> &launcher::Place;

    /// This rank among those of its machine, from 0.
    fn local_rank(&self) -> usize {
        self.place().local_rank
    }

    /// Name of the group, for errors.
    fn label(&self) -> &str;

    /// A second group of the same ranks with its own order of operations. A collective.
    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError>;

    /// Groups of the ranks that pass the same `color`, in the order of their `key`s, and where these are equal of their ranks. A
    /// collective.
    fn split_by(&self, label: &str, color: u64, key: u64) -> Result<Arc<dyn Collective>, CommError>;

    /// [`Collective::split_by`] in the order of ranks.
    fn split(&self, label: &str, color: u64) -> Result<Arc<dyn Collective>, CommError> {
        self.split_by(label, color, 0)
    }

    // ---- its run ----

    /// Whether an engine that stands on this group may go on waiting in `op`, number `seq` of its group `group`: collectives
    /// on devices cannot see that a rank has failed, and ask here.
    ///
    /// # Errors
    ///
    /// [`CommError::PeerFailed`] when a rank has failed, and [`CommError::PeerLeft`] when one has ended well (it may have
    /// done its part of the operation).
    fn check(&self, group: &str, seq: u64, op: &dyn core::fmt::Display) -> Result<(), CommError>;

    /// Makes every other rank's present and future operation fail with `reason`.
    fn abort(&self, reason: &str);

    /// The longest that any operation may wait for other ranks.
    fn deadline(&self) -> Duration;

    /// This rank's flight recorder, in which an engine that stands on this group records too.
    fn recorder(&self) -> &flight::Recorder;

    /// Bytes that this rank has received, over all groups of the run.
    fn wire(&self) -> &Arc<WireCounter>;

    /// Counts `bytes` that have come from the group's other ranks, as many from each.
    fn count_received(&self, kind: WireKind, bytes: usize) {
        self.wire().add(kind, bytes);
        self.wire().add_from_other_machines(self.place().from_other_machines(bytes, self.members()));
    }

    // ---- collectives ----

    /// Runs `request` on the calling thread, after whatever was started before it. `what` it is for (a parameter's name)
    /// is part of what all ranks must agree on, and stands in errors and flight records; it may be empty.
    ///
    /// # Errors
    ///
    /// [`CommError`] as above; [`CommError::Shape`] for sizes that do not fit.
    fn execute_for(&self, request: Request, what: &str) -> Result<Buffer, CommError>;

    /// Starts `request` on the communicator's own thread; the result is waited for with [`Pending::wait`]. `what` it is for
    /// as in [`Collective::execute_for`].
    fn start_for(&self, request: Request, what: &str) -> Pending;

    /// Starts an all-reduce whose result the ranks of one process share: `join` makes it, on one of them, and all of them
    /// get that. The values are those of [`Request::AllReduce`]. `what` is as in [`Collective::execute_for`].
    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined>;

    /// What the group can do besides when its ranks are threads of one process; none otherwise.
    fn in_process(&self) -> Option<&dyn InProcess>;

    /// [`Collective::execute_for`] nothing in particular.
    fn execute(&self, request: Request) -> Result<Buffer, CommError> {
        self.execute_for(request, "")
    }

    /// [`Collective::start_for`] nothing in particular.
    fn start(&self, request: Request) -> Pending {
        self.start_for(request, "")
    }

    /// See [`Request::AllGather`].
    fn all_gather(&self, shard: Buffer) -> Result<Buffer, CommError> {
        self.execute(Request::AllGather(shard))
    }

    /// Every rank's `values`, equally many, in rank order. A collective; it moves 8 bytes a value and rank.
    ///
    /// # Errors
    ///
    /// As any collective's.
    fn all_gather_values(&self, values: &[f64]) -> Result<Vec<Vec<f64>>, CommError> {
        let all = self.all_gather(Buffer::F64(values.to_vec()))?.into_f64();
        Ok(match values.len() {
            0 => vec![Vec::new(); self.world()],
            len => all.chunks_exact(len).map(<[f64]>::to_vec).collect(),
        })
    }

    /// Every rank's `bytes`, however many, in rank order. A collective, and a second one if there are any.
    ///
    /// # Errors
    ///
    /// As any collective's.
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
    /// Gives every rank all ranks' items in rank order, as they are: handles of memory that all of them can reach, such as
    /// tensors on a device. `bytes`, what each item stands for, and `what`, as in [`Collective::execute_for`], are part of
    /// what all ranks must agree on. Counts nothing as received: the caller knows what of the items it reads.
    ///
    /// # Errors
    ///
    /// As any collective's.
    fn exchange(&self, item: Joined, bytes: usize, what: &str) -> Result<Vec<Joined>, CommError>;
}
