//! What a rank's threads share: the run's state, and the way to the communication thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::super::comm::RankState;
use super::super::flight::Entry;
use super::super::operation::At;
use super::super::standing::Trouble;
use super::commands::{Command, Job, Parked};
use crate::CommError;

#[derive(Debug)]
pub struct Shared {
    pub(super) state: RankState,
    commands: Sender<Command>,
    /// The communication thread, to be woken from its naps.
    pump: Thread,
    pub(super) jobs: Sender<Job>,
    /// Reads that wait for something to be published here.
    pub(super) parked: Parked,
    pub(super) next_read: AtomicU64,
    pub(super) next_window: AtomicU32,
    /// Whether the others have been told that this rank takes part in nothing more.
    leaving: AtomicBool,
}

impl Shared {
    /// Called on the communication thread.
    pub(super) fn new(state: RankState, commands: Sender<Command>, jobs: Sender<Job>) -> Arc<Self> {
        Arc::new(Self {
            state,
            commands,
            pump: std::thread::current(),
            jobs,
            parked: Parked::default(),
            next_read: AtomicU64::new(0),
            next_window: AtomicU32::new(0),
            leaving: AtomicBool::new(false),
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.state.place.rank
    }

    /// Fails the run for a reason of this rank's own; all ranks hear of it.
    pub(super) fn fail(&self, reason: &str, cause: Option<&CommError>) {
        self.tell(Trouble { peer: self.rank(), reason: reason.into(), cause: cause.cloned() });
    }

    /// Fails the run for the end of `peer`, which cannot say it itself; all ranks hear of it.
    pub(super) fn blame(&self, peer: usize, reason: &str) {
        self.tell(Trouble { peer, reason: reason.into(), cause: None });
    }

    fn tell(&self, trouble: Trouble) {
        let reason = trouble.reason.clone();
        if self.state.standing.keep(trouble) {
            // The others first: the record may take a while.
            self.send(Command::Abort);
            self.state.recorder.write(&reason);
        }
    }

    /// Keeps the first trouble, and writes the flight record with it.
    pub(super) fn note(&self, trouble: Trouble) {
        let reason = trouble.reason.clone();
        if self.state.standing.keep(trouble) {
            self.state.recorder.write(&reason);
        }
    }

    /// Tells the others that this rank takes part in nothing more; once.
    pub(super) fn say_goodbye(&self) {
        // Relaxed: only who comes first matters.
        if !self.leaving.swap(true, Ordering::Relaxed) {
            self.send(Command::Leave);
        }
    }

    /// Hands the communication thread something to do. When it has ended, whoever waits for a reply is told so by the
    /// reply's channel.
    pub(super) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
        self.pump.unpark();
    }

    /// Waits for the communication thread's reply to what was begun at `begin`, and ends its record. Where the ranks that this one
    /// waits for may themselves wait, `behind` others, theirs is the first word at the deadline.
    pub(super) fn await_reply<T>(
        &self,
        at: At<'_>,
        reply: &Receiver<Result<T, CommError>>,
        begin: Instant,
        (entry, behind): (&Entry, u8),
    ) -> Result<T, CommError> {
        let deadline = self.state.deadline + self.state.deadline / 16 * u32::from(behind);
        let outcome = match reply.recv_timeout(deadline.saturating_sub(begin.elapsed())) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Disconnected) => Err(self.stopped(at)),
            Err(RecvTimeoutError::Timeout) => {
                let indirectly = format!("{} (its rank or one that this waits for)", at.op);
                let at = if behind > 0 { At { op: &indirectly, ..at } } else { at };
                let error = at.timeout(begin.elapsed(), entry.missing());
                self.fail(&error.to_string(), Some(&error));
                Err(error)
            }
        };
        self.state.recorder.close(entry, outcome.as_ref().map(|_| ()).map_err(CommError::to_string));
        outcome
    }

    /// The error of a wait for a communication thread that has ended.
    pub(super) fn stopped(&self, at: At<'_>) -> CommError {
        let ended = || at.failed(self.rank(), "this rank has ended its communication".into());
        self.state.standing.check(at, []).err().unwrap_or_else(ended)
    }
}
