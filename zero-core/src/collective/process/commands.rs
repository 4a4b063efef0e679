//! What a rank's threads ask of one another: of the communication thread ([`Command`]), and of the one that answers other ranks'
//! reads ([`Job`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::super::Buffer;
use super::super::flight::Entry;
use super::super::landing::Landing;
use super::super::operation::At;
use super::message::{Answer, Slot};
use crate::CommError;
use crate::exposure::{Exposure, Key};

/// A peer's part of an exchange.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) peer: usize,
    /// Bytes of the input that go to it, or of what it fills.
    pub(super) bytes: Range<usize>,
}

/// One phase of a collective, as the communication thread runs it.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) slot: Slot,
    /// Label of the group, for errors.
    pub(super) group: Arc<str>,
    pub(super) op: String,
    pub(super) input: Arc<Buffer>,
    /// Whether the input is to be free again when the exchange has ended.
    pub(super) until_sent: bool,
    /// To other ranks of the group, be it nothing.
    pub(super) sends: Vec<Share>,
    pub(super) landing: Arc<Landing>,
    /// From other ranks of the group, be it nothing.
    pub(super) receives: Vec<Share>,
    pub(super) entry: Arc<Entry>,
    pub(super) reply: Sender<Result<(), CommError>>,
}

impl Exchange {
    pub(super) fn at(&self, rank: usize) -> At<'_> {
        At { group: &self.group, seq: self.slot.seq, rank, op: &self.op }
    }

    /// Gives the result to whoever waits for it, after the communication thread's hold of its memory.
    pub(super) fn end(self, outcome: Result<(), CommError>) {
        let Self { reply, landing, input, .. } = self;
        drop((landing, input));
        // Nobody listens any more when the wait has passed its deadline.
        let _ = reply.send(outcome);
    }
}

/// A read of what a peer has published.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) id: u64,
    pub(super) peer: usize,
    pub(super) window: u32,
    pub(super) key: Key,
    pub(super) what: String,
    /// The read in the words of errors.
    pub(super) op: String,
    /// Where its bytes go; otherwise they get memory of their own.
    pub(super) into: Option<(Arc<Landing>, Range<usize>)>,
    pub(super) entry: Arc<Entry>,
    pub(super) reply: Sender<Result<Got, CommError>>,
}

impl Read {
    pub(super) fn at(&self, rank: usize) -> At<'_> {
        At { group: "window", seq: self.key.version, rank, op: &self.op }
    }
}

/// What a read has brought: the owner's tag, and the bytes, unless they went where the reader wanted them.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) tag: String,
    pub(super) bytes: Option<Arc<Landing>>,
}

pub(super) enum Command {
    Exchange(Exchange),
    Read(Read),
    Serve {
        to: usize,
        id: u64,
        answer: Answer<Exposed>,
    },
    /// This rank has failed: the state says how.
    Abort,
    /// This rank takes part in nothing more.
    Leave,
    /// After a failure: this rank's process is about to end.
    Done,
    /// Ends the thread, when all has been sent or `within` has passed; the link is ended well if asked for.
    Finish {
        finalize: bool,
        within: Duration,
    },
}

/// Bytes that a value lends to be sent.
pub(super) type Exposed = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What a window knows of a key.
pub(crate) enum Found {
    /// Not published yet.
    Absent,
    /// Replaced by a later version.
    Gone,
    /// Published.
    Here(Exposure),
}

/// How a window is looked into.
pub(crate) type Lookup = Box<dyn Fn(Key) -> Found + Send>;

pub(super) enum Job {
    /// A window is there.
    Join { window: u32, lookup: Lookup },
    /// A rank asks.
    Asked(Asked),
    /// Something was published.
    Changed,
    /// Values that were sent: dropped here, since dropping one may run its owner's code.
    Dispose(Exposed),
    /// This rank publishes nothing more.
    Left,
    /// Ends the thread.
    Stop,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) from: usize,
    pub(super) id: u64,
    pub(super) window: u32,
    pub(super) key: Key,
}

/// Requests that are parked; publishing looks here first.
pub(crate) type Parked = Arc<AtomicUsize>;
