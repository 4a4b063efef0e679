//! Status of a run: whether it has failed, and which of its ranks have ended.
//!
//! States of a run: *sound* -> *failed* (the first failure is kept; it ends every wait of every rank that can be reached).

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::operation::OperationContext;
use crate::CommError;

/// The failure that makes a run, and with it all its groups, unusable.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed first.
    pub(super) peer: usize,
    pub(super) reason: Arc<str>,
    /// The communication error that caused it, if the other ranks are to report it too.
    pub(super) cause: Option<CommError>,
}

#[derive(Debug, Default)]
struct State {
    trouble: Option<Failure>,
    /// Ranks that take part in no further operation. The first to end may have caused the others to end.
    left: Said,
    /// Ranks whose processes may be ended after a failure.
    done: Said,
}

/// The ranks that have made an announcement.
#[derive(Debug, Default)]
struct Said {
    /// Ranks in the order of their announcements.
    by: Vec<usize>,
    /// `true` if all ranks have made it.
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
pub struct RunStatus {
    world: usize,
    /// The ranks that announce their end to this rank directly.
    near: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

impl RunStatus {
    /// Creates the status of a run of `world` ranks, of which the `near` ones announce their end directly.
    pub(super) fn new(world: usize, near: impl IntoIterator<Item = usize>) -> Self {
        Self { world, near: near.into_iter().collect(), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Keeps `trouble` and returns `true` if it is the first.
    pub(super) fn keep(&self, trouble: Failure) -> bool {
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

    pub(super) fn trouble(&self) -> Option<Failure> {
        self.state.lock().trouble.clone()
    }

    /// Records that `peer` takes part in no further operation.
    pub(super) fn leave(&self, peer: usize) {
        self.tell(|state| state.left.note(peer, self.world));
    }

    /// Records that no rank takes part in any further operation.
    pub(super) fn leave_all(&self) {
        self.tell(|state| state.left.all = true);
    }

    /// Returns `true` if `peer` takes part in no further operation.
    pub(super) fn has_left(&self, peer: usize) -> bool {
        let state = self.state.lock();
        state.left.all || state.left.by.contains(&peer)
    }

    /// Records that, after a failure, `peer`'s process may be ended.
    pub(super) fn note_done(&self, peer: usize) {
        self.tell(|state| state.done.note(peer, self.world));
    }

    /// Records that, after a failure, every rank's process may be ended.
    pub(super) fn note_all_done(&self) {
        self.tell(|state| state.done.all = true);
    }

    fn tell(&self, note: impl FnOnce(&mut State)) {
        note(&mut self.state.lock());
        self.changed.notify_all();
    }

    /// Returns the error of a wait in operation `at` if the run has failed or a rank in `missing` has left (the first that did).
    pub(crate) fn check(
        &self,
        at: OperationContext<'_>,
        missing: impl IntoIterator<Item = usize>,
    ) -> Result<(), CommError> {
        let state = self.state.lock();
        if let Some(Failure { peer, reason, cause }) = &state.trouble {
            return Err(match cause {
                // Both descriptions, on every rank.
                Some(mismatch @ CommError::Mismatch { .. }) => mismatch.clone(),
                _ => at.failed(*peer, reason.clone()),
            });
        }
        let first = missing.into_iter().filter_map(|peer| state.left.by.iter().position(|&left| left == peer)).min();
        first.map_or(Ok(()), |first| Err(at.left(state.left.by[first])))
    }

    /// Waits until every rank has left, the run has failed, or `within` has passed. Returns ranks that have not left, or only the
    /// near ones if any of those has not.
    pub(super) fn wait_for_leavers(&self, within: Duration) -> Vec<usize> {
        self.wait_for(within, |state| {
            if state.trouble.is_some() {
                return Vec::new();
            }
            let missing = |ranks: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
                ranks.filter(|rank| !state.left.by.contains(rank)).collect()
            };
            // Near ranks must announce their end directly, whatever the tree reports: a link ends with no message in transit.
            match missing(&mut self.near.iter().copied()) {
                near if near.is_empty() && !state.left.all => missing(&mut (0..self.world)),
                near => near,
            }
        })
    }

    /// Waits, after a failure, until every rank's process may be ended, or `within` has passed.
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
