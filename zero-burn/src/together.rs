//! When parameters are gathered where all ranks gather together ([`crate::bulk`], ADR 15): in few operations, begun at places
//! where every rank comes, in an order that depends on nothing but the program.

use std::sync::{Arc, Weak};

use burn_backend::Backend;
use zero_core::ReduceOp;

use crate::bulk::Bulk;
use crate::config::Tier;
use crate::context::Context;
use crate::shard::Cell;
use crate::trouble::raise;

impl<B: Backend> Context<B> {
    /// What gathers parameters by all ranks together, if that is how they are gathered.
    pub(crate) fn collecting(&self) -> Option<&Arc<Bulk>> {
        self.bulk.as_ref().filter(|bulk| bulk.gathers())
    }

    /// A version of parameter `index` is there: if its whole will be kept until the next one, all ranks gather it with the
    /// others of its kind. The same versions on every rank: nothing here depends on what a rank has of them.
    pub(crate) fn await_whole(&self, cell: &Arc<Cell<B>>, index: u64) {
        let config = &self.config;
        let is_kept = !config.stage.shards_parameters() || cell.partition.numel() <= config.param_persistence_threshold;
        // Updates beside the next forward pass end one by one: gathers wait for each as it is used.
        let is_late = config.offload.optimizer != Tier::Memory || config.offload.parameters != Tier::Memory;
        if is_kept
            && !is_late
            && !cell.partition.is_whole()
            && !cell.partition.is_empty()
            && self.collecting().is_some()
        {
            self.awaited.lock().insert(index, Arc::downgrade(cell));
        }
    }

    /// After what may go well on one rank and not on another: gathers what waits for it only if it is `sound` on all of them.
    /// Otherwise ranks have made different versions, whose gathers would not match; the caller has an error to tell. A
    /// collective, where ranks gather together.
    pub(crate) fn keep_awaited_if(&self, sound: bool) {
        if self.collecting().is_some() && self.reduce_scalars(vec![f64::from(u8::from(!sound))], ReduceOp::Max)[0] > 0.0
        {
            self.awaited.lock().clear();
        }
    }

    /// Begins to gather what waits for it, in few operations. Called where every rank comes: after an update, before a
    /// parameter is used, before gradients are reduced, before a fence.
    pub(crate) fn gather_awaited(&self) {
        let Some(bulk) = self.collecting() else { return };
        let awaited = std::mem::take(&mut *self.awaited.lock());
        // One that was dropped was replaced, on every rank.
        let cells: Vec<Arc<Cell<B>>> = awaited.into_values().filter_map(|cell| cell.upgrade()).collect();
        let wanted = |cell: &Arc<Cell<B>>| {
            let state = cell.settled();
            state.whole.is_none() && state.arriving.is_none()
        };
        let cells: Vec<Arc<Cell<B>>> = cells.into_iter().filter(wanted).collect();
        if cells.is_empty() {
            return;
        }
        let _span = tracing::trace_span!("gather", parameters = cells.len()).entered();
        let begun = bulk.begin_gathers(&cells).unwrap_or_else(|error| raise(error));
        let mut arriving = self.arriving.lock();
        for (cell, begun) in cells.iter().zip(begun) {
            let mut state = cell.state.lock();
            cell.update(&mut state, |state| state.arriving = Some(begun));
            arriving.push(Arc::downgrade(cell));
        }
    }

    /// Ends the gathers that [`Context::gather_awaited`] has begun: one of them is needed, and they come together.
    pub(crate) fn end_awaited(&self) {
        let Some(bulk) = self.collecting() else { return };
        let (mut cells, mut wholes) = (Vec::new(), Vec::new());
        for cell in std::mem::take(&mut *self.arriving.lock()).iter().filter_map(Weak::upgrade) {
            let mut state = cell.state.lock();
            let Some(begun) = cell.update(&mut state, |state| state.arriving.take()) else { continue };
            drop(state);
            wholes.push(bulk.end_gather(begun, &cell).unwrap_or_else(|error| raise(error)));
            cells.push(cell);
        }
        if cells.is_empty() {
            return;
        }
        let keeps_piece = self.config.stage.shards_parameters();
        for (cell, whole) in cells.iter().zip(self.share_many(wholes)) {
            let mut state = cell.state.lock();
            cell.update(&mut state, |state| {
                state.whole = Some(whole);
                if !keeps_piece {
                    // The whole is the parameter's home; a piece beside it would be held twice.
                    state.local = None;
                }
            });
        }
    }

    /// The rank ends: what all ranks have begun together has ended on all of them. One that leaves with its part of an
    /// operation still to come would keep the others.
    pub(crate) fn end_gathers(&self) {
        if let Some(bulk) = self.collecting() {
            bulk.finish().unwrap_or_else(|error| raise(error));
        }
    }
}
