//! The `mpi` engine: ranks are processes, started by an MPI launcher; messages go through MPI.
//!
//! MPI moves bytes and nothing else. Collectives are exchanges between pairs of ranks ([`MpiComm`]), because a mismatch
//! inside one of MPI's own collectives is undefined, and because additions must be in rank order; one-sided reads are
//! requests that a thread of the owner answers, because MPI's windows need the owner to call MPI (ADR 11).
//!
//! * In: buffers by value, as for every engine. Out: buffers received where they are returned from.
//! * Memory: what MPI reads or writes is owned by the communication thread until MPI has finished with it, whatever
//!   becomes of the operation.
//! * Threads: `rank-N-mpi` alone calls MPI (`MPI_THREAD_FUNNELED`); `rank-N-window` answers reads; callers wait for them
//!   on channels, with the run's deadline.
//!
//! Every operation exchanges a message between all pairs of a group's ranks, so that each rank sees for itself who calls
//! what: right for the tens of ranks that this engine is meant for.
//!
//! What it costs, between 2 ranks on the 2 cores of a virtual machine that was busy with other work as well (Open MPI
//! 4.1.4, `examples/mpi_rates.rs`, 100 MB of f32, medians of several runs): an all-gather 3.5 to 6.5 GB/s, a reduce-scatter
//! 2.9 to 5.6 GB/s, beside 8 to 12 GB/s of a plain copy; 17 to 35 microseconds for a barrier while the cores are free; 14
//! ms of processor time a second when nothing happens. This is with one copy from process to process (`process_vm_readv`,
//! which a container must allow: the same user, and no stricter `ptrace_scope` or seccomp filter). With two, through
//! shared memory (`--mca btl_vader_single_copy_mechanism none`), or over TCP (`--mca btl self,tcp`), 1.6 to 1.8 GB/s.
//!
//! A process runs one rank, once: MPI cannot be started again after it has ended.

mod comm;
mod link;
mod message;
mod pump;
pub(crate) mod remote;
mod run;
pub(crate) mod serve;
mod shared;
mod traffic;

pub use comm::MpiComm;
pub use run::{Failed, MpiOptions, MpiRun, run, start};
