//! Gathering: from a parameter's cell to the full tensor, and the policy by which the full tensor is kept.
//!
//! A parameter is gathered by reading the other ranks' shards in place ([`zero_core::window`]), without those ranks taking part. At stage 3
//! the first rank to need a parameter concatenates the shards, and the others borrow the result for as long as any rank uses it: the ranks
//! of one process hold one copy. Bytes are counted as if each rank had read its own. If all ranks gather collectively ([`crate::tensor_collectives`], ADR
//! 15), gathers begin at points that every rank reaches, in an order that depends only on the program.
//!
//! At stages 0 to 2 the full tensor is kept until the parameter is updated. At stage 3 it is kept only if it is small (persistence
//! threshold) or needed again soon, and gathered again otherwise. The order of a step's gathers (the *trace*) is recorded. In the next step
//! it determines what to prefetch and what is needed again soon.

mod read;

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use zero_core::accounting::WireKind;
use zero_core::collective::threads::panic_reason;
use zero_core::{CommError, OperationCall};
use zero_kernels::quantized::Quantized;

use crate::abort::raise;
use crate::backend::Backend;
use crate::cell::rank::Rank;
use crate::cell::slot::Slot;
use crate::cell::{Cell, FullState, Kind, ShardState, State};
use crate::copier::Caller;
use crate::tensor_collectives::{Begun, TensorCollectives};
use crate::values::part;
use crate::worker::Worker;

pub use read::exact as read_exact;

/// The order of the last step's gathers, and the position in it.
#[derive(Default)]
struct Trace {
    /// This step's gathers so far.
    recorded: Vec<(u64, usize)>,
    /// The last step's gathers, each with the number of elements gathered before the same parameter's next use.
    plan: Vec<(u64, usize, usize)>,
    cursor: usize,
    /// Position in the plan up to which prefetch has begun.
    ahead: usize,
    /// True if this step has followed the plan so far.
    followed: bool,
    /// True if the plan's beginning follows its end.
    cyclic: bool,
}

/// Maximum number of gathers remembered per step: a program that only evaluates never ends a step.
const MOST_RECORDED: usize = 1 << 16;

impl Trace {
    /// Records a gather of parameter `slot`. Returns the number of elements gathered before its next use, if this step follows the plan.
    fn record(&mut self, slot: u64, numel: usize) -> Option<usize> {
        let planned = |at: usize, slot: u64| self.plan.get(at).is_some_and(|&(planned, ..)| planned == slot);
        if !self.followed || !planned(self.cursor, slot) {
            // Off the plan: an evaluation, or another path through the model. A new step is recognized by its first two gathers, and
            // followed from there.
            let previous = self.recorded.last().copied();
            self.followed = previous.is_some_and(|(first, _)| planned(0, first)) && planned(1, slot);
            if self.followed {
                self.recorded = previous.into_iter().collect();
                self.cursor = 1;
                self.ahead = 1;
            }
        }
        if self.recorded.len() == MOST_RECORDED {
            self.recorded.clear();
        }
        self.recorded.push((slot, numel));
        let reuse_distance = self.followed.then(|| self.plan[self.cursor].2)?;
        self.cursor += 1;
        Some(reuse_distance)
    }

    /// Ends a step: its gathers become the plan. `cyclic` means that the next step is known to gather the same.
    fn end_cycle(&mut self, cyclic: bool) {
        let recorded = std::mem::take(&mut self.recorded);
        let count = recorded.len();
        // Prefetches beyond the plan's end are the beginning of the next step.
        let ahead = self.ahead.saturating_sub(self.plan.len());
        let goes_on = cyclic && self.cyclic && self.followed && self.cursor == self.plan.len() && count == self.cursor;
        self.plan = match cyclic {
            false => with_reuse_distances(&recorded),
            true => with_reuse_distances(&[&recorded[..], &recorded].concat()),
        };
        self.plan.truncate(count);
        (self.cursor, self.ahead) = (0, if goes_on { ahead } else { 0 });
        (self.followed, self.cyclic) = (!self.plan.is_empty(), cyclic);
    }

    /// Returns the plan's gather number `at`, which may lie beyond the end of a cyclic plan.
    fn planned(&self, at: usize) -> Option<(u64, usize, usize)> {
        let len = self.plan.len();
        let beyond = self.cyclic && (len..2 * len).contains(&at);
        self.plan.get(if beyond { at - len } else { at }).copied()
    }
}

/// The gathers of a rank's parameters, and the trace of its steps.
pub struct Gatherer<B: Backend> {
    rank: Arc<Rank<B>>,
    /// The collective path, if all ranks gather parameters collectively.
    together: Option<Arc<TensorCollectives>>,
    /// Parameters that all ranks have begun to gather because they will be kept.
    arriving: Mutex<Vec<Weak<Cell<B>>>>,
    trace: Mutex<Trace>,
    /// Parameters to be gathered ahead of their use.
    prefetch: Worker<Arc<Cell<B>>>,
    /// Versions whose secondary shard is to be gathered.
    seconds: Worker<Arc<Cell<B>>>,
    /// Secondary shards that are being gathered.
    filling: Mutex<Vec<Weak<Cell<B>>>>,
}

impl<B: Backend> Gatherer<B> {
    /// Creates the gathers of `rank`, collective ones if `collectives` is given and the rank is configured to gather collectively.
    pub fn new(rank: Arc<Rank<B>>, collectives: Option<&Arc<TensorCollectives>>) -> Self {
        Self {
            together: collectives.filter(|_| rank.gathers_together).cloned(),
            arriving: Mutex::default(),
            trace: Mutex::default(),
            prefetch: Worker::new(format!("rank-{}-prefetch", rank.place.rank)),
            seconds: Worker::new(format!("rank-{}-second-cut", rank.place.rank)),
            filling: Mutex::default(),
            rank,
        }
    }

    /// Returns the collective path, if all ranks gather parameters collectively.
    pub fn together(&self) -> Option<&Arc<TensorCollectives>> {
        self.together.as_ref()
    }

    /// Stops the threads that prefetch parameters and gather secondary shards.
    pub fn stop(&self) {
        self.prefetch.stop();
        self.seconds.stop();
    }

    /// Returns the full tensor of a version of parameter `slot`.
    pub fn load(&self, cell: &Arc<Cell<B>>, slot: &Slot<B>) -> B::Tensor {
        cell.mark_loaded();
        self.begin_awaited();
        self.end_awaited();
        // Elements of this load that count as gathered already.
        let begun = match self.together.is_some() && !cell.settled().full.is_begun() {
            true => {
                self.begin(std::slice::from_ref(cell));
                cell.partition.numel()
            }
            false => 0,
        };
        let keep = self.plan_load(slot, begun);
        // The prefetch thread may be gathering it. Its gather has a deadline, and it ends `Gathering` in any case.
        let mut state = {
            let _span = tracing::trace_span!("wait for prefetch", parameter = slot.index).entered();
            cell.wait_until(|state| !state.is_gathering())
        };
        if !matches!(state.full, FullState::There(_)) {
            let arriving = cell.update(&mut state, |state| state.full.take_arriving());
            cell.no_longer_ahead(&mut state);
            drop(state);
            let full = match arriving {
                Some(begun) => self.end(begun, cell),
                None => read::used(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error)),
            };
            if !keep {
                // Owned by this thread, for this use. Counted like one that is kept until it is taken.
                let bytes = (cell.partition.numel() * cell.dtype.size()) as i64;
                self.rank.gauges.gathered.add(bytes);
                self.rank.gauges.gathered.add(-bytes);
                return full;
            }
            let full = self.rank.share(full);
            state = cell.state.lock();
            cell.update(&mut state, |state| state.full = FullState::There(full));
        }
        cell.no_longer_ahead(&mut state);
        self.use_full(cell, &mut state, keep)
    }

    /// Returns the full tensor, which is available, for a use after which it is kept or dropped.
    fn use_full(&self, cell: &Cell<B>, state: &mut State<B>, keep: bool) -> B::Tensor {
        self.make_full_the_home(cell, state);
        let full = match keep {
            true => state.full.tensor(),
            false => match cell.update(state, |state| std::mem::replace(&mut state.full, FullState::Absent)) {
                FullState::There(full) => Some(full.into_tensor()),
                _ => None,
            },
        };
        full.expect("the full tensor is available")
    }

    /// At stages 1 and 2, makes the full tensor the only storage of the parameter: a separate shard would be held twice.
    fn make_full_the_home(&self, cell: &Cell<B>, state: &mut State<B>) {
        if !self.rank.config.stage.shards_parameters() && matches!(state.shard, ShardState::Tensor(_)) {
            cell.update(state, |state| state.shard = ShardState::OfFull);
        }
    }

    /// Records a load and returns whether its result is to be kept. Starts the prefetches that are due. `begun` elements of it count as
    /// gathered already.
    fn plan_load(&self, slot: &Slot<B>, begun: usize) -> bool {
        let (config, numel) = (&self.rank.config, slot.partition.numel());
        if !config.stage.shards_parameters() || numel <= config.param_persistence_threshold {
            return true;
        }
        let mut trace = self.trace.lock();
        let Some(reuse_distance) = trace.record(slot.index, numel) else { return false };
        let room = self.room() + begun;
        self.prefetch_from(&mut trace, slot.index, room.saturating_sub(numel));
        reuse_distance <= config.max_reuse_distance && numel <= room
    }

    /// Returns the number of elements that may still be gathered and kept.
    fn room(&self) -> usize {
        let (rank, config) = (&self.rank, &self.rank.config);
        let live = rank.gauges.gathered.live() as usize / config.param_dtype.size();
        config.max_live_parameters.saturating_sub(live + rank.ahead.in_flight.load(Ordering::Relaxed))
    }

    /// Begins the next gathers of the plan. Stops at a parameter that is being gathered for an earlier use, as `loading` is, and will not
    /// be kept after it: a gather begun now would serve the earlier use, after all gathers that were begun before it.
    fn prefetch_from(&self, trace: &mut Trace, loading: u64, mut room: usize) {
        let (rank, config) = (&self.rank, &self.rank.config);
        trace.ahead = trace.ahead.max(trace.cursor);
        let mut together = Vec::new();
        while let Some((index, numel, _)) = trace.planned(trace.ahead) {
            let ahead = rank.ahead.prefetched.load(Ordering::Relaxed);
            if ahead + numel > config.prefetch_bucket_size || numel > room {
                break;
            }
            trace.ahead += 1;
            let Some(cell) = rank.parameters.current_version(index) else { continue };
            {
                let mut state = cell.state.lock();
                if index == loading || state.is_gathering() || state.prefetched {
                    let earlier = (0..trace.ahead - 1)
                        .rev()
                        .filter_map(|at| trace.planned(at))
                        .find(|&(other, ..)| other == index);
                    if earlier.is_some_and(|(.., distance)| distance <= config.max_reuse_distance) {
                        // Kept from that use to this one.
                        continue;
                    }
                    trace.ahead -= 1;
                    break;
                }
                if state.full.is_begun() {
                    continue;
                }
                match self.together.is_some() {
                    true => state.prefetched = true,
                    false => state.full = FullState::Gathering,
                }
            }
            room -= numel;
            rank.ahead.prefetched.fetch_add(numel, Ordering::Relaxed);
            if self.together.is_some() {
                together.push(cell);
                continue;
            }
            rank.ahead.in_flight.fetch_add(numel, Ordering::Relaxed);
            self.prefetch.send::<B>(cell, |inbox| inbox.into_iter().for_each(|cell| gather_ahead(&cell)));
        }
        self.begin(&together);
    }

    // ---- gathers by all ranks together ----

    /// Begins a collective gather of `cells` on the rank's own thread, so that every rank begins the same gathers in the same order.
    fn begin(&self, cells: &[Arc<Cell<B>>]) {
        let Some(collectives) = self.together.as_ref().filter(|_| !cells.is_empty()) else { return };
        let name = |cell: &Cell<B>| cell.slot.as_ref().map_or_else(String::new, |slot| slot.to_string());
        let outputs = cells.iter().map(|cell| (name(cell), cell.shape.clone())).collect();
        let rows = cells.iter().map(|cell| row(cell)).collect();
        let begun = collectives.begin_gathers(rows, outputs).unwrap_or_else(|error| raise(error));
        for (cell, begun) in cells.iter().zip(begun) {
            let mut state = cell.state.lock();
            cell.update(&mut state, |state| state.full = FullState::Arriving(begun));
        }
    }

    /// Ends a collective gather and returns the full tensor of `cell`, in its own shape.
    fn end(&self, begun: Begun<B>, cell: &Cell<B>) -> B::Tensor {
        let collectives = self.together.as_ref().expect("only collective gathers are begun");
        let flat = collectives.end::<B>(begun, &cell.device).unwrap_or_else(|error| raise(error));
        let (numel, ranks, width) = (cell.partition.numel(), cell.partition.world(), cell.partition.stride());
        let flat = match cell.quantized() {
            Some(format) => {
                let rows = B::reshape(flat, &[ranks, format.words(width)]);
                let values = B::from_codes(rows, Quantized { format, width }, cell.dtype);
                B::reshape(values, &[ranks * width])
            }
            None => flat,
        };
        // The last ranks' shards may be shorter than the others'.
        B::reshape(part::<B>(flat, 0..numel), &cell.shape)
    }

    /// Begins the queued gathers ([`Rank::awaited`]) in few operations. Called at points that every rank reaches: after an update, before a
    /// parameter is used, before gradients are reduced, before a fence.
    pub fn begin_awaited(&self) {
        if self.together.is_none() {
            return self.begin_secondary();
        }
        let awaited = std::mem::take(&mut *self.rank.awaited.lock());
        // A dropped version has been replaced, on every rank.
        let cells = awaited.into_values().filter_map(|cell| cell.upgrade());
        let cells: Vec<Arc<Cell<B>>> = cells.filter(|cell| !cell.settled().full.is_begun()).collect();
        if cells.is_empty() {
            return;
        }
        let _span = tracing::trace_span!("gather", parameters = cells.len()).entered();
        self.begin(&cells);
        self.arriving.lock().extend(cells.iter().map(Arc::downgrade));
    }

    /// Begins to gather the queued secondary shards, concurrently with the rank's own thread: other ranks of the group that read this
    /// rank's secondary shard must not wait for its next use of a parameter.
    fn begin_secondary(&self) {
        let awaited = std::mem::take(&mut *self.rank.awaited.lock());
        for cell in awaited.into_values().filter_map(|cell| cell.upgrade()) {
            let Some(second) = cell.secondary.get() else { continue };
            read::count_secondary(&cell, second);
            self.filling.lock().push(Arc::downgrade(second));
            self.seconds.send::<B>(cell, |inbox| inbox.into_iter().for_each(|cell| gather_secondary(&cell)));
        }
    }

    /// Waits for the secondary shards that are being gathered: their source may be replaced next.
    pub fn end_secondary(&self) {
        let filling = std::mem::take(&mut *self.filling.lock());
        filling.iter().filter_map(Weak::upgrade).for_each(|second| drop(second.settled()));
    }

    /// Ends the gathers that [`Gatherer::begin_awaited`] has begun: one of them is needed, and they arrive together.
    pub fn end_awaited(&self) {
        let (mut cells, mut outputs) = (Vec::new(), Vec::new());
        for cell in std::mem::take(&mut *self.arriving.lock()).iter().filter_map(Weak::upgrade) {
            let mut state = cell.state.lock();
            let Some(begun) = cell.update(&mut state, |state| state.full.take_arriving()) else { continue };
            drop(state);
            outputs.push(self.end(begun, &cell));
            cells.push(cell);
        }
        if cells.is_empty() {
            return;
        }
        for (cell, full) in cells.iter().zip(self.rank.share_many(outputs)) {
            let mut state = cell.state.lock();
            cell.update(&mut state, |state| state.full = FullState::There(full));
            self.make_full_the_home(cell, &mut state);
        }
    }

    /// Waits, before the rank ends, until all collective gathers have ended on all ranks. A rank that left before its part of an operation
    /// would block the others.
    ///
    /// # Errors
    ///
    /// If the collective fails.
    pub fn finish(&self) -> Result<(), CommError> {
        self.together.as_ref().map_or(Ok(()), |collectives| collectives.finish())
    }

    // ---- the end of a step ----

    /// Ends a step: its gathers become the plan.
    pub fn end_cycle(&self) {
        self.trace.lock().end_cycle(false);
    }

    /// Ends an evaluation pass; the next one gathers the same in the same order.
    pub fn end_pass(&self) {
        self.trace.lock().end_cycle(true);
    }

    /// Drops gathered copies that the policy does not keep between steps.
    pub fn drop_unused(&self) {
        let indices: Vec<u64> = self.trace.lock().plan.iter().map(|&(index, ..)| index).collect();
        for cell in indices.into_iter().filter_map(|index| self.rank.parameters.current_version(index)) {
            let mut state = cell.state.lock();
            if cell.kind() == Kind::Parameter && state.has_shard() && state.full.is_begun() {
                cell.forget_full(&mut state);
            }
        }
    }
}

/// Gathers a parameter on the prefetch thread.
fn gather_ahead<B: Backend>(cell: &Cell<B>) {
    // An error or a panic (out of memory) is left to the load, which meets it on the rank's own thread.
    let full = catch_unwind(AssertUnwindSafe(|| read::used(cell, Caller::OtherThread))).ok().and_then(Result::ok);
    let full = full.map(|full| cell.rank.share(full));
    let mut state = cell.state.lock();
    cell.rank.ahead.in_flight.fetch_sub(cell.partition.numel(), Ordering::Relaxed);
    state.prefetched = true;
    match full {
        Some(full) => cell.update(&mut state, |state| state.full = FullState::There(full)),
        None => cell.forget_full(&mut state),
    }
    cell.changed.notify_all();
}

/// Gathers this rank's secondary shard of a version.
fn gather_secondary<B: Backend>(cell: &Cell<B>) {
    let Some(second) = cell.secondary.get() else { return };
    // An error of the shards that it waits for arrives as a panic.
    let failed = |payload: Box<dyn Any + Send>| match payload.downcast::<CommError>() {
        Ok(error) => *error,
        Err(payload) => CommError::Device {
            at: OperationCall::new(
                "window",
                second.key.map_or(0, |key| key.object),
                cell.rank.place.rank,
                format!("a gather of {cell}"),
            ),
            reason: panic_reason(&*payload).into(),
        },
    };
    let gathered = catch_unwind(AssertUnwindSafe(|| read::secondary(cell, second))).map_err(failed).and_then(|it| it);
    second.settle(gathered.map(|shard| cell.rank.share(shard)));
}

/// Returns this rank's contribution to a gather for use: its shard, or its codes, which every rank decodes, this one included.
fn row<B: Backend>(cell: &Cell<B>) -> B::Tensor {
    let Some(format) = cell.quantized() else { return filled_row(cell) };
    let (width, ranks) = (cell.partition.stride(), cell.partition.world());
    let codes = B::to_codes(B::reshape(filled_row(cell), &[1, width]), format);
    let (exact, sent) = (width * cell.dtype.size(), format.bytes(width));
    cell.rank.wire.add_uncompressed(WireKind::AllGather, (ranks - 1) * exact, (ranks - 1) * sent);
    B::reshape(codes, &[format.words(width)])
}

/// Returns this rank's shard, padded to the partition's stride.
fn filled_row<B: Backend>(cell: &Cell<B>) -> B::Tensor {
    let (len, stride) = (cell.partition.len(cell.place()), cell.partition.stride());
    let local = cell.local();
    if len == stride && B::numel(&local) == stride {
        return B::reshape(local, &[stride]);
    }
    let filler = B::zeros(&[stride - len], &cell.device, cell.dtype);
    match len {
        0 => filler,
        _ => B::cat(vec![part::<B>(local, 0..len), filler]),
    }
}

/// Adds to each gather the number of elements gathered between it and the next gather of the same parameter.
fn with_reuse_distances(recorded: &[(u64, usize)]) -> Vec<(u64, usize, usize)> {
    let mut plan: Vec<(u64, usize, usize)> = Vec::with_capacity(recorded.len());
    // Elements gathered from a place to the end, and for each parameter that count at its next use.
    let mut after = 0;
    let mut at_next_use: HashMap<u64, usize> = HashMap::new();
    for &(index, numel) in recorded.iter().rev() {
        let distance = at_next_use.insert(index, after + numel).map_or(usize::MAX, |next| after - next);
        plan.push((index, numel, distance));
        after += numel;
    }
    plan.reverse();
    plan
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zero_core::config::ZeroConfig;
    use zero_core::{Buffer, Stage};

    use super::*;
    use crate::backend::{DType, HostData};
    use crate::cell::{Origin, Template};
    use crate::testing::{Host, with_ranks};

    /// Runs `body` as two ranks at stage 3, with two parameters that are sharded and not kept.
    fn with_two_parameters(body: impl Fn(&Gatherer<Host>, [Arc<Cell<Host>>; 2]) + Sync) {
        let config = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(Stage::Parameters) };
        with_ranks(2, &config, Duration::from_secs(60), |rank| {
            let cells = [0, 1].map(|id| {
                let slot = rank.new_slot([6, 4].into(), DType::F32);
                rank.parameters.name(id, slot.clone());
                let template = Template::of(rank, &slot, Kind::Parameter, Origin::Version);
                Cell::ready(template, HostData::flat_of(Buffer::F32(vec![1.0; 12])))
            });
            let gatherer = Gatherer::new(rank.clone(), None);
            body(&gatherer, cells);
            gatherer.stop();
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_an_evaluation_gathers_is_not_remembered_for_ever() {
        with_two_parameters(|gatherer, [cell, _]| {
            let slot = cell.slot.as_ref().unwrap();
            for _ in 0..3 * MOST_RECORDED {
                gatherer.plan_load(slot, 0);
            }
            let trace = gatherer.trace.lock();
            assert!(trace.recorded.len() <= MOST_RECORDED && trace.recorded.capacity() <= 2 * MOST_RECORDED);
        });
    }

    #[test]
    fn a_load_does_not_wait_for_a_prefetch_of_its_own_next_use() {
        with_two_parameters(|gatherer, [a, b]| {
            let all = [&a, &b, &a, &b, &a];
            let load = |cell: &Arc<Cell<Host>>| drop(gatherer.load(cell, cell.slot.as_ref().unwrap()));
            all.into_iter().for_each(load);
            gatherer.end_cycle();
            let plan = |cell: &Cell<Host>| gatherer.plan_load(cell.slot.as_ref().unwrap(), 0);
            let is_ahead = |cell: &Cell<Host>| {
                let state = cell.wait_until(|state| !state.is_gathering());
                state.prefetched
            };
            plan(&a);
            assert!(is_ahead(&b) && !is_ahead(&a), "the first load is of what it is about to gather itself");
            // Used, so that the next uses come in turn.
            load(&b);
            assert!(is_ahead(&a) && !is_ahead(&b));
            load(&a);
            assert!(is_ahead(&b) && !is_ahead(&a));
        });
    }

    #[test]
    fn passes_that_are_alike_are_prefetched_across_their_ends() {
        with_two_parameters(|gatherer, [a, b]| {
            let load = |cell: &Arc<Cell<Host>>| drop(gatherer.load(cell, cell.slot.as_ref().unwrap()));
            let is_ahead = |cell: &Cell<Host>| {
                let state = cell.wait_until(|state| !state.is_gathering());
                state.prefetched
            };
            let is_there = |cell: &Cell<Host>| matches!(cell.state.lock().full, FullState::There(_));
            // The last is the next one's first: it is kept.
            for pass in 0..4 {
                assert_eq!((is_there(&a), is_ahead(&b)), (pass > 1, pass > 1), "before pass {pass}");
                [&a, &b, &a].into_iter().for_each(load);
                gatherer.end_pass();
            }
            // Other passes follow.
            [&b, &b].into_iter().for_each(load);
            gatherer.end_pass();
            [&b, &b].into_iter().for_each(load);
        });
    }

    #[test]
    fn reuse_distances_count_what_lies_between() {
        let plan = with_reuse_distances(&[(0, 10), (1, 5), (0, 10), (0, 10), (2, 3)]);
        let distances: Vec<usize> = plan.iter().map(|&(_, _, distance)| distance).collect();
        assert_eq!(distances, [5, usize::MAX, 0, usize::MAX, usize::MAX]);
    }
}
