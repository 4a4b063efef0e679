//! Started collectives: one named thread per communicator runs them in the order they were started.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::{Buffer, Request};
use crate::CommError;

/// A started collective. Dropping it without waiting is allowed; the operation still runs, as the other ranks need it.
#[derive(Debug)]
#[must_use = "the result, or the error, is in `wait`"]
pub struct Pending(Receiver<Result<Buffer, CommError>>);

impl Pending {
    /// The result, once it is there.
    ///
    /// The wait is bounded: the operation itself fails at the group's deadline.
    pub fn wait(self) -> Result<Buffer, CommError> {
        self.0.recv().expect("the progress thread answers every request before it ends")
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        !self.0.is_empty()
    }
}

/// A request, what it is for, and where its result goes.
type Job = (Request, String, Sender<Result<Buffer, CommError>>);

/// The thread that runs started operations; joined when dropped.
#[derive(Debug)]
pub(super) struct Progress {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub(super) fn spawn(
        name: String,
        run: impl Fn(Request, &str) -> Result<Buffer, CommError> + Send + 'static,
    ) -> Self {
        let (jobs, inbox) = unbounded::<Job>();
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                for (request, what, reply) in inbox {
                    // The waiter may have dropped its `Pending`: then nobody wants the result.
                    let _ = reply.send(run(request, &what));
                }
            })
            .expect("the operating system gives a thread to a rank that it gave one");
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    pub(super) fn start(&self, request: Request, what: &str) -> Pending {
        let (reply, result) = bounded(1);
        self.jobs
            .as_ref()
            .expect("jobs are closed only on drop")
            .send((request, what.to_string(), reply))
            .expect("the progress thread lives as long as its communicator");
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
