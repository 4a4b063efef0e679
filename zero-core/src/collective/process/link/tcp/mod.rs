//! A link over nonblocking sockets, with one connection to each rank that this one communicates with.
//!
//! A connection carries frames: a header of 16 bytes (kind, tag, length) followed, except for `Clear`, by that many bytes.
//!
//! * `Control`: a control message. It is sent before waiting chunks of payloads, and is received at any time.
//! * `Clear`: the receiver has posted memory for one chunk under the tag.
//! * `Data`: a chunk of a payload. It is sent only after it is cleared, so that the receiver can read it from the socket at once
//!   and directly to its destination. A chunk without posted memory would block everything behind it, possibly the very message
//!   that its receiver waits for: the answer to a read.
//!
//! So every connection can always be read, even by a rank with many unsent bytes, and ranks that send each other more than any
//! buffer holds make progress.
//!
//! Progress is made in [`Link::next_message`], which checks every connection.

mod connection;
mod socket;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::super::rendezvous::Dial;
use super::{Channel, Heard, Link};
use crate::collective::error::LinkError;
use connection::{Connection, Span};

/// Longest time that the ends of a connection wait for one another after the last message.
const CLOSE: Duration = Duration::from_secs(2);

/// Number of bytes of a send or receive; `None` until it has ended.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Ongoing(Rc<Cell<Option<usize>>>);

impl Ongoing {
    fn end(&self, bytes: usize) {
        self.0.set(Some(bytes));
    }
}

/// State of the connection between this rank and another.
enum Line {
    /// No connection yet; for this rank itself, never one.
    Absent,
    /// A connection, which may still be pending.
    Open(Box<Connection>),
    /// A connection that has ended.
    Ended,
}

pub(in super::super) struct TcpLink {
    /// Indexed by rank.
    lines: Vec<Line>,
    heard: VecDeque<Heard>,
    /// Connects with further ranks on first use; `None` if all ranks are connected.
    dial: Option<Dial>,
}

impl TcpLink {
    /// Creates a link over existing connections, indexed by rank, and those that `dial` will make.
    pub(in super::super) fn new(streams: Vec<Option<TcpStream>>, dial: Option<Dial>) -> Result<Self, LinkError> {
        let failed = |error: io::Error| LinkError { call: "set_nonblocking", reason: error.to_string() };
        let open = |stream: Option<TcpStream>| {
            let Some(stream) = stream else { return Ok(Line::Absent) };
            let mut connection = Connection::pending();
            connection.connect(stream).map(|()| Line::Open(connection.into())).map_err(failed)
        };
        Ok(Self { lines: streams.into_iter().map(open).collect::<Result<_, _>>()?, heard: VecDeque::new(), dial })
    }

    /// Writes and reads as much as possible now.
    fn progress(&mut self) {
        while let Some((peer, outcome)) = self.dial.as_ref().and_then(Dial::next) {
            let connected = match (outcome, &mut self.lines[peer]) {
                (_, Line::Ended) => continue,
                (Err(reason), _) => Err(reason),
                (Ok(stream), line) => {
                    if matches!(line, Line::Absent) {
                        *line = Line::Open(Connection::pending().into());
                    }
                    let Line::Open(connection) = line else { unreachable!("it is neither absent nor ended") };
                    connection.connect(stream).map_err(|error| error.to_string())
                }
            };
            match connected {
                Ok(()) => self.heard.push_back(Heard::Connected { peer }),
                Err(reason) => self.end(peer, reason),
            }
        }
        for peer in 0..self.lines.len() {
            let Line::Open(connection) = &mut self.lines[peer] else { continue };
            // Messages that a peer sent before its end are delivered first.
            let ended = connection.turn(|bytes| self.heard.push_back(Heard::Message { from: peer, bytes })).err();
            if let Some(end) = ended {
                self.end(
                    peer,
                    format!("its connection ended; check whether its process and its machine still run ({end})"),
                );
            }
        }
    }

    fn end(&mut self, peer: usize, reason: String) {
        if let Line::Open(mut connection) = std::mem::replace(&mut self.lines[peer], Line::Ended) {
            connection.give_up();
        }
        self.heard.push_back(Heard::Lost { peer, reason });
    }

    /// Returns the connection with a rank, after starting one if there was none; `None` if it has ended.
    fn line(&mut self, peer: usize) -> Option<&mut Connection> {
        if let (Line::Absent, Some(dial)) = (&self.lines[peer], &self.dial) {
            dial.to(peer);
            self.lines[peer] = Line::Open(Connection::pending().into());
        }
        match &mut self.lines[peer] {
            Line::Open(connection) => Some(connection),
            Line::Absent | Line::Ended => None,
        }
    }
}

impl Link for TcpLink {
    type Ongoing = Ongoing;

    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Ongoing, LinkError> {
        let done = Ongoing::default();
        let piece = Span { bytes: bytes.as_ptr(), length: bytes.len(), done: done.clone() };
        match (self.line(to), channel) {
            // There is no receiver.
            (None, _) => done.end(piece.length),
            (Some(connection), Channel::Control) => connection.say(piece),
            (Some(connection), Channel::Data) => connection.offer(tag, piece),
        }
        Ok(done)
    }

    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize) -> Result<Ongoing, LinkError> {
        let done = Ongoing::default();
        // Nothing more comes from a rank whose connection has ended.
        if let Some(connection) = self.line(from) {
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

    /// Must be called after everything has been written. Notifies the others, and waits briefly for their ends, so that none
    /// has its last messages refused.
    fn close(mut self) -> Result<(), LinkError> {
        let end = Instant::now() + CLOSE;
        for line in &self.lines {
            if let Line::Open(connection) = line {
                connection.shutdown(Shutdown::Write);
            }
        }
        while self.lines.iter().any(|line| matches!(line, Line::Open(_))) && Instant::now() < end {
            self.progress();
            self.heard.clear();
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
