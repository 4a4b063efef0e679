//! The io_uring engine: each ring has a thread that submits chunks to the kernel and takes its completions.
//!
//! A ring's thread sleeps in the kernel until a chunk ends or its [`Waker`] is written to. The ring polls the waker instead of reading it,
//! so that the kernel writes into no memory but buffers, which chunks own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError, unbounded};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;

use super::{DiskEngine, EngineKind, panic_message, spawn, stop};
use crate::offload::backing::Backing;
use crate::offload::direction::Direction;
use crate::offload::transfer::Chunk;
use crate::offload::{AioOptions, DiskError};

/// The `user_data` of the waker's poll; for chunks, it is the number of their slot.
const WAKER: u64 = u64::MAX;

/// Index of the registered file.
const FILE: types::Fixed = types::Fixed(0);

/// Wakes a ring's thread.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn wake(&self) {
        // It can only fail if the counter is full, and then the thread is being woken.
        let _ = rustix::io::write(self.0.as_fd(), &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        // It fails if there is nothing to clear.
        let _ = rustix::io::read(self.0.as_fd(), &mut [0_u8; 8]);
    }
}

/// The reason why there are no rings.
pub(super) enum NoRings {
    /// The kernel, or a seccomp filter, refuses a required feature.
    Refused(String),
    /// A thread could not be started.
    Thread(DiskError),
}

pub(super) fn start(backing: &Arc<Backing>, rank: usize, aio: &AioOptions) -> Result<DiskEngine, NoRings> {
    let (pieces, queue) = unbounded();
    let mut engine =
        DiskEngine { kind: EngineKind::IoUring, pieces: Some(pieces), wakers: Vec::new(), workers: Vec::new() };
    for index in 0..aio.intra_op_parallelism {
        let ring = open(backing, aio.queue_depth).map_err(NoRings::Refused)?;
        let waker = Waker::new().map_err(|error| NoRings::Refused(format!("eventfd: {error}")))?;
        let waker = Arc::new(waker);
        engine.wakers.push(waker.clone());
        let driver = Driver {
            ring,
            waker,
            queue: queue.clone(),
            backing: backing.clone(),
            slots: (0..aio.queue_depth).map(|_| None).collect(),
            free: (0..aio.queue_depth).rev().collect(),
            again: Vec::with_capacity(aio.queue_depth),
            polling: false,
            single_submit: aio.single_submit,
            overlap: aio.overlap_events,
        };
        let worker = spawn(format!("disk-{rank}-ring-{index}"), backing, move || driver.run());
        engine.workers.push(worker.map_err(NoRings::Thread)?);
    }
    Ok(engine)
}

/// Opens a ring for `depth` chunks and the waker's poll, with the file registered; or returns the refused call.
fn open(backing: &Backing, depth: usize) -> Result<IoUring, String> {
    let ring = IoUring::new((depth + 1) as u32).map_err(|error| format!("io_uring_setup: {error}"))?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| format!("io_uring_register of a probe: {error}"))?;
    for (name, code) in
        [("READ", opcode::Read::CODE), ("WRITE", opcode::Write::CODE), ("POLL_ADD", opcode::PollAdd::CODE)]
    {
        if !probe.is_supported(code) {
            return Err(format!("the kernel's io_uring does not support IORING_OP_{name}"));
        }
    }
    let file = [backing.fd().as_raw_fd()];
    ring.submitter().register_files(&file).map_err(|error| format!("io_uring_register of the file: {error}"))?;
    Ok(ring)
}

struct Driver {
    ring: IoUring,
    waker: Arc<Waker>,
    queue: Receiver<Chunk>,
    backing: Arc<Backing>,
    /// Chunks that the kernel has.
    slots: Vec<Option<Chunk>>,
    /// Indices of the empty slots.
    free: Vec<usize>,
    /// Chunks that need another request.
    again: Vec<Chunk>,
    polling: bool,
    single_submit: bool,
    overlap: bool,
}

impl Driver {
    fn run(mut self) {
        let reason = match catch_unwind(AssertUnwindSafe(|| self.serve())) {
            Ok(Ok(())) => {
                // A closed ring releases its file some time later; this releases it now. A failure is harmless.
                let _ = self.ring.submitter().unregister_files();
                return;
            }
            Ok(Err(error)) => format!("io_uring_enter: {error}"),
            Err(panic) => panic_message(&*panic),
        };
        // The kernel may still have these, and nobody takes its completions any more: dropping them leaks their buffers.
        self.slots.clear();
        stop(&self.backing, &self.queue, std::mem::take(&mut self.again), &reason);
        // The stopped file refuses later transfers; those that were about to be submitted end here.
        for piece in &self.queue {
            piece.skip(self.backing.check().err());
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let closed = self.fill()?;
            if self.in_flight() == 0 && self.again.is_empty() && closed {
                return Ok(());
            }
            if !self.polling {
                let poll = opcode::PollAdd::new(types::Fd(self.waker.0.as_raw_fd()), libc::POLLIN as u32);
                // SAFETY: a poll touches no memory of ours. The descriptor is open until after the ring is closed.
                unsafe { self.push(&poll.build().user_data(WAKER)) }?;
                self.polling = true;
            }
            self.enter(1)?;
            self.take_answers();
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Submits chunks while there are any and slots are free. Returns `true` if no more chunks will come.
    fn fill(&mut self) -> io::Result<bool> {
        if !self.overlap && self.in_flight() > 0 {
            return Ok(false);
        }
        while let Some(slot) = self.free.pop() {
            let piece = match self.again.pop().map_or_else(|| self.queue.try_recv(), Ok) {
                Ok(piece) => piece,
                Err(nothing) => {
                    self.free.push(slot);
                    return Ok(nothing == TryRecvError::Disconnected);
                }
            };
            if piece.transfer().failed() {
                self.free.push(slot);
                piece.skip(None);
                continue;
            }
            let bytes = match self.backing.faults.before(piece.bytes()) {
                Ok(bytes) => bytes,
                Err(error) => {
                    self.free.push(slot);
                    self.again.extend(piece.answered(Err(error)));
                    continue;
                }
            };
            let (at, len, offset) = (piece.at().as_ptr(), bytes as u32, piece.offset());
            let entry = match piece.direction() {
                Direction::Read => opcode::Read::new(FILE, at, len).offset(offset).build(),
                Direction::Write => opcode::Write::new(FILE, at, len).offset(offset).build(),
            };
            // Stored in its slot first: after the push, the kernel may have it.
            self.slots[slot] = Some(piece);
            // SAFETY: the memory belongs to the chunk's transfer, which the slot has a share of until the kernel's completion is taken; if
            // this thread ends before, the buffer is leaked.
            unsafe { self.push(&entry.user_data(slot as u64)) }?;
            if self.single_submit {
                self.enter(0)?;
            }
        }
        Ok(false)
    }

    /// # Safety
    /// The memory and descriptors that the entry refers to must stay valid until the kernel has completed it.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: by this function's contract.
        let outcome = unsafe { self.ring.submission().push(entry) };
        // The ring has an entry for each slot, and one for the poll.
        outcome.map_err(|_| io::Error::other("the submission queue is full"))
    }

    /// Submits the pushed entries, and waits for `answers` completions.
    fn enter(&mut self, answers: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(answers) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                // The kernel lacks a resource that completions free; entries stay in the ring for the next call.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    std::thread::sleep(Duration::from_micros(100));
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.ring.completion().next() {
            if answer.user_data() == WAKER {
                self.polling = false;
                self.waker.clear();
                continue;
            }
            let slot = answer.user_data() as usize;
            let piece = self.slots[slot].take().expect("an answer is to a piece in its slot");
            self.free.push(slot);
            let outcome = usize::try_from(answer.result()).map_err(|_| io::Error::from_raw_os_error(-answer.result()));
            self.again.extend(piece.answered(outcome));
        }
    }
}
