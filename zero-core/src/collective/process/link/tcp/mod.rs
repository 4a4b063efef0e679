//! A link of sockets: one connection to each other rank, without blocking and without threads.
//!
//! What goes over a connection are frames: a head of 16 bytes (kind, tag, length) and, but for `Clear`, that many bytes.
//!
//! * `Control`: a control message. It goes before pieces of payloads that wait, and is taken whenever it comes.
//! * `Clear`: the receiver has posted memory for one piece under the tag.
//! * `Data`: a piece of a payload. It is sent only when it is cleared, so that the receiver takes it from the socket straight
//!   to where it belongs, at once. A piece that nobody has posted would stop all that comes behind it, and what stops there
//!   may be just what its receiver waits for: the answer to a read.
//!
//! So a connection is always read to its end, by a rank that is itself full of unsent bytes too, and ranks that send each
//! other more than any buffer holds go on.
//!
//! Progress is made in [`Link::next_message`], which looks at every connection.

mod connection;
mod socket;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::{Channel, Heard, Link};
use crate::error::LinkError;
use connection::{Connection, Span};

/// How long the ends of a connection wait for one another once all is said.
const CLOSE: Duration = Duration::from_secs(2);

/// Bytes of a send or receive that has ended; none before.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Ongoing(Rc<Cell<Option<usize>>>);

impl Ongoing {
    fn end(&self, bytes: usize) {
        self.0.set(Some(bytes));
    }
}

pub(in super::super) struct TcpLink {
    /// By rank; none to this one, and to those whose connection has ended.
    connections: Vec<Option<Connection>>,
    heard: VecDeque<Heard>,
}

impl TcpLink {
    /// Over connections that are there, by rank.
    pub(in super::super) fn new(streams: Vec<Option<TcpStream>>) -> Result<Self, LinkError> {
        let failed = |error: io::Error| LinkError { call: "set_nonblocking", reason: error.to_string() };
        let connect = |stream: Option<TcpStream>| stream.map(Connection::new).transpose().map_err(failed);
        let connections = streams.into_iter().map(connect).collect::<Result<_, _>>()?;
        Ok(Self { connections, heard: VecDeque::new() })
    }

    /// Writes and reads what can be now.
    fn progress(&mut self) {
        for (peer, slot) in self.connections.iter_mut().enumerate() {
            let Some(connection) = slot else { continue };
            // What a peer has said before its end is heard first.
            let ended = connection.turn(|bytes| self.heard.push_back(Heard::Message { from: peer, bytes })).err();
            if let Some(end) = ended {
                connection.give_up();
                *slot = None;
                let reason = format!("its connection ended: has its process, or its machine, ended? ({end})");
                self.heard.push_back(Heard::Lost { peer, reason });
            }
        }
    }
}

impl Link for TcpLink {
    type Ongoing = Ongoing;

    const TELLS_ENDS: bool = true;

    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Ongoing, LinkError> {
        let done = Ongoing::default();
        let piece = Span { bytes: bytes.as_ptr(), length: bytes.len(), done: done.clone() };
        match (&mut self.connections[to], channel) {
            // Nobody is there to receive it.
            (None, _) => done.end(piece.length),
            (Some(connection), Channel::Control) => connection.say(piece),
            (Some(connection), Channel::Data) => connection.offer(tag, piece),
        }
        Ok(done)
    }

    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize) -> Result<Ongoing, LinkError> {
        let done = Ongoing::default();
        // What a rank that has gone has not sent never comes.
        if let Some(connection) = &mut self.connections[from] {
            connection.post(tag, to, length, done.clone());
        }
        Ok(done)
    }

    fn test(&mut self, ongoing: &mut Ongoing) -> Result<Option<usize>, LinkError> {
        Ok(ongoing.0.get())
    }

    fn next_message(&mut self) -> Result<Option<Heard>, LinkError> {
        if self.heard.is_empty() {
            self.progress();
        }
        Ok(self.heard.pop_front())
    }

    /// Everything has been written when this is called: tells the others so, and waits a moment for their ends, so that none
    /// finds its last words refused.
    fn close(mut self) -> Result<(), LinkError> {
        let end = Instant::now() + CLOSE;
        for connection in self.connections.iter().flatten() {
            connection.shutdown(Shutdown::Write);
        }
        while self.connections.iter().any(Option::is_some) && Instant::now() < end {
            self.progress();
            self.heard.clear();
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
