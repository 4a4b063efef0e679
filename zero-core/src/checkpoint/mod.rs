//! Sharded checkpoints: every rank writes what it owns, and any number of ranks reads it back.
//!
//! ```text
//! DIR/latest                                          the name of the newest complete checkpoint
//! DIR/step-00000012/rank-00000-of-00002.safetensors   one file per rank
//! DIR/step-00000012/manifest.json                     what the checkpoint consists of, with checksums
//! ```
//!
//! * In: each rank's [`Piece`] of every tensor, cut by [`Partition`](crate::Partition) at every ZeRO stage, so that the
//!   layout knows nothing of stages, buckets or offloading; and a JSON value, the engine's state.
//! * Out: elements of any tensor by their range, checked against the checksum of every piece that they come from.
//! * Memory: [`save`](save()) borrows the pieces and holds a few buffers of a MiB per rank; [`save_streamed`] one piece at
//!   a time beside them; [`AsyncSaver`] owns a copy of all until they are written; [`Checkpoint`] holds what manifest and headers say,
//!   and reads what is asked for into the caller's memory.
//! * Threads: [`save`](save()) is a collective of its callers, whose disks are written by a thread of each rank, so that the
//!   ranks can say that they get on; [`AsyncSaver`] has a named thread per rank for both.
//!
//! # Why a crash at any moment leaves a sound checkpoint
//!
//! A checkpoint is complete or invisible. What makes it so is the order in which things reach the disk:
//!
//! 1. Rank 0 takes the lock `DIR/.lock`, which the system gives back when a process dies, however it dies. Whoever
//!    holds it knows that the remains of other saves in `DIR` are nobody's, and removes them.
//! 2. Each rank writes its file into `DIR/.saving-step-...` and syncs it. A name that starts with a dot is no checkpoint
//!    to any reader. The sync comes before the manifest: a manifest on the disk must prove that the files are.
//! 3. The ranks exchange sizes, checksums and success. If one failed, all return its error and the folder is removed.
//! 4. Rank 0 looks at the files' sizes, writes the manifest under another name, syncs it, gives it its name and syncs
//!    the folder: from now on the folder is complete, its names included, but still invisible.
//! 5. Rank 0 writes the new `latest` under another name and syncs it, so that nothing that needs space is left to do.
//! 6. The folder is renamed to `step-...` and `DIR` synced: the checkpoint is visible. An earlier one of the same step
//!    was set aside as `.replaced-step-...` a moment before, where readers find it until the new one is there.
//! 7. `latest` is replaced by a rename and `DIR` synced, only now, because it must never name what may not survive.
//! 8. Checkpoints beyond the `keep_last` newest sound ones are renamed to `.pruned-...` and removed: none is ever seen half
//!    removed. Damaged ones are not counted: they go when so many sound ones are newer.
//!
//! A crash before 6 leaves the former checkpoint and remains that the next save sweeps away. A crash between 6 and 7
//! leaves `latest` on the former checkpoint, which is still there, because 8 comes after.

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
mod writer;

pub use asynchronous::{AsyncSaver, Started};
pub use element::ElementType;
pub use error::CheckpointError;
pub use folder::NewFolder;
pub use header::{Header, HeaderEntry};
pub use latest::{Found, check_together, find_latest, find_latest_together};
pub use list::{Listed, Listing, Remains, disk_bytes, is_checkpoint_name, list};
pub use manifest::{Check, FORMAT_VERSION, Manifest, TensorEntry};
pub use open::{Checkpoint, piece_for, verify};
pub use piece::{Piece, TensorSpec};
pub use publish::SaveOptions;
pub use save::{Saved, save, save_streamed};
pub use side::SideFile;
pub use writer::SafetensorsWriter;
