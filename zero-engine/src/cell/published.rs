//! Access to a cell by the other ranks, even after its own rank has dropped it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use zero_core::collective::threads::panic_reason;
use zero_core::window::{Expose, Exposure, Key};

use super::slot::Slot;
use super::{Cell, FullState, ShardState, State};
use crate::backend::Backend;

/// Exposes a shard's bytes to ranks in other processes. Runs on the thread that serves them, so it never waits.
impl<B: Backend> Expose for Cell<B> {
    fn expose(&self, key: Key) -> Exposure {
        {
            let state = self.state.lock();
            match &state.shard {
                ShardState::Pending => return Exposure::Pending,
                ShardState::Failed(error) => return Exposure::Failed(error.to_string()),
                _ => {}
            }
        }
        // A settled cell stays settled, so nothing below waits.
        let exposed = || {
            let how = self.quantized().filter(|_| self.key != Some(key));
            Exposure::Ready { tag: self.tag(how), bytes: Box::new(self.sent(how)) }
        };
        // A panic is a disk error, or out of memory.
        catch_unwind(AssertUnwindSafe(exposed)).unwrap_or_else(|payload| Exposure::Failed(panic_reason(&*payload)))
    }
}

impl<B: Backend> Drop for Cell<B> {
    fn drop(&mut self) {
        let mut state = std::mem::replace(self.state.get_mut(), State::of(ShardState::OfFull));
        self.count(&state, -1);
        self.no_longer_ahead(&mut state);
        let Some(key) = self.key else { return };
        // A version that was loaded before the last fence and then replaced has been read by all ranks. One that was
        // loaded since, or whose module was dropped, may still be read by a slower rank.
        let is_last = |slot: &Arc<Slot<B>>| key.version == slot.names.lock().epoch();
        let last = self.is_version && self.slot.as_ref().is_some_and(is_last);
        let wanted = (last || self.may_be_read()) && !self.partition.is_whole();
        let readable = state.has_shard() || matches!(state.full, FullState::There(_));
        if wanted && readable && !self.retired && self.rank.running.load(Ordering::Relaxed) {
            self.rank.retire(self.retire(state));
        } else if self.is_version {
            self.names().for_each(|key| self.rank.window.retract(key));
        } else {
            self.rank.window.forget(key);
        }
    }
}

impl<B: Backend> Cell<B> {
    /// Returns a cell that remains readable under this one's name.
    fn retire(&self, mut state: State<B>) -> Arc<Self> {
        if !matches!(state.full, FullState::There(_)) {
            state.full = FullState::Absent;
        }
        let cell = Arc::new(Self {
            rank: self.rank.clone(),
            slot: self.slot.clone(),
            key: self.key,
            signature: self.signature,
            is_version: true,
            partition: self.partition,
            shape: self.shape.clone(),
            dtype: self.dtype,
            device: self.device.clone(),
            kind: AtomicU8::new(self.kind() as u8),
            retired: true,
            loaded: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
            joining: Mutex::new(()),
            secondary: self.secondary.clone(),
            codes: self.codes.clone(),
            lent: Mutex::new(self.lent.lock().take()),
        });
        cell.count(&cell.state.lock(), 1);
        self.names().for_each(|key| self.rank.window.publish(key, &cell));
        cell
    }
}
