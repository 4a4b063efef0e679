//! Reading and writing a nonblocking socket.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::mem::MaybeUninit;
use std::net::TcpStream;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// Reads at most `length` bytes to memory that may be uninitialised. Returns their number, or `None` if none are available now.
///
/// # Safety
///
/// `length` bytes may be written at `to`.
///
/// # Errors
///
/// The system's error; [`ErrorKind::UnexpectedEof`] at the connection's end.
pub(super) unsafe fn read(stream: &TcpStream, to: *mut u8, length: usize) -> Result<Option<usize>> {
    if length == 0 {
        return Ok(Some(0));
    }
    // SAFETY: the caller guarantees that the memory is valid; its values may be uninitialised.
    let room = unsafe { std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<u8>>(), length) };
    match now(retry_on_intr(|| recv(stream, &mut *room, RecvFlags::empty()).map(|(_, more)| more)))? {
        Some(0) => Err(Error::new(ErrorKind::UnexpectedEof, "the other end has closed it")),
        more => Ok(more),
    }
}

/// Writes as much of two consecutive slices as possible now. Returns the number of bytes, or `None` if the socket is full. A
/// connection that has ended is an error, never a signal.
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
