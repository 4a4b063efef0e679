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
use super::message::Slot;
use crate::CommError;
use crate::exposure::{Exposure, Key};

/// Part of an input that goes to a rank: its bytes.
#[derive(Debug)]
pub(super) struct SendTo {
    pub(super) to: usize,
    pub(super) bytes: Range<usize>,
}

/// What a rank's part of an operation fills.
#[derive(Debug)]
pub(super) struct ReceiveFrom {
    pub(super) from: usize,
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
    /// To every other rank of the group, be it nothing.
    pub(super) sends: Vec<SendTo>,
    pub(super) landing: Arc<Landing>,
    /// From every other rank of the group, be it nothing.
    pub(super) receives: Vec<ReceiveFrom>,
    pub(super) entry: Arc<Entry>,
    pub(super) reply: Sender<Result<(), CommError>>,
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

/// What a read has brought: the owner's tag, and the bytes, unless they went where the reader wanted them.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) tag: String,
    pub(super) bytes: Option<Arc<Landing>>,
}

/// What an owner's serving thread has for a reader.
#[derive(Debug)]
pub(super) enum Served {
    Ready { tag: String, bytes: Arc<Exposed> },
    Gone,
    Left,
    Failed(String),
}

#[derive(Debug)]
pub(super) enum Command {
    Exchange(Exchange),
    Read(Read),
    Serve {
        to: usize,
        id: u64,
        served: Served,
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
pub(super) struct Exposed(pub(super) Box<dyn AsRef<[u8]> + Send + Sync>);

impl Exposed {
    pub(super) fn bytes(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl core::fmt::Debug for Exposed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Exposed({} bytes)", self.bytes().len())
    }
}

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
    Dispose(Arc<Exposed>),
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
