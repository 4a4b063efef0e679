//! What the threads of a rank share: the run's state, the results that have come, and the way to the other ranks.
//!
//! States of a run: *sound* -> *failed* (first trouble kept; it ends every wait of every rank that can be reached). The
//! mutex of `state` gives the happens-before edge from a reader thread that lays a result down to the caller that takes it.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::Buffer;
use super::super::flight::Recorder;
use super::hub::Hub;
use super::wire::{self, Head, Slot, Trouble};
use crate::CommError;
use crate::accounting::WireCounter;

/// A connection, as its writers see it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: usize,
    write: Mutex<TcpStream>,
}

impl Link {
    pub(super) fn new(peer: usize, stream: TcpStream) -> Self {
        Self { peer, write: Mutex::new(stream) }
    }

    /// Sends a message. One that cannot be sent is of no more interest: its receiver's end is noticed by who reads from it.
    pub(super) fn send(&self, head: &Head, payload: &[u8]) {
        let mut stream = self.write.lock();
        if wire::send(&mut *stream, head, payload).is_err() {
            // What was written by halves cannot be continued.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        // Closed already: then it is as it should be.
        let _ = self.write.lock().shutdown(how);
    }
}

/// What has come back for an operation of this rank.
#[derive(Debug)]
pub(super) enum Answer {
    Result(Buffer),
    Without(usize),
}

#[derive(Debug)]
struct State {
    trouble: Option<Trouble>,
    /// Ranks that take part in nothing more, in the order in which they have said so.
    left: Vec<usize>,
    answers: HashMap<Slot, Answer>,
    /// Whether nothing can come any more: the connection to the hub has ended.
    cut_off: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) local_rank: usize,
    pub(super) deadline: Duration,
    pub(super) recorder: Recorder,
    pub(super) wire: Arc<WireCounter>,
    /// On the hub to every other rank, on the others to the hub.
    pub(super) links: Vec<Link>,
    /// On rank 0.
    pub(super) hub: Option<Hub>,
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

/// How much later than the hub a rank gives up: the hub knows who is missing.
const PATIENCE: Duration = Duration::from_secs(5);

impl Shared {
    pub(super) fn new(
        (rank, world, local_rank): (usize, usize, usize),
        deadline: Duration,
        recorder: Recorder,
        links: Vec<Link>,
    ) -> Arc<Self> {
        let state = State { trouble: None, left: Vec::new(), answers: HashMap::new(), cut_off: false };
        Arc::new(Self {
            rank,
            world,
            local_rank,
            deadline,
            recorder,
            wire: Arc::default(),
            links,
            hub: (rank == 0).then(Hub::default),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    /// Fails the run for a reason of this rank's own; all ranks hear of it.
    pub(super) fn fail(&self, reason: &str, cause: Option<&CommError>) {
        let trouble = Trouble { peer: self.rank, reason: reason.to_string(), cause: cause.cloned() };
        self.note(trouble, None);
    }

    /// Keeps the first trouble, passes it on to those who have not heard of it, and writes the flight record with it.
    pub(super) fn note(&self, trouble: Trouble, from: Option<usize>) {
        {
            let mut state = self.state.lock();
            if state.trouble.is_some() {
                return;
            }
            state.trouble = Some(trouble.clone());
        }
        self.changed.notify_all();
        for link in self.links.iter().filter(|link| Some(link.peer) != from) {
            link.send(&Head::Abort(trouble.clone()), &[]);
        }
        self.recorder.write(&trouble.reason);
    }

    pub(super) fn failed(&self) -> bool {
        self.state.lock().trouble.is_some()
    }

    /// `peer` takes part in nothing more.
    pub(super) fn leave(&self, peer: usize) {
        {
            let mut state = self.state.lock();
            if !state.left.contains(&peer) {
                state.left.push(peer);
            }
        }
        self.changed.notify_all();
    }

    /// The connection to `peer` has ended.
    pub(super) fn cut(&self, peer: usize) {
        if peer == 0 {
            self.state.lock().cut_off = true;
            self.changed.notify_all();
        }
    }

    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.state.lock().left.contains(&peer)
    }

    /// Of `peers`, the first to have left: others may have left because of that.
    pub(super) fn first_to_leave(&self, peers: &[usize]) -> Option<usize> {
        self.state.lock().left.iter().copied().find(|peer| peers.contains(peer))
    }

    /// What has failed, for those who may not have heard of it.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.state.lock().trouble.clone()
    }

    pub(super) fn deliver(&self, slot: Slot, answer: Answer) {
        self.state.lock().answers.insert(slot, answer);
        self.changed.notify_all();
    }

    fn failure(&self, at: At<'_>, state: &State) -> Option<CommError> {
        let (group, seq, rank, op) = (at.group.to_string(), at.seq, self.rank, at.op.to_string());
        let Trouble { peer, reason, cause } = state.trouble.as_ref()?;
        Some(match cause {
            // Both descriptions, on every rank.
            Some(mismatch @ CommError::Mismatch { .. }) => mismatch.clone(),
            // The hub's word, as every rank that waited there says it.
            Some(CommError::Timeout { group: of, seq: number, waited_ms, missing, .. })
                if *of == group && *number == seq && !missing.contains(&rank) =>
            {
                CommError::Timeout { group, seq, rank, op, waited_ms: *waited_ms, missing: missing.clone() }
            }
            _ => CommError::PeerFailed { group, seq, rank, op, peer: *peer, reason: reason.as_str().into() },
        })
    }

    /// The error of a wait `at` some place when the run has failed or a rank that it needs has left.
    pub(super) fn check(&self, at: At<'_>, needs: &[usize]) -> Result<(), CommError> {
        let state = self.state.lock();
        if let Some(error) = self.failure(at, &state) {
            return Err(error);
        }
        let (group, seq, rank, op) = (at.group.to_string(), at.seq, self.rank, at.op.to_string());
        match state.left.iter().copied().find(|peer| needs.contains(peer)) {
            Some(peer) => Err(CommError::PeerLeft { group, seq, rank, op, peer }),
            None => Ok(()),
        }
    }

    /// Waits for what comes back for `slot`.
    pub(super) fn wait(&self, slot: Slot, at: At<'_>) -> Result<Buffer, CommError> {
        let begin = Instant::now();
        let end = begin + self.deadline + PATIENCE;
        let named = || (at.group.to_string(), at.seq, self.rank, at.op.to_string());
        let mut state = self.state.lock();
        loop {
            let answer = state.answers.remove(&slot);
            if let Some(Answer::Result(buffer)) = answer {
                return Ok(buffer);
            }
            // A rank that fails ends too: its failure is what is to be told.
            if let Some(error) = self.failure(at, &state) {
                return Err(error);
            }
            if let Some(Answer::Without(peer)) = answer {
                let (group, seq, rank, op) = named();
                return Err(CommError::PeerLeft { group, seq, rank, op, peer });
            }
            let (group, seq, rank, op) = named();
            if state.cut_off {
                return Err(CommError::PeerLeft { group, seq, rank, op, peer: 0 });
            }
            if self.changed.wait_until(&mut state, end).timed_out() {
                let waited_ms = begin.elapsed().as_millis() as u64;
                let error = CommError::Timeout { group, seq, rank, op, waited_ms, missing: vec![0] };
                drop(state);
                self.fail(&error.to_string(), Some(&error));
                return Err(error);
            }
        }
    }

    /// Waits until every other rank has left, the run has failed, or `within` has passed.
    pub(super) fn wait_for_leavers(&self, within: Duration) {
        let end = Instant::now() + within;
        let mut state = self.state.lock();
        while state.trouble.is_none() && (0..self.world).any(|peer| peer != self.rank && !state.left.contains(&peer)) {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return;
            }
        }
    }
}
