//! The process engine: ranks are processes that a launcher has started on one machine or on several.
//!
//! The links between them only move bytes: sockets ([`start`] with torchrun's variables) or, as a cargo feature, MPI.
//! Collectives are exchanges between pairs of ranks (`rank.rs`), because a mismatch inside a library's own collectives
//! is undefined, and because additions must be in rank order. One-sided reads are requests that a thread of the owner answers
//! (ADR 11, ADR 14).
//!
//! * Buffers: inputs are taken by value, as in every engine; results are received in the buffers that are returned.
//! * Memory: the communication thread owns memory that the link reads or writes until the link has finished with it, even if
//!   the operation fails.
//! * Threads: only `rank-N-link` uses the link; `rank-N-window` answers reads; callers wait for them on channels, with the
//!   run's deadline.
//! * Failures: a rank that fails notifies all others. A rank that dies ends its connections: its peers see this at once and
//!   notify the others (over MPI it is noticed at the deadline, or by the launcher). TCP's keep-alive detects a machine that is
//!   cut off within half a minute. A rank that does not reach an operation is named at the deadline.
//!
//! In groups of up to 8 ranks, an operation exchanges a message between all pairs, so that each rank detects mismatches itself.
//! In larger groups, small results are gathered in rounds, broadcasts and gathers to one rank use a tree, and notifications of
//! failures and ends go to a few ranks, which forward them (`rounds`): a rank of a thousand sends tens of messages. Only large
//! data goes directly from each rank to every other. ADR 23 has the figures.
//!
//! `docs/book/src/many-machines.md` has the costs measured by `examples/process_rates.rs`: transfer rates next to those of a plain copy
//! and of MPI.
//! In addition, a barrier takes 16 to 35 microseconds while the cores are free, and an idle rank 14 to 19 ms of CPU time per
//! second. Rates over MPI are with one copy from process to process (`process_vm_readv`, which a container must allow: the same
//! user, and no stricter `ptrace_scope` or seccomp filter). With two copies through shared memory (`--mca
//! btl_vader_single_copy_mechanism none`), or over TCP (`--mca btl self,tcp`), they are 1.6 to 1.8 GB/s.
//!
//! A process runs one rank, once: MPI cannot be restarted after it has ended, and rank 0's port belongs to one job.

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
pub use rendezvous::{RefusedConnections, RendezvousError};
pub use run::{Failed, ProcessOptions, ProcessRun, run, start};
