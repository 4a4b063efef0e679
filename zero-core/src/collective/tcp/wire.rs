//! Messages between a rank and the hub, and their bytes.
//!
//! A message is two lengths (u32, little-endian), a head in JSON and a payload: the elements of a buffer as they lie in
//! memory, little-endian on every machine that this runs on.

use std::io::{Error, ErrorKind, Read, Result, Write};

use serde::{Deserialize, Serialize};

use super::super::{Buffer, DType, ReduceOp, Request};
use super::MAX_BYTES;
use crate::CommError;

/// The longest head: an error with its texts.
const MAX_HEAD: usize = 1 << 20;

/// What a rank does with its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    AllGather,
    ReduceScatter(Reduce),
    AllReduce(Reduce),
    /// From the rank at this place of the group.
    Broadcast(usize),
    AllToAll,
    Barrier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reduce {
    Sum,
    Mean,
    Max,
}

impl From<ReduceOp> for Reduce {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Sum => Reduce::Sum,
            ReduceOp::Mean => Reduce::Mean,
            ReduceOp::Max => Reduce::Max,
        }
    }
}

impl From<Reduce> for ReduceOp {
    fn from(op: Reduce) -> Self {
        match op {
            Reduce::Sum => ReduceOp::Sum,
            Reduce::Mean => ReduceOp::Mean,
            Reduce::Max => ReduceOp::Max,
        }
    }
}

impl Work {
    /// A request's work and its buffer.
    pub(super) fn of(request: Request) -> (Self, Buffer) {
        match request {
            Request::AllGather(buffer) => (Work::AllGather, buffer),
            Request::ReduceScatter(buffer, op) => (Work::ReduceScatter(op.into()), buffer),
            Request::AllReduce(buffer, op) => (Work::AllReduce(op.into()), buffer),
            Request::Broadcast(buffer, root) => (Work::Broadcast(root), buffer),
            Request::AllToAll(buffer) => (Work::AllToAll, buffer),
            Request::Barrier(_) => (Work::Barrier, Buffer::U8(Vec::new())),
        }
    }
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

/// Which operation: identity of its group, and its number there.
pub(super) type Slot = (u64, u64);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Head {
    /// All ranks have connected.
    Go,
    /// The sender has come to an operation; the payload is its part.
    Part { slot: Slot, label: String, members: Vec<usize>, op: String, work: Work, dtype: u8 },
    /// The receiver's result.
    Result { slot: Slot, dtype: u8 },
    /// The receiver's operation cannot end: this rank has ended without it.
    Without { slot: Slot, peer: usize },
    /// A rank has failed.
    Abort(Trouble),
    /// This rank takes part in nothing more.
    Bye(usize),
}

pub(super) fn code_of(dtype: DType) -> u8 {
    match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::Bf16 => 3,
        DType::U8 => 4,
    }
}

fn dtype_of(code: u8) -> Option<DType> {
    [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::U8].into_iter().find(|&dtype| code_of(dtype) == code)
}

/// A payload as a buffer.
pub(super) fn buffer_of(dtype: u8, payload: Vec<u8>) -> Result<Buffer> {
    let damaged = || Error::new(ErrorKind::InvalidData, "a payload that is no whole number of elements");
    dtype_of(dtype).and_then(|dtype| Buffer::from_bytes(dtype, payload)).ok_or_else(damaged)
}

/// Sends a message, with one write.
pub(super) fn send(to: &mut impl Write, head: &Head, payload: &[u8]) -> Result<()> {
    let mut bytes = vec![0; 8];
    serde_json::to_writer(&mut bytes, head)?;
    let head_bytes = bytes.len() - 8;
    bytes[..4].copy_from_slice(&(head_bytes as u32).to_le_bytes());
    bytes[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)
}

/// The next message; `None` at the end of the connection.
pub(super) fn receive(from: &mut impl Read, ranks: usize) -> Result<Option<(Head, Vec<u8>)>> {
    let mut lengths = [0; 8];
    let mut have = 0;
    while have < lengths.len() {
        match from.read(&mut lengths[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(more) => have += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let length = |at: usize| u32::from_le_bytes(lengths[at..at + 4].try_into().expect("four bytes")) as usize;
    let (head, payload) = (length(0), length(4));
    // A result may be what all ranks brought, joined.
    if head > MAX_HEAD || payload > MAX_BYTES.saturating_mul(ranks) {
        return Err(Error::new(ErrorKind::InvalidData, "a message that is longer than any"));
    }
    let mut bytes = vec![0; head];
    from.read_exact(&mut bytes)?;
    let head = serde_json::from_slice(&bytes)?;
    let mut bytes = vec![0; payload];
    from.read_exact(&mut bytes)?;
    Ok(Some((head, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let cause = CommError::Gone { rank: 1, what: "parameter 3".into(), peer: 0 };
        let heads = [
            Head::Go,
            Head::Part {
                slot: (u64::MAX, 7),
                label: "world".into(),
                members: vec![0, 2],
                op: "barrier".into(),
                work: Work::AllReduce(Reduce::Mean),
                dtype: code_of(DType::Bf16),
            },
            Head::Abort(Trouble { peer: 1, reason: "é".into(), cause: Some(cause) }),
            Head::Bye(3),
        ];
        let mut wire = Vec::new();
        for (i, head) in heads.iter().enumerate() {
            send(&mut wire, head, &vec![7; i]).unwrap();
        }
        let mut reader = wire.as_slice();
        for (i, head) in heads.iter().enumerate() {
            let (back, payload) = receive(&mut reader, 2).unwrap().unwrap();
            assert_eq!((format!("{back:?}"), payload.len()), (format!("{head:?}"), i));
        }
        assert!(receive(&mut reader, 2).unwrap().is_none());
    }

    #[test]
    fn cut_or_damaged_messages_are_errors() {
        let mut wire = Vec::new();
        send(&mut wire, &Head::Result { slot: (1, 2), dtype: 0 }, &[1, 2, 3, 4]).unwrap();
        for end in 1..wire.len() {
            assert!(receive(&mut &wire[..end], 2).is_err(), "cut at {end}");
        }
        for at in 0..wire.len() {
            let mut damaged = wire.clone();
            damaged[at] ^= 0x80;
            let _ = receive(&mut damaged.as_slice(), 2);
        }
        assert!(receive(&mut [0xff; 64].as_slice(), 2).is_err(), "no such length is allocated");
        assert!(buffer_of(0, vec![0; 3]).is_err() && buffer_of(9, vec![]).is_err());
    }

    #[test]
    fn buffers_survive_the_wire() {
        let floats = Buffer::from_f32(vec![1.5, -2.0, 3.25], DType::Bf16);
        for buffer in [floats, Buffer::F64(vec![0.1]), Buffer::U8(vec![1, 2]), Buffer::F32(vec![f32::MIN])] {
            let back = buffer_of(code_of(buffer.dtype()), buffer.as_bytes().to_vec()).unwrap();
            assert_eq!(back, buffer);
        }
    }
}
