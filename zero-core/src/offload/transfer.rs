//! One read or write of a region. It owns the buffer until its last chunk has ended, and then passes it to the waiter.
//!
//! Chunks end on the file's threads; [`PendingTransfer`] waits on the caller's. The last chunk of a transfer sees the effects of all others (`left`
//! is decremented with acquire and release ordering) and sends the buffer to the waiter, which therefore sees the bytes.

use std::io;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use crate::offload::backing::{Backing, ENDING_LIMIT};
use crate::offload::direction::Direction;
use crate::offload::{DiskError, Region, SwapBuffer};

type Outcome = Result<SwapBuffer, DiskError>;

pub(crate) struct Transfer {
    direction: Direction,
    region: Region,
    backing: Arc<Backing>,
    start: NonNull<u8>,
    /// Number of chunks that have not ended.
    left: AtomicUsize,
    /// Set when a chunk failed: chunks that have not started are skipped.
    failed: AtomicBool,
    state: Mutex<State>,
    /// Channel to the waiter. If nobody waits any more, the buffer sent here returns to its pool.
    ended: Sender<Outcome>,
}

struct State {
    /// `None` once the transfer has ended.
    buffer: Option<SwapBuffer>,
    error: Option<DiskError>,
}

// SAFETY: `start` points into the buffer that the transfer owns. Each of its chunks has its own range, and is used by one thread (or the
// kernel).
unsafe impl Send for Transfer {}
// SAFETY: as above; everything else in it is atomic or locked.
unsafe impl Sync for Transfer {}

impl Transfer {
    /// Creates a transfer and its chunks of at most `block` bytes. The caller has checked that the region's padded bytes fit the buffer.
    pub(crate) fn begin(
        direction: Direction,
        region: Region,
        mut buffer: SwapBuffer,
        block: usize,
        backing: Arc<Backing>,
    ) -> (PendingTransfer, impl Iterator<Item = Chunk>) {
        backing.counters.start(direction);
        let bytes = region.padded_bytes();
        let left = AtomicUsize::new(bytes.div_ceil(block));
        if direction == Direction::Read {
            buffer.set_len(region.bytes());
        }
        let start = buffer.start();
        let state = Mutex::new(State { buffer: Some(buffer), error: None });
        let (failed, (ended, outcome)) = (AtomicBool::new(false), bounded(1));
        let transfer = Arc::new(Self { direction, region, backing, start, left, failed, state, ended });
        if bytes == 0 {
            transfer.end();
        }
        let ticket = PendingTransfer { transfer: transfer.clone(), outcome: Some(outcome) };
        let piece = move |start| Chunk {
            transfer: transfer.clone(),
            ended: false,
            stalled: false,
            start,
            end: bytes.min(start + block),
        };
        (ticket, (0..bytes).step_by(block).map(piece))
    }

    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    fn piece_ended(&self, outcome: Result<(), DiskError>) {
        if let Err(error) = outcome {
            self.failed.store(true, Ordering::Relaxed);
            self.state.lock().error.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end();
        }
    }

    fn end(&self) {
        let mut state = self.state.lock();
        let Some(buffer) = state.buffer.take() else { return };
        let outcome = match state.error.take() {
            None => Ok(buffer),
            Some(error) => {
                drop(buffer);
                Err(error)
            }
        };
        let moved = if outcome.is_ok() { self.region.padded_bytes() as u64 } else { 0 };
        self.backing.counters.stop(self.direction, moved);
        let _ = self.ended.send(outcome);
    }

    /// Ends the transfer although the kernel may still use the buffer, which is therefore leaked.
    fn lose(&self, reason: &str) {
        if let Some(buffer) = self.state.lock().buffer.take() {
            mem::forget(buffer);
            self.backing.counters.stop(self.direction, 0);
            let (path, reason) = (self.backing.path().to_path_buf(), reason.to_string());
            let _ = self.ended.send(Err(DiskError::Stopped { path, reason }));
        }
    }

    fn describe(&self) -> String {
        let (verb, region, path) = (self.direction.verb(), &self.region, self.backing.path().display());
        format!("the {verb} of {} bytes at byte {} of {path}", region.bytes(), region.offset())
    }

    /// Leaves the buffer with the transfer and stops the file. The contents of the region are then unknown, so it must not be read or
    /// allocated again.
    fn abandon(&self, waited: Duration) -> DiskError {
        let doing = self.describe();
        self.backing.stop(format!("{doing} did not finish within {waited:?}"));
        DiskError::Deadline { doing, waited }
    }
}

/// A part of a transfer that is one request to the kernel, or several if the kernel transfers less than requested.
///
/// The owner of a chunk must call [`Chunk::answered`] or [`Chunk::skip`]. If it is dropped without (a panic, or a failed ring), its
/// transfer's buffer is leaked, since the kernel may still use it.
pub(crate) struct Chunk {
    transfer: Arc<Transfer>,
    ended: bool,
    /// The last request moved less than a block.
    stalled: bool,
    /// Start of the remaining bytes in the transfer.
    start: usize,
    /// End of the remaining bytes in the transfer.
    end: usize,
}

impl Chunk {
    pub(crate) fn transfer(&self) -> &Arc<Transfer> {
        &self.transfer
    }

    pub(crate) fn direction(&self) -> Direction {
        self.transfer.direction
    }

    /// Returns the address of the remaining bytes.
    pub(crate) fn at(&self) -> NonNull<u8> {
        // SAFETY: `start` is within the transfer's padded bytes, which fit the buffer that it owns.
        unsafe { self.transfer.start.add(self.start) }
    }

    /// Returns the number of remaining bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// Returns the offset of the remaining bytes in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.transfer.region.offset() + self.start as u64
    }

    /// Handles the kernel's answer to a request for the remaining bytes. Returns the chunk if another request is needed: the kernel
    /// transferred a part, or was interrupted.
    pub(crate) fn answered(mut self, outcome: io::Result<usize>) -> Option<Self> {
        let backing = self.transfer.backing.clone();
        let outcome = match outcome {
            Ok(0) => Err(match self.direction() {
                Direction::Read => io::ErrorKind::UnexpectedEof.into(),
                Direction::Write => io::ErrorKind::WriteZero.into(),
            }),
            Ok(moved) if moved < self.bytes() => {
                // With direct I/O the rest must start aligned, so a partly transferred block is transferred again. If that happens twice in
                // a row without a full block, the file or the disk ends within the block.
                let unit = if backing.is_direct() { backing.alignment() } else { 1 };
                let whole = moved / unit * unit;
                if whole == 0 && self.stalled {
                    Err(io::ErrorKind::UnexpectedEof.into())
                } else {
                    let settled = backing.settle(self.direction(), self.offset(), whole);
                    self.start += whole;
                    self.stalled = whole == 0;
                    match settled {
                        Ok(()) => return Some(self),
                        Err(error) => Err(error),
                    }
                }
            }
            Ok(_) => backing.settle(self.direction(), self.offset(), self.bytes()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => return Some(self),
            Err(error) => Err(error),
        };
        let (direction, offset, bytes) = (self.direction(), self.offset(), self.bytes());
        self.end(outcome.map_err(|error| backing.io_error(direction, offset, bytes, error)));
        None
    }

    /// Ends a chunk that no request was made for or is in flight for.
    pub(crate) fn skip(self, error: Option<DiskError>) {
        self.end(error.map_or(Ok(()), Err));
    }

    fn end(mut self, outcome: Result<(), DiskError>) {
        self.ended = true;
        self.transfer.piece_ended(outcome);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.ended {
            self.transfer.lose("its I/O thread stopped during a transfer");
        }
    }
}

/// A transfer in flight. Dropping it waits for the end.
#[must_use = "dropping a ticket waits for its transfer"]
#[derive(Debug)]
pub struct PendingTransfer {
    transfer: Arc<Transfer>,
    /// `None` once it has been waited for.
    outcome: Option<Receiver<Outcome>>,
}

impl PendingTransfer {
    /// Returns whether [`PendingTransfer::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.outcome.as_ref().is_none_or(|outcome| !outcome.is_empty())
    }

    /// Waits up to `limit` for the end, and returns the buffer, which contains the region's bytes after a read.
    ///
    /// # Errors
    /// The error of the disk, with the file, the offset and the length; the buffer is back in its pool. Or [`DiskError::Deadline`]: then
    /// the transfer keeps the buffer until the system is done with it, and every later use of the file is an error, because the contents of
    /// the region are unknown.
    pub fn wait(mut self, limit: Duration) -> Result<SwapBuffer, DiskError> {
        self.take(limit).expect("only waiting takes the outcome, and it takes the ticket")
    }

    /// Returns the outcome, unless it has been taken.
    fn take(&mut self, limit: Duration) -> Option<Outcome> {
        let (outcome, start) = (self.outcome.take()?, Instant::now());
        Some(outcome.recv_timeout(limit).unwrap_or_else(|_| Err(self.transfer.abandon(start.elapsed()))))
    }
}

impl Drop for PendingTransfer {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.take(ENDING_LIMIT) {
            tracing::error!("a dropped transfer failed: {error}");
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

#[cfg(test)]
mod tests;
