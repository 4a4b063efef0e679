//! The `nccl` engine: collectives on the memory of NVIDIA GPUs, one per rank, without copies through the host.
//!
//! * Buffers: the caller passes addresses in device memory ([`DeviceSlice`]), gets a [`DevicePending`], and finds the results in
//!   device memory when the operation has ended. Nothing is allocated or copied.
//! * Threads: any thread may issue operations. Each communicator has a watchdog (`rank-N-nccl-LABEL`) that checks for faults.
//! * Control group: [`NcclComm::control`], a [`Collective`](super::Collective) of another engine (processes or `threads`) for
//!   communication between hosts. It distributes the unique identity of the communicator, compares devices and versions,
//!   carries scalars and settings, and reports ranks that fail.
//!
//! # Order
//!
//! Operations run on the communicator's own stream, concurrently with compute kernels. CubeCL does not expose the streams of its
//! kernels, so the engine records an event for *all* work of the device's primary context (`cuCtxRecordEvent`, a driver of CUDA
//! 12.5) and makes its stream wait for it before the operation. [`DevicePending::order_compute`] makes all later work of
//! the context wait for the operation (`cuCtxWaitEvent`). The host waits for neither. With an older driver, or
//! [`NcclOptions::context_events`] off, the host waits for the context before the operation (`cuCtxSynchronize`), and
//! for the operation in `order_compute`. A caller that knows its stream passes it ([`Compute::Stream`],
//! [`DevicePending::order_stream`]), so that other streams continue.
//!
//! The events only cover work submitted to the driver: CubeCL must have flushed its queue.
//!
//! # Faults
//!
//! An NCCL collective waits forever, on the device, for peers that do not call it. Here, a communicator *faults* if an
//! operation is first in the queue for longer than the deadline, if the library reports an asynchronous error, if the control
//! group reports a failed rank, or on a driver error. It is then aborted, which ends its kernels. Every wait and every later
//! call returns the same [`CommError`](crate::CommError), which names rank, group, operation and sequence number. The other
//! ranks of the control group, and with them all their communicators, fail too. Calls of the library do not block
//! (`ncclConfig_t.blocking = 0`), so that neither creating a communicator nor connecting ranks can hang.
//!
//! NCCL does not compare the ranks' calls: sizes that differ hang, or give wrong results. The flight records of the ranks
//! ([`super::flight`]), written when a run fails, show in which operation they differ.
//!
//! Reductions add in the library's order, not in that of the other engines. The library adds in the input's type, so a sum
//! of 16-bit floats is rounded, and may overflow, at each step. Request sums in fp32 if they must be rounded once.
//!
//! # Requirements
//!
//! Building needs nothing; running needs a driver (libcuda) and NCCL 2.18 or newer (`libnccl.so.2`), both found at run time.

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

/// Returns `true` if this machine has the driver and a usable NCCL.
pub fn is_there() -> bool {
    library::library().is_ok() && device_count().is_ok()
}
