//! What moves the bytes of one file: rings or threads, chosen when the file is created.

mod threads;
mod uring;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::offload::backing::{Backing, ENDING_LIMIT};
use crate::offload::queue::Queue;
use crate::offload::transfer::{Piece, Transfer};
use crate::offload::{AioOptions, DiskError, EngineChoice};
use uring::Waker;

/// Which engine moves a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring.
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Threads,
}

pub(crate) struct Engine {
    kind: EngineKind,
    queue: Arc<Queue>,
    wakers: Vec<Arc<Waker>>,
    /// Locked only because a receiver cannot be shared; nobody but `drop` looks at them.
    workers: Mutex<Vec<Worker>>,
}

/// A thread, and the receiver whose sender it holds until it ends.
pub(crate) struct Worker {
    name: String,
    thread: JoinHandle<()>,
    ending: Receiver<()>,
}

impl Engine {
    pub(crate) fn start(
        backing: &Arc<Backing>,
        rank: usize,
        aio: &AioOptions,
        choice: EngineChoice,
    ) -> Result<Self, DiskError> {
        if choice != EngineChoice::Threads {
            // Without direct I/O the ring's thread would wait in each write behind the cache, so threads are better.
            let refused = match choice {
                EngineChoice::Auto if !backing.is_direct() => "the file is not open for direct I/O".to_string(),
                _ => match uring::start(backing, rank, aio) {
                    Ok(engine) => return Ok(engine),
                    Err(uring::StartError::Refused(reason)) => reason,
                    Err(uring::StartError::Thread(error)) => return Err(error),
                },
            };
            if choice == EngineChoice::IoUring {
                return Err(DiskError::NoUring { reason: refused });
            }
            backing.dir().warn_once(format!("using threads instead of io_uring: {refused}"));
        }
        threads::start(backing, rank, aio)
    }

    pub(crate) fn kind(&self) -> EngineKind {
        self.kind
    }

    pub(crate) fn submit(&self, transfer: Arc<Transfer>) {
        self.queue.push(transfer);
        for waker in &self.wakers {
            waker.wake();
        }
    }
}

impl Drop for Engine {
    /// Carries out what was submitted, and ends the threads.
    fn drop(&mut self) {
        self.queue.close();
        for waker in &self.wakers {
            waker.wake();
        }
        for Worker { name, thread, ending } in self.workers.get_mut().drain(..) {
            match ending.recv_timeout(ENDING_LIMIT) {
                // A disk that does not answer: waiting on would hang the program instead of ending it.
                Err(RecvTimeoutError::Timeout) => tracing::error!("thread {name} has not ended after {ENDING_LIMIT:?}"),
                // A panic was already reported by every ticket.
                _ => drop(thread.join()),
            }
        }
    }
}

/// Starts a named thread. What it captured is dropped when it ends.
fn spawn(name: String, backing: &Backing, body: impl FnOnce() + Send + 'static) -> Result<Worker, DiskError> {
    let (running, ending) = std::sync::mpsc::channel();
    let builder = std::thread::Builder::new().name(name.clone()).stack_size(256 << 10);
    let thread = builder.spawn(move || {
        let _running = running;
        body();
    });
    match thread {
        Ok(thread) => Ok(Worker { name, thread, ending }),
        Err(error) => Err(crate::offload::error::system_at("start a thread for", backing.path())(error)),
    }
}

/// The serving thread cannot go on: stops the file and ends what no request was made for. `at_hand` are pieces that it
/// has taken and that the kernel does not have.
fn stop(backing: &Backing, queue: &Queue, at_hand: Vec<Piece>, reason: &str) {
    tracing::error!("{}: {reason}", backing.path().display());
    backing.stop(reason.to_string());
    let error = || backing.check().err();
    for piece in at_hand {
        piece.skip(error());
    }
    let (transfers, next) = queue.clear();
    for (place, transfer) in transfers.into_iter().enumerate() {
        let bytes = transfer.region.padded_bytes();
        let mut start = if place == 0 { next } else { 0 };
        while start < bytes {
            let end = bytes.min(start + queue.block());
            Piece::new(transfer.clone(), start, end).skip(error());
            start = end;
        }
    }
}

/// What a panic said.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("a thread that served it panicked: {}", text.unwrap_or("no message"))
}
