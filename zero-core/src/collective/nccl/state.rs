//! A communicator's state, and the detection of its faults.
//!
//! States: *sound* -> *faulted* (the first error is kept, and every later call returns it) -> *aborted* (`ncclCommAbort` has
//! succeeded: no kernel of the communicator accesses memory any more). If it cannot be aborted, the process ends, before a
//! caller reuses memory because of the error. [`Core::poll`] detects faults. Waiting callers call it, and so does the watchdog,
//! which polls at all times and is the only one to abort.
//!
//! Operations are queued (`line`) in the order of the communicator's stream. The deadline of an operation counts from when it
//! became the first in the queue, so that many may be issued ahead. Polling removes completed operations.
//!
//! Locks: `order` (one operation is issued at a time) before `handle` (the library's communicator; held through each call,
//! which does not block) before `state`. The watchdog takes `handle` to abort. Threads that hold it for longer, while the
//! library connects, check the deadline and faults themselves. `state`'s mutex gives the happens-before edge from the
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
use crate::collective::operation::{Group, OperationContext};
use crate::collective::progress::apart;
use crate::collective::{Collective, exit};

/// An operation on the device that has been issued.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) seq: u64,
    pub(super) words: String,
    pub(super) entry: Arc<Entry>,
    /// Event after this rank's own work that it waits for, if there is one.
    pub(super) ready: Option<Event>,
    /// Event at its end.
    pub(super) done: Event,
    pub(super) received: Vec<(WireKind, usize)>,
    /// Set (release) after the device has reported the end; loaded (acquire) before results are read.
    pub(super) ended: AtomicBool,
}

impl Issued {
    pub(super) fn at<'a>(&'a self, group: &'a Group) -> OperationContext<'a> {
        group.at(self.seq, &self.words)
    }
}

/// The library's communicator; `None` before it is created and after it is ended.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Option<ncclComm_t>);

// SAFETY: any thread may use a communicator of the library, one at a time, which the mutex around this guarantees.
unsafe impl Send for Handle {}

#[derive(Debug, Default)]
struct State {
    line: VecDeque<Arc<Issued>>,
    /// Time since which the first operation in the queue has been first.
    first_since: Option<Instant>,
    /// Time since which a rank is known to have ended.
    left_since: Option<Instant>,
    fault: Option<CommError>,
    /// Outcome of the abort, once it is over.
    aborted: Option<Result<(), String>>,
    /// `true` if the watchdog must end.
    stop: bool,
}

/// A communicator that is moved to the thread that ends it.
struct Ending(ncclComm_t);

// SAFETY: as for `Handle`; nobody else has it any more.
unsafe impl Send for Ending {}

/// State that a communicator and its watchdog share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) library: &'static Library,
    pub(super) device: Arc<Device>,
    pub(super) stream: Stream,
    /// Control group of the same ranks, for communication between their hosts.
    pub(super) control: Arc<dyn Collective>,
    /// Its identity differs from the control group's, as both use the same recorder.
    pub(super) group: Group,
    pub(super) deadline: Duration,
    pub(super) wire: Arc<WireCounter>,
    order: Mutex<()>,
    /// Number of operations issued, which is the next one's sequence number.
    pub(super) issued: AtomicU64,
    pub(super) handle: Mutex<Handle>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Longest time that the library may take to abort, or another thread to release it.
pub(super) const ABORT: Duration = Duration::from_secs(10);
/// Longest time that operations may continue after a rank has ended successfully: it has done its part, and theirs takes moments.
const LEFT: Duration = Duration::from_secs(5);

impl Core {
    /// Creates the state of a communicator of the ranks of `control`; the library's communicator does not exist yet.
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

    /// Returns the next operation's number, with the lock that prevents other operations from being issued.
    pub(super) fn next(&self) -> (MutexGuard<'_, ()>, u64) {
        let order = self.order.lock();
        // Relaxed: changed only under the lock; without it, read only for messages.
        (order, self.issued.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the error of the fault if the communicator has faulted.
    pub(super) fn sound(&self) -> Result<(), CommError> {
        self.state.lock().fault.clone().map_or(Ok(()), Err)
    }

    /// Keeps the first error, notifies the other ranks, and leaves the abort to the watchdog. Returns the error that was kept.
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
        // First notify the others, and write the flight record, which shows the operations in progress.
        self.control.abort(&error.to_string());
        for op in line {
            self.control.recorder().close(&op.entry, Err(error.to_string()));
        }
        error
    }

    /// Adds an operation to the queue.
    pub(super) fn line_up(&self, op: Arc<Issued>) {
        let mut state = self.state.lock();
        if state.line.is_empty() {
            state.first_since = Some(Instant::now());
        }
        state.line.push_back(op);
        drop(state);
        self.changed.notify_all();
    }

    /// Removes completed operations from the queue, and checks for faults.
    ///
    /// # Errors
    ///
    /// The error of the fault, detected now or before.
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
        // Relaxed: the number is only for a message.
        let pause = || self.group.at(self.issued.load(Ordering::Relaxed), &"the pause before its next operation");
        let at = first.as_ref().map_or_else(pause, |op| op.at(&self.group));
        self.look(at, first.is_some())?;
        let Some(first) = &first else { return Ok(()) };
        if waited >= self.deadline {
            let own = first.ready.as_ref().is_some_and(|ready| !ready.reached().unwrap_or(true));
            let state = match own {
                true => "this rank's own earlier work has not finished",
                false => {
                    "it has started here but not finished, so other ranks have not started it or cannot be reached"
                }
            };
            return Err(self.fault(at.stalled(waited, state)));
        }
        Ok(())
    }

    /// Checks the library's errors and the other ranks for operation `at`.
    fn look(&self, at: OperationContext<'_>, waiting: bool) -> Result<(), CommError> {
        // A thread that holds the handle checks by itself.
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

    fn look_at_others(&self, at: OperationContext<'_>, waiting: bool) -> Result<(), CommError> {
        match self.control.check(at.group, at.seq, at.op) {
            Ok(()) => Ok(()),
            Err(left @ CommError::PeerLeft { .. }) => {
                // Counts from when both hold: a rank has left, and this operation is first in the queue.
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

    /// Returns `true` if the library has completed its last call, `false` if it is still in progress, or its error.
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

    /// Waits until the library has completed its last call; checks the deadline and the other ranks meanwhile. The caller holds
    /// the handle's lock.
    pub(super) fn until_done(&self, comm: ncclComm_t, at: OperationContext<'_>) -> Result<(), CommError> {
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
                    "NCCL has not finished setting it up, so other ranks have not started it or cannot be reached";
                return Err(self.fault(at.stalled(waited, state)));
            }
            // The first operation of a kind connects the ranks, which takes long; later ones take microseconds.
            match waited {
                short if short < Duration::from_micros(200) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Ends the library's communicator after a fault: its kernels end, and it accesses no memory any more.
    pub(super) fn abort(&self) {
        let outcome = match self.handle.try_lock_for(ABORT) {
            Some(mut handle) => handle.0.take().map_or(Ok(()), |comm| self.end_now(comm)),
            None => Err("an NCCL call has not returned".to_string()),
        };
        if let Err(reason) = &outcome {
            let (rank, group) = (self.group.rank(), &self.group.label);
            tracing::warn!(rank, %group, %reason, "the communicator could not be aborted");
        }
        self.state.lock().aborted = Some(outcome);
        self.changed.notify_all();
    }

    /// Calls `ncclCommAbort` on a separate thread, which is abandoned if the call does not return.
    pub(super) fn end_now(&self, comm: ncclComm_t) -> Result<(), String> {
        let (library, device, ending) = (self.library, self.device.clone(), Ending(comm));
        let abort = move || {
            let ending = ending;
            let _entered = device.enter();
            // SAFETY: the communicator is alive, and only this thread has it.
            unsafe { (library.abort)(ending.0) }
        };
        match apart(format!("rank-{}-nccl-abort", self.group.rank()), ABORT, abort) {
            Ok(Some(SUCCESS | IN_PROGRESS)) => Ok(()),
            Ok(Some(code)) => Err(format!("ncclCommAbort: {}", self.library.explain(code))),
            Ok(None) => Err(format!("ncclCommAbort has not returned after {} s", ABORT.as_secs())),
            Err(error) => Err(format!("cannot create a thread to abort it: {error}")),
        }
    }

    /// Waits, after a fault, until the communicator has been aborted; otherwise its kernels could write to memory that the
    /// caller reuses because of the error. If it cannot be aborted, ends the process, which is then the only way to prevent this.
    pub(super) fn await_abort(&self) {
        // One `ABORT` for the lock, and one for the call.
        let end = Instant::now() + ABORT + ABORT + LEFT;
        let mut state = self.state.lock();
        while state.aborted.is_none() && !self.changed.wait_until(&mut state, end).timed_out() {}
        let why = match &state.aborted {
            Some(Ok(())) => return,
            Some(Err(reason)) => reason.clone(),
            None => "the watchdog did not abort it in time".to_string(),
        };
        let error = state.fault.clone().map_or(String::new(), |error| error.to_string());
        drop(state);
        // The fault has already notified the other ranks.
        self.control.recorder().finish(LEFT);
        eprintln!(
            "{error}; the communicator could not be aborted ({why}) and may still write to GPU memory, so this process \
             exits"
        );
        exit::end_process(exit::code::WATCHDOG)
    }

    /// Returns `true` if operations are in progress.
    pub(super) fn busy(&self) -> bool {
        !self.state.lock().line.is_empty()
    }

    /// Runs the watchdog: checks for faults until [`Core::stop`], and aborts after one.
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

    /// Stops the watchdog.
    pub(super) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
}
