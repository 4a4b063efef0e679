//! The `nccl` engine: collectives on the memory of NVIDIA GPUs, one for each rank, without copies through the host.
//!
//! * In: addresses in device memory ([`DeviceSlice`]), which the caller keeps. Out: a [`DevicePending`]; results are in device
//!   memory when the operation has ended. Nothing is allocated or copied.
//! * Threads: any may issue; `rank-N-nccl-LABEL`, a watchdog for each communicator, looks for faults whoever waits.
//! * Beside it stands a *control group* ([`NcclComm::control`]), a [`Collective`](super::Collective) of another engine
//!   (of processes, or `threads`) for what hosts say to each other: it hands out the unique identity of the communicator,
//!   compares devices and versions, carries scalars and settings, and tells of ranks that fail.
//!
//! # Order
//!
//! Operations run on a stream of the communicator's own, beside computing kernels. CubeCL does not say which streams its
//! kernels are on; so the engine marks *all* work of the device's primary context (`cuCtxRecordEvent`, a driver of CUDA
//! 12.5) and makes its stream wait for that mark before the operation; [`DevicePending::order_compute`] makes all later work of
//! the context wait for the operation (`cuCtxWaitEvent`). The host waits for neither. With an older driver, or
//! [`NcclOptions::context_events`] off, the host waits for the context before the operation (`cuCtxSynchronize`), and
//! for the operation in `order_compute`. A caller that knows its stream passes it ([`Compute::Stream`],
//! [`DevicePending::order_stream`]), so that other streams go on.
//!
//! The marks are of work that the driver has been given: CubeCL must have flushed what it has queued.
//!
//! # Faults
//!
//! A collective of NCCL whose peers do not come waits for ever, on the device. Here, an operation that has been first in
//! line for longer than the deadline, an error that the library reports asynchronously, a failed rank that the control
//! group tells of, or an error of the driver *faults* the communicator: it is aborted, which ends its kernels; every wait and
//! every later call gives the one [`CommError`](crate::CommError), which names rank, group, operation and sequence number;
//! and the control group's other ranks, and with them all their communicators, fail too. Calls of the library do not block
//! (`ncclConfig_t.blocking = 0`), so that neither making a communicator nor connecting ranks can hang.
//!
//! NCCL does not compare what ranks call: sizes that differ hang, or give wrong results. The flight records of the ranks
//! ([`super::flight`]), written when a run fails, show in which operation they differ.
//!
//! Results of a reduction have the library's order of additions, not that of the other engines; and the library adds in the
//! type that it is given, so that a sum of floats in 16 bit is rounded, and may overflow, at each of its steps. Sums that are to
//! be rounded once are asked for in fp32.
//!
//! # What is needed
//!
//! Nothing to build; to run, a driver (libcuda) and NCCL 2.18 or newer (`libnccl.so.2`), found at run time.

mod comm;
pub(crate) mod cuda;
mod error;
mod init;
mod inner;
mod issue;
mod library;
mod pending;
mod request;
mod state;

pub use self::comm::{Compute, NcclComm, NcclOptions};
pub use self::cuda::device_count;
pub use self::error::NcclError;
pub use self::init::device_of;
pub use self::pending::DevicePending;
pub use self::request::{DeviceRequest, DeviceSlice};

/// Whether this machine has the driver and an NCCL that can be used.
pub fn is_there() -> bool {
    library::library().is_ok() && device_count().is_ok()
}
