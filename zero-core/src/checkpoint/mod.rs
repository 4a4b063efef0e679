//! Sharded checkpoints: every rank writes its shards, and any number of ranks reads them back.
//!
//! ```text
//! DIR/latest                                          the name of the newest complete checkpoint
//! DIR/step-00000012/rank-00000-of-00002.safetensors   one file per rank
//! DIR/step-00000012/manifest.json                     the contents of the checkpoint, with checksums
//! ```
//!
//! * In: each rank's [`Piece`] of every tensor, partitioned by [`Partition`](crate::Partition) at every ZeRO stage, so that the layout does
//!   not depend on stages, buckets or offloading; and the engine's state as a JSON value.
//! * Out: elements of any tensor by their range, checked against the checksum of every shard that they come from.
//! * Memory: [`save`](save()) borrows the shards and holds a few buffers of 1 MiB per rank. [`save_streamed`] also holds one shard at a
//!   time. [`AsyncSaver`] owns a copy of all shards until they are written. [`Checkpoint`] holds the contents of manifest and headers, and
//!   reads the requested elements into the caller's memory.
//! * Threads: [`save`](save()) is a collective of its callers. A thread of each rank writes to the disk, so that the rank itself can report
//!   progress. [`AsyncSaver`] has a named thread per rank for both.
//!
//! # Why a crash at any moment leaves an intact checkpoint
//!
//! A checkpoint is complete or invisible. The order in which data reaches the disk ensures this:
//!
//! 1. Rank 0 takes the lock `DIR/.lock`, which the system releases when a process dies, however it dies. The holder knows that no other
//!    process uses the remains of other saves in `DIR`, and removes them.
//! 2. Each rank writes its file into `DIR/.saving-step-...` and syncs it. Readers ignore names that start with a dot. The sync comes before
//!    the manifest: a manifest on the disk must prove that the files are there.
//! 3. The ranks exchange sizes, checksums and success. If one failed, all return its error and the folder is removed.
//! 4. Rank 0 checks the files' sizes, writes the manifest under a temporary name, syncs it, renames it and syncs the folder. From now on
//!    the folder is complete, including its names, but still invisible.
//! 5. Rank 0 writes the new `latest` under a temporary name and syncs it, so that no later operation needs space.
//! 6. The folder is renamed to `step-...` and `DIR` synced: the checkpoint is visible. An earlier checkpoint of the same step is first
//!    renamed to `.replaced-step-...`, where readers find it until the new one is there.
//! 7. `latest` is replaced by a rename and `DIR` synced. This comes after 6 because `latest` must never name a checkpoint that may not
//!    survive a crash.
//! 8. Checkpoints beyond the `keep_last` newest intact ones are renamed to `.pruned-...` and removed, so that no reader sees a partly
//!    removed one. Damaged ones are not counted: they are removed when that many intact ones are newer.
//!
//! A crash before 6 leaves the previous checkpoint and remains that the next save removes. A crash between 6 and 7 leaves `latest` on the
//! previous checkpoint, which still exists, because 8 comes later.

mod asynchronous;
mod disk;
#[cfg(test)]
mod edits;
mod element;
mod error;
mod exchange;
mod folder;
mod header;
mod latest;
mod list;
mod manifest;
mod names;
mod open;
mod piece;
mod publish;
mod save;
mod shard;
mod side;
mod sound;
pub mod training;
mod writer;

pub use asynchronous::{AsyncSaver, Started};
pub use element::ElementType;
pub use error::CheckpointError;
pub use folder::NewFolder;
pub use header::{Header, HeaderEntry};
pub use latest::{Found, check_together, find_latest, find_latest_together};
pub use list::{InterruptedSave, ListedCheckpoint, Listing, disk_bytes, is_checkpoint_name, list};
pub use manifest::{Check, FORMAT_VERSION, Manifest, TensorEntry};
pub use open::{Checkpoint, piece_for, verify};
pub use piece::{Piece, TensorSpec};
pub use publish::SaveOptions;
pub use save::{Saved, save, save_streamed};
pub use side::SideFile;
pub use writer::SafetensorsWriter;
