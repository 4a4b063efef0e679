//! Asynchronous collectives: one named thread per communicator runs them in the order they were started. Also waits for threads
//! with a time limit.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use super::Buffer;
use crate::CommError;

/// A started collective. Dropping it without waiting is allowed; the operation still runs, as the other ranks need it.
#[derive(Debug)]
#[must_use = "the result, or the error, is in `wait`"]
pub struct Pending<T = Buffer>(Receiver<Result<T, CommError>>);

impl<T> Pending<T> {
    /// Waits for the result.
    ///
    /// The wait is bounded: the operation itself fails at the group's deadline.
    pub fn wait(self) -> Result<T, CommError> {
        self.0.recv().expect("the progress thread answers every request before it ends")
    }

    /// Waits like [`Pending::wait`], but no longer than `limit`; returns itself as the error if there is no result by then.
    pub fn wait_for(self, limit: Duration) -> Result<Result<T, CommError>, Self> {
        match self.0.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) => Err(self),
            answer => Ok(answer.expect("the progress thread answers every request before it ends")),
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// The thread that runs started operations; joined when dropped.
#[derive(Debug)]
pub(super) struct Progress {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub(super) fn spawn(name: String) -> Self {
        let (jobs, inbox) = unbounded::<Job>();
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || inbox.into_iter().for_each(|job| job()))
            .expect("the operating system gives a thread to a rank that it gave one");
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    pub(super) fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let (reply, result) = bounded(1);
        // The waiter may have dropped its `Pending`: then nobody wants the result.
        let job = Box::new(move || drop(reply.send(job())));
        let jobs = self.jobs.as_ref().expect("jobs are closed only on drop");
        jobs.send(job).expect("the progress thread lives as long as its communicator");
        Pending(result)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported to whoever waited for its result.
            let _ = thread.join();
        }
    }
}

/// Runs `call`, which has no deadline, on its own thread. Returns `None`, and abandons the thread, if it takes longer than `within`.
#[cfg(feature = "nccl")]
pub(super) fn apart<T: Send + 'static>(
    name: String,
    within: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<Option<T>> {
    let (done, ended) = bounded(1);
    let thread = std::thread::Builder::new().name(name).spawn(move || drop(done.send(call())))?;
    let outcome = ended.recv_timeout(within).ok();
    if outcome.is_some() {
        // It has nothing more to do.
        let _ = thread.join();
    }
    Ok(outcome)
}

/// Joins a thread; returns `None` if it does not end `within` that time (it is inside a library), and leaves it running.
pub(super) fn joined<T>(thread: JoinHandle<T>, within: Duration) -> Option<std::thread::Result<T>> {
    let end = Instant::now() + within;
    while !thread.is_finished() {
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Some(thread.join())
}
