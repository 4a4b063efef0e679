//! Gradient reduction that overlaps the backward pass.
//!
//! The rank's thread only hands over gradients as the backward pass finishes them. It never waits there, because inside the library's autodiff it
//! holds locks that other ranks' threads may need. A reducer thread per rank does the rest:
//!
//! 1. *begin*: by one small all-reduce, the ranks agree which parameters get a gradient on at least one of them.
//! 2. These gradients are laid out in buckets of constant size, in the order in which rank 0's first backward pass produced them (in that
//!    pass itself: from the module's last parameter to its first). A bucket has a row per rank, and a parameter has `stride` columns of it;
//!    a large parameter spans buckets. A large gradient that the ranks divide evenly is sent alone and without a copy: its rows already
//!    have a bucket's layout.
//! 3. A bucket is sent when its last gradient has arrived: by reduce-scatter (stages 2 and 3, and stage 1 at the end of the pass) or
//!    all-reduce (stage 0). One bucket is in flight while the next is filled.
//! 4. *end*: parameters without a gradient on this rank contribute zeros, so that a rank that skipped a layer blocks no other. Their
//!    reduced gradients are returned as *foreign*.
//!
//! A rank may have no pass for a backward pass of the others (its graph had no marked parameter). It then joins them in its next pass,
//! [`Phase::Collect`], which is repeated until no rank is in a backward pass. So every gradient is reduced exactly once, whatever each
//! rank's graph contained.
//!
//! Values are summed in rank order and scaled by `1 / ranks`, so that stages give the same bits. If there are several groups of ranks that
//! each hold the full model state, a bucket's sum within the group is then summed across the groups, in their order.
//!
//! `buckets` lays gradients out: in host memory (`host`), for any collective engine, or on the device (`device`), if the ranks are
//! processes, for NCCL or for one copy per bucket. `tensors` reduces them in place on devices, if the ranks are threads of one process:
//! handles are exchanged, and nothing is copied to the host.
//!
//! If all ranks gather parameters collectively ([`crate::tensor_collectives`]), the rank's own thread does the reducer thread's work when it hands a
//! gradient over: NCCL operations, including gathers, must come in one order on all ranks. With NCCL nothing blocks there, and ranks that
//! are processes share no locks.

mod buckets;
mod device;
mod host;
mod quantized;
mod tensors;

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use zero_core::collective::threads::panic_reason;
use zero_core::{Buffer, Collective, CommError, Mesh, OperationCall, ReduceOp, Stage};

use crate::backend::{Backend, Shared};
use crate::cell::Cell;
use crate::cell::deadline::Deadline;
use crate::cell::rank::Rank;
use crate::cell::slot::Slot;
use crate::random::words;
use crate::tensor_collectives::TensorCollectives;
use crate::worker::Worker;
use zero_core::config::ZeroConfig;

use buckets::Buckets;
use device::OnDevice;
use host::Host;
use tensors::Tensors;

/// A dense gradient to be reduced, and the cell that will hold this rank's shard of the result.
pub struct Contribution<B: Backend> {
    gradient: Shared<B>,
    cell: Arc<Cell<B>>,
}

/// The point in a step at which a pass runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A backward pass.
    Backward,
    /// After it, for gradients that it has not reduced.
    Collect,
}

/// A rank's report at the beginning of a pass.
#[derive(Debug, Clone)]
pub struct PassReport {
    /// The point in the step.
    pub phase: Phase,
    /// Parameters that get a gradient in the pass on this rank.
    pub indices: Vec<u64>,
    /// Parameters whose gradients are being collected on this rank.
    pub named: Vec<u64>,
    /// Number of this rank's backward passes since it last collected gradients, including this one.
    pub passes: u64,
    /// Hash of the ordinary tensors in place of parameters, when gradients are collected.
    pub edits: Option<u64>,
}

enum Message<B: Backend> {
    Begin { rank: Arc<Rank<B>>, report: PassReport },
    Gradient { index: u64, contribution: Contribution<B> },
    End { reply: Sender<Result<Outcome<B>, CommError>> },
}

/// Reduced gradients of parameters for which this rank had no gradient, by parameter.
pub type Foreign<B> = Vec<(u64, Arc<Cell<B>>)>;

/// The outcome of a pass.
pub struct Outcome<B: Backend> {
    /// Gradients of parameters for which only other ranks had one.
    pub foreign: Foreign<B>,
    /// True if some rank was in a backward pass.
    pub in_backward: bool,
    /// Parameters whose gradients some rank is collecting.
    pub named: HashSet<u64>,
}

/// The rank's handle to its reducer.
pub struct Reducer<B: Backend> {
    serving: Serving<B>,
    /// True if this pass has given up waiting for slower ranks.
    hurried: AtomicBool,
    /// Parameters whose gradients the current pass takes.
    taken: Mutex<HashSet<u64>>,
}

/// Time without progress of the reduction after which a rank that is ahead stops waiting.
const NO_PROGRESS: Duration = Duration::from_secs(1);

/// The thread on which a rank's gradients are reduced.
enum Serving<B: Backend> {
    /// A thread that runs concurrently with the rank's own.
    Thread(Worker<Message<B>>, ReduceGroups),
    /// The rank's own thread, immediately.
    Inline(Box<Mutex<Server<B>>>),
}

/// The groups and settings of a reduction.
#[derive(Clone)]
pub struct ReduceGroups {
    /// All ranks.
    comm: Arc<dyn Collective>,
    hops: Hops,
    /// The collective path between processes.
    collectives: Option<Arc<TensorCollectives>>,
    bucket_size: usize,
    stage: Stage,
}

/// The groups over which gradients are summed, one after the other.
#[derive(Clone)]
struct Hops {
    /// The ranks that hold the full model state between them: each gets a shard of their sum, or all of it.
    within: Arc<dyn Collective>,
    /// The ranks that hold the same shard in the other groups, if there are other groups.
    across: Option<Arc<dyn Collective>>,
}

impl ReduceGroups {
    /// Creates the groups for the ranks of `comm`, which is used for nothing else. A collective.
    pub fn new(
        comm: Arc<dyn Collective>,
        mesh: Mesh,
        config: &ZeroConfig,
        collectives: Option<Arc<TensorCollectives>>,
    ) -> Result<Self, CommError> {
        let mesh = config.cut_on_the_way(comm.world()).unwrap_or(mesh);
        let hops = match mesh.replicas() {
            1 => Hops { within: comm.clone(), across: None },
            _ => Hops {
                within: comm.split("gradients within", mesh.replica(comm.rank()) as u64)?,
                across: Some(comm.split("gradients across", mesh.shard(comm.rank()) as u64)?),
            },
        };
        Ok(Self { comm, hops, collectives, bucket_size: config.reduce_bucket_size, stage: config.stage })
    }
}

impl<B: Backend> Reducer<B> {
    /// Creates the reducer. Its thread starts with the first pass.
    pub fn new(groups: ReduceGroups) -> Self {
        let is_inline = groups.collectives.as_ref().is_some_and(|collectives| collectives.gathers());
        let worker = Worker::new(format!("rank-{}-reducer", groups.comm.place().rank));
        let serving = match is_inline {
            true => Serving::Inline(Box::new(Mutex::new(Server::inline(groups)))),
            false => Serving::Thread(worker, groups),
        };
        Self { serving, hurried: AtomicBool::new(false), taken: Mutex::default() }
    }

    fn send(&self, job: Message<B>) {
        let (worker, groups) = match &self.serving {
            Serving::Thread(worker, groups) => (worker, groups.clone()),
            Serving::Inline(server) => return server.lock().serve(job),
        };
        worker.send::<B>(job, move |inbox| {
            let comm = groups.comm.clone();
            let mut server = Server::new(groups);
            let served = catch_unwind(AssertUnwindSafe(|| inbox.into_iter().for_each(|job| server.serve(job))));
            if let Err(payload) = served {
                comm.abort(&format!("reducing gradients panicked: {}", panic_reason(&*payload)));
            }
        });
    }

    /// Begins a pass.
    pub fn begin(&self, rank: Arc<Rank<B>>, report: PassReport) {
        self.hurried.store(false, Ordering::Relaxed);
        *self.taken.lock() = report.indices.iter().copied().collect();
        self.send(Message::Begin { rank, report });
    }

    /// Returns whether the current pass expects a gradient of parameter `index`.
    pub fn takes(&self, index: u64) -> bool {
        self.taken.lock().contains(&index)
    }

    /// Hands a gradient over; the pending `cell` will hold this rank's shard of the result.
    pub fn submit(&self, index: u64, gradient: B::Tensor, cell: Arc<Cell<B>>) {
        let gradient = match &self.serving {
            Serving::Thread(..) => Shared::new(gradient),
            Serving::Inline(_) => Shared::not(gradient),
        };
        cell.rank.count_unreduced(bytes_of(&gradient));
        self.send(Message::Gradient { index, contribution: Contribution { gradient, cell } });
    }

    /// Waits for the reducer if this rank is so far ahead of the others that unreduced gradients accumulate.
    ///
    /// This runs under autodiff's lock, which another rank may need to make progress (ADR 2). So the wait ends when nothing has changed for
    /// a while, and is not repeated in this pass.
    pub fn catch_up(&self, rank: &Rank<B>) {
        let Serving::Thread(worker, groups) = &self.serving else { return };
        if !rank.config.stage.shards_gradients() || self.hurried.load(Ordering::Relaxed) {
            return;
        }
        let unreduced = || rank.gauges.in_flight.live();
        let limit = (2 * groups.bucket_size * size_of::<f32>()) as u64;
        let (mut seen, mut since) = (unreduced(), Instant::now());
        // Without a backlog the reducer waits for this rank's next gradients, not for other ranks.
        while seen > limit && worker.backlog() > 0 {
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

    /// Waits until all gradients of this pass are reduced.
    pub fn end(&self, rank: &Rank<B>) -> Result<Outcome<B>, CommError> {
        let _span = tracing::trace_span!("wait for reduction").entered();
        let (reply, result) = bounded(1);
        self.send(Message::End { reply });
        Deadline::receive(rank, &result, "a wait for reduced gradients")
    }

    /// Ends its thread.
    pub fn stop(&self) {
        match &self.serving {
            Serving::Thread(worker, _) => worker.stop(),
            Serving::Inline(server) => server.lock().stop(),
        }
    }
}

/// One backward pass on the reducer thread.
struct Pass<B: Backend> {
    rank: Arc<Rank<B>>,
    /// Parameters with a gradient on some rank, in the order of their layout.
    plan: Vec<u64>,
    /// Parameters for which this rank has a gradient.
    mine: HashSet<u64>,
    in_backward: bool,
    named: HashSet<u64>,
    /// Parameters in the order in which their gradients arrived.
    order: Vec<u64>,
    next: usize,
    arrived: HashMap<u64, Contribution<B>>,
    foreign: Foreign<B>,
    lanes: Box<dyn Lanes<B>>,
}

/// Returns the size of a gradient in bytes.
fn bytes_of<B: Backend>(gradient: &Shared<B>) -> i64 {
    (gradient.numel() * gradient.dtype().size()) as i64
}

/// The reduction of a pass's gradients.
trait Lanes<B: Backend>: Send {
    /// Adds one gradient, and sends what is due.
    fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError>;

    /// Sends everything that has not been sent, and waits for all results.
    fn finish(&mut self) -> Result<(), CommError>;

    /// Settles the cells of unreduced gradients with the error.
    fn fail(&mut self, error: &CommError);
}

/// Separate buckets for parameters that every rank holds in full ([`Rank::is_replicated`]), whose gradients are all-reduced.
struct Split<B: Backend> {
    whole: Box<dyn Lanes<B>>,
    sharded: Box<dyn Lanes<B>>,
}

impl<B: Backend> Lanes<B> for Split<B> {
    fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError> {
        if incoming.cell.partition.is_whole() { self.whole.push(incoming) } else { self.sharded.push(incoming) }
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.whole.finish()?;
        self.sharded.finish()
    }

    fn fail(&mut self, error: &CommError) {
        self.whole.fail(error);
        self.sharded.fail(error);
    }
}

/// One gradient to be reduced into `cell`; zeros if `gradient` is `None`. `counted` bytes of it count as not reduced.
struct Incoming<B: Backend> {
    gradient: Option<Shared<B>>,
    cell: Arc<Cell<B>>,
    numel: usize,
    counted: i64,
}

/// Returns the names of the gradients' parameters, for errors and flight records.
fn names<'c, B: Backend>(cells: impl Iterator<Item = &'c Cell<B>>) -> String {
    let slots: Vec<Arc<Slot<B>>> = cells.filter_map(|cell| cell.slot.clone()).collect();
    match &slots[..] {
        [] => String::new(),
        [one] => format!("gradient of {one}"),
        [first, .., last] => format!("gradients of {} parameters from {first} to {last}", slots.len()),
    }
}

/// The server of a rank's messages, which it handles one after another.
struct Server<B: Backend> {
    groups: ReduceGroups,
    pass: Option<Pass<B>>,
    failure: Option<CommError>,
    /// True if the order of a backward pass is known; all ranks learn it in the same pass.
    ordered: bool,
    /// Set on the rank's own thread, which does not wait for the device.
    settler: Option<Arc<device::Settler<B>>>,
}

impl<B: Backend> Server<B> {
    fn new(groups: ReduceGroups) -> Self {
        Self { groups, pass: None, failure: None, ordered: false, settler: None }
    }

    /// Creates the server for the rank's own thread.
    fn inline(groups: ReduceGroups) -> Self {
        let settler = Some(Arc::new(Worker::new(format!("rank-{}-reducer", groups.comm.place().rank))));
        Self { settler, ..Self::new(groups) }
    }

    /// Ends its thread, and drops what it holds of the rank.
    fn stop(&mut self) {
        self.pass = None;
        if let Some(settler) = &self.settler {
            settler.stop();
        }
    }

    fn serve(&mut self, job: Message<B>) {
        let outcome = match job {
            Message::Begin { rank, report } => self.begin(rank, report),
            Message::Gradient { index, contribution } => self.take(index, contribution),
            Message::End { reply } => {
                // The rank's thread may have been stopped meanwhile: then nobody waits.
                let _ = reply.send(self.end());
                Ok(())
            }
        };
        if let Err(error) = outcome {
            if let Some(pass) = &mut self.pass {
                pass.fail(&error);
            }
            self.failure = Some(error);
        }
    }

    fn begin(&mut self, rank: Arc<Rank<B>>, report: PassReport) -> Result<(), CommError> {
        self.failure = None;
        let Agreed { plan, in_backward, named } = agree(&*self.groups.comm, &rank, &report)?;
        let lanes = self.lanes(&rank, &plan);
        self.pass = Some(Pass {
            rank,
            plan,
            mine: report.indices.into_iter().collect(),
            in_backward,
            named,
            order: Vec::new(),
            next: 0,
            arrived: HashMap::new(),
            foreign: Vec::new(),
            lanes,
        });
        Ok(())
    }

    /// Creates the reduction of gradients of the parameters `plan`.
    fn lanes(&self, rank: &Arc<Rank<B>>, plan: &[u64]) -> Box<dyn Lanes<B>> {
        let ReduceGroups { comm, hops, bucket_size, stage, .. } = self.groups.clone();
        if let Some(collectives) = self.groups.collectives.as_ref().filter(|_| B::has_kernels(&rank.device)) {
            let medium = OnDevice::new(collectives.clone(), rank, self.settler.clone());
            return Box::new(Buckets::new(rank, medium, bucket_size.min(device::MOST), plan));
        }
        // Threads exchange tensor handles, each with all others.
        let is_flat = rank.mesh.replicas() == 1;
        let in_place =
            comm.in_process().is_some() && !B::is_host(&rank.device) && is_flat && !rank.config.reduces_on_hosts();
        let lane = |shards, plan: &[u64]| -> Box<dyn Lanes<B>> {
            match in_place {
                true => Box::new(Tensors::new(comm.clone(), bucket_size, shards, rank)),
                false => Box::new(Buckets::new(rank, Host::new(hops.clone(), rank, shards), bucket_size, plan)),
            }
        };
        let is_replicated = |index: &u64| rank.parameters.slot(*index).is_some_and(|slot| rank.is_replicated(&slot));
        let (whole, sharded): (Vec<u64>, Vec<u64>) = plan.iter().partition(|index| is_replicated(index));
        match whole.is_empty() {
            true => lane(stage.shards_optimizer(), plan),
            false => Box::new(Split { whole: lane(false, &whole), sharded: lane(true, &sharded) }),
        }
    }

    fn take(&mut self, index: u64, contribution: Contribution<B>) -> Result<(), CommError> {
        let comm = &*self.groups.comm;
        let (Some(pass), None) = (&mut self.pass, &self.failure) else {
            contribution.cell.settle(Err(self.failure.clone().unwrap_or_else(|| stray(comm))));
            return Ok(());
        };
        if let Some(first) = pass.arrived.insert(index, contribution) {
            // A parameter has one gradient in a pass.
            first.cell.settle(Err(stray(comm)));
        }
        pass.order.push(index);
        // Stage 1 keeps full gradients until the end of the pass, as its memory formula says.
        if self.groups.stage == Stage::OptimizerState { Ok(()) } else { pass.advance() }
    }

    fn end(&mut self) -> Result<Outcome<B>, CommError> {
        let comm = &*self.groups.comm;
        let mut pass = match (self.failure.take(), self.pass.take()) {
            (Some(error), _) => return Err(error),
            (None, Some(pass)) => pass,
            (None, None) => {
                return Ok(Outcome { foreign: Vec::new(), in_backward: false, named: HashSet::new() });
            }
        };
        let result = pass.finish().and_then(|outcome| {
            if outcome.in_backward && !self.ordered {
                share_order(comm, &pass)?;
                self.ordered = true;
            }
            Ok(outcome)
        });
        if let Err(error) = &result {
            pass.fail(error);
        }
        result
    }
}

/// Broadcasts the order in which rank 0's backward pass produced its gradients. It differs from the module's: autodiff finishes a parameter
/// that is used through a view (a slice of position embeddings) at the very end.
fn share_order<B: Backend>(comm: &dyn Collective, pass: &Pass<B>) -> Result<(), CommError> {
    let slots = pass.rank.parameters.slots().len();
    let mut order = pass.order.clone();
    order.resize(slots, u64::MAX);
    let bytes = order.iter().flat_map(|index| index.to_le_bytes()).collect();
    let bytes = comm.broadcast(Buffer::U8(bytes), 0)?.into_u8();
    for (position, index) in words(&bytes).enumerate().filter(|&(_, index)| index != u64::MAX) {
        // Ahead of everything that is placed by the module's order alone.
        let place = (2 * slots - position) as u64;
        if let Some(slot) = pass.rank.parameters.slot(index) {
            slot.reduction.layout.store(place, Ordering::Relaxed);
        }
    }
    Ok(())
}

fn stray(comm: &dyn Collective) -> CommError {
    CommError::Shape {
        at: OperationCall::new(comm.label(), 0, comm.place().rank, "gradient"),
        expected: "a gradient during a backward pass".into(),
        got: "a gradient outside of one".into(),
    }
}

/// The ranks' agreement at the beginning of a pass.
struct Agreed {
    /// The union of the parameters that get a gradient, the module's last first.
    plan: Vec<u64>,
    /// True if a rank is in a backward pass.
    in_backward: bool,
    /// The union of the parameters whose gradients are being collected.
    named: HashSet<u64>,
}

/// Agrees on a pass. Ranks that have made backward passes since they last collected gradients must have made equally many: otherwise
/// gradients of different steps would be averaged.
fn agree<B: Backend>(comm: &dyn Collective, rank: &Rank<B>, report: &PassReport) -> Result<Agreed, CommError> {
    const HEAD: usize = 3 + 16;
    let (slots, mine) = (rank.parameters.slots(), report.indices.iter().collect::<HashSet<_>>());
    let named: HashSet<_> = report.named.iter().collect();
    let passes = report.passes.min(100) as u8;
    // The maximum number of passes, and 255 minus the minimum among ranks that made some.
    let fewest = if passes == 0 { 0 } else { u8::MAX - passes };
    let mut flags = vec![u8::from(report.phase == Phase::Backward), passes, fewest];
    // The maximum and the minimum of each byte: equal if all ranks that report a hash report the same one.
    flags.extend(report.edits.map_or([0; 8], u64::to_le_bytes));
    flags.extend(report.edits.map_or([0; 8], |edits| (!edits).to_le_bytes()));
    let bits = |slot: &Arc<Slot<B>>| u8::from(mine.contains(&slot.index)) | u8::from(named.contains(&slot.index)) << 1;
    flags.extend(slots.iter().map(|slot| bits(slot) & 1));
    flags.extend(slots.iter().map(|slot| bits(slot) >> 1));
    let union = comm.all_reduce(Buffer::U8(flags), ReduceOp::Max)?.into_u8();
    if union[1] > 0 && union[1] != u8::MAX - union[2] {
        return Err(uneven(comm, rank, report));
    }
    let [most, fewest] = [&union[3..11], &union[11..HEAD]];
    if fewest.iter().any(|byte| *byte > 0) && most.iter().zip(fewest).any(|(most, fewest)| *most != !fewest) {
        return Err(unlike(comm, rank, report));
    }
    let has = |place: usize| slots.iter().zip(&union[HEAD + place * slots.len()..]).filter(|(_, any)| **any == 1);
    let mut plan: Vec<_> = has(0).map(|(slot, _)| slot).collect();
    plan.sort_by_key(|slot| Reverse((slot.reduction.layout.load(Ordering::Relaxed), slot.index)));
    Ok(Agreed {
        plan: plan.into_iter().map(|slot| slot.index).collect(),
        in_backward: union[0] == 1,
        named: has(1).map(|(slot, _)| slot.index).collect(),
    })
}

/// Returns, on every rank, the error for parameters that have become different ordinary tensors.
fn unlike<B: Backend>(comm: &dyn Collective, rank: &Rank<B>, report: &PassReport) -> CommError {
    let bytes = report.edits.unwrap_or(0).to_le_bytes().to_vec();
    let all = match comm.all_gather_bytes(bytes.clone()) {
        Ok(all) => all,
        Err(error) => return error,
    };
    let other = all.iter().position(|rank| *rank != bytes).unwrap_or(0);
    CommError::Mismatch {
        at: OperationCall::new(
            comm.label(),
            0,
            rank.place.rank,
            "an update of a module in which an ordinary tensor has replaced a parameter",
        ),
        other_rank: rank.window.in_run(other),
        other_op:
            "an update with other values there (call zero_burn::module::collect_grads on all gradients before an \
             optimizer's step, change parameters alike on all ranks, and call zero_burn::module::prepare on a model \
             whose parameters were replaced; LBFGS replaces them in each step, so its closure must return the same \
             loss and collected gradients on all ranks)"
                .into(),
    }
}

/// Returns, on every rank, the error for unequal numbers of backward passes.
fn uneven<B: Backend>(comm: &dyn Collective, rank: &Rank<B>, report: &PassReport) -> CommError {
    let mine = [report.passes as f64, f64::from(u8::from(report.phase == Phase::Backward))];
    let all = match comm.all_gather_values(&mine) {
        Ok(all) => all,
        Err(error) => return error,
    };
    let does = |passes: f64, is_backward: bool| match is_backward {
        true => format!("backward pass {passes} of its step"),
        false => format!("step after {passes} backward pass(es)"),
    };
    let other = all.iter().position(|rank| rank[0] != mine[0] && rank[0] > 0.0).unwrap_or(0);
    CommError::Mismatch {
        at: OperationCall::new(comm.label(), 0, rank.place.rank, does(mine[0], mine[1] == 1.0)),
        other_rank: rank.window.in_run(other),
        other_op: format!(
            "{}: all ranks must run the same backward passes through prepared parameters in a step, and skip the same \
             steps; to inspect gradients on one rank alone, differentiate a copy (model.clone().no_grad())",
            does(all[other][0], all[other][1] == 1.0)
        ),
    }
}

impl<B: Backend> Pass<B> {
    /// Lays out the gradients that have arrived, in the order of the plan.
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

    /// Lays out all remaining gradients, with zeros for those that have not arrived.
    fn finish(&mut self) -> Result<Outcome<B>, CommError> {
        while let Some(&index) = self.plan.get(self.next) {
            let contribution = self.arrived.remove(&index);
            self.lay_out(index, contribution)?;
        }
        self.lanes.finish()?;
        let named = std::mem::take(&mut self.named);
        Ok(Outcome { foreign: std::mem::take(&mut self.foreign), in_backward: self.in_backward, named })
    }

    fn lay_out(&mut self, index: u64, contribution: Option<Contribution<B>>) -> Result<(), CommError> {
        let slot = self.rank.parameters.slot(index).expect("ranks agree only on parameters that all of them have");
        let counted = contribution.as_ref().map_or(0, |contribution| bytes_of(&contribution.gradient));
        let (gradient, cell) = match contribution {
            Some(Contribution { gradient, cell }) => (Some(gradient), cell),
            None => {
                let cell = Cell::gradient(&self.rank, &slot);
                self.foreign.push((index, cell.clone()));
                (None, cell)
            }
        };
        self.next += 1;
        let _span = tracing::trace_span!("lay out gradient", parameter = index).entered();
        self.lanes.push(Incoming { gradient, cell, numel: slot.partition.numel(), counted })
    }

    fn fail(&mut self, error: &CommError) {
        for (_, contribution) in self.arrived.drain() {
            self.rank.count_unreduced(-bytes_of(&contribution.gradient));
            contribution.cell.settle(Err(error.clone()));
        }
        for (_, cell) in self.foreign.drain(..) {
            cell.settle(Err(error.clone()));
        }
        self.lanes.fail(error);
    }
}
