//! What the link has been given and not finished with, and how the communication thread waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::Buffer;
use super::super::landing::Landing;
use super::commands::Exposed;
use super::message::Slot;

/// What keeps bytes where they are while the link sends them.
#[allow(dead_code)] // Held, not read.
pub(super) enum Held {
    Message(Vec<u8>),
    Input(Arc<Buffer>),
    Exposed(Arc<Exposed>),
}

pub(super) struct Outgoing<O> {
    pub(super) ongoing: O,
    pub(super) held: Held,
    pub(super) to: usize,
    /// The exchange that this is part of.
    pub(super) slot: Option<Slot>,
}

/// For what a piece comes in.
#[derive(Clone, Copy)]
pub(super) enum For {
    Exchange(Slot, usize),
    Read(u64),
    /// It is not what was asked for.
    Nobody,
}

/// What the link has not finished with.
pub(super) struct Underway<O> {
    pub(super) outgoing: Vec<Outgoing<O>>,
    pub(super) incoming: Vec<Incoming<O>>,
}

impl<O> Default for Underway<O> {
    fn default() -> Self {
        Self { outgoing: Vec::new(), incoming: Vec::new() }
    }
}

impl<O> Drop for Underway<O> {
    fn drop(&mut self) {
        // The link, MPI's network card say, may still read and write this memory: after a failure it is never given back.
        std::mem::forget(std::mem::take(&mut self.outgoing));
        std::mem::forget(std::mem::take(&mut self.incoming));
    }
}

pub(super) struct Incoming<O> {
    pub(super) ongoing: O,
    pub(super) bytes: usize,
    /// Keeps the memory that the link writes to.
    pub(super) landing: Arc<Landing>,
    pub(super) purpose: For,
}

/// How long the thread may nap between two looks at the link: the longer the longer nothing has happened.
pub(super) struct Idle {
    since: Instant,
}

impl Idle {
    pub(super) fn new() -> Self {
        Self { since: Instant::now() }
    }

    pub(super) fn reset(&mut self) {
        self.since = Instant::now();
    }

    pub(super) fn next(&self, moving: bool, expecting: bool) -> Duration {
        let quiet = self.since.elapsed();
        let steps: &[(u64, u64)] = match (moving, expecting) {
            // A payload on its way is copied by these very calls. One that does not move leaves the processor to others.
            (true, _) => &[(5_000, 0), (50_000, 20), (1_000_000, 50)],
            (false, true) => &[(50, 0), (2_000, 20), (20_000, 50), (200_000, 200)],
            (false, false) => &[(20, 0), (1_000, 50), (10_000, 100), (100_000, 500), (1_000_000, 1_000)],
        };
        let longest = if moving || expecting { 500 } else { 2_000 };
        let quiet = quiet.as_micros() as u64;
        let nap = steps.iter().find(|(until, _)| quiet < *until).map_or(longest, |&(_, nap)| nap);
        Duration::from_micros(nap)
    }
}
