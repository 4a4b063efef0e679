//! A communicator's state, and what finds its faults.
//!
//! States: *sound* -> *faulted* (first error kept, every later call gives it) -> *aborted* (`ncclCommAbort` has returned well:
//! no kernel of the communicator touches memory any more). One that cannot be aborted ends the process, before anyone takes
//! memory back because of the error. Faults are found by whoever looks ([`Core::poll`]): a waiting
//! caller, or the watchdog, which looks at all times and is the only one to abort.
//!
//! Operations stand *in line* in the order of the communicator's stream. The deadline of an operation counts from when it
//! was first in line, so that many may be issued ahead. What ended is taken out by whoever looks first.
//!
//! Locks: `order` (one operation is issued at a time) before `handle` (the library's communicator; held through each call,
//! which does not block) before `state`. The watchdog takes `handle` to abort; whoever holds it for longer, while the
//! library connects, looks at the deadline and at faults itself. `state`'s mutex gives the happens-before edge from the
//! end of an operation, as the device reports it to one thread, to a waiting caller on another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::nccl::sys::ncclComm_t;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::NcclError;
use super::cuda::{Device, Event, Stream};
use super::library::{Code, IN_PROGRESS, Library, SUCCESS};
use crate::CommError;
use crate::accounting::{WireCounter, WireKind};
use crate::collective::flight::Entry;
use crate::collective::operation::{At, Group};
use crate::collective::progress::apart;
use crate::collective::{Collective, exit};

/// An operation on the device that has been issued.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) seq: u64,
    pub(super) words: String,
    pub(super) entry: Arc<Entry>,
    /// What it waits for of this rank's own work, where that is known.
    pub(super) ready: Option<Event>,
    /// Its end.
    pub(super) done: Event,
    pub(super) received: Vec<(WireKind, usize)>,
    /// Release: set after the device has reported the end; acquire by who reads results because of it.
    pub(super) ended: AtomicBool,
}

impl Issued {
    pub(super) fn at<'a>(&'a self, group: &'a Group) -> At<'a> {
        group.at(self.seq, &self.words)
    }
}

/// The library's communicator; none before it is made and after it is given up.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Option<ncclComm_t>);

// SAFETY: the library lets any thread use a communicator, one at a time, which the mutex around this sees to.
unsafe impl Send for Handle {}

#[derive(Debug, Default)]
struct State {
    line: VecDeque<Arc<Issued>>,
    /// Since when the first in line has been first.
    first_since: Option<Instant>,
    /// Since when a rank is known to have ended.
    left_since: Option<Instant>,
    fault: Option<CommError>,
    /// What became of the abort, once it is over.
    aborted: Option<Result<(), String>>,
    /// Whether the watchdog is to end.
    stop: bool,
}

/// A communicator on its way to the thread that ends it.
struct Ending(ncclComm_t);

// SAFETY: as `Handle`; nobody else has it any more.
unsafe impl Send for Ending {}

/// What a communicator and its watchdog share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) library: &'static Library,
    pub(super) device: Arc<Device>,
    pub(super) stream: Stream,
    /// The same ranks, for what their hosts say to each other.
    pub(super) control: Arc<dyn Collective>,
    /// Another identity than the control group's own: both record in one place.
    pub(super) group: Group,
    pub(super) deadline: Duration,
    pub(super) wire: Arc<WireCounter>,
    order: Mutex<()>,
    /// Operations issued; the next one's number.
    pub(super) issued: AtomicU64,
    pub(super) handle: Mutex<Handle>,
    state: Mutex<State>,
    changed: Condvar,
}

/// How long the library may take to abort, or another thread to let go of it.
pub(super) const ABORT: Duration = Duration::from_secs(10);
/// How long operations may go on after a rank has ended well: it has done its part, and theirs is a matter of moments.
const LEFT: Duration = Duration::from_secs(5);

impl Core {
    /// A communicator of the ranks of `control`, which the library has still to make.
    pub(super) fn new(
        (library, device): (&'static Library, &Arc<Device>),
        (control, id): (Arc<dyn Collective>, u64),
        deadline: Duration,
        wire: Arc<WireCounter>,
        high_priority: bool,
    ) -> Result<Arc<Self>, NcclError> {
        let members: Arc<[usize]> = control.members().into();
        let rank = members[control.rank()];
        Ok(Arc::new(Self {
            library,
            device: device.clone(),
            stream: Stream::new(device, high_priority)?,
            group: Group::new(id, control.label(), members, rank),
            control,
            deadline,
            wire,
            order: Mutex::default(),
            issued: AtomicU64::new(0),
            handle: Mutex::new(Handle(None)),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// The next operation's number; no other is issued while the lock is held.
    pub(super) fn next(&self) -> (MutexGuard<'_, ()>, u64) {
        let order = self.order.lock();
        // Relaxed: changed under the lock only; without it, a number for a message.
        (order, self.issued.fetch_add(1, Ordering::Relaxed))
    }

    /// The error that every call gives since the communicator has faulted.
    pub(super) fn sound(&self) -> Result<(), CommError> {
        self.state.lock().fault.clone().map_or(Ok(()), Err)
    }

    /// Keeps the first error, tells the other ranks, and leaves the rest to the watchdog. Gives the error that was kept.
    pub(super) fn fault(&self, error: CommError) -> CommError {
        let line = {
            let mut state = self.state.lock();
            if let Some(first) = &state.fault {
                return first.clone();
            }
            state.fault = Some(error.clone());
            std::mem::take(&mut state.line)
        };
        self.changed.notify_all();
        // The others first, and the flight record, which shows what was under way.
        self.control.abort(&error.to_string());
        for op in line {
            self.control.recorder().close(&op.entry, Err(error.to_string()));
        }
        error
    }

    /// Puts an operation in line.
    pub(super) fn line_up(&self, op: Arc<Issued>) {
        let mut state = self.state.lock();
        if state.line.is_empty() {
            state.first_since = Some(Instant::now());
        }
        state.line.push_back(op);
        drop(state);
        self.changed.notify_all();
    }

    /// Takes what has ended out of the line, and looks for faults.
    ///
    /// # Errors
    ///
    /// The error that the communicator has faulted with, now or before.
    pub(super) fn poll(&self) -> Result<(), CommError> {
        let (first, waited) = {
            let mut state = self.state.lock();
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            while let Some(op) = state.line.front() {
                match op.done.reached() {
                    Ok(false) => break,
                    Ok(true) => {
                        op.received.iter().for_each(|&(kind, bytes)| self.wire.add(kind, bytes));
                        self.control.recorder().close(&op.entry, Ok(()));
                        op.ended.store(true, Ordering::Release);
                        state.line.pop_front();
                        state.first_since = Some(Instant::now());
                        self.changed.notify_all();
                    }
                    Err(error) => {
                        let error = op.at(&self.group).device(error);
                        drop(state);
                        return Err(self.fault(error));
                    }
                }
            }
            let waited = state.first_since.map_or(Duration::ZERO, |since| since.elapsed());
            (state.line.front().cloned(), waited)
        };
        // Relaxed: a number for a message.
        let pause = || self.group.at(self.issued.load(Ordering::Relaxed), &"the pause before its next operation");
        let at = first.as_ref().map_or_else(pause, |op| op.at(&self.group));
        self.look(at, first.is_some())?;
        let Some(first) = &first else { return Ok(()) };
        if waited >= self.deadline {
            let own = first.ready.as_ref().is_some_and(|ready| !ready.reached().unwrap_or(true));
            let state = match own {
                true => "this rank's own work before it has not ended",
                false => "it has been started here and goes on, so other ranks have not come to it, or are cut off",
            };
            return Err(self.fault(at.stalled(waited, state)));
        }
        Ok(())
    }

    /// Looks at the library's errors and at the other ranks, for an operation `here`.
    fn look(&self, at: At<'_>, waiting: bool) -> Result<(), CommError> {
        // Whoever holds the handle looks itself.
        if let Some(handle) = self.handle.try_lock()
            && let Some(comm) = handle.0
        {
            let found = self.library_state(comm);
            drop(handle);
            if let Err(reason) = found {
                return Err(self.fault(at.device(reason)));
            }
        }
        self.look_at_others(at, waiting)
    }

    fn look_at_others(&self, at: At<'_>, waiting: bool) -> Result<(), CommError> {
        match self.control.check(at.group, at.seq, at.op) {
            Ok(()) => Ok(()),
            Err(left @ CommError::PeerLeft { .. }) => {
                // From when both are so: a rank has left, and this operation is first in line.
                let since = {
                    let mut state = self.state.lock();
                    let left = *state.left_since.get_or_insert_with(Instant::now);
                    state.first_since.filter(|_| !state.line.is_empty()).map_or(left, |first| first.max(left))
                };
                if waiting && since.elapsed() >= LEFT.min(self.deadline) {
                    return Err(self.fault(left));
                }
                Ok(())
            }
            Err(error) => Err(self.fault(error)),
        }
    }

    /// Whether the library is done with its last call (`true`), still at it, or has failed.
    pub(super) fn library_state(&self, comm: ncclComm_t) -> Result<bool, String> {
        let mut state: Code = SUCCESS;
        // SAFETY: the communicator is alive: the caller holds the handle's lock. The pointer is to a local.
        let code = unsafe { (self.library.get_async_error)(comm, &raw mut state) };
        match (code, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, failed) => Err(format!("NCCL reports: {}", self.library.explain(failed))),
            (failed, _) => Err(format!("ncclCommGetAsyncError: {}", self.library.explain(failed))),
        }
    }

    /// Waits until the library has done what it was last asked for, with the deadline and an eye on the other ranks. The
    /// caller holds the handle's lock.
    pub(super) fn until_done(&self, comm: ncclComm_t, at: At<'_>) -> Result<(), CommError> {
        let begin = Instant::now();
        loop {
            match self.library_state(comm) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(reason) => return Err(self.fault(at.device(reason))),
            }
            self.sound()?;
            self.look_at_others(at, true)?;
            let waited = begin.elapsed();
            if waited >= self.deadline {
                let state =
                    "NCCL has not finished setting it up, so other ranks have not come to it, or cannot be reached";
                return Err(self.fault(at.stalled(waited, state)));
            }
            // The first of a kind connects the ranks, which takes long; what is connected takes microseconds.
            match waited {
                short if short < Duration::from_micros(200) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Ends the library's communicator after a fault: its kernels end, and nothing of it touches memory any more.
    pub(super) fn abort(&self) {
        let outcome = match self.handle.try_lock_for(ABORT) {
            Some(mut handle) => handle.0.take().map_or(Ok(()), |comm| self.end_now(comm)),
            None => Err("NCCL does not return from a call".to_string()),
        };
        if let Err(reason) = &outcome {
            tracing::warn!(rank = self.group.rank(), group = %self.group.label, %reason, "not aborted");
        }
        self.state.lock().aborted = Some(outcome);
        self.changed.notify_all();
    }

    /// `ncclCommAbort`, on a thread of its own: one that does not return is left behind.
    pub(super) fn end_now(&self, comm: ncclComm_t) -> Result<(), String> {
        let (library, device, ending) = (self.library, self.device.clone(), Ending(comm));
        let abort = move || {
            let ending = ending;
            let _entered = device.enter();
            // SAFETY: the communicator is alive, and nobody has it but this thread.
            unsafe { (library.abort)(ending.0) }
        };
        match apart(format!("rank-{}-nccl-abort", self.group.rank()), ABORT, abort) {
            Ok(Some(SUCCESS | IN_PROGRESS)) => Ok(()),
            Ok(Some(code)) => Err(format!("ncclCommAbort: {}", self.library.explain(code))),
            Ok(None) => Err(format!("ncclCommAbort has not returned after {} s", ABORT.as_secs())),
            Err(error) => Err(format!("the system gives no thread to end it: {error}")),
        }
    }

    /// After a fault: waits until the communicator has been aborted. Its kernels could otherwise write to memory that the
    /// caller takes back because of the error, which nothing but the process's end can keep them from: then it ends.
    pub(super) fn await_abort(&self) {
        // For the lock, and for the call.
        let end = Instant::now() + ABORT + ABORT + LEFT;
        let mut state = self.state.lock();
        while state.aborted.is_none() && !self.changed.wait_until(&mut state, end).timed_out() {}
        let why = match &state.aborted {
            Some(Ok(())) => return,
            Some(Err(reason)) => reason.clone(),
            None => "its watchdog has not come to it".to_string(),
        };
        let error = state.fault.clone().map_or(String::new(), |error| error.to_string());
        drop(state);
        // The other ranks have been told with the fault.
        self.control.recorder().finish(LEFT);
        eprintln!(
            "{error}; its communicator could not be ended ({why}), so that it may still write to memory of the GPU: this \
             process ends here"
        );
        exit::end_process(exit::code::WATCHDOG)
    }

    /// Whether operations are under way.
    pub(super) fn busy(&self) -> bool {
        !self.state.lock().line.is_empty()
    }

    /// The watchdog: looks for faults until it is told to stop, and aborts after one.
    pub(super) fn watch(&self) {
        while !self.state.lock().stop {
            if self.poll().is_err() {
                self.abort();
                return;
            }
            let pause = Duration::from_millis(if self.busy() { 5 } else { 20 });
            let mut state = self.state.lock();
            if state.fault.is_none() && !state.stop {
                self.changed.wait_for(&mut state, pause);
            }
        }
    }

    /// Tells the watchdog to end.
    pub(super) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
}
