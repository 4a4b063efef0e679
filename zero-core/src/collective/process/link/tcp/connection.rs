//! One rank's end of the connection to another: what is to be written, and what is being read.

use std::collections::{HashMap, VecDeque};
use std::io::{Error, ErrorKind, Result};
use std::net::{Shutdown, TcpStream};

use super::{Ongoing, socket};

const HEAD: usize = 16;
const CONTROL: u32 = 0;
const DATA: u32 = 1;
const CLEAR: u32 = 2;

/// Most bytes of a control message: payloads go otherwise, and errors and names are short.
const LONGEST: usize = 16 << 20;
/// Bytes that are read ahead of a frame's head.
const AHEAD: usize = 32 << 10;
/// Bytes that one look at a connection reads, and writes, before the others have their turn.
const TURN: usize = 2 << 20;

/// Memory that is to be sent.
pub(super) struct Span {
    pub(super) bytes: *const u8,
    pub(super) length: usize,
    pub(super) done: Ongoing,
}

/// A frame on its way out.
struct Frame {
    head: [u8; HEAD],
    /// None of a frame that is its head alone.
    piece: Option<Span>,
}

/// Memory that a piece of a payload is to come to.
struct Post {
    to: *mut u8,
    length: usize,
    done: Ongoing,
}

/// What follows the head that was read last.
enum Body {
    Control {
        bytes: Vec<u8>,
        length: usize,
    },
    Data {
        post: Post,
        /// Bytes that the frame has; the post has room for them.
        length: usize,
        have: usize,
    },
}

pub(super) struct Connection {
    /// None while it is being made.
    stream: Option<TcpStream>,
    /// Control messages and clearances, which go first.
    first: VecDeque<Frame>,
    /// Pieces that have been cleared.
    then: VecDeque<Frame>,
    /// Pieces that have not, by tag.
    offered: HashMap<i32, VecDeque<Span>>,
    /// Clearances by tag that came before their pieces.
    cleared: HashMap<i32, usize>,
    /// The frame that is being written, and how far it has come.
    writing: Option<(Frame, usize)>,
    /// Why nothing more can be written; what the other end has said before is still read.
    unwritable: Option<Error>,
    /// Bytes read ahead: those in `begin..end` are still to be looked at.
    ahead: Box<[u8]>,
    begin: usize,
    end: usize,
    reading: Option<Body>,
    /// Memory for pieces, by tag, in the order in which they come.
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
    Error::new(ErrorKind::InvalidData, format!("{what}: do all ranks run the same build?"))
}

/// Takes the first entry of a tag's queue, and the queue when it was the last.
fn take<T>(queues: &mut HashMap<i32, VecDeque<T>>, tag: i32) -> Option<T> {
    let queue = queues.get_mut(&tag)?;
    let first = queue.pop_front();
    if queue.is_empty() {
        queues.remove(&tag);
    }
    first
}

impl Connection {
    /// One that is being made: what is said waits for [`Connection::connect`].
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

    /// Sends a piece of a payload once it is cleared.
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

    /// Has a piece of a payload come to `to`, and says so to its sender.
    pub(super) fn post(&mut self, tag: i32, to: *mut u8, length: usize, done: Ongoing) {
        self.posted.entry(tag).or_default().push_back(Post { to, length, done });
        self.first.push_back(Frame { head: head(CLEAR, tag, length), piece: None });
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        // It may have ended already.
        let _ = self.stream.as_ref().map(|stream| stream.shutdown(how));
    }

    /// Ends what was to be sent: nobody is there to receive it. What was to be received never comes.
    pub(super) fn give_up(&mut self) {
        let frames = self.first.drain(..).chain(self.then.drain(..)).chain(self.writing.take().map(|(frame, _)| frame));
        let offered = self.offered.drain().flat_map(|(_, pieces)| pieces);
        for piece in frames.filter_map(|frame| frame.piece).chain(offered) {
            piece.done.end(piece.length);
        }
    }

    /// Writes and reads what can be now, and hands over the control messages that have come.
    ///
    /// # Errors
    ///
    /// Why nothing more will come.
    pub(super) fn turn(&mut self, hear: impl FnMut(Vec<u8>)) -> Result<()> {
        // Taken and put back: a pending one has nothing to write to.
        let Some(stream) = self.stream.take() else { return Ok(()) };
        if self.unwritable.is_none()
            && let Err(error) = self.write(&stream)
        {
            // The other end may have said why; its words are read to their end.
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
            // Not more at once than a turn has, so that what comes in is looked at.
            let rest = (length - in_piece).min(TURN);
            let body = match &frame.piece {
                // SAFETY: what is left of the piece, which stays as it is until it is said to have ended (`Link::send`);
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
                    // SAFETY: the rest of the frame fits what was posted, which is nobody else's (`Link::receive`); what was
                    // read ahead lies elsewhere.
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

    /// Reads ahead, and takes that off what is left of the turn; whether anything has come.
    fn fill(&mut self, stream: &TcpStream, left: &mut usize) -> Result<bool> {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if self.end == AHEAD {
            self.ahead.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        let room = &mut self.ahead[self.end..];
        // SAFETY: the room is a part of this connection's own buffer.
        let more = unsafe { socket::read(stream, room.as_mut_ptr(), room.len())? };
        self.end += more.unwrap_or(0);
        *left = left.saturating_sub(more.unwrap_or(0));
        Ok(more.is_some())
    }

    /// Begins with a frame whose head has come.
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
                    return Err(foreign(format!(
                        "it sent {length} bytes under tag {tag}, which nothing here waits for"
                    )));
                };
                if length > post.length {
                    return Err(foreign(format!(
                        "it sent {length} bytes under tag {tag}, {} were awaited",
                        post.length
                    )));
                }
                self.reading = Some(Body::Data { post, length, have: 0 });
            }
            _ => return Err(foreign(format!("it sent a frame of kind {kind} with {length} bytes"))),
        }
        Ok(())
    }
}
