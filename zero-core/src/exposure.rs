//! What a rank lets the others read: a value under a key, and its bytes.

/// Names one version of one object, alike on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The object (a parameter's number).
    pub object: u64,
    /// Its version, from 0, ascending.
    pub version: u64,
}

/// What a published value gives to a reader in another process.
pub enum Exposure {
    /// Nothing yet: it is being made. The reader waits.
    Pending,
    /// Its bytes.
    Ready {
        /// What they are (type and shape); the reader compares it with what it expects.
        tag: String,
        /// The bytes, lent for as long as it takes to send them.
        bytes: Box<dyn AsRef<[u8]> + Send + Sync>,
    },
    /// Nothing ever: why.
    Failed(String),
}

/// A value whose bytes other processes may read.
pub trait Expose {
    /// The bytes as they are now, as what `key` names of them. Called on a thread that serves the other ranks' reads: it may copy,
    /// compute or read a disk, but does not wait for anything that another rank does.
    fn expose(&self, key: Key) -> Exposure;
}
