//! Reading and writing a socket that does not block.

use std::io::{Error, ErrorKind, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

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
    loop {
        // SAFETY: the socket is open while the stream is borrowed; the caller answers for the memory.
        let got = unsafe { libc::recv(stream.as_raw_fd(), to.cast(), length, 0) };
        match got {
            0 => return Err(Error::new(ErrorKind::UnexpectedEof, "the other end has closed it")),
            more if more > 0 => return Ok(Some(more as usize)),
            _ => match Error::last_os_error() {
                error if error.kind() == ErrorKind::Interrupted => {}
                error if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                error => return Err(error),
            },
        }
    }
}

/// Writes of two stretches, one behind the other, what goes now: how much, none if nothing does. A connection that has ended
/// is an error, never a signal.
///
/// # Safety
///
/// The stretches, of so many bytes, may be read.
pub(super) unsafe fn write(stream: &TcpStream, parts: [(*const u8, usize); 2]) -> Result<Option<usize>> {
    let mut parts = parts.map(|(base, length)| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: length });
    // SAFETY: a header of zeros names no address, no control data and no flags; the system reads the parts only.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    loop {
        // SAFETY: the socket is open while the stream is borrowed; the header and its parts are locals, and the caller
        // answers for what they name.
        let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return Ok(Some(sent as usize));
        }
        match Error::last_os_error() {
            error if error.kind() == ErrorKind::Interrupted => {}
            error if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            error => return Err(error),
        }
    }
}
