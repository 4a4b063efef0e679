//! A worker thread of a rank.

use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::backend::Backend;

/// A lazily started worker thread that takes jobs until it is stopped. On devices, its operations run in the stream of the thread that
/// starts it.
pub struct Worker<J: Send + 'static> {
    jobs: Mutex<Option<crossbeam_channel::Sender<J>>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    started: OnceLock<()>,
    name: String,
}

impl<J: Send + 'static> Worker<J> {
    /// Creates a worker whose thread has this name. The thread starts with the first job.
    pub fn new(name: String) -> Self {
        Self { jobs: Mutex::new(None), thread: Mutex::new(None), started: OnceLock::new(), name }
    }

    /// Sends a job to the thread. `body` is what the thread runs with its inbox when it is first needed.
    pub fn send<B: Backend>(&self, job: J, body: impl FnOnce(crossbeam_channel::Receiver<J>) + Send + 'static) {
        self.started.get_or_init(|| {
            let (jobs, inbox) = crossbeam_channel::unbounded();
            let stream = B::stream();
            let thread = std::thread::Builder::new()
                .name(self.name.clone())
                .spawn(move || B::in_stream(stream, || body(inbox)))
                .expect("cannot start a worker thread of a rank");
            *self.jobs.lock() = Some(jobs);
            *self.thread.lock() = Some(thread);
        });
        if let Some(jobs) = &*self.jobs.lock() {
            // A worker that has ended has left its error where its results are waited for.
            let _ = jobs.send(job);
        }
    }

    /// Returns the number of jobs that wait for the thread.
    pub fn backlog(&self) -> usize {
        self.jobs.lock().as_ref().map_or(0, crossbeam_channel::Sender::len)
    }

    /// Ends the thread after its queued jobs, and waits for it.
    pub fn stop(&self) {
        *self.jobs.lock() = None;
        if let Some(thread) = self.thread.lock().take() {
            // Its panic, if any, has been reported to whoever waited for its results.
            let _ = thread.join();
        }
    }
}
