//! How the communication thread puts messages and payloads on their way.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::super::super::landing::{Landing, chunks};
use super::super::commands::{Exposed, Job};
use super::super::link::{Channel, Link, MAX_TAG};
use super::super::message::{Answer, INLINE, Message, Payload, Slot};
use super::super::traffic::{For, Held, Incoming, Outgoing, Transfer};
use super::Pump;
use crate::error::LinkError;

impl<L: Link> Pump<L> {
    /// How a payload is announced, and the tag under which it is to be sent, if it does not go along.
    pub(super) fn announce_payload(&mut self, bytes: &[u8]) -> (Payload, Option<i32>) {
        if bytes.len() <= INLINE {
            return (Payload::Inline(bytes.to_vec()), None);
        }
        let tag = self.next_tag;
        // Payloads of one pair of ranks that are under way at once are far fewer than there are tags.
        self.next_tag = (tag + 1) % MAX_TAG;
        (Payload::Follows { bytes: bytes.len() as u64, tag }, Some(tag))
    }

    pub(super) fn say(&mut self, to: usize, message: &Message) -> Result<(), LinkError> {
        let bytes = message.encode();
        // SAFETY: the vector is kept, unmoved on the heap, until the send has ended.
        let ongoing = unsafe { self.link.send(Channel::Control, to, 0, &bytes) }?;
        let what = Outgoing { held: Held::Message(bytes), to, slot: None };
        self.underway.outgoing.push(Transfer { ongoing, what });
        Ok(())
    }

    pub(super) fn say_all(&mut self, message: &Message) -> Result<(), LinkError> {
        let rank = self.shared.rank();
        (0..self.lost.len()).filter(|&to| to != rank).try_for_each(|to| self.say(to, message))
    }

    /// Starts sending a payload; in how many pieces.
    pub(super) fn send_payload(
        &mut self,
        to: usize,
        tag: i32,
        bytes: &[u8],
        slot: Option<Slot>,
        held: impl Fn() -> Held,
    ) -> Result<usize, LinkError> {
        let mut pieces = 0;
        for range in chunks(bytes.len(), self.chunk) {
            let piece = &bytes[range];
            // SAFETY: what is held keeps the bytes where they are, and nobody writes to them, until the send has ended.
            let ongoing = unsafe { self.link.send(Channel::Data, to, tag, piece) }?;
            self.underway.outgoing.push(Transfer { ongoing, what: Outgoing { held: held(), to, slot } });
            pieces += 1;
        }
        Ok(pieces)
    }

    pub(super) fn send_exposed(&mut self, to: usize, id: u64, tag: String, exposed: Exposed) -> Result<(), LinkError> {
        let bytes = (*exposed).as_ref();
        let (payload, data_tag) = self.announce_payload(bytes);
        self.say(to, &Message::Seen { id, answer: Answer::Ready { tag, payload } })?;
        match data_tag {
            Some(data_tag) => {
                self.send_payload(to, data_tag, bytes, None, || Held::Exposed(exposed.clone()))?;
            }
            None => dispose(&self.shared.jobs, exposed),
        }
        Ok(())
    }

    /// Posts the receives of a payload; how many.
    pub(super) fn receive_payload(
        &mut self,
        from: usize,
        tag: i32,
        landing: &Arc<Landing>,
        range: core::ops::Range<usize>,
        purpose: For,
    ) -> Result<usize, LinkError> {
        let mut pieces = 0;
        for piece in chunks(range.len(), self.chunk) {
            let piece = range.start + piece.start..range.start + piece.end;
            // SAFETY: the landing is kept until the receive has ended, and this range of it is this payload's alone.
            let ongoing = unsafe { self.link.receive(from, tag, landing.target(&piece), piece.len()) }?;
            let what = Incoming { bytes: piece.len(), landing: landing.clone(), purpose };
            self.underway.incoming.push(Transfer { ongoing, what });
            pieces += 1;
        }
        Ok(pieces)
    }
}

pub(super) fn dispose(jobs: &Sender<Job>, exposed: Exposed) {
    // When the serving thread has ended, the value is dropped here.
    let _ = jobs.send(Job::Dispose(exposed));
}
