//! Values that a rank lets the others read: a key, and the value's bytes.

/// The name of one version of one object, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The object (a parameter's number).
    pub object: u64,
    /// Its version, from 0, ascending.
    pub version: u64,
}

/// The answer of a published value to a reader in another process.
pub enum Exposure {
    /// Not ready yet: the value is being computed. The reader waits.
    Pending,
    /// The value's bytes.
    Ready {
        /// Type and shape of the bytes; the reader compares it with what it expects.
        tag: String,
        /// The bytes, borrowed until they are sent.
        bytes: Box<dyn AsRef<[u8]> + Send + Sync>,
    },
    /// Never ready, for this reason.
    Failed(String),
}

/// A value whose bytes other processes may read.
pub trait Expose {
    /// Returns the current bytes of the part that `key` names. Called on a thread that serves the other ranks' reads: it may
    /// copy, compute or read a disk, but must not wait for anything that another rank does.
    fn expose(&self, key: Key) -> Exposure;
}
