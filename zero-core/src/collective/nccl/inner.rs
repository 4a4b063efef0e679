//! Ownership of a communicator of the library, and its end.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::ncclComm_t;

use super::NcclError;
use super::state::{ABORT, Core};
use crate::CommError;
use crate::collective::progress::joined;

/// Longest time that a dropped communicator may take to end.
const CLOSE: Duration = Duration::from_secs(10);

/// A communicator with its watchdog; ends when the last reference, such as a [`super::DevicePending`], is dropped.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) core: Arc<Core>,
    /// `true` if events order the work of the context, without the host.
    pub(super) context_events: bool,
    pub(super) high_priority: bool,
    watchdog: Option<JoinHandle<()>>,
}

impl Inner {
    pub(super) fn new(core: Arc<Core>, context_events: bool, high_priority: bool) -> Result<Arc<Self>, NcclError> {
        let watched = core.clone();
        let name = format!("rank-{}-nccl-{}", core.group.rank(), core.group.label);
        let watchdog = std::thread::Builder::new().name(name).spawn(move || watched.watch());
        let watchdog = Some(watchdog.map_err(NcclError::Thread)?);
        Ok(Arc::new(Self { core, context_events, high_priority, watchdog }))
    }

    /// Ends the communicator: together with the other ranks if it is sound, by an abort otherwise.
    fn close(&mut self) {
        let core = self.core.clone();
        let end = Instant::now() + CLOSE.min(core.deadline);
        while core.busy() && core.poll().is_ok() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        core.stop();
        // A watchdog that does not end is inside the library, which may never return.
        if let Some(Some(Err(_))) = self.watchdog.take().map(|watchdog| joined(watchdog, ABORT)) {
            tracing::warn!(rank = core.group.rank(), group = %core.group.label, "the watchdog has panicked");
        }
        if core.busy() || core.sound().is_err() {
            return core.abort();
        }
        // Checks as `poll` does, but accepts a rank that has left: it has completed its own part.
        let others = |core: &Core| match core.control.check(&core.group.label, u64::MAX, &"ending") {
            Err(CommError::PeerLeft { .. }) | Ok(()) => true,
            Err(_) => false,
        };
        let ended = {
            // A watchdog that is stuck inside the library may hold it.
            let Some(mut handle) = core.handle.try_lock_for(ABORT) else { return core.abort() };
            let Some(comm) = handle.0 else { return };
            let _entered = core.device.enter();
            // SAFETY: the communicator is alive, and the handle locked.
            let code = unsafe { (core.library.finalize)(comm) };
            let mut ended = core.library.check("ncclCommFinalize", code).is_ok();
            while ended && Instant::now() < end + CLOSE {
                match core.library_state(comm) {
                    Ok(true) => break,
                    Ok(false) => std::thread::sleep(Duration::from_micros(200)),
                    Err(_) => ended = false,
                }
                ended &= others(&core) && Instant::now() < end + CLOSE;
            }
            if ended {
                handle.0 = None;
                // SAFETY: as above; nobody uses it afterwards.
                let code = unsafe { (core.library.destroy)(comm) };
                ended = core.library.check("ncclCommDestroy", code).is_ok();
            }
            ended
        };
        if !ended {
            core.abort();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

/// Ends a communicator whose creation has failed.
pub(super) fn discard(core: &Core, comm: ncclComm_t) {
    if let Err(reason) = core.end_now(comm) {
        tracing::debug!(rank = core.group.rank(), %reason, "a communicator whose creation failed could not be aborted");
    }
}
