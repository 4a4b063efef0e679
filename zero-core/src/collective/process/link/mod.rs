//! What carries bytes between the ranks' processes, as the communication thread sees it.
//!
//! Two streams of messages to each rank: short control messages, which come as they are sent, and pieces of payloads, which
//! go straight to the memory that the receiver has posted for their tag. Whatever carries them, memory belongs to the link
//! from the call that names it until [`Link::test`] has said that it is done.

#[cfg(test)]
pub(super) mod memory;
#[cfg(feature = "mpi")]
pub(super) mod mpi;
pub(super) mod tcp;

use crate::collective::error::LinkError;

/// Largest tag that every MPI library takes.
pub(super) const MAX_TAG: i32 = 32_767;

/// Most bytes of one message; MPI counts elements in a C `int`.
pub(super) const MAX_CHUNK: usize = 1 << 30;

/// The two streams of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Control,
    Data,
}

/// What a link has to tell.
#[derive(Debug)]
pub(super) enum Heard {
    /// A control message.
    Message { from: usize, bytes: Vec<u8> },
    /// A connection with a rank that is no neighbour has been made, by whichever of the two. Its end will be told.
    Connected { peer: usize },
    /// Nothing more comes from `peer`, or goes to it.
    Lost { peer: usize, reason: String },
}

/// Messages of bytes to and from the other ranks. Called on one thread; no call waits for another rank but `close`.
pub(super) trait Link {
    /// A send or receive that the link has not finished with.
    type Ongoing;

    /// Whether it unparks its thread when something has come, which need not look for it then.
    const WAKES: bool = false;

    /// Starts sending bytes. Pieces under one tag are received in the order in which they are sent.
    ///
    /// # Safety
    ///
    /// The bytes stay where they are, unchanged, until [`Link::test`] has said that the send has ended, or for ever.
    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Self::Ongoing, LinkError>;

    /// Starts receiving `length` bytes of data.
    ///
    /// # Safety
    ///
    /// The memory is there, and nobody else's, until [`Link::test`] has said that the receive has ended, or for ever.
    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize)
    -> Result<Self::Ongoing, LinkError>;

    /// Whether a send or receive has ended: then the number of bytes that have come (of a send: anything).
    fn test(&mut self, ongoing: &mut Self::Ongoing) -> Result<Option<usize>, LinkError>;

    /// The next control message, or news of a connection, if something has come.
    fn next_message(&mut self) -> Result<Option<Heard>, LinkError>;

    /// Ends the link well: what was sent arrives.
    fn close(self) -> Result<(), LinkError>;
}
