//! Reading and writing a socket that does not block.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::mem::MaybeUninit;
use std::net::TcpStream;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// Reads at most `length` bytes to memory that need not have a value yet: how many have come, none if there is nothing now.
///
/// # Safety
///
/// `length` bytes may be written at `to`.
///
/// # Errors
///
/// The system's; [`ErrorKind::UnexpectedEof`] at the connection's end.
pub(super) unsafe fn read(stream: &TcpStream, to: *mut u8, length: usize) -> Result<Option<usize>> {
    if length == 0 {
        return Ok(Some(0));
    }
    // SAFETY: the caller answers for the memory, of whose values nothing is said.
    let room = unsafe { std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<u8>>(), length) };
    match now(retry_on_intr(|| recv(stream, &mut *room, RecvFlags::empty()).map(|(_, more)| more)))? {
        Some(0) => Err(Error::new(ErrorKind::UnexpectedEof, "the other end has closed it")),
        more => Ok(more),
    }
}

/// Writes of two stretches, one behind the other, what goes now: how much, none if nothing does. A connection that has ended
/// is an error, never a signal.
pub(super) fn write(stream: &TcpStream, parts: [&[u8]; 2]) -> Result<Option<usize>> {
    let parts = parts.map(IoSlice::new);
    now(retry_on_intr(|| sendmsg(stream, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)))
}

fn now(outcome: rustix::io::Result<usize>) -> Result<Option<usize>> {
    match outcome {
        Err(Errno::WOULDBLOCK) => Ok(None),
        outcome => Ok(Some(outcome?)),
    }
}
