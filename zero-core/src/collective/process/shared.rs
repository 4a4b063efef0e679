//! What a rank's threads share: the run's state, and the way to the communication thread.
//!
//! States of a run: *sound* -> *failed* (first trouble kept; it ends every wait of every rank that can be reached).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use super::super::flight::Recorder;
use super::super::launcher::Place;
use super::commands::{Command, Job, Parked};
use super::message::Trouble;
use crate::CommError;
use crate::accounting::WireCounter;

#[derive(Debug)]
struct State {
    trouble: Option<Trouble>,
    left: Vec<bool>,
    /// Ranks that have ended after a failure.
    done: Vec<bool>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) place: Place,
    pub(super) deadline: Duration,
    commands: Sender<Command>,
    /// The communication thread, to be woken from its naps.
    pump: Thread,
    pub(super) jobs: Sender<Job>,
    /// Reads that wait for something to be published here.
    pub(super) parked: Parked,
    pub(super) recorder: Recorder,
    pub(super) wire: Arc<WireCounter>,
    pub(super) next_read: AtomicU64,
    pub(super) next_window: AtomicU32,
    /// Whether the others have been told that this rank takes part in nothing more.
    leaving: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

/// Where a wait is, for its errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct At<'a> {
    pub(super) group: &'a str,
    pub(super) seq: u64,
    pub(super) op: &'a str,
}

impl Shared {
    /// Called on the communication thread.
    pub(super) fn new(
        place: Place,
        deadline: Duration,
        recorder: Recorder,
        commands: Sender<Command>,
        jobs: Sender<Job>,
    ) -> Arc<Self> {
        let state = State { trouble: None, left: vec![false; place.world], done: vec![false; place.world] };
        Arc::new(Self {
            place,
            deadline,
            commands,
            pump: std::thread::current(),
            jobs,
            parked: Parked::default(),
            recorder,
            wire: Arc::default(),
            next_read: AtomicU64::new(0),
            next_window: AtomicU32::new(0),
            leaving: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.place.rank
    }

    /// Fails the run for a reason of this rank's own; all ranks hear of it.
    pub(super) fn fail(&self, reason: &str, cause: Option<&CommError>) {
        let trouble = Trouble { peer: self.rank(), reason: reason.to_string(), cause: cause.cloned() };
        let reason = trouble.reason.clone();
        if self.keep(trouble) {
            // The others first: the record may take a while.
            self.send(Command::Abort);
            self.recorder.write(&reason);
        }
    }

    /// Fails the run for the end of `peer`, which cannot say it itself; all ranks hear of it.
    pub(super) fn blame(&self, peer: usize, reason: &str) {
        if self.keep(Trouble { peer, reason: reason.to_string(), cause: None }) {
            self.send(Command::Abort);
            self.recorder.write(reason);
        }
    }

    /// Keeps the first trouble, and writes the flight record with it.
    pub(super) fn note(&self, trouble: Trouble) {
        let reason = trouble.reason.clone();
        if self.keep(trouble) {
            self.recorder.write(&reason);
        }
    }

    /// Whether this trouble was the first.
    fn keep(&self, trouble: Trouble) -> bool {
        {
            let mut state = self.state.lock();
            if state.trouble.is_some() {
                return false;
            }
            state.trouble = Some(trouble);
        }
        self.changed.notify_all();
        true
    }

    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.state.lock().trouble.clone()
    }

    /// Tells the others that this rank takes part in nothing more; once.
    pub(super) fn say_goodbye(&self) {
        // Relaxed: only who comes first matters.
        if !self.leaving.swap(true, Ordering::Relaxed) {
            self.send(Command::Leave);
        }
    }

    /// Whether `peer` has said that it takes part in nothing more.
    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.state.lock().left[peer]
    }

    /// `peer` takes part in nothing more.
    pub(super) fn leave(&self, peer: usize) {
        self.state.lock().left[peer] = true;
        self.changed.notify_all();
    }

    /// The error of a wait `at` some place when the run has failed or a rank it waits for has left.
    pub(super) fn check(&self, at: At<'_>, missing: impl IntoIterator<Item = usize>) -> Result<(), CommError> {
        let (group, seq, rank, op) = (at.group.to_string(), at.seq, self.rank(), at.op.to_string());
        let state = self.state.lock();
        if let Some(Trouble { peer, reason, cause }) = &state.trouble {
            return Err(match cause {
                // Both descriptions, on every rank.
                Some(mismatch @ CommError::Mismatch { .. }) => mismatch.clone(),
                _ => CommError::PeerFailed { group, seq, rank, op, peer: *peer, reason: reason.as_str().into() },
            });
        }
        match missing.into_iter().find(|&peer| state.left[peer]) {
            Some(peer) => Err(CommError::PeerLeft { group, seq, rank, op, peer }),
            None => Ok(()),
        }
    }

    /// After a failure, `peer` may be ended.
    pub(super) fn note_done(&self, peer: usize) {
        self.state.lock().done[peer] = true;
        self.changed.notify_all();
    }

    /// Waits until every rank has left, the run has failed, or `within` has passed: then the ranks that have not left.
    pub(super) fn wait_for_leavers(&self, within: Duration) -> Vec<usize> {
        self.wait_for(within, |state| if state.trouble.is_some() { Vec::new() } else { absent(&state.left) })
    }

    /// After a failure: waits until every rank may be ended, or `within` has passed.
    pub(super) fn wait_for_done(&self, within: Duration) {
        self.wait_for(within, |state| absent(&state.done));
    }

    fn wait_for(&self, within: Duration, missing: impl Fn(&State) -> Vec<usize>) -> Vec<usize> {
        let end = Instant::now() + within;
        let mut state = self.state.lock();
        loop {
            let missing = missing(&state);
            if missing.is_empty() || self.changed.wait_until(&mut state, end).timed_out() {
                return missing;
            }
        }
    }

    /// Hands the communication thread something to do. When it has ended, whoever waits for a reply is told so by the
    /// reply's channel.
    pub(super) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
        self.pump.unpark();
    }

    /// The error of a wait for a communication thread that has ended.
    pub(super) fn stopped(&self, at: At<'_>) -> CommError {
        self.check(at, []).err().unwrap_or_else(|| CommError::PeerFailed {
            group: at.group.to_string(),
            seq: at.seq,
            rank: self.rank(),
            op: at.op.to_string(),
            peer: self.rank(),
            reason: "this rank has ended its communication".into(),
        })
    }
}

fn absent(present: &[bool]) -> Vec<usize> {
    (0..present.len()).filter(|&rank| !present[rank]).collect()
}
