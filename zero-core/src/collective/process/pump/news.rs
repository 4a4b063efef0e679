//! Notifications of failures and ends: the ranks that a rank notifies, and its reaction to notifications from others.
//!
//! A rank communicates with all others only to send large data to each. It sends notifications to the ranks that are *near*: its
//! neighbours, and those that the link was asked to connect with. These forward the first failure that they learn of. Ends are
//! collected up a tree from its leaves, and the end of all is announced down it. So a rank of a thousand sends tens of messages.

use super::super::super::run_status::Failure;
use super::super::link::Link;
use super::super::message::{End, Message, Slot, Who};
use super::{Active, Pump};
use crate::collective::error::LinkError;

/// The ends known to a node of the tree.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// `true` if this rank has ended.
    pub(super) own: bool,
    /// Number of children whose subtrees have not all ended.
    pub(super) branches: usize,
}

impl<L: Link> Pump<L> {
    /// Handles a connection with a rank that is not a neighbour: sends it the notifications that neighbours have got.
    pub(super) fn come_near(&mut self, peer: usize) -> Result<(), LinkError> {
        self.near.push(peer);
        if let (true, Some(trouble)) = (self.aborted, self.shared.state.standing.trouble()) {
            self.say(peer, &Message::Abort(trouble))?;
        }
        for end in [End::Part, End::Process] {
            if self.ends[end as usize].own {
                self.say(peer, &Message::Ended { end, who: Who::Sender })?;
            }
        }
        Ok(())
    }

    /// Forwards the first failure that this rank has, or is notified of.
    pub(super) fn abort(&mut self, trouble: Failure) -> Result<(), LinkError> {
        if std::mem::replace(&mut self.aborted, true) {
            return Ok(());
        }
        self.say_near(&Message::Abort(trouble))
    }

    /// Ends the exchanges selected by `of`, which cannot be completed because rank `left` has ended.
    pub(super) fn end_exchanges(&mut self, left: usize, of: impl Fn(&Slot, &Active) -> bool) {
        for (_, Active { exchange, .. }) in self.active.extract_if(|slot, active| of(slot, active)) {
            let error = self.shared.state.standing.check(exchange.at(self.shared.rank()), [left]);
            exchange.end(error);
        }
    }

    /// Announces this rank's end.
    pub(super) fn come_to(&mut self, end: End) -> Result<(), LinkError> {
        self.say_near(&Message::Ended { end, who: Who::Sender })?;
        self.ends[end as usize].own = true;
        self.end_branch(end)
    }

    /// Notifies the parent once this rank, and all below it, have ended.
    pub(super) fn end_branch(&mut self, end: End) -> Result<(), LinkError> {
        match (self.ends[end as usize], self.tree.parent) {
            (Ends { own: true, branches: 0 }, Some(parent)) => {
                self.say(parent, &Message::Ended { end, who: Who::Branch })
            }
            (Ends { own: true, branches: 0 }, None) => self.all_ended(end),
            _ => Ok(()),
        }
    }

    /// Records that all ranks have ended, and notifies the children.
    pub(super) fn all_ended(&mut self, end: End) -> Result<(), LinkError> {
        match end {
            End::Part => self.shared.state.standing.leave_all(),
            End::Process => self.shared.state.standing.note_all_done(),
        }
        let children = self.tree.children.clone();
        children.into_iter().try_for_each(|child| self.say(child, &Message::Ended { end, who: Who::All }))
    }

    /// Handles the end of the connection to a rank. After its goodbye this is no failure, unless it still owes this rank data.
    pub(super) fn lose(&mut self, peer: usize, reason: &str) {
        self.lost[peer] = true;
        // It sends no further messages.
        self.shared.state.standing.note_done(peer);
        let owes = self.reads.values().any(|fetch| fetch.read.peer == peer)
            || self.active.values().any(|active| active.receiving.contains_key(&peer));
        if owes || !self.shared.state.standing.has_left(peer) {
            self.shared.blame(peer, reason);
        }
    }

    fn say_near(&mut self, message: &Message) -> Result<(), LinkError> {
        (0..self.near.len()).try_for_each(|at| self.say(self.near[at], message))
    }
}
