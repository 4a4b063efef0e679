//! The runtime of one rank: its gathers, reductions and updates, its groups of ranks, and its position in the step.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use zero_core::collective::threads::alone;
use zero_core::config::{Tier, ZeroConfig};
use zero_core::window::Window;
use zero_core::{Axes, Buffer, Collective, CommError, ReduceOp, Request};
use zero_kernels::quantized::Format;

use crate::abort::{or_stop, raise, stop};
use crate::activations::Offloader;
use crate::backend::{Backend, HostData};
use crate::cell::rank::Rank;
use crate::cell::slot::Slot;
use crate::cell::{Cell, slice_shard};
use crate::copier::{Caller, Copier};
use crate::gather::{Gatherer, read_exact};
use crate::random::{Draws, Stream};
use crate::reduce::{Foreign, Outcome, PassReport, Phase, ReduceGroups, Reducer};
use crate::tensor_collectives::TensorCollectives;
use crate::tier::{SwapDisk, filled};
use crate::update::overlapped::Updates;
use crate::values::of_type;

/// One rank of a run: its mechanisms, and its position in the step.
pub struct Runtime<B: Backend> {
    /// The state that cells use.
    pub rank: Arc<Rank<B>>,
    /// The gathers of its parameters.
    pub gatherer: Gatherer<B>,
    /// Reductions that overlap the backward pass; `None` on a single rank.
    pub reducer: Option<Reducer<B>>,
    /// Updates of state in host memory or on a disk.
    pub updates: Option<Arc<Updates<B>>>,
    /// Moves inputs of checkpointed blocks out of memory and back.
    pub offloader: Option<Arc<Offloader<B>>>,
    /// The random numbers of the rank.
    pub draws: Draws,
    /// Blocking collectives of the rank's own thread.
    main: Arc<dyn Collective>,
    /// Groups along the axes of a mesh, if there are axes other than the data axis.
    groups: Option<Groups>,
    /// The same ranks in the order of their own shards ([`Rank::owners`]), if that order differs.
    owners: Option<Arc<dyn Collective>>,
    step: Step<B>,
}

/// A rank's groups in a run with foreign axes.
struct Groups {
    run: Arc<dyn Collective>,
    /// The groups along each axis, by its name.
    along: HashMap<String, Arc<dyn Collective>>,
    /// The group along all axes except data: the parts of one model.
    parts: Arc<dyn Collective>,
}

impl Groups {
    /// Creates the groups. A collective of `run`.
    fn new(axes: &Axes, run: &dyn Collective) -> Result<Self, CommError> {
        let split = |label: &str, names: &[&str]| run.split(label, axes.first(names, run.rank()) as u64);
        let along = axes.names().map(|name| Ok((name.to_string(), split(name, &[name])?)));
        let along = along.collect::<Result<_, CommError>>()?;
        Ok(Self { along, parts: split("parts", &axes.foreign())?, run: run.duplicate("run")? })
    }
}

/// Backward passes since gradients were last collected.
#[derive(Default)]
struct Passes {
    made: u64,
    /// Parameters whose gradients the passes have reduced.
    reduced: HashSet<u64>,
    /// True once a pass that reduced nothing has been noticed.
    has_unmarked: bool,
}

impl Passes {
    /// Counts a backward pass and returns the number so far. A pass that reduced nothing is counted when its gradients are collected: it
    /// leaves a gradient for a parameter whose gradient has been reduced already.
    fn count(&mut self, phase: Phase, indices: &[u64]) -> u64 {
        match phase {
            Phase::Backward => {
                self.made += 1;
                self.reduced.extend(indices);
            }
            Phase::Collect if !self.has_unmarked && indices.iter().any(|index| self.reduced.contains(index)) => {
                (self.made, self.has_unmarked) = (self.made + 1, true);
            }
            Phase::Collect => {}
        }
        self.made
    }
}

/// A rank's position in its step.
#[derive(Default)]
struct Step<B: Backend> {
    /// Reduced gradients of parameters for which only other ranks had a gradient.
    foreign: Mutex<HashMap<u64, Vec<Arc<Cell<B>>>>>,
    /// True if the current backward pass leaves gradients unreduced.
    holding: AtomicBool,
    passes: Mutex<Passes>,
    /// True once a module has been prepared.
    is_prepared: AtomicBool,
    /// Number of the model's blocks that the current pass has reached.
    blocks: AtomicUsize,
    /// Groups in which the rank has waited during the current pass, by label.
    waits: Mutex<BTreeMap<String, Arc<dyn Collective>>>,
    /// Set at the end of a backward pass, cleared by the fence before the first update after it.
    fence_due: AtomicBool,
    /// Number of updates so far whose fence has been passed.
    updated: AtomicU64,
    /// For each module, by its first slot: the last update counted for it, and the number of its updates.
    checked: Mutex<HashMap<u64, (u64, u64)>>,
}

impl<B: Backend> Runtime<B> {
    /// Creates the runtime of one of the several ranks of `run`. A collective: every rank calls it.
    ///
    /// # Errors
    ///
    /// If a collective fails.
    pub fn new(
        config: ZeroConfig,
        device: B::Device,
        run: Arc<dyn Collective>,
        window: Window<Cell<B>>,
    ) -> Result<Self, CommError> {
        let is_flat = config.axes.foreign().is_empty();
        let groups = if is_flat { None } else { Some(Groups::new(&config.axes, &*run)?) };
        // From here on, the ranks are those along the data axis.
        let comm = groups.as_ref().map_or(run, |groups| groups.along[Axes::DATA].clone());
        let window = if is_flat { window } else { window.of_group(&*comm) };
        let (index, world) = (comm.rank(), comm.world());
        let mesh = config.mesh(world).expect("the configuration was validated");
        let is_meshed = mesh.replicas() > 1;
        let collectives = match world > 1 && comm.in_process().is_none() && !config.reduces_on_hosts() {
            true => Some(Arc::new(TensorCollectives::new::<B>(
                comm.duplicate("tensors")?,
                mesh,
                &device,
                config.gathers(world),
            )?)),
            false => None,
        };
        let disk =
            config.offload.uses(Tier::Disk).then(|| or_stop(SwapDisk::open(comm.place().rank, &config.offload.disk)));
        let copier = match config.offload.uses(Tier::Host) || disk.is_some() {
            true => Copier::open::<B>(&device, comm.deadline()),
            false => Copier::default(),
        };
        let together = collectives.as_ref().is_some_and(|collectives| collectives.gathers());
        let rank = Rank::new(&*comm, config, device, together, window, (disk, copier));
        let gradients = match world > 1 {
            true => Some(ReduceGroups::new(comm.duplicate("gradients")?, mesh, &rank.config, collectives.clone())?),
            false => None,
        };
        Ok(Self {
            gatherer: Gatherer::new(rank.clone(), collectives.as_ref()),
            reducer: gradients.map(Reducer::new),
            offloader: Offloader::new(&rank),
            updates: rank.overlaps_updates.then(|| Updates::new(rank.place.rank).into()),
            main: if world > 1 { comm.duplicate("parameters")? } else { alone() },
            groups,
            owners: if is_meshed { Some(comm.split_by("owners", 0, mesh.place(index) as u64)?) } else { None },
            draws: Draws::new(rank.config.seed),
            step: Step::default(),
            rank,
        })
    }

    /// Creates the runtime of a single rank.
    pub fn alone(device: B::Device, window: Window<Cell<B>>) -> Self {
        Self::new(ZeroConfig::default(), device, alone(), window).unwrap_or_else(|error| raise(error))
    }

    /// Ends the rank: drops what it holds, and stops its threads.
    pub fn end(&self) {
        self.rank.end();
        drop(std::mem::take(&mut *self.step.foreign.lock()));
        self.gatherer.stop();
        self.updates.iter().for_each(|updates| updates.stop());
        self.reducer.iter().for_each(Reducer::stop);
        self.offloader.iter().for_each(|offloader| offloader.stop());
    }

    // ---- gathers ----

    /// Returns the full tensor of `cell`, in its own shape: quantized in format `how`, or exact.
    ///
    /// Gradients and optimizer state are read like parameters when they are saved or inspected, in any order, and never kept. Every rank
    /// must read them, because their owners wait until all have. A tensor computed from loaded state before its first use has no name that
    /// other ranks know: it is gathered by a collective, in the same order on every rank.
    pub fn load(&self, cell: &Arc<Cell<B>>, how: Option<Format>) -> B::Tensor {
        match (&cell.slot, cell.key) {
            (Some(slot), _) if cell.is_version() && how == cell.quantized() => self.gatherer.load(cell, slot),
            (Some(_), _) if cell.is_version() => {
                cell.mark_loaded();
                read_exact(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error))
            }
            (_, Some(_)) => {
                let full = read_exact(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error));
                // Optimizers replace their state immediately, so wait until every rank has read it.
                self.barrier("after reading a gradient or optimizer state");
                full
            }
            (_, None) => self.gather_nameless(cell),
        }
    }

    /// Gathers a tensor that has no name. A collective: every rank calls it.
    fn gather_nameless(&self, cell: &Cell<B>) -> B::Tensor {
        let (partition, size) = (cell.partition, cell.dtype.size());
        let mut bytes = cell.data().bytes().to_vec();
        bytes.truncate(partition.len(cell.place()) * size);
        bytes.resize(partition.stride() * size, 0);
        let full = self.gather_bytes(bytes);
        // The result has a copy for each group: this rank takes its own group's.
        let begin = self.rank.mesh.replica(self.rank.index) * partition.world() * partition.stride() * size;
        let data: B::Data = filled(&self.rank.copier, partition.numel(), cell.dtype, |out| {
            out.copy_from_slice(&full[begin..][..out.len()]);
        });
        B::from_data(data.reshaped(&cell.shape), &cell.device)
    }

    /// Gathers the parameters that all ranks will use and keep, while every rank is here: later, one may use a parameter alone.
    pub fn gather_awaited(&self) {
        self.gatherer.begin_awaited();
        self.gatherer.end_awaited();
    }

    /// Discards the queued gathers unless the ranks are all `sound`. Called after something that may fail on one rank only: the ranks would
    /// then have created different versions, whose gathers do not match. The caller reports the error. A collective, if ranks gather
    /// collectively.
    pub fn keep_awaited_if(&self, sound: bool) {
        let is_odd = || self.reduce_scalars(vec![f64::from(u8::from(!sound))], ReduceOp::Max)[0] > 0.0;
        if self.rank.gathers_together && is_odd() {
            self.rank.awaited.lock().clear();
        }
    }

    // ---- phases of a step ----

    /// Begins a pass that produces gradients of the parameters `indices` on this rank; the caller ends it. `named` are the parameters of
    /// the gradients being collected, and `edits` is a hash of the tensors that have replaced parameters.
    pub fn begin_reduction(&self, phase: Phase, indices: Vec<u64>, (named, edits): (Vec<u64>, Option<u64>)) {
        if let Some(reducer) = &self.reducer {
            self.gatherer.begin_awaited();
            let passes = self.step.passes.lock().count(phase, &indices);
            if phase == Phase::Backward && passes == 1 {
                // Left over from the previous step: no rank's optimizer has asked for them.
                self.step.foreign.lock().clear();
            }
            reducer.begin(self.rank.clone(), PassReport { phase, indices, named, passes, edits });
        }
    }

    /// Creates the cell of the reduced gradient of `slot`, which [`Runtime::reduce`] computes.
    pub fn gradient(&self, slot: &Arc<Slot<B>>) -> Arc<Cell<B>> {
        if let Some(version) = slot.current.lock().upgrade().and_then(|cell| cell.key) {
            slot.reduction.reduced_version.store(version.version, Ordering::Relaxed);
        }
        Cell::gradient(&self.rank, slot)
    }

    /// Reduces this rank's full gradient `full` into `cell`. The reducer reads it without a copy if this is the only handle.
    pub fn reduce(&self, full: B::Tensor, cell: &Arc<Cell<B>>) {
        match (&self.reducer, &cell.slot) {
            (Some(reducer), Some(slot)) => reducer.submit(slot.index, full, cell.clone()),
            _ => {
                let own = slice_shard::<B>(full, cell.partition, cell.place());
                cell.settle(Ok(self.rank.share(of_type::<B>(own, cell.dtype))));
            }
        }
    }

    /// Resets the passes: their gradients have been collected.
    pub fn end_passes(&self) {
        *self.step.passes.lock() = Passes::default();
    }

    /// Waits until all gradients of this pass are reduced. Does nothing on a single rank.
    pub fn end_reduction(&self) -> Option<Outcome<B>> {
        let reducer = self.reducer.as_ref()?;
        Some(reducer.end(&self.rank).unwrap_or_else(|error| raise(error)))
    }

    /// Makes this rank pass the next fence: gradients are being collected, perhaps of a backward pass in which it took no part.
    pub fn join_fence(&self) {
        self.step.fence_due.store(true, Ordering::Relaxed);
    }

    /// Advances to the next block of this pass, as the model counts them, and returns whether it is to be checkpointed.
    pub fn next_block(&self) -> bool {
        self.step.blocks.fetch_add(1, Ordering::Relaxed) < self.rank.config.checkpointed_blocks
    }

    /// Ends a backward pass: before anything is updated, all ranks must have read what they need.
    pub fn end_backward(&self, foreign: Foreign<B>) {
        self.add_foreign(foreign);
        self.join_fence();
        self.step.blocks.store(0, Ordering::Relaxed);
        self.gatherer.end_cycle();
        self.gatherer.drop_unused();
    }

    /// Sets whether backward passes leave gradients unreduced from here on.
    pub fn hold_back(&self, on: bool) {
        self.step.holding.store(on, Ordering::Relaxed);
    }

    /// Returns whether the current backward pass leaves its gradients unreduced.
    pub fn is_holding_back(&self) -> bool {
        !self.rank.config.overlap_comm || self.step.holding.load(Ordering::Relaxed)
    }

    /// Keeps reduced gradients until [`Runtime::take_foreign`] asks for their parameter.
    pub fn add_foreign(&self, cells: Foreign<B>) {
        let mut foreign = self.step.foreign.lock();
        for (slot, cell) in cells {
            foreign.entry(slot).or_default().push(cell);
        }
    }

    /// Takes the reduced gradients of parameter `slot` for which only other ranks had a gradient, in the order of the passes.
    pub fn take_foreign(&self, slot: u64) -> Vec<Arc<Cell<B>>> {
        self.step.foreign.lock().remove(&slot).unwrap_or_default()
    }

    /// Waits, before the first update after a backward pass, until every rank has come this far, so that none still reads what the others
    /// are about to replace.
    pub fn before_update(&self) {
        if self.step.fence_due.swap(false, Ordering::Relaxed) {
            self.wait_for_updates();
            let is_collected = self.step.passes.lock().made == 0;
            if let Some(&slot) = self.step.foreign.lock().keys().next().filter(|_| !is_collected) {
                stop(format!(
                    "rank {} has no gradient for {}, but other ranks have one: call zero_burn::module::collect_grads \
                     on the gradients before the optimizer's step",
                    self.rank.place.rank,
                    self.rank.parameters.slot(slot).map_or_else(|| "a parameter".into(), |slot| slot.to_string())
                ));
            }
            self.fence("before an update");
            self.step.updated.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of the next update, from 1, and whether replicas of the module with first parameter `slot` must be compared
    /// before it. Returns `None` if this update has been counted already. Updates are counted per module, as several may be trained in
    /// turn. The same on every rank.
    pub fn update_to_check(&self, slot: u64) -> Option<(u64, bool)> {
        let update = self.step.updated.load(Ordering::Relaxed) + 1;
        let mut checked = self.step.checked.lock();
        let (last, count) = checked.entry(slot).or_default();
        if *last == update {
            return None;
        }
        (*last, *count) = (update, *count + 1);
        Some((update, count.is_multiple_of(self.rank.config.check_replicas)))
    }

    /// Notes that a module has been prepared: from here on, each rank draws random numbers of its own.
    pub fn end_building(&self) {
        self.step.is_prepared.store(true, Ordering::Relaxed);
    }

    /// Waits for updates that run concurrently with the rank's own thread; their error ends the rank.
    pub fn wait_for_updates(&self) {
        if let Some(updates) = &self.updates {
            updates.wait(&self.rank).unwrap_or_else(|error| raise(error));
        }
    }

    /// Waits until every rank has come this far: afterwards, no rank reads what was loaded before.
    pub fn fence(&self, purpose: &'static str) {
        self.gatherer.begin_awaited();
        self.gatherer.end_secondary();
        match self.gatherer.together() {
            Some(collectives) => {
                let _span = tracing::trace_span!("wait for ranks", purpose).entered();
                collectives.compare(&*self.main, purpose).unwrap_or_else(|error| raise(error));
            }
            None => self.barrier(purpose),
        }
        self.rank.fences.fetch_add(1, Ordering::Relaxed);
        self.rank.drop_retired();
    }

    /// Waits until every rank has come this far, for the same `purpose`.
    pub fn barrier(&self, purpose: &'static str) {
        let _span = tracing::trace_span!("wait for ranks", purpose).entered();
        self.main.execute(Request::Barrier(purpose)).unwrap_or_else(|error| raise(error));
    }

    // ---- collectives of the rank's own thread ----

    /// All-reduces numbers, in rank order.
    pub fn reduce_scalars(&self, values: Vec<f64>, op: ReduceOp) -> Vec<f64> {
        self.main.all_reduce(Buffer::F64(values), op).unwrap_or_else(|error| raise(error)).into_f64()
    }

    /// All-gathers byte strings of equal length, in rank order.
    pub fn gather_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.main.all_gather(Buffer::U8(bytes)).unwrap_or_else(|error| raise(error)).into_u8()
    }

    /// Broadcasts the values of rank `root`; the other ranks pass equally many.
    pub fn broadcast(&self, values: Buffer, root: usize) -> Buffer {
        self.main.broadcast(values, root).unwrap_or_else(|error| raise(error))
    }

    /// Broadcasts the bytes of rank 0.
    pub fn broadcast_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.broadcast(Buffer::U8(bytes), 0).into_u8()
    }

    /// Returns the group of ranks in the order of their own shards, for checkpoints. Within a step the ranks use one group, so that a rank
    /// that calls something else is detected at once.
    pub fn owners(&self) -> Arc<dyn Collective> {
        self.owners.clone().unwrap_or_else(|| self.collective())
    }

    /// Returns the group of ranks, for other collectives on the rank's own thread.
    pub fn collective(&self) -> Arc<dyn Collective> {
        self.main.clone()
    }

    /// Returns the group of all ranks of the run, including those at other places on foreign axes, for collectives on the rank's own
    /// thread.
    pub fn everyone(&self) -> Arc<dyn Collective> {
        self.groups.as_ref().map_or_else(|| self.collective(), |groups| groups.run.clone())
    }

    /// Returns the group of ranks along an axis.
    pub fn group(&self, axis: &str) -> Arc<dyn Collective> {
        let is_data = axis == Axes::DATA;
        match self.groups.as_ref().map(|groups| groups.along.get(axis)) {
            Some(Some(group)) => group.clone(),
            None if is_data => self.collective(),
            _ => stop(format!(
                "the mesh has no axis {axis:?}: expected one of {:?}; add it to ZeroConfig::axes",
                self.rank.config.axes.names().collect::<Vec<_>>()
            )),
        }
    }

    /// Returns the group along the mesh's expert axis, if there is one; each place on it trains on its own part of the batch.
    pub fn expert_places(&self) -> Option<&Arc<dyn Collective>> {
        self.groups.as_ref()?.along.get(Axes::EXPERT)
    }

    /// Returns this rank's index among those that train on their own part of the batch.
    fn place_of_rows(&self) -> u64 {
        let place = self.expert_places().map_or(0, |places| places.rank());
        (self.rank.index + self.rank.world * place) as u64
    }

    /// Sums `value` over the parts of a model along foreign axes, in their order.
    pub fn sum_over_parts(&self, value: f64) -> f64 {
        let Some(Groups { parts, .. }) = &self.groups else { return value };
        let sum = parts.all_reduce(Buffer::F64(vec![value]), ReduceOp::Sum);
        sum.unwrap_or_else(|error| raise(error)).into_f64()[0]
    }

    /// Returns this rank's index among the parts of its model; 0 if there is only one.
    pub fn part(&self) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups.parts.rank())
    }

    /// Returns whether models have parts along foreign axes.
    pub fn has_parts(&self) -> bool {
        self.groups.is_some()
    }

    /// Notes that the rank is about to wait for others of `group` within a pass.
    pub fn waits_in(&self, group: &Arc<dyn Collective>) {
        if group.in_process().is_some() {
            self.step.waits.lock().insert(group.label().to_string(), group.clone());
        }
    }

    /// Makes ranks that have waited for each other in a backward pass, and share autodiff's locks, leave it together. Called after the
    /// pass, when autodiff has released its locks.
    pub fn end_waits(&self) {
        for group in std::mem::take(&mut *self.step.waits.lock()).into_values() {
            group.execute(Request::Barrier("the end of a backward pass")).unwrap_or_else(|error| raise(error));
        }
    }

    // ---- random numbers ----

    /// Returns the random numbers of the next draw. Modules are built from the same numbers on all ranks. From
    /// [`Runtime::end_building`] on, each rank draws its own.
    pub fn draw(&self) -> Stream {
        let (seed, draw) = self.draws.next();
        let is_prepared = self.step.is_prepared.load(Ordering::Relaxed);
        Stream::new(&[seed, if is_prepared { self.place_of_rows() } else { 0 }, draw])
    }

    /// Returns the random numbers of a draw on a thread other than the rank's own.
    pub fn draw_on_another_thread(&self) -> Stream {
        let (seed, draw) = self.draws.next_beside();
        Stream::new(&[seed, self.place_of_rows(), u64::MAX, draw])
    }
}
