//! Saving beside the training: the caller pays for a copy, a thread of each rank for the rest.
//!
//! The threads have a group of their own, so that their collectives and the training's do not meet. One save is in
//! flight at a time: it owns a copy of what it writes, and two copies would be two too many.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{CheckpointError, Piece, SaveOptions, Saved, save};
use crate::Collective;
use crate::collective::threads::panic_reason;

/// Saves on a thread of its own, which is joined by dropping this.
#[derive(Debug)]
pub struct AsyncSaver {
    rank: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    in_flight: Option<Receiver<Result<Saved, CheckpointError>>>,
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

struct Job {
    dir: PathBuf,
    step: u64,
    pieces: Vec<Piece<'static>>,
    state: Value,
    options: SaveOptions,
    reply: Sender<Result<Saved, CheckpointError>>,
}

impl AsyncSaver {
    /// Starts this rank's thread `rank-R-checkpoint` with a group of its own. A collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Comm`], and [`CheckpointError::Stopped`] when the system gives no thread.
    pub fn new(comm: &dyn Collective) -> Result<Self, CheckpointError> {
        let rank = comm.rank();
        let group = comm.duplicate("checkpoint").map_err(|source| {
            let doing = "making a group for checkpoints".to_string();
            CheckpointError::Comm { doing, source: Box::new(source) }
        })?;
        let (jobs, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("rank-{rank}-checkpoint"))
            .spawn(move || work(&group, inbox))
            .map_err(|error| CheckpointError::Stopped { rank, reason: error.to_string() })?;
        Ok(Self { rank, jobs: Some(jobs), thread: Some(thread), in_flight: None })
    }

    /// Copies what is borrowed of `pieces` and starts to save it as [`save`](save()) does. A save that is still under way is
    /// waited for first.
    ///
    /// # Errors
    ///
    /// The error of the save before, in which case this one has not been started, on any rank.
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
        let pieces = pieces.into_iter().map(Piece::into_owned).collect();
        let (reply, result) = channel();
        let job = Job { dir: dir.to_path_buf(), step, pieces, state, options, reply };
        self.in_flight = Some(result);
        let jobs = self.jobs.as_ref().expect("jobs are closed only on drop");
        // When the thread has stopped, the closed reply says so to whoever waits for it.
        let _ = jobs.send(job);
        Ok(Started { stall: begin.elapsed(), waited, previous })
    }

    /// Waits for the save that is under way, if there is one, for as long as it gets on: a rank that does not come, or a disk that
    /// does nothing, ends it after the communicator's deadline.
    ///
    /// # Errors
    ///
    /// Those of [`save`](save()).
    pub fn wait(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let Some(result) = self.in_flight.take() else { return Ok(None) };
        let stopped = |_| Err(CheckpointError::Stopped { rank: self.rank, reason: "it has ended".to_string() });
        result.recv().unwrap_or_else(stopped).map(Some)
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its panics are caught inside and come out of `wait`.
            let _ = thread.join();
        }
        if let Err(error) = self.wait() {
            tracing::error!("a checkpoint that nobody waited for: {error}");
        }
    }
}

fn work(group: &Arc<dyn Collective>, inbox: Receiver<Job>) {
    for Job { dir, step, pieces, state, options, reply } in inbox {
        let outcome = catch_unwind(AssertUnwindSafe(|| save(&**group, &dir, step, &pieces, &state, &options)));
        // The copy is given back before anybody hears that the save has ended.
        drop(pieces);
        let result = outcome.unwrap_or_else(|payload| {
            let (rank, reason) = (group.rank(), panic_reason(&*payload));
            group.abort(&format!("the checkpoint thread panicked: {reason}"));
            Err(CheckpointError::Stopped { rank, reason })
        });
        // The saver may have been dropped in the middle of a panic: then nobody wants the result.
        let _ = reply.send(result);
    }
}
