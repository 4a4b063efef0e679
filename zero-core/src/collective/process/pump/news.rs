//! News of failures and ends: to whom a rank tells them, and what it makes of those it hears.
//!
//! A rank speaks to all others only where it has something large for each. News goes to the ranks that are *near*: its neighbours, and
//! those that the link was asked to connect with. They pass on the first failure that they hear of; that all have ended is
//! collected up a tree from its leaves, and told down it. So a rank of a thousand sends tens of messages.

use super::super::super::standing::Trouble;
use super::super::link::Link;
use super::super::message::{End, Message, Slot, Who};
use super::{Active, Pump};
use crate::collective::error::LinkError;

/// Which ranks have come to an end, as the tree tells.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// Whether this one has.
    pub(super) own: bool,
    /// Children below which not all have.
    pub(super) branches: usize,
}

impl<L: Link> Pump<L> {
    /// A rank that is no neighbour is connected with this one: it hears what neighbours have heard.
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

    /// Passes on the first failure that this rank has, or hears of.
    pub(super) fn abort(&mut self, trouble: Trouble) -> Result<(), LinkError> {
        if std::mem::replace(&mut self.aborted, true) {
            return Ok(());
        }
        self.say_near(&Message::Abort(trouble))
    }

    /// Ends those exchanges for the end of a rank without which they cannot be completed.
    pub(super) fn end_exchanges(&mut self, left: usize, of: impl Fn(&Slot, &Active) -> bool) {
        for (_, Active { exchange, .. }) in self.active.extract_if(|slot, active| of(slot, active)) {
            let error = self.shared.state.standing.check(exchange.at(self.shared.rank()), [left]);
            exchange.end(error);
        }
    }

    /// This rank has come to an end.
    pub(super) fn come_to(&mut self, end: End) -> Result<(), LinkError> {
        self.say_near(&Message::Ended { end, who: Who::Sender })?;
        self.ends[end as usize].own = true;
        self.end_branch(end)
    }

    /// Tells the tree when this rank, and all below it, have come to an end.
    pub(super) fn end_branch(&mut self, end: End) -> Result<(), LinkError> {
        match (self.ends[end as usize], self.tree.parent) {
            (Ends { own: true, branches: 0 }, Some(parent)) => {
                self.say(parent, &Message::Ended { end, who: Who::Branch })
            }
            (Ends { own: true, branches: 0 }, None) => self.all_ended(end),
            _ => Ok(()),
        }
    }

    /// All ranks have come to an end.
    pub(super) fn all_ended(&mut self, end: End) -> Result<(), LinkError> {
        match end {
            End::Part => self.shared.state.standing.leave_all(),
            End::Process => self.shared.state.standing.note_all_done(),
        }
        let children = self.tree.children.clone();
        children.into_iter().try_for_each(|child| self.say(child, &Message::Ended { end, who: Who::All }))
    }

    /// The connection to a rank has ended. After its goodbye that is what was to come, unless it owes this rank something.
    pub(super) fn lose(&mut self, peer: usize, reason: &str) {
        self.lost[peer] = true;
        // It says nothing more.
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
