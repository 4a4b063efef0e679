//! Commands between a rank's threads: to the communication thread ([`Command`]), and to the thread that answers other ranks'
//! reads ([`Job`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::super::Buffer;
use super::super::flight::Entry;
use super::super::landing::Landing;
use super::super::operation::OperationContext;
use super::message::{Answer, Slot};
use crate::CommError;
use crate::exposure::{Exposure, Key};

/// A peer's part of an exchange.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) peer: usize,
    /// Byte range of the input that is sent to it, or of the landing that it fills.
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
    /// `true` if the exchange ends only after the input has been sent and can be reused.
    pub(super) until_sent: bool,
    /// Sends to other ranks of the group, possibly of 0 bytes.
    pub(super) sends: Vec<Share>,
    pub(super) landing: Arc<Landing>,
    /// Receives from other ranks of the group, possibly of 0 bytes.
    pub(super) receives: Vec<Share>,
    pub(super) entry: Arc<Entry>,
    pub(super) reply: Sender<Result<(), CommError>>,
}

impl Exchange {
    pub(super) fn at(&self, rank: usize) -> OperationContext<'_> {
        OperationContext { group: &self.group, seq: self.slot.seq, rank, op: &self.op }
    }

    /// Releases the communication thread's references to the memory, then passes the result to the waiter.
    pub(super) fn end(self, outcome: Result<(), CommError>) {
        let Self { reply, landing, input, .. } = self;
        drop((landing, input));
        // Nobody receives it if the wait has passed its deadline.
        let _ = reply.send(outcome);
    }
}

/// A read of data that a peer has published.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) id: u64,
    pub(super) peer: usize,
    pub(super) window: u32,
    pub(super) key: Key,
    pub(super) what: String,
    /// Description of the read for errors.
    pub(super) op: String,
    /// Destination of its bytes; if `None`, new memory is allocated.
    pub(super) into: Option<(Arc<Landing>, Range<usize>)>,
    pub(super) entry: Arc<Entry>,
    pub(super) reply: Sender<Result<Got, CommError>>,
}

impl Read {
    pub(super) fn at(&self, rank: usize) -> OperationContext<'_> {
        OperationContext { group: "window", seq: self.key.version, rank, op: &self.op }
    }
}

/// Result of a read: the owner's tag, and the bytes, unless they went to the reader's own destination.
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
    /// This rank has failed, as recorded in the shared state.
    Abort,
    /// This rank takes part in no further operation.
    Leave,
    /// This rank's process is about to end, after a failure.
    Done,
    /// Ends the thread when everything has been sent or `within` has passed; closes the link if `finalize` is set.
    Finish {
        finalize: bool,
        within: Duration,
    },
}

/// A published value whose bytes are borrowed for sending.
pub(super) type Exposed = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// State of a key in a window.
pub(crate) enum Found {
    /// Not published yet.
    Absent,
    /// Replaced by a later version.
    Gone,
    /// Published.
    Here(Exposure),
}

/// A function that looks up a key in a window.
pub(crate) type Lookup = Box<dyn Fn(Key) -> Found + Send>;

pub(super) enum Job {
    /// A window has been created.
    Join { window: u32, lookup: Lookup },
    /// A rank has requested a read.
    Asked(Asked),
    /// A value was published.
    Changed,
    /// A value that was sent. It is dropped on this thread, since dropping it may run its owner's code.
    Dispose(Exposed),
    /// This rank publishes no further values.
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

/// Number of parked requests, which publishing checks first.
pub(crate) type Parked = Arc<AtomicUsize>;
