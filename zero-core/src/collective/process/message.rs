//! The control messages between the ranks' communication threads, and their bytes.
//!
//! A message is a kind and its fields, little-endian, texts with their length before them. What is large follows on the
//! other communicator under a tag that the message names.

use serde::{Deserialize, Serialize};

use crate::CommError;
use crate::exposure::Key;

/// Payloads up to this many bytes travel inside the control message.
pub(super) const INLINE: usize = 2 << 10;

/// Bytes that belong to a message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Payload {
    /// Here they are.
    Inline(Vec<u8>),
    /// They come on the data communicator.
    Follows { bytes: u64, tag: i32 },
}

impl Payload {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Payload::Inline(bytes) => bytes.len(),
            Payload::Follows { bytes, .. } => *bytes as usize,
        }
    }
}

/// An operation's name on the wire: group, sequence number in it, phase.
pub(super) type Slot = (u64, u64, u8);

/// What an owner says to a read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    /// The value.
    Ready { tag: String, payload: Payload },
    /// A later version is there instead.
    Gone,
    /// The owner has ended without publishing it.
    Left,
    /// It cannot be had.
    Failed(String),
}

/// A rank's trouble, as it is told to the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Trouble {
    /// The rank that failed first.
    pub(super) peer: usize,
    pub(super) reason: String,
    /// The error of communication that it was, if it was one.
    pub(super) cause: Option<CommError>,
}

#[derive(Debug, Clone)]
pub(super) enum Message {
    /// The sender has come to an operation; what it contributes to the receiver.
    Arrived { slot: Slot, op: String, payload: Payload },
    /// The sender wants what the receiver has published.
    Read { id: u64, window: u32, key: Key },
    /// The answer to a read.
    Seen { id: u64, answer: Answer },
    /// A rank has failed.
    Abort(Trouble),
    /// The sender takes part in nothing more.
    Bye,
    /// After a failure: the sender has said all that it has to say, and may be ended.
    Done,
}

/// A message that cannot be read: the ranks run different builds.
#[derive(Debug, thiserror::Error)]
#[error("a message of {length} bytes cannot be read at byte {at}: do all ranks run the same build?")]
pub(super) struct Malformed {
    length: usize,
    at: usize,
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn number(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn byte(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    fn bytes(self, value: &[u8]) -> Self {
        let mut this = self.number(value.len() as u64);
        this.0.extend_from_slice(value);
        this
    }

    fn payload(self, payload: &Payload) -> Self {
        match payload {
            Payload::Inline(bytes) => self.byte(0).bytes(bytes),
            Payload::Follows { bytes, tag } => self.byte(1).number(*bytes).number(*tag as u64),
        }
    }
}

struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn malformed<T>(&self) -> Result<T, Malformed> {
        Err(Malformed { length: self.all.len(), at: self.at })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        match self.at.checked_add(len).and_then(|end| self.all.get(self.at..end)) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => self.malformed(),
        }
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn number(&mut self) -> Result<u64, Malformed> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes were taken")))
    }

    fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.number()?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec()).or_else(|_| self.malformed())
    }

    fn payload(&mut self) -> Result<Payload, Malformed> {
        match self.byte()? {
            0 => Ok(Payload::Inline(self.bytes()?.to_vec())),
            1 => Ok(Payload::Follows { bytes: self.number()?, tag: self.number()? as i32 }),
            _ => self.malformed(),
        }
    }
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Message::Arrived { slot: (group, seq, phase), op, payload } => {
                writer.byte(0).number(*group).number(*seq).byte(*phase).bytes(op.as_bytes()).payload(payload).0
            }
            Message::Read { id, window, key } => {
                writer.byte(1).number(*id).number(u64::from(*window)).number(key.object).number(key.version).0
            }
            Message::Seen { id, answer } => {
                let writer = writer.byte(2).number(*id);
                match answer {
                    Answer::Ready { tag, payload } => writer.byte(0).bytes(tag.as_bytes()).payload(payload).0,
                    Answer::Gone => writer.byte(1).0,
                    Answer::Left => writer.byte(2).0,
                    Answer::Failed(reason) => writer.byte(3).bytes(reason.as_bytes()).0,
                }
            }
            Message::Abort(trouble) => {
                let text = serde_json::to_vec(trouble).expect("numbers and texts are always JSON");
                writer.byte(3).bytes(&text).0
            }
            Message::Bye => writer.byte(4).0,
            Message::Done => writer.byte(5).0,
        }
    }

    pub(super) fn decode(all: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader { all, at: 0 };
        let message = match reader.byte()? {
            0 => Message::Arrived {
                slot: (reader.number()?, reader.number()?, reader.byte()?),
                op: reader.text()?,
                payload: reader.payload()?,
            },
            1 => Message::Read {
                id: reader.number()?,
                window: reader.number()? as u32,
                key: Key { object: reader.number()?, version: reader.number()? },
            },
            2 => Message::Seen {
                id: reader.number()?,
                answer: match reader.byte()? {
                    0 => Answer::Ready { tag: reader.text()?, payload: reader.payload()? },
                    1 => Answer::Gone,
                    2 => Answer::Left,
                    3 => Answer::Failed(reader.text()?),
                    _ => return reader.malformed(),
                },
            },
            3 => match serde_json::from_slice(reader.bytes()?) {
                Ok(trouble) => Message::Abort(trouble),
                Err(_) => return reader.malformed(),
            },
            4 => Message::Bye,
            5 => Message::Done,
            _ => return reader.malformed(),
        };
        if reader.at == all.len() { Ok(message) } else { reader.malformed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Message> {
        let payload = Payload::Follows { bytes: 5 << 30, tag: 32_000 };
        let cause = CommError::Gone { rank: 1, what: "parameter 3".into(), peer: 0 };
        vec![
            Message::Arrived { slot: (7, u64::MAX, 1), op: "barrier".into(), payload: Payload::Inline(vec![]) },
            Message::Arrived { slot: (1, 2, 0), op: "all_gather of 3 f32".into(), payload: payload.clone() },
            Message::Read { id: 9, window: 2, key: Key { object: 3, version: 4 } },
            Message::Seen {
                id: 9,
                answer: Answer::Ready { tag: "f32 [2]".into(), payload: Payload::Inline(vec![1, 2]) },
            },
            Message::Seen { id: 9, answer: Answer::Ready { tag: String::new(), payload } },
            Message::Seen { id: 1, answer: Answer::Gone },
            Message::Seen { id: 1, answer: Answer::Left },
            Message::Seen { id: 1, answer: Answer::Failed("its disk".into()) },
            Message::Abort(Trouble { peer: 1, reason: "é".into(), cause: Some(cause) }),
            Message::Abort(Trouble { peer: 0, reason: String::new(), cause: None }),
            Message::Bye,
            Message::Done,
        ]
    }

    #[test]
    fn messages_survive_the_wire() {
        for message in samples() {
            let back = Message::decode(&message.encode()).unwrap();
            assert_eq!(format!("{back:?}"), format!("{message:?}"));
        }
    }

    #[test]
    fn cut_or_damaged_messages_are_refused_or_read_but_never_panic() {
        for message in samples() {
            let bytes = message.encode();
            for end in 0..bytes.len() {
                assert!(Message::decode(&bytes[..end]).is_err(), "{message:?} cut at {end}");
            }
            for at in 0..bytes.len() {
                for flip in [1, 0x80, 0xff] {
                    let mut damaged = bytes.clone();
                    damaged[at] ^= flip;
                    let _ = Message::decode(&damaged);
                }
            }
            let longer = [bytes, vec![0]].concat();
            assert!(Message::decode(&longer).is_err());
        }
    }
}
