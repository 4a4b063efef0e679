//! The thread engine: each thread takes a chunk, calls `pread` or `pwrite`, and takes the next.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Receiver, unbounded};
use parking_lot::{Condvar, Mutex};

use super::{DiskEngine, EngineKind, panic_message, spawn, stop};
use crate::offload::backing::Backing;
use crate::offload::transfer::Chunk;
use crate::offload::{AioOptions, DiskError};

pub(super) fn start(backing: &Arc<Backing>, rank: usize, aio: &AioOptions) -> Result<DiskEngine, DiskError> {
    let count = aio.io_threads();
    let (pieces, queue) = unbounded();
    let waves = (!aio.overlap_events).then(|| Arc::new(Waves::of(count)));
    let mut engine =
        DiskEngine { kind: EngineKind::Threads, pieces: Some(pieces), wakers: Vec::new(), workers: Vec::new() };
    for index in 0..count {
        let (queue, waves, shared) = (queue.clone(), waves.clone(), backing.clone());
        let name = format!("disk-{rank}-io-{index}");
        engine.workers.push(spawn(name, backing, move || serve(&queue, waves.as_deref(), &shared))?);
    }
    Ok(engine)
}

fn serve(queue: &Receiver<Chunk>, waves: Option<&Waves>, backing: &Backing) {
    for piece in queue {
        if let Some(waves) = waves {
            waves.begin();
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| carry_out(piece, backing))) {
            stop(backing, queue, Vec::new(), &panic_message(&*panic));
        }
        if let Some(waves) = waves {
            waves.end();
        }
    }
}

fn carry_out(mut piece: Chunk, backing: &Backing) {
    loop {
        if piece.transfer().failed() {
            return piece.skip(None);
        }
        let answer = request(&piece, backing);
        match piece.answered(answer) {
            Some(rest) => piece = rest,
            None => return,
        }
    }
}

fn request(piece: &Chunk, backing: &Backing) -> io::Result<usize> {
    let bytes = backing.faults.before(piece.bytes())?;
    // SAFETY: the chunk is this thread's, and its transfer, which it has a share of, owns the memory.
    unsafe { backing.request(piece.direction(), piece.at(), bytes, piece.offset()) }
}

/// Waves of chunks, for `overlap_events` off: the threads start as many chunks as there are threads, and more when all of these have ended.
struct Waves {
    threads: usize,
    wave: Mutex<Wave>,
    next: Condvar,
}

struct Wave {
    /// Number of chunks that may still start in this wave.
    left: usize,
    /// Number of chunks that have started and not ended.
    busy: usize,
}

impl Waves {
    fn of(threads: usize) -> Self {
        Self { threads, wave: Mutex::new(Wave { left: threads, busy: 0 }), next: Condvar::new() }
    }

    fn begin(&self) {
        let mut wave = self.wave.lock();
        // Waits as long as the disk takes; the waiters for a chunk have a deadline.
        self.next.wait_while(&mut wave, |wave| wave.left == 0);
        wave.left -= 1;
        wave.busy += 1;
    }

    fn end(&self) {
        let mut wave = self.wave.lock();
        wave.busy -= 1;
        if wave.busy == 0 {
            wave.left = self.threads;
            self.next.notify_all();
        }
    }
}
