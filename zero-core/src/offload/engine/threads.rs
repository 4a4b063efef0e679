//! The engine of threads: each takes a piece, calls `pread` or `pwrite`, and takes the next.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Engine, EngineKind, panic_message, spawn, stop};
use crate::offload::backing::Backing;
use crate::offload::queue::Queue;
use crate::offload::transfer::Piece;
use crate::offload::{AioOptions, DiskError};

pub(super) fn start(backing: &Arc<Backing>, rank: usize, aio: &AioOptions) -> Result<Engine, DiskError> {
    let count = aio.io_threads();
    let queue = Arc::new(Queue::new(aio.block_size, (!aio.overlap_events).then_some(count)));
    let mut engine =
        Engine { kind: EngineKind::Threads, queue: queue.clone(), wakers: Vec::new(), workers: Mutex::default() };
    for index in 0..count {
        let (queue, backing) = (queue.clone(), backing.clone());
        let name = format!("disk-{rank}-io-{index}");
        engine.workers.get_mut().push(spawn(name, &backing.clone(), move || serve(&queue, &backing))?);
    }
    Ok(engine)
}

fn serve(queue: &Queue, backing: &Backing) {
    while let Some(piece) = queue.wait() {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| carry_out(piece, backing))) {
            stop(backing, queue, Vec::new(), &panic_message(&*panic));
        }
        queue.ended();
    }
}

fn carry_out(mut piece: Piece, backing: &Backing) {
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

fn request(piece: &Piece, backing: &Backing) -> io::Result<usize> {
    let bytes = backing.faults.before(piece.bytes())?;
    // SAFETY: the piece is this thread's, and its transfer, which it has a share of, owns the memory.
    unsafe { backing.request(piece.direction(), piece.at(), bytes, piece.offset()) }
}
