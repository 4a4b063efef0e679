//! Exchange of values of any length between ranks, agreement of all ranks on the first failure, and work on disks.
//!
//! A separate thread does the work on a disk ([`DiskWork`]). Meanwhile the rank exchanges its status with the others every few seconds. So
//! a slow disk delays the work but makes no collective reach its deadline. A disk that does nothing for a full deadline fails the task, not
//! the run; its thread is then abandoned.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::CheckpointError;
use crate::collective::agree;
use crate::{Buffer, Collective, CommError};

/// Maximum time between two status exchanges while ranks work.
const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// Progress of a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    Done,
    Working,
    Failed,
}

/// The ranks' common task, for error messages.
#[derive(Debug, Clone)]
pub(super) enum Task {
    Save { step: u64 },
    Check { path: PathBuf },
}

impl Task {
    fn doing(&self) -> String {
        match self {
            Self::Save { step } => format!("saving step {step}"),
            Self::Check { path } => format!("verifying {}", path.display()),
        }
    }

    /// `rank` and `world` are those of the run.
    fn failed(&self, rank: usize, world: usize, reason: String) -> CheckpointError {
        match self {
            Self::Save { step } => CheckpointError::SaveFailed { step: *step, rank, world, reason },
            Self::Check { path } => {
                let source = io::Error::other(format!("rank {rank} of {world}: {reason}"));
                CheckpointError::Io { action: "verify", path: path.clone(), source }
            }
        }
    }
}

/// All ranks of a task, as seen by one of them.
pub(super) struct Ranks<'c> {
    comm: &'c dyn Collective,
    task: Task,
    /// Interval between two status exchanges.
    every: Duration,
    last: Instant,
    /// A rank has reported a failure: all ranks know it, and take part in the error exchange next.
    failed: bool,
}

impl<'c> Ranks<'c> {
    pub(super) fn new(comm: &'c dyn Collective, task: Task) -> Self {
        let every = (comm.deadline() / 4).min(LONGEST_SILENCE);
        Self { comm, task, every, last: Instant::now(), failed: false }
    }

    /// Returns the deadline for work that makes no progress.
    pub(super) fn patience(&self) -> Duration {
        self.comm.deadline()
    }

    /// Returns this rank's number in the run.
    pub(super) fn rank(&self) -> usize {
        self.comm.place().rank
    }

    /// Returns the interval between two status exchanges.
    pub(super) fn every(&self) -> Duration {
        self.every
    }

    /// Waits for all ranks and returns this rank's value, or on all ranks the error of the first rank that failed.
    pub(super) fn together<T>(&self, mine: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
        let (told, mine) = match mine {
            Ok(value) => (None, Some(value)),
            Err(error) => (Some(error.to_string()), None),
        };
        self.settled(told)?;
        Ok(mine.expect("a rank that has not failed has its value"))
    }

    /// Returns, on all ranks, the error of the first rank that failed.
    fn settled(&self, failed: Option<String>) -> Result<(), CheckpointError> {
        match self.first_told(failed)? {
            None => Ok(()),
            Some((rank, reason)) => Err(self.task.failed(rank, self.comm.place().world, reason)),
        }
    }

    /// Returns, on every rank, the first rank with a message, by its number in the run, and its message.
    pub(super) fn first_told(&self, mine: Option<String>) -> Result<Option<(usize, String)>, CheckpointError> {
        let told = agree::first_told(self.comm, mine, "").map_err(|error| self.comm_error(error))?;
        Ok(told.map(|(at, reason)| (self.comm.members()[at], reason)))
    }

    /// Returns, on every rank, the first rank whose value differs from the first rank's, by its number in the run, with the first rank's
    /// value and its own.
    pub(super) fn first_unlike<T: Serialize + DeserializeOwned>(
        &self,
        mine: &T,
    ) -> Result<Option<(usize, T, T)>, CheckpointError> {
        let unlike = agree::first_unlike(self.comm, json(mine), "").map_err(|error| self.comm_error(error))?;
        let in_run = |at: usize| self.comm.members()[at];
        unlike.map(|(at, [first, other])| Ok((in_run(at), self.value(&first)?, self.value(&other)?))).transpose()
    }

    /// Returns rank 0's value on every rank.
    pub(super) fn of_first<T: Serialize + DeserializeOwned>(&self, mine: &T) -> Result<T, CheckpointError> {
        let all = agree::broadcast_bytes(self.comm, 0, json(mine), "").map_err(|error| self.comm_error(error))?;
        self.value(&all)
    }

    /// Returns every rank's value, in rank order, on rank 0; nothing on the others.
    pub(super) fn to_first<T: Serialize + DeserializeOwned>(&self, mine: &T) -> Result<Vec<T>, CheckpointError> {
        let all = agree::gather_bytes(self.comm, json(mine), "").map_err(|error| self.comm_error(error))?;
        all.iter().map(|bytes| self.value(bytes)).collect()
    }

    fn value<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, CheckpointError> {
        let failed = |error: serde_json::Error| {
            self.task.failed(
                self.rank(),
                self.comm.place().world,
                format!("cannot parse the message of another rank: {error}"),
            )
        };
        serde_json::from_slice(bytes).map_err(failed)
    }

    /// Waits for all ranks' work as long as it makes progress, and then acts as [`Ranks::together`]. A rank without work contributes
    /// `idle`.
    pub(super) fn share_work<T>(
        &mut self,
        work: Option<Result<DiskWork<T>, CheckpointError>>,
        idle: impl FnOnce() -> T,
    ) -> Result<T, CheckpointError> {
        let (work, ended) = match work {
            None => (None, Some(Ok(idle()))),
            Some(Ok(work)) => (Some(work), None),
            Some(Err(error)) => (None, Some(Err(error))),
        };
        self.finish(work, ended)
    }

    /// Waits until the work of all ranks has ended, or that of one has failed. Returns this rank's result, or the error. `ended` is this
    /// rank's result if it is already known.
    pub(super) fn finish<T>(
        &mut self,
        mut work: Option<DiskWork<T>>,
        mut ended: Option<Result<T, CheckpointError>>,
    ) -> Result<T, CheckpointError> {
        while !self.failed {
            if let (None, Some(work)) = (&ended, &mut work) {
                ended = work.wait(self.every, self.patience());
            }
            let status = match &ended {
                None => Status::Working,
                Some(Ok(_)) => Status::Done,
                Some(Err(_)) => Status::Failed,
            };
            if self.turn(status)? != Status::Working {
                break;
            }
        }
        self.failed = false;
        // All threads end, as far as disks let them, before any rank continues: rank 0 may remove what they wrote.
        if let Some(work) = work {
            work.end(self.every);
        }
        match ended {
            Some(outcome) => self.together(outcome),
            None => Err(self.settled(None).expect_err("work is broken off where another rank has failed")),
        }
    }

    /// Reports to the other ranks that this one is working, if it is time to. Returns `false` if a rank has failed and the work must stop.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Comm`].
    pub(super) fn go_on(&mut self) -> Result<bool, CheckpointError> {
        Ok(self.last.elapsed() < self.every || self.turn(Status::Working)? != Status::Failed)
    }

    fn turn(&mut self, mine: Status) -> Result<Status, CheckpointError> {
        let all = self.comm.all_gather(Buffer::U8(vec![mine as u8])).map_err(|error| self.comm_error(error))?;
        self.last = Instant::now();
        let all = all.into_u8();
        let any = |status: Status| all.contains(&(status as u8));
        self.failed = any(Status::Failed);
        Ok([Status::Failed, Status::Working].into_iter().find(|&status| any(status)).unwrap_or(Status::Done))
    }

    fn comm_error(&self, source: CommError) -> CheckpointError {
        CheckpointError::Comm { doing: self.task.doing(), source: Box::new(source) }
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("what ranks exchange has a JSON form")
}

/// Counter of the progress of some work.
#[derive(Debug, Clone, Default)]
pub(super) struct Heartbeat(Arc<AtomicU64>);

impl Heartbeat {
    pub(super) fn made(&self) {
        // Relaxed: it is compared with what it was, and guards nothing.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of progress reports.
    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Work on a disk, on a separate thread.
pub(super) struct DiskWork<T> {
    path: PathBuf,
    thread: JoinHandle<()>,
    result: Receiver<Result<T, CheckpointError>>,
    progress: Heartbeat,
    /// The progress last seen, and the time of its last change.
    seen: (u64, Instant),
}

impl<T: Send + 'static> DiskWork<T> {
    /// Starts work on `path`.
    pub(super) fn start(
        rank: usize,
        path: PathBuf,
        body: impl FnOnce(&Heartbeat) -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<Self, CheckpointError> {
        let ((reply, result), progress) = (bounded(1), Heartbeat::default());
        let made = progress.clone();
        let body = move || {
            // The receiver may be gone.
            let _ = reply.send(body(&made));
        };
        let thread = std::thread::Builder::new().name(format!("rank-{rank}-save")).spawn(body);
        let thread = thread.map_err(|error| CheckpointError::Stopped { rank, reason: error.to_string() })?;
        Ok(Self { path, thread, result, progress, seen: (0, Instant::now()) })
    }
}

impl<T> DiskWork<T> {
    /// Waits up to `within` for the result. Returns an error if the work has made no progress for `patience`.
    pub(super) fn wait(&mut self, within: Duration, patience: Duration) -> Option<Result<T, CheckpointError>> {
        let failed = |kind, reason: String| {
            let source = io::Error::new(kind, reason);
            Some(Err(CheckpointError::Io { action: "access", path: self.path.clone(), source }))
        };
        match self.result.recv_timeout(within) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Disconnected) => failed(io::ErrorKind::Other, "its I/O thread panicked".to_string()),
            Err(RecvTimeoutError::Timeout) => {
                let made = self.progress.count();
                if made != self.seen.0 {
                    self.seen = (made, Instant::now());
                }
                if self.seen.1.elapsed() < patience {
                    return None;
                }
                failed(io::ErrorKind::TimedOut, format!("the disk made no progress for {patience:?}"))
            }
        }
    }

    /// Joins the thread, or abandons it after `within`.
    pub(super) fn end(self, within: Duration) {
        match self.result.recv_timeout(within) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::error!("abandoned the I/O thread of {}: the disk makes no progress", self.path.display());
            }
            // It has sent its result, or panicked, which `wait` reports.
            _ => drop(self.thread.join()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::threads::{ThreadOptions, run};

    const DEADLINE: Duration = Duration::from_millis(400);

    /// Ranks 0 and 1 of two share work; rank 1's is `slow`.
    fn shared(
        slow: impl FnOnce(&Heartbeat) -> Result<usize, CheckpointError> + Send + Sync + Copy + 'static,
    ) -> Vec<String> {
        run(2, &ThreadOptions { deadline: DEADLINE }, |comm| -> Result<String, CheckpointError> {
            let mut ranks = Ranks::new(&*comm, Task::Save { step: 7 });
            let rank = comm.rank();
            let work =
                DiskWork::start(rank, "there".into(), move |progress| if rank == 1 { slow(progress) } else { Ok(5) });
            let shared = ranks.share_work(Some(work), || 0);
            // The ranks continue whatever the outcome.
            comm.barrier().map_err(|error| ranks.comm_error(error))?;
            Ok(format!("{:?}", shared.map_err(|error| error.to_string())))
        })
        .unwrap()
    }

    #[test]
    fn a_slow_disk_takes_its_time_while_it_gets_on() {
        let slow = |progress: &Heartbeat| {
            for _ in 0..10 {
                std::thread::sleep(DEADLINE / 4);
                progress.made();
            }
            Ok(6)
        };
        assert_eq!(shared(slow), ["Ok(5)", "Ok(6)"]);
    }

    #[test]
    fn a_rank_that_fails_stops_one_that_still_hands_out_its_work() {
        let told = run(2, &ThreadOptions { deadline: DEADLINE }, |comm| -> Result<String, CheckpointError> {
            let mut ranks = Ranks::new(&*comm, Task::Save { step: 7 });
            let shared = if comm.rank() == 1 {
                ranks.finish(None, Some(Err(CheckpointError::Stopped { rank: 1, reason: "no space".into() })))
            } else {
                let work = DiskWork::start(0, "there".into(), |_| Ok(5))?;
                while ranks.go_on()? {
                    std::thread::sleep(DEADLINE / 40);
                }
                ranks.finish(Some(work), None)
            };
            // The group is still usable.
            comm.barrier().map_err(|error| ranks.comm_error(error))?;
            Ok(shared.map(|_: usize| ()).unwrap_err().to_string())
        });
        for told in told.unwrap() {
            assert!(told.contains("saving step 7 failed on rank 1 of 2") && told.contains("no space"), "{told}");
        }
    }

    #[test]
    fn a_rank_of_a_group_is_told_by_its_number_in_the_run() {
        run(4, &ThreadOptions { deadline: DEADLINE }, |comm| {
            let group = comm.split("part", comm.rank() as u64 % 2)?;
            let ranks = Ranks::new(&*group, Task::Save { step: 7 });
            let error = CheckpointError::Stopped { rank: 3, reason: "no space".into() };
            let told = ranks.together(if comm.rank() == 3 { Err(error) } else { Ok(()) }).map_err(|e| e.to_string());
            let unlike = ranks.first_unlike(&(comm.rank() == 3)).unwrap();
            match comm.rank() % 2 {
                0 => assert_eq!((told, unlike), (Ok(()), None)),
                _ => {
                    assert!(told.unwrap_err().starts_with("saving step 7 failed on rank 3 of 4: "));
                    assert_eq!(unlike, Some((3, false, true)));
                }
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
    }

    #[test]
    fn a_disk_that_does_nothing_fails_the_save_and_not_the_run() {
        let stuck = |_: &Heartbeat| {
            std::thread::sleep(10 * DEADLINE);
            Ok(6)
        };
        let begin = Instant::now();
        for outcome in shared(stuck) {
            let words = "saving step 7 failed on rank 1 of 2: cannot access there: the disk made no progress for 400ms";
            assert!(outcome.contains(words), "{outcome}");
        }
        assert!(begin.elapsed() < 8 * DEADLINE);
        // Without the hook, whose backtrace may take longer than the deadline.
        let panics = |_: &Heartbeat| std::panic::resume_unwind(Box::new("a test's panic"));
        assert!(
            shared(panics).iter().all(|outcome| outcome.contains("on rank 1 of 2") && outcome.contains("panicked"))
        );
    }
}
