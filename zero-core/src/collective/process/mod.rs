//! The engine of processes: ranks are processes, which a launcher has started on one machine or on several.
//!
//! What connects them moves bytes and nothing else: sockets ([`start`] with torchrun's variables) or, as a cargo feature, MPI.
//! Collectives are exchanges between pairs of ranks ([`ProcessComm`]), because a mismatch inside a library's own collectives
//! is undefined, and because additions must be in rank order; one-sided reads are requests that a thread of the owner answers
//! (ADR 11, ADR 14).
//!
//! * In: buffers by value, as for every engine. Out: buffers received where they are returned from.
//! * Memory: what the link reads or writes is owned by the communication thread until the link has finished with it, whatever
//!   becomes of the operation.
//! * Threads: `rank-N-link` alone uses the link; `rank-N-window` answers reads; callers wait for them on channels, with the
//!   run's deadline.
//! * Trouble: a rank that fails tells all others. One that dies ends its connections, which all see at once (over MPI, at
//!   the deadline, or by the launcher); a machine that is cut off is noticed by TCP's own keep-alive within half a minute; a
//!   rank that does not come to an operation is named at the deadline.
//!
//! Every operation exchanges a message between all pairs of a group's ranks, so that each rank sees for itself who calls
//! what: right for the tens of ranks that this engine is meant for.
//!
//! What it costs over MPI, between 2 ranks on the 2 cores of a virtual machine that was busy with other work as well (Open MPI
//! 4.1.4, `examples/process_rates.rs`, 100 MB of f32, medians of several runs): an all-gather 3.5 to 6.5 GB/s, a
//! reduce-scatter 2.9 to 5.6 GB/s, beside 8 to 12 GB/s of a plain copy; 17 to 35 microseconds for a barrier while the cores
//! are free; 14 ms of processor time a second when nothing happens. This is with one copy from process to process
//! (`process_vm_readv`, which a container must allow: the same user, and no stricter `ptrace_scope` or seccomp filter). With
//! two, through shared memory (`--mca btl_vader_single_copy_mechanism none`), or over TCP (`--mca btl self,tcp`), 1.6 to 1.8
//! GB/s.
//!
//! Over sockets, on another such machine, idle, in turn with MPI (3 turns): an all-gather 3.2 to 3.7 GB/s and a reduce-scatter
//! 3.1 to 3.3 GB/s, a barrier 16 to 22 microseconds; beside it MPI over TCP 3.3 to 3.7 and 2.5 to 3.0 GB/s, with one copy 8.8 to
//! 14.4 and 5.7 to 8.5 GB/s. 14 to 19 ms of processor time a second when nothing happens.
//!
//! A process runs one rank, once: MPI cannot be started again after it has ended, and rank 0's port is one job's.

mod comm;
pub(crate) mod commands;
mod link;
mod message;
mod pump;
pub(crate) mod remote;
mod rendezvous;
mod run;
mod serve;
mod shared;
mod traffic;

pub use comm::ProcessComm;
pub use rendezvous::{Refused, RendezvousError};
pub use run::{Failed, ProcessOptions, ProcessRun, run, start};
