//! The engine of rings: each ring has a thread that hands pieces to the kernel and takes its answers.
//!
//! A ring's thread sleeps in the kernel until a piece ends or its [`Waker`] is written to, which the ring polls like a
//! piece. Polling, and not reading it, because then the kernel writes into no memory but buffers, which pieces own.

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

/// `user_data` of the poll of the waker; pieces have the numbers of their slots.
const WAKER: u64 = u64::MAX;

/// The registered file's index.
const FILE: types::Fixed = types::Fixed(0);

/// Wakes a ring's thread.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn wake(&self) {
        // It can only fail when the counter is full, and then the thread is being woken.
        let _ = rustix::io::write(self.0.as_fd(), &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        // It fails when there was nothing to clear.
        let _ = rustix::io::read(self.0.as_fd(), &mut [0_u8; 8]);
    }
}

/// Why there are no rings.
pub(super) enum NoRings {
    /// The kernel, or a filter before it, does not offer what is needed.
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

/// A ring for `depth` pieces and the poll of the waker, with the file registered, or what was refused.
fn open(backing: &Backing, depth: usize) -> Result<IoUring, String> {
    let ring = IoUring::new((depth + 1) as u32).map_err(|error| format!("io_uring_setup: {error}"))?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| format!("io_uring_register of a probe: {error}"))?;
    for (name, code) in
        [("READ", opcode::Read::CODE), ("WRITE", opcode::Write::CODE), ("POLL_ADD", opcode::PollAdd::CODE)]
    {
        if !probe.is_supported(code) {
            return Err(format!("the kernel's io_uring has no IORING_OP_{name}"));
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
    /// The pieces that the kernel has.
    slots: Vec<Option<Chunk>>,
    /// The slots without one.
    free: Vec<usize>,
    /// Pieces of which something is left to be asked for.
    again: Vec<Chunk>,
    polling: bool,
    single_submit: bool,
    overlap: bool,
}

impl Driver {
    fn run(mut self) {
        let reason = match catch_unwind(AssertUnwindSafe(|| self.serve())) {
            Ok(Ok(())) => {
                // A ring that is closed lets go of its file some time later; this does so now. If it fails, so be it.
                let _ = self.ring.submitter().unregister_files();
                return;
            }
            Ok(Err(error)) => format!("io_uring_enter: {error}"),
            Err(panic) => panic_message(&*panic),
        };
        // The kernel may still have these, and nobody takes its answers any more: dropped, they lose their buffers.
        self.slots.clear();
        stop(&self.backing, &self.queue, std::mem::take(&mut self.again), &reason);
        // Later transfers are refused by the stopped file; ones that were about to be handed over are ended here.
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

    /// Hands over pieces while there are any and slots for them. True: no more will come.
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
            // In its slot first: from the push on, the kernel may have it.
            self.slots[slot] = Some(piece);
            // SAFETY: the memory belongs to the piece's transfer, which the slot has a share of until the kernel's
            // answer is taken; if this thread ends before, the buffer is leaked.
            unsafe { self.push(&entry.user_data(slot as u64)) }?;
            if self.single_submit {
                self.enter(0)?;
            }
        }
        Ok(false)
    }

    /// # Safety
    /// What the entry refers to stays valid until the kernel has answered it.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: by this function's contract.
        let outcome = unsafe { self.ring.submission().push(entry) };
        // The ring was made for as many entries as there are slots, and the poll.
        outcome.map_err(|_| io::Error::other("the submission queue is full"))
    }

    /// Hands over what was pushed, and waits until `answers` have come.
    fn enter(&mut self, answers: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(answers) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                // The kernel is short of something that answers free; entries stay in the ring for the next call.
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
