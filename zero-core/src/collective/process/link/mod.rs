//! The transport of bytes between the ranks' processes, as the communication thread uses it.
//!
//! There are two streams of messages to each rank: short control messages, which arrive in order, and chunks of payloads, which
//! go directly to the memory that the receiver has posted for their tag. With every transport, memory belongs to the link
//! from the call that names it until [`Link::test`] reports the end of the transfer.

#[cfg(test)]
pub(super) mod memory;
#[cfg(feature = "mpi")]
pub(super) mod mpi;
pub(super) mod tcp;

use crate::collective::error::LinkError;

/// Largest tag that every MPI library accepts.
pub(super) const MAX_TAG: i32 = 32_767;

/// Maximum size of one message in bytes; MPI counts elements in a C `int`.
pub(super) const MAX_CHUNK: usize = 1 << 30;

/// The two streams of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Control,
    Data,
}

/// An event of a link.
#[derive(Debug)]
pub(super) enum Heard {
    /// A control message.
    Message { from: usize, bytes: Vec<u8> },
    /// A connection with a rank that is not a neighbour has been made, by either side. Its end will be reported.
    Connected { peer: usize },
    /// Nothing more can be received from `peer` or sent to it.
    Lost { peer: usize, reason: String },
}

/// Messages of bytes to and from the other ranks. It is used on one thread. No call except `close` waits for another rank.
pub(super) trait Link {
    /// A send or receive that the link has not finished.
    type Ongoing;

    /// `true` if the link unparks its thread when something arrives, so that the thread need not poll.
    const WAKES: bool = false;

    /// Starts sending bytes. Chunks under one tag are received in the order in which they are sent.
    ///
    /// # Safety
    ///
    /// The bytes stay in place, unchanged, until [`Link::test`] reports the end of the send, or forever.
    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Self::Ongoing, LinkError>;

    /// Starts receiving `length` bytes of data.
    ///
    /// # Safety
    ///
    /// The memory is valid, and nobody else accesses it, until [`Link::test`] reports the end of the receive, or forever.
    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize)
    -> Result<Self::Ongoing, LinkError>;

    /// Returns the number of received bytes if a receive has ended, or any number if a send has ended; `None` otherwise.
    fn test(&mut self, ongoing: &mut Self::Ongoing) -> Result<Option<usize>, LinkError>;

    /// Returns the next control message or connection event, if there is one.
    fn next_message(&mut self) -> Result<Option<Heard>, LinkError>;

    /// Closes the link cleanly: everything that was sent arrives.
    fn close(self) -> Result<(), LinkError>;
}
