//! Errors of saving or reading a checkpoint. Each says what was expected, what was found and what to change.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::CommError;

/// An error of saving or reading a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A required file or folder is missing.
    #[error("{what} is missing: expected it at {}; restore the file, or resume from another checkpoint", path.display())]
    Missing {
        /// Description of the missing item.
        what: &'static str,
        /// The expected path.
        path: PathBuf,
    },
    /// A file is shorter than the manifest says.
    #[error(
        "{} is truncated: expected {expected_bytes} bytes, found {got_bytes}; copy it again, or resume from another \
         checkpoint", path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Size when it was saved.
        expected_bytes: u64,
        /// Size now.
        got_bytes: u64,
    },
    /// A file is longer than the manifest says.
    #[error(
        "{} is not the file that was saved: expected {expected_bytes} bytes, found {got_bytes}; copy it again, or resume \
         from another checkpoint", path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Size when it was saved.
        expected_bytes: u64,
        /// Size now.
        got_bytes: u64,
    },
    /// A tensor's bytes differ from the saved ones.
    #[error(
        "tensor '{tensor}' is corrupt in {}: expected crc32c {expected:08x}, its bytes give {got:08x}; copy the file \
         again, or resume from another checkpoint", path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The tensor whose shard is damaged.
        tensor: String,
        /// Checksum when it was saved.
        expected: u32,
        /// Checksum now.
        got: u32,
    },
    /// An intact file of another rank, step or save is in this file's place.
    #[error(
        "{} is in the wrong place: expected the file of {expected}, found the file of {got}; put the right file there, or \
         resume from another checkpoint", path.display()
    )]
    Swapped {
        /// The file.
        path: PathBuf,
        /// The owner of the expected file.
        expected: String,
        /// The owner of the file found.
        got: String,
    },
    /// A file's header cannot be read, or contradicts the manifest.
    #[error("the header of {} is damaged: {reason}; copy the file again, or resume from another checkpoint", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// The problem, with the expected value.
        reason: String,
    },
    /// The manifest cannot be read, or contradicts itself.
    #[error(
        "{} is damaged: {reason}; restore it (it is not meant to be edited), or resume from another checkpoint", path.display()
    )]
    BadManifest {
        /// The manifest.
        path: PathBuf,
        /// The problem, with the expected value.
        reason: String,
    },
    /// The checkpoint was written by a later version of this crate.
    #[error(
        "{} has format {version}, written by version {written_by}; this version {} reads formats up to {supported}: \
         update to read it", path.display(), env!("CARGO_PKG_VERSION")
    )]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        version: u64,
        /// The newest format that can be read.
        supported: u32,
        /// The version of the crate that wrote it.
        written_by: String,
    },
    /// Ranks called [`save`](super::save()) with different arguments.
    #[error(
        "ranks disagree on {what}: rank {rank} saves {got}, rank {first_rank} saves {expected}; all ranks must save the same"
    )]
    Disagree {
        /// The argument that differs.
        what: String,
        /// The first rank of the group that saves.
        first_rank: usize,
        /// The first rank that differs from it.
        rank: usize,
        /// The first rank's value.
        expected: String,
        /// The differing rank's value.
        got: String,
    },
    /// A rank failed to save. Every rank gets this error, and earlier checkpoints are unchanged.
    #[error("saving step {step} failed on rank {rank} of {world}: {reason}")]
    SaveFailed {
        /// The step.
        step: u64,
        /// The first rank that failed.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// The failed rank's error.
        reason: String,
    },
    /// Another save into the same folder is still running.
    #[error("another save into {} is in progress: wait for it, or give each run its own folder", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// A folder cannot be created at this path.
    #[error("cannot create folder {}: {reason}", path.display())]
    Destination {
        /// The path.
        path: PathBuf,
        /// The obstacle, and what to change.
        reason: String,
    },
    /// Data to be written does not match its declaration.
    #[error("tensor '{tensor}': expected {expected}, got {got}")]
    Unfit {
        /// The tensor.
        tensor: String,
        /// The declared value.
        expected: String,
        /// The value received.
        got: String,
    },
    /// The checkpoint has no such tensor.
    #[error("{} has no tensor '{tensor}' among its {count} tensors; list them to see their names", path.display())]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The name asked for.
        tensor: String,
        /// Number of tensors in the checkpoint.
        count: usize,
    },
    /// The requested elements are outside the tensor.
    #[error("tensor '{tensor}' has {numel} elements, but elements {start}..{end} were requested")]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// Number of its elements.
        numel: usize,
        /// First requested element.
        start: usize,
        /// End of the requested range (exclusive).
        end: usize,
    },
    /// The thread of an [`AsyncSaver`](super::AsyncSaver) ended in a panic.
    #[error("rank {rank}'s checkpoint thread stopped: {reason}")]
    Stopped {
        /// The rank.
        rank: usize,
        /// The panic's message.
        reason: String,
    },
    /// Another rank reported this error.
    #[error("{reason}")]
    Told {
        /// The reporting rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// Ranks that resume together found different checkpoints, for example parts of a model whose save was interrupted.
    #[error(
        "ranks would resume from different checkpoints: rank 0 has {}, rank {} has {}; copy the missing checkpoints, \
         or remove the steps that only some ranks have", .0.first, .0.rank, .0.other
    )]
    Unlike(crate::collective::Difference),
    /// Communication between the ranks failed.
    #[error("{doing}: {source}")]
    Comm {
        /// The operation that they were about to start.
        doing: String,
        /// The collective's error.
        source: Box<CommError>,
    },
}

/// Adds the action and the path to an I/O error.
pub(super) fn io_at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io { action, path: path.to_path_buf(), source }
}

/// Shortens values of unbounded length for error messages.
pub(super) fn brief(shown: impl fmt::Display) -> String {
    cut(shown, 100)
}

/// Formats an error of serde, which may quote text of unbounded length.
pub(super) fn parsing(error: serde_json::Error) -> String {
    cut(error, 400)
}

fn cut(shown: impl fmt::Display, limit: usize) -> String {
    struct Cut(String, usize);
    impl fmt::Write for Cut {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let end = text.floor_char_boundary(self.1 - self.0.len().min(self.1));
            self.0.push_str(&text[..end]);
            if end < text.len() {
                self.0.push_str("...");
                return Err(fmt::Error);
            }
            Ok(())
        }
    }
    let mut cut = Cut(String::new(), limit);
    // An error means that the limit is reached.
    let _ = fmt::Write::write_fmt(&mut cut, format_args!("{shown}"));
    cut.0
}

#[cfg(test)]
mod tests {
    use super::brief;

    #[test]
    fn errors_are_brief() {
        assert_eq!(brief("short"), "short");
        assert_eq!(brief("ü".repeat(1000)), format!("{}...", "ü".repeat(50)));
        assert_eq!(brief(format_args!("{:?}", [1u64 << 63; 64])).len(), 103);
    }
}
