//! Random damage to JSON, for tests of its parsers.

use proptest::prelude::*;
use proptest::sample::Index;

/// Bytes to insert: the characters of JSON syntax.
const JSON: &[u8] = b"0123456789[]{},:\"\\-eE";

/// A strategy for edits: a position, a byte, and a kind (overwrite with the byte, insert one of [`JSON`], or truncate).
pub fn edits() -> impl Strategy<Value = Vec<(Index, u8, u8)>> {
    prop::collection::vec((any::<Index>(), any::<u8>(), 0u8..3), 1..6)
}

pub fn edit(bytes: &mut Vec<u8>, edits: Vec<(Index, u8, u8)>) {
    for (at, byte, kind) in edits {
        let at = at.index(bytes.len());
        match kind {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, JSON[usize::from(byte) % JSON.len()]),
            _ => bytes.truncate(at.max(1)),
        }
    }
}
