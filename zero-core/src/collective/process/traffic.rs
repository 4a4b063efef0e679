//! The link's unfinished transfers, and the time that the communication thread naps between two checks of them.

use std::sync::Arc;
use std::time::Duration;

use super::super::Buffer;
use super::super::landing::Landing;
use super::commands::Exposed;
use super::link::Link;
use super::message::Slot;
use crate::collective::error::LinkError;

/// The owner of bytes that the link is sending, which keeps them in place.
#[allow(dead_code)] // Held, not read.
pub(super) enum Held {
    Message(Vec<u8>),
    Input(Arc<Buffer>),
    Exposed(Exposed),
}

/// A transfer that the link has started: a send or a receive.
pub(super) struct Given<O, T> {
    pub(super) ongoing: O,
    pub(super) what: T,
}

/// An outgoing message or chunk of a payload.
pub(super) struct Outgoing {
    pub(super) held: Held,
    pub(super) to: usize,
    /// The exchange that it belongs to.
    pub(super) slot: Option<Slot>,
}

/// An incoming chunk of a payload.
pub(super) struct Incoming {
    pub(super) bytes: usize,
    /// Keeps the memory that the link writes to alive.
    #[allow(dead_code)] // Held, not read.
    pub(super) landing: Arc<Landing>,
    pub(super) purpose: For,
}

/// The purpose of an incoming chunk.
#[derive(Clone, Copy)]
pub(super) enum For {
    Exchange(Slot, usize),
    Read(u64),
    /// It does not match the request, and is discarded.
    Nobody,
}

/// The unfinished transfers of the link.
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
        // The link (or a network card under MPI) may still read and write this memory: after a failure it is leaked.
        std::mem::forget(std::mem::take(&mut self.outgoing));
        std::mem::forget(std::mem::take(&mut self.incoming));
    }
}

/// Removes the finished transfers from `transfers` and returns them, each with its number of bytes.
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

/// Returns the time that the thread may nap between two checks of the link. It grows with the time since the last event.
pub(super) fn nap(quiet: Duration, moving: bool, expecting: bool) -> Duration {
    let steps: &[(u64, u64)] = match (moving, expecting) {
        // These calls themselves copy a payload in transit. If one makes no progress, the naps leave the CPU to others.
        (true, _) => &[(5_000, 0), (50_000, 20), (1_000_000, 50)],
        (false, true) => &[(50, 0), (2_000, 20), (20_000, 50), (200_000, 200)],
        (false, false) => &[(20, 0), (1_000, 50), (10_000, 100), (100_000, 500), (1_000_000, 1_000)],
    };
    let longest = if moving || expecting { 500 } else { 2_000 };
    let quiet = quiet.as_micros() as u64;
    Duration::from_micros(steps.iter().find(|(until, _)| quiet < *until).map_or(longest, |&(_, nap)| nap))
}
