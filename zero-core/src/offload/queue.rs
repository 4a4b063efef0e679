//! The pieces that have not been handed to the kernel, in the order in which their transfers were submitted.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::offload::transfer::{Piece, Transfer};

pub(crate) struct Queue {
    block: usize,
    state: Mutex<State>,
    /// Something came, or a wave ended, or the queue was closed. Rings do not wait here: they are woken by their own means.
    changed: Condvar,
}

struct State {
    transfers: VecDeque<Arc<Transfer>>,
    /// Where the next piece of the first transfer begins.
    next: usize,
    closed: bool,
    wave: Option<Wave>,
}

/// With `overlap_events` off, the threads take so many pieces, and more when all of these have ended.
struct Wave {
    depth: usize,
    left: usize,
    busy: usize,
}

/// What there is to do.
pub(crate) enum Next {
    Piece(Piece),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Closed,
}

impl Queue {
    /// A queue of pieces of `block` bytes at most, taken in waves of so many, or as they come.
    pub(crate) fn new(block: usize, wave: Option<usize>) -> Self {
        let wave = wave.map(|depth| Wave { depth, left: depth, busy: 0 });
        let state = State { transfers: VecDeque::new(), next: 0, closed: false, wave };
        Self { block, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn push(&self, transfer: Arc<Transfer>) {
        self.state.lock().transfers.push_back(transfer);
        self.changed.notify_all();
    }

    /// No transfers come any more; the ones that are here are still carried out.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Takes every transfer of which pieces are left, and the place of the first one's next piece.
    pub(crate) fn clear(&self) -> (VecDeque<Arc<Transfer>>, usize) {
        let mut state = self.state.lock();
        let next = std::mem::take(&mut state.next);
        (std::mem::take(&mut state.transfers), next)
    }

    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// The next piece, if there is one.
    pub(crate) fn take(&self) -> Next {
        self.state.lock().take(self.block)
    }

    /// The next piece, waited for without a deadline: an idle thread waits until the file is dropped. `None`: closed.
    pub(crate) fn wait(&self) -> Option<Piece> {
        let mut state = self.state.lock();
        loop {
            match state.take(self.block) {
                Next::Piece(piece) => return Some(piece),
                Next::Closed => return None,
                Next::Nothing => self.changed.wait(&mut state),
            }
        }
    }

    /// A piece from [`Queue::wait`] has ended.
    pub(crate) fn ended(&self) {
        let mut state = self.state.lock();
        if let Some(wave) = &mut state.wave {
            wave.busy -= 1;
            if wave.busy == 0 {
                wave.left = wave.depth;
                self.changed.notify_all();
            }
        }
    }
}

impl State {
    fn take(&mut self, block: usize) -> Next {
        let Some(transfer) = self.transfers.front() else {
            return if self.closed { Next::Closed } else { Next::Nothing };
        };
        if let Some(wave) = &mut self.wave {
            if wave.left == 0 {
                return Next::Nothing;
            }
            wave.left -= 1;
            wave.busy += 1;
        }
        let start = self.next;
        let end = transfer.region.padded_bytes().min(start + block);
        let piece = Piece::new(transfer.clone(), start, end);
        if end == transfer.region.padded_bytes() {
            self.transfers.pop_front();
            self.next = 0;
        } else {
            self.next = end;
        }
        Next::Piece(piece)
    }
}
