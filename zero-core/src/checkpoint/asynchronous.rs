//! Asynchronous saving: the caller only waits for a copy, and a thread of each rank does the rest.
//!
//! The threads have a group of their own, so that their collectives do not mix with those of training. One save is in flight at a time,
//! since each owns a copy of what it writes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{CheckpointError, Piece, SaveOptions, Saved, save};
use crate::Collective;
use crate::collective::threads::panic_reason;

/// Saves on a thread of its own. Waiting for the save, or dropping this, joins the thread.
#[derive(Debug)]
pub struct AsyncSaver {
    group: Arc<dyn Collective>,
    in_flight: Option<JoinHandle<Result<Saved, CheckpointError>>>,
}

/// A save in progress.
#[derive(Debug, Clone, PartialEq)]
pub struct Started {
    /// Time for which training was stopped.
    pub stall: Duration,
    /// Part of `stall` spent waiting for the previous save; the rest was copying.
    pub waited: Duration,
    /// The previous save, unless [`AsyncSaver::wait`] has already returned it.
    pub previous: Option<Saved>,
}

impl AsyncSaver {
    /// Creates the group in which the ranks' threads `rank-R-checkpoint` communicate. A collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Comm`].
    pub fn new(comm: &dyn Collective) -> Result<Self, CheckpointError> {
        let group = comm.duplicate("checkpoint").map_err(|source| {
            let doing = "creating the group for checkpoints".to_string();
            CheckpointError::Comm { doing, source: Box::new(source) }
        })?;
        Ok(Self { group, in_flight: None })
    }

    /// Copies the borrowed data of `pieces` and starts to save it as [`save`](save()) does. Waits first for a save that is still in
    /// progress.
    ///
    /// # Errors
    ///
    /// The error of the previous save; the new one is then started on no rank. [`CheckpointError::Stopped`] if the system cannot create a
    /// thread; the other ranks are notified.
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

    /// Waits for the save in progress, if any, while it makes progress. A rank that does not arrive, or a disk that does nothing, ends the
    /// save after the communicator's deadline.
    ///
    /// # Errors
    ///
    /// Same as [`save`](save()).
    pub fn wait(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let Some(thread) = self.in_flight.take() else { return Ok(None) };
        thread.join().expect("panics are caught in the thread").map(Some)
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("a background save failed: {error}");
        }
    }
}

/// Returns the error of this rank's thread, and ends the other ranks' waits for it.
fn stopped(group: &dyn Collective, what: &str, reason: String) -> CheckpointError {
    group.abort(&format!("the checkpoint thread {what}: {reason}"));
    CheckpointError::Stopped { rank: group.place().rank, reason }
}
