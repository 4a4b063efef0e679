//! Gradient reduction beside the backward pass.
//!
//! The rank's thread only hands over gradients as the backward pass finishes them; it never waits there, because inside
//! Burn's autodiff it holds locks that other ranks' threads may need. A reducer thread per rank does the rest:
//!
//! 1. *begin*: the ranks agree, by one small all-reduce, which parameters get a gradient on at least one of them.
//! 2. The union is laid out in the order in which rank 0's first backward pass gave gradients (in that pass itself: from
//!    the module's last parameter to its first), in buckets of constant size: per rank a row, per parameter `stride` columns of it; a large parameter spans buckets.
//!    A large gradient that the ranks divide evenly goes alone, as it is: its rows are already those of a bucket, and
//!    nothing is copied.
//! 3. A bucket is sent when its last gradient has come: reduce-scatter (stages 2 and 3, and stage 1 at the end of the
//!    pass), or all-reduce (stage 0). One bucket is in flight while the next is filled.
//! 4. *end*: parameters without a gradient on this rank contribute zeros, so that a rank that skipped a layer holds up
//!    nobody; their reduced gradients are handed back as *settled*.
//!
//! A rank may have no pass for a backward pass of the others (its graph had no marked parameter). It then meets them in
//! its next one, [`Phase::Collect`], which is repeated until no rank is in a backward pass: every gradient is reduced
//! exactly once, whatever each rank's graph held.
//!
//! Values are summed in rank order and scaled by `1 / ranks`, so that stages give the same bits.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use crossbeam_channel::{Receiver, Sender, bounded};
use zero_core::collective::Joined;
use zero_core::collective::threads::panic_reason;
use zero_core::{Buffer, Collective, CommError, Partition, Pending, ReduceOp, Request, Stage};

use crate::config::ZeroConfig;
use crate::context::{Context, Slot, Worker, stop};
use crate::gather::read;
use crate::module::bytes_of;
use crate::shard::{Cell, GRADIENT, Kind, Template};

/// A dense gradient on its way and the cell that will hold its reduced piece.
pub(crate) struct Contribution<B: Backend> {
    gradient: B::FloatTensorPrimitive,
    cell: Arc<Cell<B>>,
}

/// From where a pass is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A backward pass.
    Backward,
    /// After it, for what it has not reduced.
    Collect,
}

enum Job<B: Backend> {
    Begin { context: Arc<Context<B>>, phase: Phase, indices: Vec<u64> },
    Gradient { index: u64, contribution: Contribution<B> },
    End { reply: Sender<Result<Outcome<B>, CommError>> },
}

/// Reduced gradients of parameters that this rank had no gradient for, by parameter.
pub(crate) type Settled<B> = Vec<(u64, Arc<Cell<B>>)>;

/// What a pass came to.
pub(crate) struct Outcome<B: Backend> {
    pub(crate) settled: Settled<B>,
    /// Whether some rank was in a backward pass.
    pub(crate) in_backward: bool,
}

/// The rank's end of its reducer thread.
pub(crate) struct Reducer<B: Backend> {
    worker: Worker<Job<B>>,
    comm: Arc<dyn Collective>,
    bucket_size: usize,
    stage: Stage,
    /// Whether this pass has given up waiting for slower ranks.
    hurried: AtomicBool,
}

/// How long a rank that is ahead waits, without any progress of the reduction, before it goes on regardless.
const NO_PROGRESS: Duration = Duration::from_secs(1);

impl<B: Backend> Reducer<B> {
    pub(crate) fn spawn(comm: Arc<dyn Collective>, config: &ZeroConfig) -> Self {
        Self {
            worker: Worker::new(format!("rank-{}-reducer", comm.rank())),
            comm,
            bucket_size: config.reduce_bucket_size,
            stage: config.stage,
            hurried: AtomicBool::new(false),
        }
    }

    fn send(&self, job: Job<B>) {
        let (comm, bucket_size, stage) = (self.comm.clone(), self.bucket_size, self.stage);
        self.worker.send(job, move |inbox| {
            let served = catch_unwind(AssertUnwindSafe(|| serve(inbox, comm.clone(), bucket_size, stage)));
            if let Err(payload) = served {
                comm.abort(&format!("reducing gradients panicked: {}", panic_reason(&*payload)));
            }
        });
    }

    /// A pass begins that will give gradients for the parameters `indices` on this rank.
    pub(crate) fn begin(&self, context: Arc<Context<B>>, phase: Phase, indices: Vec<u64>) {
        self.hurried.store(false, Ordering::Relaxed);
        self.send(Job::Begin { context, phase, indices });
    }

    /// Hands a gradient over; `cell`, pending, will hold its reduced piece.
    pub(crate) fn submit(
        &self,
        context: &Context<B>,
        index: u64,
        gradient: B::FloatTensorPrimitive,
        cell: Arc<Cell<B>>,
    ) {
        context.count_unreduced(bytes_of::<B>(&gradient));
        self.send(Job::Gradient { index, contribution: Contribution { gradient, cell } });
    }

    /// Lets the reducer catch up when this rank is so far ahead of the others that unreduced gradients pile up.
    ///
    /// This runs under autodiff's lock, which another rank may need to get on (ADR 2): so it ends when nothing has moved
    /// for a while, and is not tried again in this pass.
    pub(crate) fn catch_up(&self, context: &Context<B>) {
        if !context.config.stage.shards_gradients() || self.hurried.load(Ordering::Relaxed) {
            return;
        }
        let unreduced = || context.gauges.in_flight.live();
        let limit = (2 * self.bucket_size * size_of::<f32>()) as u64;
        let (mut seen, mut since) = (unreduced(), Instant::now());
        // Without a backlog the reducer waits for this rank's next gradients, not for other ranks.
        while seen > limit && self.worker.backlog() > 0 {
            std::thread::sleep(Duration::from_micros(200));
            let now = unreduced();
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > NO_PROGRESS {
                self.hurried.store(true, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Waits until all gradients of this pass are reduced. Every collective under it has a deadline.
    pub(crate) fn end(&self) -> Result<Outcome<B>, CommError> {
        let _span = tracing::trace_span!("wait for reduction").entered();
        let (reply, result) = bounded(1);
        self.send(Job::End { reply });
        result.recv().unwrap_or_else(|_| stop("the thread that reduces gradients has panicked".into()))
    }

    pub(crate) fn stop(&self) {
        self.worker.stop();
    }
}

/// How the gradient of `slot` is cut.
pub(crate) fn gradient_template<B: Backend>(
    context: &Arc<Context<B>>,
    slot: &Arc<Slot<B>>,
    device: B::Device,
) -> Template<B> {
    Template {
        context: context.clone(),
        slot: Some(slot.clone()),
        partition: slot.partition,
        shape: slot.shape.clone(),
        device,
        kind: Kind::Gradient,
        origin: GRADIENT,
    }
}

/// One backward pass on the reducer thread.
struct Pass<B: Backend> {
    context: Arc<Context<B>>,
    /// Parameters with a gradient on some rank, in the order in which they are laid out.
    plan: Vec<u64>,
    /// Those that this rank has a gradient for.
    mine: HashSet<u64>,
    in_backward: bool,
    /// Gradients in the order in which they came.
    order: Vec<u64>,
    next: usize,
    arrived: HashMap<u64, Contribution<B>>,
    settled: Settled<B>,
    buckets: Buckets<B>,
}

fn serve<B: Backend>(inbox: Receiver<Job<B>>, comm: Arc<dyn Collective>, bucket_size: usize, stage: Stage) {
    let mut pass: Option<Pass<B>> = None;
    let mut failure: Option<CommError> = None;
    // Whether the order of a backward pass is known; all ranks learn it in the same pass.
    let mut ordered = false;
    for job in inbox {
        let outcome = match job {
            Job::Begin { context, phase, indices } => {
                failure = None;
                agree(&*comm, &context, phase, &indices).map(|(plan, in_backward)| {
                    let buckets = Buckets::new(comm.clone(), bucket_size, stage, &context, &plan);
                    pass = Some(Pass {
                        context,
                        plan,
                        mine: indices.into_iter().collect(),
                        in_backward,
                        order: Vec::new(),
                        next: 0,
                        arrived: HashMap::new(),
                        settled: Vec::new(),
                        buckets,
                    });
                })
            }
            Job::Gradient { index, contribution } => match (&mut pass, &failure) {
                (Some(pass), None) => {
                    if let Some(first) = pass.arrived.insert(index, contribution) {
                        // A parameter has one gradient in a pass.
                        first.cell.settle(Err(stray(&*comm)));
                    }
                    pass.order.push(index);
                    // Stage 1 keeps whole gradients until the end of the pass, as its memory formula says.
                    if stage == Stage::OptimizerState { Ok(()) } else { pass.advance() }
                }
                (_, failure) => {
                    contribution.cell.settle(Err(failure.clone().unwrap_or_else(|| stray(&*comm))));
                    Ok(())
                }
            },
            Job::End { reply } => {
                let result = match (failure.take(), pass.take()) {
                    (Some(error), _) => Err(error),
                    (None, Some(mut pass)) => {
                        let result = pass.finish().and_then(|outcome| {
                            if outcome.in_backward && !ordered {
                                share_order(&*comm, &pass)?;
                                ordered = true;
                            }
                            Ok(outcome)
                        });
                        if let Err(error) = &result {
                            pass.fail(error);
                        }
                        result
                    }
                    (None, None) => Ok(Outcome { settled: Vec::new(), in_backward: false }),
                };
                // The rank's thread may have been stopped meanwhile: then nobody waits.
                let _ = reply.send(result);
                Ok(())
            }
        };
        if let Err(error) = outcome {
            if let Some(pass) = &mut pass {
                pass.fail(&error);
            }
            failure = Some(error);
        }
    }
}

/// Tells all ranks the order in which rank 0's backward pass gave its gradients. It differs from the module's: autodiff
/// finishes a parameter that is used through a view (a slice of position embeddings) at the very end.
fn share_order<B: Backend>(comm: &dyn Collective, pass: &Pass<B>) -> Result<(), CommError> {
    let slots = pass.context.slot_count();
    let mut order = pass.order.clone();
    order.resize(slots, u64::MAX);
    let bytes = order.iter().flat_map(|index| index.to_le_bytes()).collect();
    let bytes = comm.broadcast(Buffer::U8(bytes), 0)?.into_u8();
    let order = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("chunks of eight bytes")));
    for (position, index) in order.enumerate().filter(|&(_, index)| index != u64::MAX) {
        // Before everything that is placed by the module's order alone.
        let place = (2 * slots - position) as u64;
        pass.context.slot(index).place.store(place, Ordering::Relaxed);
    }
    Ok(())
}

fn stray(comm: &dyn Collective) -> CommError {
    CommError::Shape {
        group: comm.label().into(),
        seq: 0,
        rank: comm.rank(),
        op: "gradient".into(),
        expected: "a gradient between the begin and the end of a backward pass".into(),
        got: "one outside".into(),
    }
}

/// The union over the ranks of the parameters that get a gradient, the module's last first, and whether a rank is in a
/// backward pass.
fn agree<B: Backend>(
    comm: &dyn Collective,
    context: &Context<B>,
    phase: Phase,
    indices: &[u64],
) -> Result<(Vec<u64>, bool), CommError> {
    let mut flags = vec![0u8; 1 + context.slot_count()];
    flags[0] = u8::from(phase == Phase::Backward);
    for &index in indices {
        flags[1 + index as usize] = 1;
    }
    let union = comm.all_reduce(Buffer::U8(flags), ReduceOp::Max)?.into_u8();
    let mut plan: Vec<u64> = (0..context.slot_count() as u64).filter(|&index| union[1 + index as usize] == 1).collect();
    plan.sort_by_key(|&index| Reverse((context.slot(index).place.load(Ordering::Relaxed), index)));
    Ok((plan, union[0] == 1))
}

impl<B: Backend> Pass<B> {
    /// Lays out gradients as far as they have come in the order of the plan.
    fn advance(&mut self) -> Result<(), CommError> {
        while let Some(&index) = self.plan.get(self.next) {
            let contribution = self.arrived.remove(&index);
            if contribution.is_none() && self.mine.contains(&index) {
                break;
            }
            self.lay_out(index, contribution)?;
        }
        Ok(())
    }

    /// Lays out everything, zeros for what has not come.
    fn finish(&mut self) -> Result<Outcome<B>, CommError> {
        while let Some(&index) = self.plan.get(self.next) {
            let contribution = self.arrived.remove(&index);
            self.lay_out(index, contribution)?;
        }
        self.buckets.flush()?;
        self.buckets.wait()?;
        Ok(Outcome { settled: std::mem::take(&mut self.settled), in_backward: self.in_backward })
    }

    fn lay_out(&mut self, index: u64, contribution: Option<Contribution<B>>) -> Result<(), CommError> {
        let slot = self.context.slot(index);
        let counted = contribution.as_ref().map_or(0, |contribution| bytes_of::<B>(&contribution.gradient));
        let (values, cell) = match contribution {
            Some(Contribution { gradient, cell }) => (Some(read::<B>(gradient).convert_dtype(DType::F32)), cell),
            None => {
                let device = self.buckets.device.clone();
                let dtype = self.context.gradient_dtype(&slot);
                let cell = Cell::pending(gradient_template(&self.context, &slot, device), dtype);
                self.settled.push((index, cell.clone()));
                (None, cell)
            }
        };
        self.next += 1;
        let _span = tracing::trace_span!("lay out gradient", parameter = index).entered();
        self.buckets.push(values, cell, slot.partition.numel(), counted)
    }

    fn fail(&mut self, error: &CommError) {
        for (_, contribution) in self.arrived.drain() {
            self.context.count_unreduced(-bytes_of::<B>(&contribution.gradient));
            contribution.cell.settle(Err(error.clone()));
        }
        for (_, cell) in self.settled.drain(..) {
            cell.settle(Err(error.clone()));
        }
        self.buckets.fail(error);
    }
}

/// A gradient's reduced piece as it is put together from buckets.
struct Piece<B: Backend> {
    cell: Arc<Cell<B>>,
    values: Vec<f32>,
    /// Columns of the layout that have been reduced.
    columns_done: usize,
    columns: usize,
}

/// `columns` columns of piece `piece`, from its column `from`, at column `at` of the bucket.
struct Segment {
    piece: usize,
    from: usize,
    at: usize,
    columns: usize,
}

/// Rows of one bucket: for each rank `capacity` columns.
struct Buckets<B: Backend> {
    context: Arc<Context<B>>,
    comm: Arc<dyn Collective>,
    stage: Stage,
    device: B::Device,
    /// What values are multiplied by before they are added, and their sum afterwards.
    before: f32,
    after: f32,
    sent_as: zero_core::collective::DType,
    /// Columns of a full bucket.
    capacity: usize,
    /// Columns still to come in this pass, so that the last bucket is no larger than it need be.
    remaining: usize,
    rows: Vec<f32>,
    row_len: usize,
    filled: usize,
    segments: Vec<Segment>,
    in_flight: Option<InFlight>,
    pieces: Vec<Option<Piece<B>>>,
}

/// A request, and what it holds.
enum InFlight {
    /// A bucket of rows of `row_len` columns.
    Bucket { pending: Pending, segments: Vec<Segment>, row_len: usize },
    /// One gradient: the result is its piece.
    Alone { pending: Pending, piece: usize, counted: i64 },
    /// One gradient that every rank keeps whole: the result is a tensor, the same for all ranks of this process.
    Shared { pending: Pending<Joined>, piece: usize, counted: i64 },
}

/// Elements from which a gradient goes alone: 256 KiB, beyond which a request's own cost is nothing.
const ALONE: usize = 1 << 16;

impl<B: Backend> Buckets<B> {
    fn new(
        comm: Arc<dyn Collective>,
        bucket_size: usize,
        stage: Stage,
        context: &Arc<Context<B>>,
        plan: &[u64],
    ) -> Self {
        let world = comm.world();
        let columns = |numel: usize| Partition::new(numel, world).stride();
        let config = &context.config;
        let sent_as = config.communication_dtype.unwrap_or(config.param_dtype).on_the_wire();
        let divided = config.gradient_predivide_factor;
        let sizes = || plan.iter().map(|index| context.slot(*index).partition.numel());
        Self {
            before: 1.0 / divided,
            after: divided / world as f32,
            sent_as,
            capacity: (bucket_size / world).max(1),
            remaining: sizes().filter(|&numel| !goes_alone(numel, world, sent_as, 1.0 / divided)).map(columns).sum(),
            context: context.clone(),
            comm,
            stage,
            device: context.device.clone(),
            rows: Vec::new(),
            row_len: 0,
            filled: 0,
            segments: Vec::new(),
            in_flight: None,
            pieces: Vec::new(),
        }
    }

    /// Lays `values` (zeros if absent) of one gradient into buckets, sending those that fill up.
    /// `counted` bytes of it were counted as not reduced.
    fn push(
        &mut self,
        values: Option<TensorData>,
        cell: Arc<Cell<B>>,
        numel: usize,
        counted: i64,
    ) -> Result<(), CommError> {
        if self.goes_alone(numel) {
            return self.send_alone(values, cell, numel, counted);
        }
        // It is in the bucket by the end of this.
        self.context.count_unreduced(-counted);
        let values = values.as_ref().map(|data| data.as_slice::<f32>().expect("callers converted it"));
        let world = self.comm.world();
        let layout = Partition::new(numel, world);
        let piece = self.pieces.len();
        let len = if self.stage.shards_optimizer() { layout.len(self.comm.rank()) } else { numel };
        self.pieces.push(Some(Piece {
            cell,
            values: vec![0.0; len.max(1)],
            columns_done: 0,
            columns: layout.stride(),
        }));
        if numel == 0 {
            self.complete(piece);
            return Ok(());
        }
        let mut from = 0;
        while from < layout.stride() {
            if self.row_len == 0 {
                self.row_len = self.capacity.min(self.remaining);
                self.rows = vec![0.0; self.row_len * world];
            }
            let columns = (self.row_len - self.filled).min(layout.stride() - from);
            if let Some(values) = values {
                for rank in 0..world {
                    let owned = layout.range(rank);
                    let source = (owned.start + from).min(owned.end)..(owned.start + from + columns).min(owned.end);
                    let at = rank * self.row_len + self.filled;
                    copy_scaled(&mut self.rows[at..at + source.len()], &values[source], self.before);
                }
            }
            self.segments.push(Segment { piece, from, at: self.filled, columns });
            self.filled += columns;
            self.remaining -= columns;
            from += columns;
            if self.filled == self.row_len {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends the bucket, full by now, once the one before it is done.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.filled == 0 {
            return Ok(());
        }
        debug_assert_eq!(self.filled, self.row_len, "a bucket is never larger than what remains");
        self.wait()?;
        let rows = Buffer::from_f32(std::mem::take(&mut self.rows), self.sent_as);
        let name = self.names(self.segments.iter().map(|segment| segment.piece));
        let request = if self.stage.shards_optimizer() {
            Request::ReduceScatter(rows, ReduceOp::Sum)
        } else {
            Request::AllReduce(rows, ReduceOp::Sum)
        };
        let segments = std::mem::take(&mut self.segments);
        let pending = self.comm.start_for(request, &name);
        self.in_flight = Some(InFlight::Bucket { pending, segments, row_len: self.row_len });
        self.filled = 0;
        self.row_len = 0;
        Ok(())
    }

    /// What the pieces are gradients of, in the words of errors and flight records.
    fn names(&self, pieces: impl Iterator<Item = usize>) -> String {
        let slots = pieces.filter_map(|piece| self.pieces[piece].as_ref()?.cell.slot.clone());
        let slots: Vec<Arc<Slot<B>>> = slots.collect();
        match &slots[..] {
            [] => String::new(),
            [one] => format!("gradient of {one}"),
            [first, .., last] => format!("gradients of {} parameters from {first} to {last}", slots.len()),
        }
    }

    /// Whether a gradient is sent as it is; the same on every rank. Not where it is converted or divided first.
    fn goes_alone(&self, numel: usize) -> bool {
        goes_alone(numel, self.comm.world(), self.sent_as, self.before)
    }

    fn send_alone(
        &mut self,
        values: Option<TensorData>,
        cell: Arc<Cell<B>>,
        numel: usize,
        counted: i64,
    ) -> Result<(), CommError> {
        let columns = Partition::new(numel, self.comm.world()).stride();
        let piece = self.pieces.len();
        self.pieces.push(Some(Piece { cell, values: Vec::new(), columns_done: 0, columns }));
        let values = match values {
            Some(values) => values.into_vec::<f32>().expect("callers converted it"),
            None => vec![0.0; numel],
        };
        if let Err(error) = self.wait() {
            self.context.count_unreduced(-counted);
            return Err(error);
        }
        let values = Buffer::F32(values);
        let name = self.names(std::iter::once(piece));
        self.in_flight = Some(if self.stage.shards_optimizer() {
            let pending = self.comm.start_for(Request::ReduceScatter(values, ReduceOp::Mean), &name);
            InFlight::Alone { pending, piece, counted }
        } else {
            let cell = &self.pieces[piece].as_ref().expect("it is completed by its result").cell;
            let (device, dtype) = (cell.device.clone(), cell.dtype);
            let join = move |pieces: &[Arc<Buffer>]| -> Joined {
                Arc::new(tensor::<B>(Buffer::join(pieces).into_f32(), dtype, &device))
            };
            let pending = self.comm.start_shared(values, ReduceOp::Mean, &name, Box::new(join));
            InFlight::Shared { pending, piece, counted }
        });
        Ok(())
    }

    /// Takes in the result of the request in flight.
    fn wait(&mut self) -> Result<(), CommError> {
        // An error: `fail` tells the cells of what was in flight and of all that is still to come.
        match self.in_flight.take() {
            None => {}
            Some(InFlight::Bucket { pending, segments, row_len }) => {
                self.take_in(segments, row_len, &pending.wait()?.into_f32());
            }
            Some(InFlight::Alone { pending, piece, counted }) => {
                let reduced = pending.wait().map(Buffer::into_f32);
                self.context.count_unreduced(-counted);
                self.pieces[piece].as_mut().expect("a piece is completed once").values = reduced?;
                self.complete(piece);
            }
            Some(InFlight::Shared { pending, piece, counted }) => {
                let joined = pending.wait();
                self.context.count_unreduced(-counted);
                let joined = joined?.downcast::<B::FloatTensorPrimitive>();
                let whole = (*joined.expect("every rank joins to a tensor of the one inner backend")).clone();
                let cell = self.pieces[piece].take().expect("a piece is completed once").cell;
                let whole = match B::float_device(&whole) == cell.device {
                    true => whole,
                    false => B::float_to_device(whole, &cell.device),
                };
                cell.settle(Ok(whole));
            }
        }
        Ok(())
    }

    /// Copies the reduced rows of a bucket to the pieces that they are parts of.
    fn take_in(&mut self, segments: Vec<Segment>, row_len: usize, reduced: &[f32]) {
        let world = self.comm.world();
        let scale = self.after;
        for Segment { piece: index, from, at, columns } in segments {
            let piece = self.pieces[index].as_mut().expect("a piece is completed by its last segment");
            if self.stage.shards_optimizer() {
                let from = from.min(piece.values.len());
                let take = columns.min(piece.values.len() - from);
                copy_scaled(&mut piece.values[from..from + take], &reduced[at..at + take], scale);
            } else {
                let layout = Partition::new(piece.values.len(), world);
                for rank in 0..world {
                    let owned = layout.range(rank);
                    let target = (owned.start + from).min(owned.end)..(owned.start + from + columns).min(owned.end);
                    let source = rank * row_len + at;
                    let len = target.len();
                    copy_scaled(&mut piece.values[target], &reduced[source..source + len], scale);
                }
            }
            piece.columns_done += columns;
            if piece.columns_done == piece.columns {
                self.complete(index);
            }
        }
    }

    fn complete(&mut self, index: usize) {
        let piece = self.pieces[index].take().expect("a piece is completed once");
        piece.cell.settle(Ok(tensor::<B>(piece.values, piece.cell.dtype, &piece.cell.device)));
    }

    fn fail(&mut self, error: &CommError) {
        for piece in self.pieces.iter_mut().filter_map(Option::take) {
            piece.cell.settle(Err(error.clone()));
        }
    }
}

/// A flat tensor of `values`, as `dtype`.
fn tensor<B: Backend>(values: Vec<f32>, dtype: DType, device: &B::Device) -> B::FloatTensorPrimitive {
    let len = values.len();
    let mut data = TensorData::new(values, Shape::new([len]));
    if dtype != DType::F32 {
        data = data.convert_dtype(dtype);
    }
    B::float_from_data(data, device)
}

/// See [`Buckets::goes_alone`].
fn goes_alone(numel: usize, world: usize, sent_as: zero_core::collective::DType, before: f32) -> bool {
    numel >= ALONE && numel.is_multiple_of(world) && sent_as == zero_core::collective::DType::F32 && before == 1.0
}

fn copy_scaled(target: &mut [f32], source: &[f32], scale: f32) {
    if scale == 1.0 {
        target.copy_from_slice(source);
        return;
    }
    target.iter_mut().zip(source).for_each(|(t, s)| *t = s * scale);
}
