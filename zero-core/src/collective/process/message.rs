//! The control messages between the ranks' communication threads, and their encoding.
//!
//! A message is a kind and its fields in little-endian; texts are preceded by their length. Large payloads follow on the
//! data channel under a tag that the message names.

use super::super::run_status::Failure;
use crate::exposure::Key;

/// Payloads up to this many bytes travel inside the control message.
pub(super) const INLINE: usize = 2 << 10;

/// The payload of a message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Payload {
    /// The bytes are in the message.
    Inline(Vec<u8>),
    /// The bytes follow on the data channel.
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

/// Identifier of an exchange on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Slot {
    pub(super) group: u64,
    /// The operation's number in the group.
    pub(super) seq: u64,
    pub(super) phase: u8,
}

/// An owner's answer to a read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer<P> {
    /// The value.
    Ready { tag: String, payload: P },
    /// A later version has replaced it.
    Gone,
    /// The owner has ended without publishing it.
    Left,
    /// The value is not available.
    Failed(String),
}

/// A stage of a rank's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It takes part in no further operation.
    Part,
    /// It has reported everything after a failure, and its process may be ended.
    Process,
}

/// The ranks that have reached a stage of their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The sender.
    Sender,
    /// The sender and all ranks below it in the tree of the run's ranks.
    Branch,
    /// All ranks of the run.
    All,
}

#[derive(Debug, Clone)]
pub(super) enum Message {
    /// The sender has reached an operation; the payload is its contribution to the receiver.
    Arrived { slot: Slot, op: String, payload: Payload },
    /// The sender requests data that the receiver has published.
    Read { id: u64, window: u32, key: Key },
    /// The answer to a read.
    ReadValue { id: u64, answer: Answer<Payload> },
    /// A rank has failed.
    Abort(Failure),
    /// Ranks have ended.
    Ended { end: End, who: Who },
    /// The sender has ended, and takes part in no further operation of this group.
    Absent { group: u64 },
}

/// A message that cannot be decoded: the ranks run different builds.
#[derive(Debug, thiserror::Error)]
#[error("a message of {length} bytes that cannot be decoded at byte {at}; run the same build on all ranks")]
pub(super) struct Malformed {
    length: usize,
    at: usize,
}

struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn malformed<T>(&self) -> Result<T, Malformed> {
        Err(Malformed { length: self.all.len(), at: self.at })
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        match self.at.checked_add(len).and_then(|end| self.all.get(self.at..end)) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => self.malformed(),
        }
    }
}

/// A field of a message.
trait Coded: Sized {
    fn write(&self, to: &mut Vec<u8>);

    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed>;
}

impl Coded for u8 {
    fn write(&self, to: &mut Vec<u8>) {
        to.push(*self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(from.bytes(1)?[0])
    }
}

/// Encodes all other numbers as eight bytes.
macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Coded for $number {
            fn write(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&(*self as u64).to_le_bytes());
            }

            fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(u64::from_le_bytes(from.bytes(8)?.try_into().expect("eight bytes were taken")) as $number)
            }
        }
    )*};
}

numbers!(u64, u32, i32);

impl Coded for Vec<u8> {
    fn write(&self, to: &mut Vec<u8>) {
        (self.len() as u64).write(to);
        to.extend_from_slice(self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = u64::read(from)?;
        Ok(from.bytes(usize::try_from(len).unwrap_or(usize::MAX))?.to_vec())
    }
}

impl Coded for String {
    fn write(&self, to: &mut Vec<u8>) {
        (self.len() as u64).write(to);
        to.extend_from_slice(self.as_bytes());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        String::from_utf8(Vec::read(from)?).or_else(|_| from.malformed())
    }
}

impl Coded for Failure {
    fn write(&self, to: &mut Vec<u8>) {
        serde_json::to_vec(self).expect("numbers and texts are always JSON").write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        serde_json::from_slice(&Vec::read(from)?).or_else(|_| from.malformed())
    }
}

/// Encodes the fields in order.
macro_rules! fields {
    ($type:ident: $($field:ident),*) => {
        impl Coded for $type {
            fn write(&self, to: &mut Vec<u8>) {
                $(self.$field.write(to);)*
            }

            fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(Self { $($field: Coded::read(from)?),* })
            }
        }
    };
}

fields!(Slot: group, seq, phase);
fields!(Key: object, version);

/// Encodes a kind as one byte, followed by its fields in order.
macro_rules! kinds {
    ($type:ident $(<$of:ty>)?: $($kind:literal $variant:ident $(($only:ident))? $({ $($field:ident),* })?;)*) => {
        impl Coded for $type $(<$of>)? {
            fn write(&self, to: &mut Vec<u8>) {
                match self {$(
                    $type::$variant $(($only))? $({ $($field),* })? => {
                        to.push($kind);
                        $($only.write(to);)?
                        $($($field.write(to);)*)?
                    }
                )*}
            }

            fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(match u8::read(from)? {
                    $($kind => {
                        $(let $only = Coded::read(from)?;)?
                        $($(let $field = Coded::read(from)?;)*)?
                        $type::$variant $(($only))? $({ $($field),* })?
                    })*
                    _ => return from.malformed(),
                })
            }
        }
    };
}

kinds!(Payload: 0 Inline(bytes); 1 Follows { bytes, tag };);
kinds!(Answer<Payload>: 0 Ready { tag, payload }; 1 Gone; 2 Left; 3 Failed(reason););
kinds!(End: 0 Part; 1 Process;);
kinds!(Who: 0 Sender; 1 Branch; 2 All;);
kinds!(Message:
    0 Arrived { slot, op, payload };
    1 Read { id, window, key };
    2 ReadValue { id, answer };
    3 Abort(trouble);
    4 Ended { end, who };
    5 Absent { group };
);

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    pub(super) fn decode(all: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader { all, at: 0 };
        let message = Self::read(&mut reader)?;
        if reader.at == all.len() { Ok(message) } else { reader.malformed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CommError;

    fn samples() -> Vec<Message> {
        let payload = Payload::Follows { bytes: 5 << 30, tag: 32_000 };
        let cause = CommError::Gone { rank: 1, what: "parameter 3".into(), peer: 0 };
        vec![
            Message::Arrived {
                slot: Slot { group: 7, seq: u64::MAX, phase: 1 },
                op: "barrier".into(),
                payload: Payload::Inline(vec![]),
            },
            Message::Arrived {
                slot: Slot { group: 1, seq: 2, phase: 0 },
                op: "all_gather of 3 f32".into(),
                payload: payload.clone(),
            },
            Message::Read { id: 9, window: 2, key: Key { object: 3, version: 4 } },
            Message::ReadValue {
                id: 9,
                answer: Answer::Ready { tag: "f32 [2]".into(), payload: Payload::Inline(vec![1, 2]) },
            },
            Message::ReadValue { id: 9, answer: Answer::Ready { tag: String::new(), payload } },
            Message::ReadValue { id: 1, answer: Answer::Gone },
            Message::ReadValue { id: 1, answer: Answer::Left },
            Message::ReadValue { id: 1, answer: Answer::Failed("its disk".into()) },
            Message::Abort(Failure { peer: 1, reason: "é".into(), cause: Some(cause) }),
            Message::Abort(Failure { peer: 0, reason: "".into(), cause: None }),
            Message::Ended { end: End::Part, who: Who::Sender },
            Message::Ended { end: End::Part, who: Who::All },
            Message::Ended { end: End::Process, who: Who::Branch },
            Message::Absent { group: u64::MAX },
        ]
    }

    #[test]
    fn the_bytes_stay_what_they_are() {
        let payload = Payload::Follows { bytes: 3, tag: 0x0102 };
        let message = Message::ReadValue { id: 7, answer: Answer::Ready { tag: "f".into(), payload } };
        let number = |first: u8, second: u8| [first, second, 0, 0, 0, 0, 0, 0];
        let parts = [&[2][..], &number(7, 0), &[0], &number(1, 0), b"f", &[1], &number(3, 0), &number(2, 1)];
        assert_eq!(message.encode(), parts.concat());
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
