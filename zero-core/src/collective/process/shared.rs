//! State that a rank's threads share: that of the run, and the channel to the communication thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::super::comm::RankState;
use super::super::flight::Entry;
use super::super::operation::OperationContext;
use super::super::run_status::Failure;
use super::commands::{Command, Job, Parked};
use crate::CommError;

#[derive(Debug)]
pub struct Shared {
    pub(super) state: RankState,
    commands: Sender<Command>,
    /// The communication thread, which commands wake from its naps.
    pump: Thread,
    pub(super) jobs: Sender<Job>,
    /// Reads that wait for a value to be published by this rank.
    pub(super) parked: Parked,
    pub(super) next_read: AtomicU64,
    pub(super) next_window: AtomicU32,
    /// `true` once the others have been notified that this rank takes part in no further operation.
    leaving: AtomicBool,
}

impl Shared {
    /// Creates the state; must be called on the communication thread.
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

    /// Fails the run for a reason on this rank, and notifies all ranks.
    pub(super) fn fail(&self, reason: &str, cause: Option<&CommError>) {
        self.tell(Failure { peer: self.rank(), reason: reason.into(), cause: cause.cloned() });
    }

    /// Fails the run because of `peer`, which cannot report it itself, and notifies all ranks.
    pub(super) fn blame(&self, peer: usize, reason: &str) {
        self.tell(Failure { peer, reason: reason.into(), cause: None });
    }

    fn tell(&self, trouble: Failure) {
        let reason = trouble.reason.clone();
        if self.state.standing.keep(trouble) {
            // The others are notified first: the record may take a while.
            self.send(Command::Abort);
            self.state.recorder.write(&reason);
        }
    }

    /// Keeps the first failure, and writes the flight record with it.
    pub(super) fn note(&self, trouble: Failure) {
        let reason = trouble.reason.clone();
        if self.state.standing.keep(trouble) {
            self.state.recorder.write(&reason);
        }
    }

    /// Notifies the others, once, that this rank takes part in no further operation.
    pub(super) fn say_goodbye(&self) {
        // Relaxed: only the first call matters.
        if !self.leaving.swap(true, Ordering::Relaxed) {
            self.send(Command::Leave);
        }
    }

    /// Sends a command to the communication thread. If the thread has ended, whoever waits for a reply is notified by the
    /// reply's channel.
    pub(super) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
        self.pump.unpark();
    }

    /// Waits for the communication thread's reply to an operation that began at `begin`, and closes its record. Ranks that this one
    /// waits for may themselves wait, in a chain of `behind` ranks; this wait is then longer, so that theirs time out first.
    pub(super) fn await_reply<T>(
        &self,
        at: OperationContext<'_>,
        reply: &Receiver<Result<T, CommError>>,
        begin: Instant,
        (entry, behind): (&Entry, u8),
    ) -> Result<T, CommError> {
        let deadline = self.state.deadline + self.state.deadline / 16 * u32::from(behind);
        let outcome = match reply.recv_timeout(deadline.saturating_sub(begin.elapsed())) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Disconnected) => Err(self.stopped(at)),
            Err(RecvTimeoutError::Timeout) => {
                let indirectly = format!("{} (the listed ranks may be waiting for others themselves)", at.op);
                let at = if behind > 0 { OperationContext { op: &indirectly, ..at } } else { at };
                let error = at.timeout(begin.elapsed(), entry.missing());
                self.fail(&error.to_string(), Some(&error));
                Err(error)
            }
        };
        self.state.recorder.close(entry, outcome.as_ref().map(|_| ()).map_err(CommError::to_string));
        outcome
    }

    /// Returns the error of a wait for a communication thread that has ended.
    pub(super) fn stopped(&self, at: OperationContext<'_>) -> CommError {
        let ended = || at.failed(self.rank(), "this rank has ended its communication".into());
        self.state.standing.check(at, []).err().unwrap_or_else(ended)
    }
}
