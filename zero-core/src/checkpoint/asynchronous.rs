//! Saving beside the training: the caller pays for a copy, a thread of each rank for the rest.
//!
//! The threads have a group of their own, so that their collectives and the training's do not meet. One save is in
//! flight at a time: it owns a copy of what it writes, and two copies would be two too many.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{CheckpointError, Piece, SaveOptions, Saved, save};
use crate::Collective;
use crate::collective::threads::panic_reason;

/// Saves on a thread of its own, which is joined by waiting for it or by dropping this.
#[derive(Debug)]
pub struct AsyncSaver {
    group: Arc<dyn Collective>,
    in_flight: Option<JoinHandle<Result<Saved, CheckpointError>>>,
}

/// A save that is under way.
#[derive(Debug, Clone, PartialEq)]
pub struct Started {
    /// How long the training stood still for it.
    pub stall: Duration,
    /// How much of that was waiting for the save before it; the rest was copying.
    pub waited: Duration,
    /// The save before it, if nobody has asked for it by [`AsyncSaver::wait`].
    pub previous: Option<Saved>,
}

impl AsyncSaver {
    /// Makes the group in which this rank's thread `rank-R-checkpoint` will meet the others'. A collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Comm`].
    pub fn new(comm: &dyn Collective) -> Result<Self, CheckpointError> {
        let group = comm.duplicate("checkpoint").map_err(|source| {
            let doing = "making a group for checkpoints".to_string();
            CheckpointError::Comm { doing, source: Box::new(source) }
        })?;
        Ok(Self { group, in_flight: None })
    }

    /// Copies what is borrowed of `pieces` and starts to save it as [`save`](save()) does. A save that is still under way is
    /// waited for first.
    ///
    /// # Errors
    ///
    /// The error of the save before, in which case this one has not been started, on any rank; and
    /// [`CheckpointError::Stopped`] when the system gives no thread, which the other ranks are told.
    pub fn save(
        &mut self,
        dir: &Path,
        step: u64,
        pieces: Vec<Piece<'_>>,
        state: Value,
        options: SaveOptions,
    ) -> Result<Started, CheckpointError> {
        let begin = Instant::now();
        let previous = self.wait()?;
        let waited = begin.elapsed();
        let pieces: Vec<Piece<'static>> = pieces.into_iter().map(Piece::into_owned).collect();
        let (group, dir) = (self.group.clone(), dir.to_path_buf());
        let body = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| save(&*group, &dir, step, &pieces, &state, &options)));
            outcome.unwrap_or_else(|payload| Err(stopped(&*group, "panicked", panic_reason(&*payload))))
        };
        let thread =
            std::thread::Builder::new().name(format!("rank-{}-checkpoint", self.group.place().rank)).spawn(body);
        let thread = thread.map_err(|error| stopped(&*self.group, "could not be started", error.to_string()))?;
        self.in_flight = Some(thread);
        Ok(Started { stall: begin.elapsed(), waited, previous })
    }

    /// Waits for the save that is under way, if there is one, for as long as it gets on: a rank that does not come, or a disk that
    /// does nothing, ends it after the communicator's deadline.
    ///
    /// # Errors
    ///
    /// Those of [`save`](save()).
    pub fn wait(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let Some(thread) = self.in_flight.take() else { return Ok(None) };
        thread.join().expect("panics are caught in the thread").map(Some)
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("a checkpoint that nobody waited for: {error}");
        }
    }
}

/// The error of this rank's thread, which ends the others' waits for it.
fn stopped(group: &dyn Collective, what: &str, reason: String) -> CheckpointError {
    group.abort(&format!("the checkpoint thread {what}: {reason}"));
    CheckpointError::Stopped { rank: group.place().rank, reason }
}
