//! Loads: from a cell to the whole tensor, and the policy by which the whole is kept.
//!
//! A parameter is gathered by reading the other ranks' pieces where they lie ([`zero_core::window`]); they do not take
//! part. At stage 3 the first rank to need it joins the pieces, and the others borrow the result for as long as it is used
//! anywhere: ranks of one process hold one copy. Bytes are counted as if each had read its own. At stages 0 to 2 the whole is kept until the parameter is updated. At stage 3 it is kept only when it is small
//! (persistence threshold) or needed again at once, and gathered again otherwise; the order of gathers of one step (the
//! *trace*) is recorded and tells, in the next step, what to prefetch and what is needed again.
//!
//! Gradients and optimizer state are read the same way when they are saved or inspected, in any order, and never kept;
//! every rank must do so, as their owners wait until all have read. Only what was computed of loaded state before its first
//! use has no name that other ranks know: it is gathered by a collective, in the same order on every rank.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use parking_lot::Mutex;
use zero_core::CommError;
use zero_core::accounting::WireKind;
use zero_core::window::{Key, Whole};
use zero_ops::Shared;

use crate::bulk::Bulk;
use crate::config::ZeroConfig;
use crate::context::Context;
use crate::mover::For;
use crate::shard::{Cell, Kind, State};
use crate::slot::Slot;
use crate::tier::filled;
use crate::trouble::{or_stop, raise, stop_foreign};
use crate::values::{data, here, on_the_wire, read, tag};
use crate::worker::Worker;

/// The whole tensor of `cell` in its own shape.
pub(crate) fn load<B: Backend>(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
    if !cell.context.is_here() {
        stop_foreign(&cell.shape);
    }
    cell.adopt();
    if cell.partition.is_empty() {
        return empty::<B>(&cell.shape, cell.dtype, &cell.device);
    }
    if cell.partition.is_whole() {
        return B::float_reshape(cell.local(), cell.shape.clone());
    }
    match (&cell.slot, cell.key) {
        (Some(slot), _) if cell.is_version() => load_parameter(cell, slot),
        (_, Some(_)) => {
            let whole = gather(cell, For::Own).unwrap_or_else(|error| raise(error));
            // Optimizers replace their state at once: not before every rank has read it.
            cell.context.barrier("after reading a gradient or optimizer state out");
            whole
        }
        (_, None) => gather_collectively(cell),
    }
}

/// A tensor without elements: created from data, as not every backend slices or reshapes to nothing.
pub(crate) fn empty<B: Backend>(shape: &Shape, dtype: DType, device: &B::Device) -> B::FloatTensorPrimitive {
    B::float_from_data(TensorData::from_bytes_vec(Vec::new(), shape.clone(), dtype), device)
}

fn load_parameter<B: Backend>(cell: &Arc<Cell<B>>, slot: &Arc<Slot<B>>) -> B::FloatTensorPrimitive {
    let context = &cell.context;
    cell.mark_loaded();
    if let Some(bulk) = context.collecting() {
        return load_together(cell, slot, bulk);
    }
    let keep = context.gatherer.plan_load(context, slot, 0);
    // The prefetch thread may be at it. Its gather has a deadline, and it ends `gathering` in any case.
    let mut state = {
        let _span = tracing::trace_span!("wait for prefetch", parameter = slot.index).entered();
        cell.wait_until(|state| !state.gathering)
    };
    if state.whole.is_none() {
        drop(state);
        let whole = gather(cell, For::Own).unwrap_or_else(|error| raise(error));
        if !keep {
            // This thread's, for this once; counted as one that is kept until it is taken would be.
            let bytes = (cell.partition.numel() * cell.dtype.size()) as i64;
            context.gauges.gathered.add(bytes);
            context.gauges.gathered.add(-bytes);
            return whole;
        }
        let whole = context.share(whole);
        state = cell.state.lock();
        cell.update(&mut state, |state| state.whole = Some(whole));
    }
    used(cell, &mut state, keep)
}

/// The whole, which is there, for a use after which it is kept or not.
fn used<B: Backend>(cell: &Cell<B>, state: &mut State<B>, keep: bool) -> B::FloatTensorPrimitive {
    let context = &cell.context;
    if std::mem::take(&mut state.prefetched) {
        context.gatherer.forget_prefetched(cell.partition.numel());
    }
    let sharded_home = context.config.stage.shards_parameters();
    cell.update(state, |state| {
        if !sharded_home && state.local.is_some() {
            // Stages 1 and 2: the whole is the parameter's home; a piece beside it would be held twice.
            state.local = None;
        }
        if keep { state.whole.as_ref().map(Shared::tensor) } else { state.whole.take().map(Shared::into_tensor) }
    })
    .expect("the whole is there")
}

/// [`load_parameter`] where all ranks gather together: begun here, on the rank's own thread, and what the plan says comes next
/// with it, so that every rank begins the same gathers in the same order.
fn load_together<B: Backend>(cell: &Arc<Cell<B>>, slot: &Arc<Slot<B>>, bulk: &Bulk) -> B::FloatTensorPrimitive {
    let context = &cell.context;
    context.gather_awaited();
    context.end_awaited();
    let is_there = {
        let state = cell.settled();
        state.whole.is_some() || state.arriving.is_some()
    };
    // What counts as gathered already of what is about to be.
    let begun = if is_there { 0 } else { cell.partition.numel() };
    if !is_there {
        let begun = bulk.begin_gathers(std::slice::from_ref(cell)).unwrap_or_else(|error| raise(error));
        let mut state = cell.state.lock();
        cell.update(&mut state, |state| state.arriving = begun.into_iter().next());
    }
    let keep = context.gatherer.plan_load(context, slot, begun);
    let mut state = cell.state.lock();
    if let Some(begun) = cell.update(&mut state, |state| state.arriving.take()) {
        drop(state);
        let whole = bulk.end_gather(begun, cell).unwrap_or_else(|error| raise(error));
        let whole = if keep { context.share(whole) } else { Shared::not(whole) };
        state = cell.state.lock();
        cell.update(&mut state, |state| state.whole = Some(whole));
    }
    used(cell, &mut state, keep)
}

/// How long a rank waits for another that is joining the same pieces, before it does so itself. Bounded, and short: this may
/// run under autodiff's locks (ADR 2).
const JOINING: Duration = Duration::from_secs(1);

/// Reads all pieces and joins them, or borrows what another rank has joined.
fn gather<B: Backend>(cell: &Cell<B>, who: For) -> Result<B::FloatTensorPrimitive, CommError> {
    let (context, partition) = (&cell.context, cell.partition);
    let key = cell.key.expect("only what has a name is read one-sidedly");
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
    if context.window.is_remote() {
        return gather_from_processes(cell, key);
    }
    let mut cells: Vec<Option<Arc<Cell<B>>>> = Vec::with_capacity(partition.world());
    for rank in 0..partition.world() {
        if partition.len(rank) == 0 {
            continue;
        }
        if rank == context.rank {
            cells.push(None);
        } else {
            let peer = context.window.read(rank, key, cell)?.here().expect("ranks of one process show what they have");
            if peer.shape != cell.shape || peer.dtype != cell.dtype {
                return Err(CommError::Mismatch {
                    group: "window".into(),
                    seq: key.object,
                    rank: context.rank,
                    op: format!("a gather of {cell} of {:?}", cell.dtype),
                    other_rank: rank,
                    other_op: format!("holds {:?} of {:?} there", peer.shape.as_slice(), peer.dtype),
                });
            }
            cells.push(Some(peer));
        }
    }
    let received = partition.numel() - partition.len(context.rank);
    context.wire.add(WireKind::AllGather, received * cell.dtype.size());
    let cells = || cells.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    let join = || {
        if cells().any(|piece| piece.stored().is_some()) {
            return join_stored(cell, cells(), who);
        }
        // Ranks of one process may have a device each.
        let mut pieces: Vec<_> = cells().map(|piece| here::<B>(piece.local(), &cell.device)).collect();
        let flat = match pieces.len() {
            1 => pieces.swap_remove(0),
            _ => B::float_cat(pieces, 0),
        };
        B::float_reshape(flat, cell.shape.clone())
    };
    // At the other stages a whole is the parameter's home, of which each rank has its own.
    if !context.config.stage.shards_parameters() || cells().any(|peer| peer.device != cell.device) {
        return Ok(join());
    }
    let _joining = cells().next().and_then(|first| first.joining.try_lock_for(JOINING));
    let borrowed = cells().find_map(|peer| peer.lent.lock().as_ref()?.borrow::<B>());
    let whole = borrowed.unwrap_or_else(join);
    *cell.lent.lock() = zero_ops::Lent::of::<B>(&whole);
    Ok(whole)
}

/// Has the other processes' pieces sent to where they belong in the whole.
fn gather_from_processes<B: Backend>(cell: &Cell<B>, key: Key) -> Result<B::FloatTensorPrimitive, CommError> {
    let (context, partition, size) = (&cell.context, cell.partition, cell.dtype.size());
    let bytes = |rank: usize| {
        let range = partition.range(rank);
        range.start * size..range.end * size
    };
    let pieces: Vec<_> =
        (0..partition.world()).filter(|&rank| rank != context.rank).map(|rank| (rank, bytes(rank))).collect();
    let mine = bytes(context.rank);
    let own = (!mine.is_empty()).then(|| cell.data());
    let own = own.as_ref().map(|data| (mine.start, &data.as_bytes()[..mine.len()]));
    let dtype = on_the_wire(cell.dtype);
    let whole = Whole { dtype, elements: partition.numel(), tag: &tag(&cell.shape, cell.dtype), own, pieces: &pieces };
    let whole = context.window.gather(whole, key, cell)?;
    context.wire.add(WireKind::AllGather, (partition.numel() - partition.len(context.rank)) * size);
    Ok(B::float_from_data(data(whole, cell.shape.clone()), &cell.device))
}

/// Joins pieces of which some are in the host's memory or on a disk, in one new array.
fn join_stored<'c, B: Backend>(
    cell: &Cell<B>,
    pieces: impl Iterator<Item = &'c Cell<B>>,
    who: For,
) -> B::FloatTensorPrimitive {
    let (size, mover) = (cell.dtype.size(), &cell.context.mover);
    let data = filled(mover, cell.partition.numel(), cell.dtype, cell.shape.clone(), |whole| {
        for piece in pieces {
            let range = cell.partition.range(piece.place());
            let part = &mut whole[range.start * size..range.end * size];
            match piece.stored() {
                Some(stored) => or_stop(stored.read_into(part)),
                None => part.copy_from_slice(&read::<B>(piece.local()).as_bytes()[..part.len()]),
            }
        }
    });
    mover.to_backend::<B>(data, cell.shape.clone(), &cell.device, who).into_tensor()
}

/// Gathers a tensor that has no name; every rank must call it.
fn gather_collectively<B: Backend>(cell: &Cell<B>) -> B::FloatTensorPrimitive {
    let (partition, size) = (cell.partition, cell.dtype.size());
    let mut bytes = cell.data().into_bytes().to_vec();
    bytes.truncate(partition.len(cell.place()) * size);
    bytes.resize(partition.stride() * size, 0);
    let mut whole = cell.context.gather_bytes(bytes);
    whole.truncate(partition.numel() * size);
    B::float_from_data(TensorData::from_bytes_vec(whole, cell.shape.clone(), cell.dtype), &cell.device)
}

/// The order of gathers of the last step and the place in it.
#[derive(Default)]
struct Trace {
    /// This step's gathers so far.
    recorded: Vec<(u64, usize)>,
    /// The last step's, with the number of elements gathered before the same parameter's next use.
    plan: Vec<(u64, usize, usize)>,
    cursor: usize,
    /// Where prefetch has got to.
    ahead: usize,
    /// Whether this step has followed the plan so far.
    followed: bool,
}

/// Most gathers of a step that are remembered: a program that only ever evaluates has no end of a step.
const MOST_RECORDED: usize = 1 << 16;

/// A parameter to be gathered ahead of its use.
type Job<B> = Arc<Cell<B>>;

/// The policy of stage 3.
pub(crate) struct Gatherer<B: Backend> {
    trace: Mutex<Trace>,
    prefetch: Worker<Job<B>>,
    /// Elements gathered ahead, or about to be, and not used yet.
    prefetched: AtomicUsize,
    /// The part of them that is not there yet.
    in_flight: AtomicUsize,
    max_reuse_distance: usize,
    prefetch_bucket_size: usize,
}

impl<B: Backend> Gatherer<B> {
    pub(crate) fn new(rank: usize, config: &ZeroConfig) -> Self {
        Self {
            trace: Mutex::default(),
            prefetch: Worker::new(format!("rank-{rank}-prefetch")),
            prefetched: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            max_reuse_distance: config.max_reuse_distance,
            prefetch_bucket_size: config.prefetch_bucket_size,
        }
    }

    pub(crate) fn forget_prefetched(&self, numel: usize) {
        self.prefetched.fetch_sub(numel, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.prefetch.stop();
    }

    /// Records a load; returns whether its result is to be kept. Starts what is due ahead of it.
    /// `begun` elements of it count as gathered already.
    fn plan_load(&self, context: &Context<B>, slot: &Slot<B>, begun: usize) -> bool {
        let config = &context.config;
        let numel = slot.partition.numel();
        if !config.stage.shards_parameters() || numel <= config.param_persistence_threshold {
            return true;
        }
        let mut trace = self.trace.lock();
        let planned = |at: usize, index: u64| trace.plan.get(at).is_some_and(|&(planned, ..)| planned == index);
        if !trace.followed || !planned(trace.cursor, slot.index) {
            // Off the plan: an evaluation, or another path through the model. A step that begins anew is told by its
            // first two gathers, and followed from there.
            let previous = trace.recorded.last().copied();
            trace.followed = previous.is_some_and(|(index, _)| planned(0, index)) && planned(1, slot.index);
            if trace.followed {
                trace.recorded = previous.into_iter().collect();
                trace.cursor = 1;
                trace.ahead = 1;
            }
        }
        if trace.recorded.len() == MOST_RECORDED {
            trace.recorded.clear();
        }
        trace.recorded.push((slot.index, numel));
        if !trace.followed {
            return false;
        }
        let reuse_distance = trace.plan[trace.cursor].2;
        trace.cursor += 1;
        let room = self.room(context) + begun;
        self.prefetch_from(context, &mut trace, slot.index, room.saturating_sub(numel));
        reuse_distance <= self.max_reuse_distance && numel <= room
    }

    /// Elements that may still be gathered and kept.
    fn room(&self, context: &Context<B>) -> usize {
        let live = context.gauges.gathered.live() as usize / context.config.param_dtype.size();
        context.config.max_live_parameters.saturating_sub(live + self.in_flight.load(Ordering::Relaxed))
    }

    /// Begins what the plan says comes next, up to a further use of something that is on its way to an earlier one, as
    /// `loading` is, and will not be kept: begun now, it would serve the earlier use, behind all that was begun before it.
    fn prefetch_from(&self, context: &Context<B>, trace: &mut Trace, loading: u64, mut room: usize) {
        trace.ahead = trace.ahead.max(trace.cursor);
        let mut together = Vec::new();
        while let Some(&(index, numel, _)) = trace.plan.get(trace.ahead) {
            let ahead = self.prefetched.load(Ordering::Relaxed);
            if ahead + numel > self.prefetch_bucket_size || numel > room {
                break;
            }
            trace.ahead += 1;
            let Some(cell) = context.parameters.current_version(index) else { continue };
            let is_together = context.collecting().is_some();
            {
                let mut state = cell.state.lock();
                if index == loading || state.gathering || state.prefetched {
                    let earlier = trace.plan[..trace.ahead - 1].iter().rev().find(|&&(other, ..)| other == index);
                    if earlier.is_some_and(|&(.., distance)| distance <= self.max_reuse_distance) {
                        // Kept from that use to this one.
                        continue;
                    }
                    trace.ahead -= 1;
                    break;
                }
                if state.whole.is_some() || state.arriving.is_some() {
                    continue;
                }
                (state.gathering, state.prefetched) = (!is_together, is_together);
            }
            room -= numel;
            self.prefetched.fetch_add(numel, Ordering::Relaxed);
            if is_together {
                together.push(cell);
                continue;
            }
            self.in_flight.fetch_add(numel, Ordering::Relaxed);
            self.prefetch.send(cell, |inbox| {
                for cell in inbox {
                    // An error or a panic (no memory) is left to the load, which meets it on the rank's own thread.
                    let whole = catch_unwind(AssertUnwindSafe(|| gather(&cell, For::Beside))).ok().and_then(Result::ok);
                    let whole = whole.map(|whole| cell.context.share(whole));
                    let gatherer = &cell.context.gatherer;
                    let mut state = cell.state.lock();
                    gatherer.in_flight.fetch_sub(cell.partition.numel(), Ordering::Relaxed);
                    cell.update(&mut state, |state| {
                        state.gathering = false;
                        state.whole = whole;
                        state.prefetched = state.whole.is_some();
                    });
                    if !state.prefetched {
                        gatherer.forget_prefetched(cell.partition.numel());
                    }
                    cell.changed.notify_all();
                }
            });
        }
        let Some(bulk) = context.collecting().filter(|_| !together.is_empty()) else { return };
        let begun = bulk.begin_gathers(&together).unwrap_or_else(|error| raise(error));
        for (cell, begun) in together.iter().zip(begun) {
            let mut state = cell.state.lock();
            cell.update(&mut state, |state| state.arriving = Some(begun));
        }
    }

    /// A step has ended: its gathers become the plan, and what was gathered for nothing is dropped.
    pub(crate) fn end_cycle(&self) {
        let mut trace = self.trace.lock();
        let recorded = std::mem::take(&mut trace.recorded);
        trace.plan = with_reuse_distances(&recorded);
        trace.cursor = 0;
        trace.ahead = 0;
        trace.followed = !trace.plan.is_empty();
    }

    /// Drops gathered copies that the policy does not keep between steps.
    pub(crate) fn drop_unused(&self, context: &Context<B>) {
        let indices: Vec<u64> = self.trace.lock().plan.iter().map(|&(index, ..)| index).collect();
        for index in indices {
            let Some(cell) = context.parameters.current_version(index) else { continue };
            let mut state = cell.state.lock();
            let is_whole = state.whole.is_some() || state.arriving.is_some();
            if cell.kind() == Kind::Parameter && !state.gathering && state.has_piece() && is_whole {
                if std::mem::take(&mut state.prefetched) {
                    self.forget_prefetched(cell.partition.numel());
                }
                cell.update(&mut state, |state| (state.whole, state.arriving) = (None, None));
            }
        }
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
    use burn_flex::Flex;
    use zero_core::Stage;

    use super::*;
    use crate::birth::{Fill, parameter};
    use crate::launch::launch;
    use crate::tensor::ZeroTensor;

    /// Runs `body` as two ranks at stage 3, with two parameters that are cut and not kept.
    fn with_two_parameters(body: impl Fn(&Context<Flex>, [Arc<Cell<Flex>>; 2]) + Sync) {
        let config = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(Stage::Parameters) };
        launch::<Flex, (), String>(2, &config, &Default::default(), |device| {
            let context = Context::<Flex>::current();
            let born = |_| match parameter(Fill::Value(1f32.into()), Shape::new([6, 4]), device.inner(), DType::F32) {
                ZeroTensor::Shard(shard) => shard.cell,
                _ => unreachable!("a parameter is a shard"),
            };
            let cells = [(); 2].map(born);
            for (id, cell) in cells.iter().enumerate() {
                context.parameters.name((id as u64).into(), cell.slot.clone().unwrap());
            }
            body(&context, cells);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_an_evaluation_gathers_is_not_remembered_for_ever() {
        with_two_parameters(|context, [cell, _]| {
            let slot = cell.slot.as_ref().unwrap();
            for _ in 0..3 * MOST_RECORDED {
                context.gatherer.plan_load(context, slot, 0);
            }
            let trace = context.gatherer.trace.lock();
            assert!(trace.recorded.len() <= MOST_RECORDED && trace.recorded.capacity() <= 2 * MOST_RECORDED);
        });
    }

    #[test]
    fn a_load_does_not_wait_for_a_prefetch_of_its_own_next_use() {
        with_two_parameters(|context, [a, b]| {
            let all = [&a, &b, &a, &b, &a];
            all.iter().for_each(|cell| drop(load(cell)));
            context.gatherer.end_cycle();
            let plan = |cell: &Cell<Flex>| context.gatherer.plan_load(context, cell.slot.as_ref().unwrap(), 0);
            let is_ahead = |cell: &Cell<Flex>| {
                let state = cell.wait_until(|state| !state.gathering);
                state.prefetched
            };
            plan(&a);
            assert!(is_ahead(&b) && !is_ahead(&a), "the first load is of what it is about to gather itself");
            // Used, so that the next uses come in turn.
            drop(load(&b));
            assert!(is_ahead(&a) && !is_ahead(&b));
            drop(load(&a));
            assert!(is_ahead(&b) && !is_ahead(&a));
        });
    }

    #[test]
    fn reuse_distances_count_what_lies_between() {
        let plan = with_reuse_distances(&[(0, 10), (1, 5), (0, 10), (0, 10), (2, 3)]);
        let distances: Vec<usize> = plan.iter().map(|&(_, _, distance)| distance).collect();
        assert_eq!(distances, [5, usize::MAX, 0, usize::MAX, usize::MAX]);
    }
}
