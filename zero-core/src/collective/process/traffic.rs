//! What the link has been given and not finished with, and how the communication thread waits for it.

use std::sync::Arc;
use std::time::Duration;

use super::super::Buffer;
use super::super::landing::Landing;
use super::commands::Exposed;
use super::link::Link;
use super::message::Slot;
use crate::collective::error::LinkError;

/// What keeps bytes where they are while the link sends them.
#[allow(dead_code)] // Held, not read.
pub(super) enum Held {
    Message(Vec<u8>),
    Input(Arc<Buffer>),
    Exposed(Exposed),
}

/// What the link has been given: to send, or to receive.
pub(super) struct Given<O, T> {
    pub(super) ongoing: O,
    pub(super) what: T,
}

/// A message, or a piece of a payload, that goes out.
pub(super) struct Outgoing {
    pub(super) held: Held,
    pub(super) to: usize,
    /// The exchange that this is part of.
    pub(super) slot: Option<Slot>,
}

/// A piece of a payload that comes in.
pub(super) struct Incoming {
    pub(super) bytes: usize,
    /// Keeps the memory that the link writes to.
    #[allow(dead_code)] // Held, not read.
    pub(super) landing: Arc<Landing>,
    pub(super) purpose: For,
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
    pub(super) outgoing: Vec<Given<O, Outgoing>>,
    pub(super) incoming: Vec<Given<O, Incoming>>,
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

/// Takes out of `transfers` what the link has finished with, each with its bytes.
pub(super) fn take_ended<L: Link, T>(
    link: &mut L,
    transfers: &mut Vec<Given<L::Ongoing, T>>,
) -> Result<Vec<(T, usize)>, LinkError> {
    let (mut ended, mut at) = (Vec::new(), 0);
    while let Some(transfer) = transfers.get_mut(at) {
        match link.test(&mut transfer.ongoing)? {
            Some(bytes) => ended.push((transfers.swap_remove(at).what, bytes)),
            None => at += 1,
        }
    }
    Ok(ended)
}

/// How long the thread may nap between two looks at the link: the longer the longer nothing has happened.
pub(super) fn nap(quiet: Duration, moving: bool, expecting: bool) -> Duration {
    let steps: &[(u64, u64)] = match (moving, expecting) {
        // A payload on its way is copied by these very calls. One that does not move leaves the processor to others.
        (true, _) => &[(5_000, 0), (50_000, 20), (1_000_000, 50)],
        (false, true) => &[(50, 0), (2_000, 20), (20_000, 50), (200_000, 200)],
        (false, false) => &[(20, 0), (1_000, 50), (10_000, 100), (100_000, 500), (1_000_000, 1_000)],
    };
    let longest = if moving || expecting { 500 } else { 2_000 };
    let quiet = quiet.as_micros() as u64;
    Duration::from_micros(steps.iter().find(|(until, _)| quiet < *until).map_or(longest, |&(_, nap)| nap))
}
