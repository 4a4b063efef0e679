//! The engine of processes: ranks are processes, which a launcher has started on one machine or on several.
//!
//! What connects them moves bytes and nothing else: sockets ([`start`] with torchrun's variables) or, as a cargo feature, MPI.
//! Collectives are exchanges between pairs of ranks (`rank.rs`), because a mismatch inside a library's own collectives
//! is undefined, and because additions must be in rank order; one-sided reads are requests that a thread of the owner answers
//! (ADR 11, ADR 14).
//!
//! * In: buffers by value, as for every engine. Out: buffers received where they are returned from.
//! * Memory: what the link reads or writes is owned by the communication thread until the link has finished with it, whatever
//!   becomes of the operation.
//! * Threads: `rank-N-link` alone uses the link; `rank-N-window` answers reads; callers wait for them on channels, with the
//!   run's deadline.
//! * Trouble: a rank that fails tells all others. One that dies ends its connections, which those at the other ends see at once, and
//!   tell the others (over MPI it is seen at the deadline, or by the launcher); a machine that is cut off is noticed by TCP's own keep-alive within half a minute; a
//!   rank that does not come to an operation is named at the deadline.
//!
//! In groups of up to 8 ranks an operation exchanges a message between all pairs, so that each rank sees for itself who calls what. In
//! larger ones small results are gathered in rounds, broadcasts and gathers to one rank go by a tree, and news of failures and ends
//! to few ranks, who pass it on (`rounds`): a rank of a thousand sends tens of messages. Only what is large goes from each to each.
//! ADR 23 has the figures.
//!
//! What it costs, measured by `examples/process_rates.rs`, is in the README: rates beside those of a plain copy and of MPI;
//! besides 16 to 35 microseconds for a barrier while the cores are free, and 14 to 19 ms of processor time a second when
//! nothing happens. Over MPI these are rates with one copy from process to process (`process_vm_readv`, which a container must
//! allow: the same user, and no stricter `ptrace_scope` or seccomp filter). With two, through shared memory (`--mca
//! btl_vader_single_copy_mechanism none`), or over TCP (`--mca btl self,tcp`), 1.6 to 1.8 GB/s.
//!
//! A process runs one rank, once: MPI cannot be started again after it has ended, and rank 0's port is one job's.

pub(crate) mod commands;
mod link;
mod message;
mod pump;
mod rank;
pub(crate) mod remote;
mod rendezvous;
mod run;
mod serve;
mod shared;
#[cfg(test)]
mod tests;
mod traffic;

pub use rank::ProcessComm;
pub use rendezvous::{Refused, RendezvousError};
pub use run::{Failed, ProcessOptions, ProcessRun, run, start};
