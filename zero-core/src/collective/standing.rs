//! How a run stands: whether it is sound, and which of its ranks have ended.
//!
//! States of a run: *sound* -> *failed* (first trouble kept; it ends every wait of every rank that can be reached).

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::operation::At;
use crate::CommError;

/// Why a run, and with it every group of it, can no longer be used.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trouble {
    /// The rank that failed first.
    pub(super) peer: usize,
    pub(super) reason: Arc<str>,
    /// The error of communication that it was, if it was one that the others are to be told.
    pub(super) cause: Option<CommError>,
}

#[derive(Debug, Default)]
struct State {
    trouble: Option<Trouble>,
    /// That they take part in nothing more: the first that ended is what the others' ends may follow from.
    left: Said,
    /// That their processes may be ended after a failure.
    done: Said,
}

/// Which ranks have said something.
#[derive(Debug, Default)]
struct Said {
    /// In the order in which they did.
    by: Vec<usize>,
    /// Whether all have.
    all: bool,
}

impl Said {
    fn note(&mut self, rank: usize, world: usize) {
        if !self.by.contains(&rank) {
            self.by.push(rank);
            self.all |= self.by.len() == world;
        }
    }
}

#[derive(Debug)]
pub struct Standing {
    world: usize,
    /// The ranks that say here that they end.
    near: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Standing {
    /// Of a run of `world` ranks, of which those that are `near` say here that they end.
    pub(super) fn new(world: usize, near: impl IntoIterator<Item = usize>) -> Self {
        Self { world, near: near.into_iter().collect(), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Whether this trouble is the first, which is kept.
    pub(super) fn keep(&self, trouble: Trouble) -> bool {
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

    /// `peer` takes part in nothing more.
    pub(super) fn leave(&self, peer: usize) {
        self.tell(|state| state.left.note(peer, self.world));
    }

    /// Every rank takes part in nothing more.
    pub(super) fn leave_all(&self) {
        self.tell(|state| state.left.all = true);
    }

    /// Whether `peer` has said that it takes part in nothing more.
    pub(super) fn has_left(&self, peer: usize) -> bool {
        let state = self.state.lock();
        state.left.all || state.left.by.contains(&peer)
    }

    /// After a failure, `peer` may be ended.
    pub(super) fn note_done(&self, peer: usize) {
        self.tell(|state| state.done.note(peer, self.world));
    }

    /// After a failure, every rank may be ended.
    pub(super) fn note_all_done(&self) {
        self.tell(|state| state.done.all = true);
    }

    fn tell(&self, note: impl FnOnce(&mut State)) {
        note(&mut self.state.lock());
        self.changed.notify_all();
    }

    /// The error of a wait `at` some place when the run has failed or a rank it waits for has left (the first that did).
    pub(crate) fn check(&self, at: At<'_>, missing: impl IntoIterator<Item = usize>) -> Result<(), CommError> {
        let state = self.state.lock();
        if let Some(Trouble { peer, reason, cause }) = &state.trouble {
            return Err(match cause {
                // Both descriptions, on every rank.
                Some(mismatch @ CommError::Mismatch { .. }) => mismatch.clone(),
                _ => at.failed(*peer, reason.clone()),
            });
        }
        let first = missing.into_iter().filter_map(|peer| state.left.by.iter().position(|&left| left == peer)).min();
        first.map_or(Ok(()), |first| Err(at.left(state.left.by[first])))
    }

    /// Waits until every rank has left, the run has failed, or `within` has passed: then ranks that have not left, near ones if
    /// there are any.
    pub(super) fn wait_for_leavers(&self, within: Duration) -> Vec<usize> {
        self.wait_for(within, |state| {
            if state.trouble.is_some() {
                return Vec::new();
            }
            let missing = |ranks: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
                ranks.filter(|rank| !state.left.by.contains(rank)).collect()
            };
            // What the near ones have said is heard, whatever the tree has told: a link is ended with nothing on its way.
            match missing(&mut self.near.iter().copied()) {
                near if near.is_empty() && !state.left.all => missing(&mut (0..self.world)),
                near => near,
            }
        })
    }

    /// After a failure: waits until every rank may be ended, or `within` has passed.
    pub(super) fn wait_for_done(&self, within: Duration) {
        self.wait_for(within, |state| match state.done.all {
            true => Vec::new(),
            false => (0..self.world).filter(|rank| !state.done.by.contains(rank)).collect(),
        });
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
}
