//! One rank's end of the connection to another, with its queues of frames to write and its read state.

use std::collections::{HashMap, VecDeque};
use std::io::{Error, ErrorKind, Result};
use std::net::{Shutdown, TcpStream};

use super::{Ongoing, socket};

const HEAD: usize = 16;
const CONTROL: u32 = 0;
const DATA: u32 = 1;
const CLEAR: u32 = 2;

/// Maximum size of a control message in bytes: payloads are sent separately, and errors and names are short.
const LONGEST: usize = 16 << 20;
/// Size in bytes of the read-ahead buffer for frame headers.
const AHEAD: usize = 32 << 10;
/// Number of bytes that a connection reads, and writes, before the other connections have their turn.
const TURN: usize = 2 << 20;

/// Memory that is to be sent.
pub(super) struct Span {
    pub(super) bytes: *const u8,
    pub(super) length: usize,
    pub(super) done: Ongoing,
}

/// An outgoing frame.
struct Frame {
    head: [u8; HEAD],
    /// `None` for a frame that has only a header.
    piece: Option<Span>,
}

/// Posted memory for a chunk of a payload.
struct Post {
    to: *mut u8,
    length: usize,
    done: Ongoing,
}

/// The body of the frame whose header was read last.
enum Body {
    Control {
        bytes: Vec<u8>,
        length: usize,
    },
    Data {
        post: Post,
        /// Number of bytes of the frame; the posted memory has room for them.
        length: usize,
        have: usize,
    },
}

pub(super) struct Connection {
    /// `None` while the connection is pending.
    stream: Option<TcpStream>,
    /// Control messages and clearances, which are sent first.
    first: VecDeque<Frame>,
    /// Chunks that have been cleared.
    then: VecDeque<Frame>,
    /// Chunks that have not been cleared, by tag.
    offered: HashMap<i32, VecDeque<Span>>,
    /// Number of clearances that arrived before their chunks, by tag.
    cleared: HashMap<i32, usize>,
    /// The frame that is being written, and the number of bytes written.
    writing: Option<(Frame, usize)>,
    /// The error after which nothing more can be written; data that the other end sent before is still read.
    unwritable: Option<Error>,
    /// Read-ahead buffer; the bytes in `begin..end` have not been processed.
    ahead: Box<[u8]>,
    begin: usize,
    end: usize,
    reading: Option<Body>,
    /// Posted memory for chunks, by tag, in the order of their arrival.
    posted: HashMap<i32, VecDeque<Post>>,
}

fn head(kind: u32, tag: i32, length: usize) -> [u8; HEAD] {
    let mut bytes = [0; HEAD];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&tag.to_le_bytes());
    bytes[8..].copy_from_slice(&(length as u64).to_le_bytes());
    bytes
}

fn foreign(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, format!("{what}; run the same build on all ranks"))
}

/// Removes the first entry of a tag's queue, and the queue itself if that was the last entry.
fn take<T>(queues: &mut HashMap<i32, VecDeque<T>>, tag: i32) -> Option<T> {
    let queue = queues.get_mut(&tag)?;
    let first = queue.pop_front();
    if queue.is_empty() {
        queues.remove(&tag);
    }
    first
}

impl Connection {
    /// Creates a pending connection: messages wait for [`Connection::connect`].
    pub(super) fn pending() -> Self {
        Self {
            stream: None,
            first: VecDeque::new(),
            then: VecDeque::new(),
            offered: HashMap::new(),
            cleared: HashMap::new(),
            writing: None,
            unwritable: None,
            ahead: vec![0; AHEAD].into(),
            begin: 0,
            end: 0,
            reading: None,
            posted: HashMap::new(),
        }
    }

    pub(super) fn connect(&mut self, stream: TcpStream) -> Result<()> {
        stream.set_nonblocking(true)?;
        self.stream = Some(stream);
        Ok(())
    }

    /// Sends a control message.
    pub(super) fn say(&mut self, piece: Span) {
        self.first.push_back(Frame { head: head(CONTROL, 0, piece.length), piece: Some(piece) });
    }

    /// Sends a chunk of a payload once it is cleared.
    pub(super) fn offer(&mut self, tag: i32, piece: Span) {
        match self.cleared.get_mut(&tag) {
            Some(early) => {
                *early -= 1;
                if *early == 0 {
                    self.cleared.remove(&tag);
                }
                self.send(tag, piece);
            }
            None => self.offered.entry(tag).or_default().push_back(piece),
        }
    }

    fn send(&mut self, tag: i32, piece: Span) {
        self.then.push_back(Frame { head: head(DATA, tag, piece.length), piece: Some(piece) });
    }

    /// Posts the memory at `to` for a chunk of a payload, and clears the chunk at its sender.
    pub(super) fn post(&mut self, tag: i32, to: *mut u8, length: usize, done: Ongoing) {
        self.posted.entry(tag).or_default().push_back(Post { to, length, done });
        self.first.push_back(Frame { head: head(CLEAR, tag, length), piece: None });
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        // It may have ended already.
        let _ = self.stream.as_ref().map(|stream| stream.shutdown(how));
    }

    /// Ends all pending sends, as there is no receiver. Pending receives never end.
    pub(super) fn give_up(&mut self) {
        let frames = self.first.drain(..).chain(self.then.drain(..)).chain(self.writing.take().map(|(frame, _)| frame));
        let offered = self.offered.drain().flat_map(|(_, pieces)| pieces);
        for piece in frames.filter_map(|frame| frame.piece).chain(offered) {
            piece.done.end(piece.length);
        }
    }

    /// Writes and reads as much as possible now, and passes received control messages to `hear`.
    ///
    /// # Errors
    ///
    /// The error after which nothing more can be received.
    pub(super) fn turn(&mut self, hear: impl FnMut(Vec<u8>)) -> Result<()> {
        // Taken and put back. A pending connection has no stream.
        let Some(stream) = self.stream.take() else { return Ok(()) };
        if self.unwritable.is_none()
            && let Err(error) = self.write(&stream)
        {
            // The other end may have sent the reason, so its data is read to the end.
            self.give_up();
            self.unwritable = Some(error);
        }
        let read = self.read(&stream, hear);
        self.stream = Some(stream);
        read.map_err(|end| match self.unwritable.take() {
            Some(error) if end.kind() == ErrorKind::UnexpectedEof => error,
            _ => end,
        })
    }

    fn write(&mut self, stream: &TcpStream) -> Result<()> {
        let mut left = TURN;
        while left > 0 {
            let Some((frame, at)) = &mut self.writing else {
                let next = self.first.pop_front().or_else(|| self.then.pop_front());
                let Some(next) = next else { return Ok(()) };
                self.writing = Some((next, 0));
                continue;
            };
            let length = frame.piece.as_ref().map_or(0, |piece| piece.length);
            let head = &frame.head[(*at).min(HEAD)..];
            let in_piece = at.saturating_sub(HEAD);
            // At most one turn's bytes per write, so that incoming data is processed too.
            let rest = (length - in_piece).min(TURN);
            let body = match &frame.piece {
                // SAFETY: the rest of the chunk, which stays unchanged until the end of its send is reported (`Link::send`);
                // `in_piece` is at most its length.
                Some(piece) => unsafe { std::slice::from_raw_parts(piece.bytes.add(in_piece), rest) },
                None => &[],
            };
            let sent = socket::write(stream, [head, body])?;
            let Some(sent) = sent else { return Ok(()) };
            *at += sent;
            left = left.saturating_sub(sent);
            if *at == HEAD + length {
                let (frame, _) = self.writing.take().expect("it is being written");
                if let Some(piece) = frame.piece {
                    piece.done.end(piece.length);
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, stream: &TcpStream, mut hear: impl FnMut(Vec<u8>)) -> Result<()> {
        let mut left = TURN;
        while left > 0 {
            let had = self.end - self.begin;
            match &mut self.reading {
                None if had >= HEAD => {
                    let bytes = &self.ahead[self.begin..self.begin + HEAD];
                    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
                    let length = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
                    let (kind, tag) = (number(0), number(4) as i32);
                    self.begin += HEAD;
                    self.open(kind, tag, usize::try_from(length).unwrap_or(usize::MAX))?;
                }
                None => {
                    if !self.fill(stream, &mut left)? {
                        return Ok(());
                    }
                }
                Some(Body::Control { bytes, length }) => {
                    let more = had.min(*length - bytes.len());
                    bytes.extend_from_slice(&self.ahead[self.begin..self.begin + more]);
                    self.begin += more;
                    if bytes.len() == *length {
                        hear(std::mem::take(bytes));
                        self.reading = None;
                    } else if !self.fill(stream, &mut left)? {
                        return Ok(());
                    }
                }
                Some(Body::Data { post, length, have }) => {
                    let ready = had.min(*length - *have);
                    // SAFETY: the rest of the frame fits the posted memory, which nobody else accesses (`Link::receive`) and
                    // which does not overlap the read-ahead buffer.
                    unsafe {
                        let to = post.to.add(*have);
                        std::ptr::copy_nonoverlapping(self.ahead.as_ptr().add(self.begin), to, ready);
                    }
                    self.begin += ready;
                    *have += ready;
                    if *have < *length {
                        // SAFETY: as above.
                        let more = unsafe {
                            let to = post.to.add(*have);
                            socket::read(stream, to, (*length - *have).min(TURN))?
                        };
                        let Some(more) = more else { return Ok(()) };
                        *have += more;
                        left = left.saturating_sub(more);
                    }
                    if *have == *length {
                        post.done.end(*length);
                        self.reading = None;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fills the read-ahead buffer, and subtracts the bytes from `left`; returns `true` if any were available.
    fn fill(&mut self, stream: &TcpStream, left: &mut usize) -> Result<bool> {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if self.end == AHEAD {
            self.ahead.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        let room = &mut self.ahead[self.end..];
        // SAFETY: `room` is a part of this connection's own buffer.
        let more = unsafe { socket::read(stream, room.as_mut_ptr(), room.len())? };
        self.end += more.unwrap_or(0);
        *left = left.saturating_sub(more.unwrap_or(0));
        Ok(more.is_some())
    }

    /// Processes the header of a frame.
    fn open(&mut self, kind: u32, tag: i32, length: usize) -> Result<()> {
        match kind {
            CONTROL if length <= LONGEST => {
                self.reading = Some(Body::Control { bytes: Vec::with_capacity(length), length });
            }
            CLEAR => match take(&mut self.offered, tag) {
                Some(piece) => self.send(tag, piece),
                None => *self.cleared.entry(tag).or_default() += 1,
            },
            DATA => {
                let Some(post) = take(&mut self.posted, tag) else {
                    return Err(foreign(format!("it sent {length} bytes with tag {tag}, which no operation expects")));
                };
                if length > post.length {
                    return Err(foreign(format!("it sent {length} bytes with tag {tag}, expected {}", post.length)));
                }
                self.reading = Some(Body::Data { post, length, have: 0 });
            }
            _ => return Err(foreign(format!("it sent an invalid frame of kind {kind} with {length} bytes"))),
        }
        Ok(())
    }
}
