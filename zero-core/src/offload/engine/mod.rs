//! The engine that transfers the bytes of one file: rings or threads, chosen when the file is created.

mod threads;
mod uring;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use crate::offload::backing::{Backing, ENDING_LIMIT};
use crate::offload::transfer::Chunk;
use crate::offload::{AioOptions, DiskError, EngineChoice};
use uring::Waker;

/// Interval at which a dropped engine checks whether its threads have ended.
const POLL: Duration = Duration::from_millis(1);

/// The engine that transfers a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring.
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Threads,
}

pub(crate) struct DiskEngine {
    kind: EngineKind,
    /// Chunks for the workers, which end when it is closed.
    pieces: Option<Sender<Chunk>>,
    wakers: Vec<Arc<Waker>>,
    workers: Vec<JoinHandle<()>>,
}

impl DiskEngine {
    pub(crate) fn start(
        backing: &Arc<Backing>,
        rank: usize,
        aio: &AioOptions,
        choice: EngineChoice,
    ) -> Result<Self, DiskError> {
        if choice != EngineChoice::Threads {
            // Without direct I/O, the ring's thread would wait for writeback in each write, so threads are better.
            let refused = match choice {
                EngineChoice::Auto if !backing.is_direct() => "the file is not open for direct I/O".to_string(),
                _ => match uring::start(backing, rank, aio) {
                    Ok(engine) => return Ok(engine),
                    Err(uring::NoRings::Refused(reason)) => reason,
                    Err(uring::NoRings::Thread(error)) => return Err(error),
                },
            };
            if choice == EngineChoice::IoUring {
                return Err(DiskError::NoUring { reason: refused });
            }
            backing.dir().warn_once(&format!("using threads instead of io_uring: {refused}"));
        }
        threads::start(backing, rank, aio)
    }

    pub(crate) fn kind(&self) -> EngineKind {
        self.kind
    }

    pub(crate) fn submit(&self, pieces: impl Iterator<Item = Chunk>) {
        let queue = self.pieces.as_ref().expect("only drop closes it");
        for piece in pieces {
            // Workers keep taking chunks after a failure; without workers, dropping the chunk ends its transfer.
            let _ = queue.send(piece);
        }
        for waker in &self.wakers {
            waker.wake();
        }
    }
}

impl Drop for DiskEngine {
    /// Completes submitted transfers and ends the threads.
    fn drop(&mut self) {
        self.pieces = None;
        for waker in &self.wakers {
            waker.wake();
        }
        let end = Instant::now() + ENDING_LIMIT;
        for worker in self.workers.drain(..) {
            while !worker.is_finished() && Instant::now() < end {
                std::thread::sleep(POLL);
            }
            if worker.is_finished() {
                // Every ticket has already reported a panic.
                drop(worker.join());
            } else {
                // The disk does not answer: a longer wait would hang the program.
                let name = worker.thread().name().unwrap_or_default();
                tracing::error!("thread {name} did not end within {ENDING_LIMIT:?}");
            }
        }
    }
}

/// Starts a named thread. Its captures are dropped when it ends.
fn spawn(name: String, backing: &Backing, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, DiskError> {
    let builder = std::thread::Builder::new().name(name).stack_size(256 << 10);
    builder.spawn(body).map_err(crate::offload::error::system_at("start a thread for", backing.path()))
}

/// Stops the file after a failure of the serving thread, and ends the chunks that no request was made for. `at_hand` are chunks that it has
/// taken and the kernel does not have.
fn stop(backing: &Backing, queue: &Receiver<Chunk>, at_hand: Vec<Chunk>, reason: &str) {
    tracing::error!("{}: {reason}", backing.path().display());
    backing.stop(reason.to_string());
    for piece in at_hand.into_iter().chain(queue.try_iter()) {
        piece.skip(backing.check().err());
    }
}

/// Returns an error message for a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("its I/O thread panicked: {}", text.unwrap_or("no message"))
}
