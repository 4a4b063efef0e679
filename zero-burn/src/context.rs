//! The runtime of one rank: its gathers, reductions and updates, and its position in the step.
//!
//! There is one [`Context`] per rank and inner backend. A launch installs it on the rank's thread; a thread outside of a launch has the
//! process-wide context of a single rank. Cells know their [`Rank`], which leads here ([`Context::of`]). The thread-local context is used
//! where a tensor is created, and where a dense tensor is asked for its device.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use burn_backend::{Backend, TensorData};
use parking_lot::Mutex;
use zero_core::collective::threads::alone;
use zero_core::window::{Window, WindowHost};
use zero_core::{Axes, Buffer, Collective, CommError, ReduceOp, Request};
use zero_ops::quantized::Format;

use crate::abort::{or_stop, raise, stop, stop_foreign};
use crate::activations::Offloader;
use crate::config::{Tier, ZeroConfig};
use crate::current::{CURRENT, Installed, PLACES, RUNNING};
use crate::device::ZeroDevice;
use crate::engine::{
    Caller, Cell, Copier, Foreign, Gatherer, Inner, Outcome, PassReport, Phase, Rank, ReduceGroups, Reducer, SwapDisk,
    TensorCollectives, Updates, burn_dtype, burn_shape,
};
use crate::random::{Draws, Stream};
use crate::values::empty;
use zero_engine::gather::read_exact;

pub(crate) struct Context<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    pub(crate) gatherer: Gatherer<B>,
    /// Reductions that overlap the backward pass; `None` on a single rank.
    pub(crate) reducer: Option<Reducer<B>>,
    /// Updates of state in host memory or on a disk.
    pub(crate) updates: Option<Updates<B>>,
    /// Moves inputs of checkpointed blocks out of memory and back.
    pub(crate) offloader: Option<Arc<Offloader<B>>>,
    /// Blocking collectives of the rank's own thread; `None` on a single rank.
    main: Option<Arc<dyn Collective>>,
    /// Groups along the axes of a mesh, if there are axes other than the data axis.
    groups: Option<Groups>,
    /// The same ranks in the order of their own shards ([`Rank::owners`]), if that order differs.
    owners: Option<Arc<dyn Collective>>,
    pub(crate) draws: Draws,
    /// Loaded state that is still in use, by a hash of its content: equal states share one cell.
    pub(crate) loaded: Mutex<HashMap<u64, Weak<Cell<B>>>>,
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

impl<B: Backend> Default for Step<B> {
    fn default() -> Self {
        let [holding, fence_due, is_prepared] = [false; 3].map(AtomicBool::new);
        let (foreign, checked, waits) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (updated, blocks, passes) = (AtomicU64::new(0), AtomicUsize::new(0), Mutex::default());
        Self { foreign, holding, waits, fence_due, updated, checked, blocks, passes, is_prepared }
    }
}

/// The process-wide context of a single rank, for each inner backend.
static LONE: LazyLock<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

/// Guard that uninstalls the context of a rank's thread.
pub(crate) struct InstallGuard<B: Backend>(Arc<Context<B>>, u64);

impl<B: Backend> Drop for InstallGuard<B> {
    fn drop(&mut self) {
        let Self(context, place) = self;
        CURRENT.set(None);
        RUNNING.lock().remove(place);
        context.rank.end();
        drop(std::mem::take(&mut *context.step.foreign.lock()));
        context.gatherer.stop();
        context.offloader.iter().for_each(|offloader| offloader.stop());
        context.updates.iter().for_each(Updates::stop);
        context.reducer.iter().for_each(Reducer::stop);
    }
}

impl<B: Backend> Context<B> {
    /// Creates the context of one of the several ranks of `run`. A collective: every rank calls it.
    pub(crate) fn new(
        config: ZeroConfig,
        device: B::Device,
        run: Arc<dyn Collective>,
        window: Window<Cell<B>>,
    ) -> Result<Arc<Self>, CommError> {
        let is_flat = config.axes.foreign().is_empty();
        let groups = if is_flat { None } else { Some(Groups::new(&config.axes, &*run)?) };
        // From here on, the ranks are those along the data axis.
        let comm = groups.as_ref().map_or(run, |groups| groups.along[Axes::DATA].clone());
        let window = if is_flat { window } else { window.of_group(&*comm) };
        let (index, world) = (comm.rank(), comm.world());
        let mesh = config.mesh(world).expect("the configuration was validated");
        let is_meshed = mesh.replicas() > 1;
        let bulk = match world > 1 && comm.in_process().is_none() && !config.reduces_on_hosts() {
            true => Some(Arc::new(TensorCollectives::new::<Inner<B>>(
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
            true => Copier::open::<Inner<B>>(&device, comm.deadline()),
            false => Copier::default(),
        };
        let together = bulk.as_ref().is_some_and(|bulk| bulk.gathers());
        let rank = Rank::new(&*comm, config, device, together, window, (disk, copier));
        let gradients = match world > 1 {
            true => Some(ReduceGroups::new(comm.duplicate("gradients")?, mesh, &rank.config, bulk.clone())?),
            false => None,
        };
        let main = if world > 1 { Some(comm.duplicate("parameters")?) } else { None };
        let owners = if is_meshed { Some(comm.split_by("owners", 0, mesh.place(index) as u64)?) } else { None };
        Ok(Self::build(rank, gradients, main, owners, groups, bulk))
    }

    fn build(
        rank: Arc<Rank<B>>,
        gradients: Option<ReduceGroups>,
        main: Option<Arc<dyn Collective>>,
        owners: Option<Arc<dyn Collective>>,
        groups: Option<Groups>,
        bulk: Option<Arc<TensorCollectives>>,
    ) -> Arc<Self> {
        let context = Arc::new(Self {
            gatherer: Gatherer::new(rank.clone(), bulk.as_ref()),
            reducer: gradients.map(Reducer::new),
            updates: rank.overlaps_updates.then(|| Updates::new(rank.place.rank)),
            offloader: Offloader::new(&rank),
            main,
            groups,
            owners,
            draws: Draws::new(rank.config.seed),
            loaded: Mutex::default(),
            step: Step::default(),
            rank,
        });
        let owner: Arc<dyn Any + Send + Sync> = context.clone();
        let _ = context.rank.owner.set(Arc::downgrade(&owner));
        context
    }

    /// Returns the context installed on this thread, if it belongs to a rank.
    fn installed() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)?.context.downcast().ok()
    }

    /// Returns the context of this thread: its rank's, or that of the single rank.
    pub(crate) fn current() -> Arc<Self> {
        Self::installed().unwrap_or_else(|| {
            let mut lone = LONE.lock();
            let context = lone.entry(TypeId::of::<B>()).or_insert_with(|| {
                let (config, window) = (ZeroConfig::default(), WindowHost::default().alone());
                let rank = Rank::new(&*alone(), config, B::Device::default(), false, window, Default::default());
                Self::build(rank, None, None, None, None, None)
            });
            context.clone().downcast::<Self>().expect("contexts are stored under their own type")
        })
    }

    /// Ends the run with an error if a thread that belongs to no rank creates a parameter of a rank: two such threads would number the
    /// rank's parameters in an order that differs from rank to rank.
    pub(crate) fn check_thread(device: &ZeroDevice<B::Device>) {
        if CURRENT.with_borrow(Option::is_none) && RUNNING.lock().contains_key(&device.place()) {
            let thread = std::thread::current();
            stop(format!(
                "a parameter of rank {} was created on thread {:?}, which the launch did not start: create the module \
                 on the thread that runs the body, or call zero_burn::module::prepare on it before your own threads \
                 use its parameters",
                device.rank(),
                thread.name().unwrap_or("unnamed")
            ));
        }
    }

    /// Returns the context of the rank that owns `device`. A thread started by the rank's body becomes the rank's, if it belonged to none;
    /// meanwhile the body waits for it, or does other work.
    pub(crate) fn of_device(device: &ZeroDevice<B::Device>) -> Arc<Self> {
        let is_free = CURRENT.with_borrow(Option::is_none);
        let running = is_free.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        if let Some(context) = running.and_then(|context| context.downcast::<Self>().ok()) {
            if !zero_ops::is_host::<B>() {
                let thread = std::thread::current();
                stop(format!(
                    "a module of rank {} was prepared or trained on thread {:?}, which the launch did not start: on a \
                     device, prepare and train it on the thread that runs the rank's body",
                    context.rank.index,
                    thread.name().unwrap_or("unnamed")
                ));
            }
            context.become_this_threads(device.place());
        }
        Self::current()
    }

    /// Returns the context of the rank that owns `cell`. Ends with an error on another rank's thread, and after the owner has ended.
    pub(crate) fn of(cell: &Cell<B>) -> Arc<Self> {
        let owner = || cell.rank.owner.get()?.upgrade()?.downcast().ok();
        match Self::installed() {
            Some(context) => Some(context).filter(|context| Arc::ptr_eq(&context.rank, &cell.rank)),
            None => owner(),
        }
        .unwrap_or_else(|| stop_foreign(&cell.shape))
    }

    /// Installs this context on the current thread until the guard is dropped.
    pub(crate) fn install(self: &Arc<Self>) -> InstallGuard<B> {
        let place = PLACES.fetch_add(1, Ordering::Relaxed);
        RUNNING.lock().insert(place, self.clone());
        self.become_this_threads(place);
        InstallGuard(self.clone(), place)
    }

    fn become_this_threads(self: &Arc<Self>, place: u64) {
        let device = Arc::new(self.rank.device.clone());
        CURRENT.set(Some(Installed { rank: self.rank.index, place, device, context: self.clone() }));
    }

    // ---- gathers ----

    /// Returns the full tensor of `cell`, in its own shape.
    ///
    /// Gradients and optimizer state are read like parameters when they are saved or inspected, in any order, and never kept. Every rank
    /// must read them, because their owners wait until all have. A tensor computed from loaded state before its first use has no name that
    /// other ranks know: it is gathered by a collective, in the same order on every rank.
    pub(crate) fn load(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
        Self::gather(cell, cell.quantized())
    }

    /// Same as [`Context::load`], but exact for a parameter that is quantized for use.
    pub(crate) fn load_exact(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
        Self::gather(cell, None)
    }

    fn gather(cell: &Arc<Cell<B>>, how: Option<Format>) -> B::FloatTensorPrimitive {
        let installed = Self::installed();
        if installed.as_ref().is_some_and(|installed| !Arc::ptr_eq(&installed.rank, &cell.rank)) {
            stop_foreign(&cell.shape);
        }
        cell.adopt();
        if cell.partition.is_empty() {
            return empty::<B>(&burn_shape(&cell.shape), burn_dtype(cell.dtype), &cell.device);
        }
        if cell.partition.is_whole() {
            return B::float_reshape(cell.local(), burn_shape(&cell.shape));
        }
        let context = installed.unwrap_or_else(|| Self::of(cell));
        match (&cell.slot, cell.key) {
            (Some(slot), _) if cell.is_version() && how == cell.quantized() => context.gatherer.load(cell, slot),
            (Some(_), _) if cell.is_version() => {
                cell.mark_loaded();
                read_exact(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error))
            }
            (_, Some(_)) => {
                let whole = read_exact(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error));
                // Optimizers replace their state immediately, so wait until every rank has read it.
                context.barrier("after reading a gradient or optimizer state");
                whole
            }
            (_, None) => context.gather_nameless(cell),
        }
    }

    /// Gathers a tensor that has no name. A collective: every rank calls it.
    fn gather_nameless(&self, cell: &Cell<B>) -> B::FloatTensorPrimitive {
        let (partition, size) = (cell.partition, cell.dtype.size());
        let mut bytes = cell.data().0.into_bytes().to_vec();
        bytes.truncate(partition.len(cell.place()) * size);
        bytes.resize(partition.stride() * size, 0);
        let mut whole = self.gather_bytes(bytes);
        // The result has a copy for each group: this rank takes its own group's.
        whole.drain(..self.rank.mesh.replica(self.rank.index) * partition.world() * partition.stride() * size);
        whole.truncate(partition.numel() * size);
        B::float_from_data(
            TensorData::from_bytes_vec(whole, burn_shape(&cell.shape), burn_dtype(cell.dtype)),
            &cell.device,
        )
    }

    /// Gathers the parameters that all ranks will use and keep, while every rank is here: later, one may use a parameter alone.
    pub(crate) fn gather_awaited(&self) {
        self.gatherer.begin_awaited();
        self.gatherer.end_awaited();
    }

    /// Discards the queued gathers unless the ranks are all `sound`. Called after something that may fail on one rank only: the ranks would
    /// then have created different versions, whose gathers do not match. The caller reports the error. A collective, if ranks gather
    /// collectively.
    pub(crate) fn keep_awaited_if(&self, sound: bool) {
        let is_odd = || self.reduce_scalars(vec![f64::from(u8::from(!sound))], ReduceOp::Max)[0] > 0.0;
        if self.rank.gathers_together && is_odd() {
            self.rank.awaited.lock().clear();
        }
    }

    // ---- phases of a step ----

    /// Begins a pass that produces gradients of the parameters `indices` on this rank; the caller ends it. `named` are the parameters of
    /// the gradients being collected, and `edits` is a hash of the tensors that have replaced parameters.
    pub(crate) fn begin_reduction(&self, phase: Phase, indices: Vec<u64>, (named, edits): (Vec<u64>, Option<u64>)) {
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

    /// Resets the passes: their gradients have been collected.
    pub(crate) fn end_passes(&self) {
        *self.step.passes.lock() = Passes::default();
    }

    /// Waits until all gradients of this pass are reduced. Does nothing on a single rank.
    pub(crate) fn end_reduction(&self) -> Option<Outcome<B>> {
        let reducer = self.reducer.as_ref()?;
        Some(reducer.end(&self.rank).unwrap_or_else(|error| raise(error)))
    }

    /// Makes this rank pass the next fence: gradients are being collected, perhaps of a backward pass in which it took no part.
    pub(crate) fn join_fence(&self) {
        self.step.fence_due.store(true, Ordering::Relaxed);
    }

    /// Advances to the next block of this pass, as the model counts them, and returns whether it is to be checkpointed.
    pub(crate) fn next_block(&self) -> bool {
        self.step.blocks.fetch_add(1, Ordering::Relaxed) < self.rank.config.checkpointed_blocks
    }

    /// Ends a backward pass: before anything is updated, all ranks must have read what they need.
    pub(crate) fn end_backward(&self, foreign: Foreign<B>) {
        self.add_foreign(foreign);
        self.join_fence();
        self.step.blocks.store(0, Ordering::Relaxed);
        self.gatherer.end_cycle();
        self.gatherer.drop_unused();
    }

    /// Sets whether backward passes leave gradients unreduced from here on.
    pub(crate) fn hold_back(&self, on: bool) {
        self.step.holding.store(on, Ordering::Relaxed);
    }

    /// Returns whether the current backward pass leaves its gradients unreduced.
    pub(crate) fn is_holding_back(&self) -> bool {
        !self.rank.config.overlap_comm || self.step.holding.load(Ordering::Relaxed)
    }

    /// Keeps reduced gradients until [`Context::take_foreign`] asks for their parameter.
    pub(crate) fn add_foreign(&self, cells: Foreign<B>) {
        let mut foreign = self.step.foreign.lock();
        for (slot, cell) in cells {
            foreign.entry(slot).or_default().push(cell);
        }
    }

    pub(crate) fn take_foreign(&self, slot: u64) -> Vec<Arc<Cell<B>>> {
        self.step.foreign.lock().remove(&slot).unwrap_or_default()
    }

    /// Waits, before the first update after a backward pass, until every rank has come this far, so that none still reads what the others
    /// are about to replace.
    pub(crate) fn before_update(&self) {
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
    pub(crate) fn update_to_check(&self, slot: u64) -> Option<(u64, bool)> {
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
    pub(crate) fn end_building(&self) {
        self.step.is_prepared.store(true, Ordering::Relaxed);
    }

    /// Waits for updates that run concurrently with the rank's own thread; their error ends the rank.
    pub(crate) fn wait_for_updates(&self) {
        if let Some(updates) = &self.updates {
            updates.wait(&self.rank).unwrap_or_else(|error| raise(error));
        }
    }

    /// Waits until every rank has come this far: afterwards, no rank reads what was loaded before.
    pub(crate) fn fence(&self, purpose: &'static str) {
        self.gatherer.begin_awaited();
        self.gatherer.end_secondary();
        match (self.gatherer.together(), &self.main) {
            (Some(bulk), Some(main)) => {
                let _span = tracing::trace_span!("wait for ranks", purpose).entered();
                bulk.compare(&**main, purpose).unwrap_or_else(|error| raise(error));
            }
            _ => self.barrier(purpose),
        }
        self.rank.fences.fetch_add(1, Ordering::Relaxed);
        self.rank.drop_retired();
    }

    /// Waits until every rank has come this far, for the same `purpose`.
    pub(crate) fn barrier(&self, purpose: &'static str) {
        if let Some(main) = &self.main {
            let _span = tracing::trace_span!("wait for ranks", purpose).entered();
            main.execute(Request::Barrier(purpose)).unwrap_or_else(|error| raise(error));
        }
    }

    // ---- collectives of the rank's own thread ----

    /// All-reduces numbers, in rank order.
    pub(crate) fn reduce_scalars(&self, values: Vec<f64>, op: ReduceOp) -> Vec<f64> {
        match &self.main {
            None => values,
            Some(main) => main.all_reduce(Buffer::F64(values), op).unwrap_or_else(|error| raise(error)).into_f64(),
        }
    }

    /// All-gathers byte strings of equal length, in rank order.
    pub(crate) fn gather_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        match &self.main {
            None => bytes,
            Some(main) => main.all_gather(Buffer::U8(bytes)).unwrap_or_else(|error| raise(error)).into_u8(),
        }
    }

    /// Broadcasts the values of rank `root`; the other ranks pass equally many.
    pub(crate) fn broadcast(&self, values: Buffer, root: usize) -> Buffer {
        match &self.main {
            None => values,
            Some(main) => main.broadcast(values, root).unwrap_or_else(|error| raise(error)),
        }
    }

    /// Broadcasts the bytes of rank 0.
    pub(crate) fn broadcast_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.broadcast(Buffer::U8(bytes), 0).into_u8()
    }

    /// Returns the group of ranks in the order of their own shards, for checkpoints. Within a step the ranks use one group, so that a rank
    /// that calls something else is detected at once.
    pub(crate) fn owners(&self) -> Arc<dyn Collective> {
        self.owners.clone().unwrap_or_else(|| self.collective())
    }

    /// Returns the group of ranks, for other collectives on the rank's own thread.
    pub(crate) fn collective(&self) -> Arc<dyn Collective> {
        self.main.clone().unwrap_or_else(alone)
    }

    /// Returns the group of all ranks of the run, including those at other places on foreign axes, for collectives on the rank's own
    /// thread.
    pub(crate) fn everyone(&self) -> Arc<dyn Collective> {
        self.groups.as_ref().map_or_else(|| self.collective(), |groups| groups.run.clone())
    }

    /// Returns the group of ranks along an axis.
    pub(crate) fn group(&self, axis: &str) -> Arc<dyn Collective> {
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
    pub(crate) fn expert_places(&self) -> Option<&Arc<dyn Collective>> {
        self.groups.as_ref()?.along.get(Axes::EXPERT)
    }

    /// Returns this rank's index among those that train on their own part of the batch.
    fn place_of_rows(&self) -> u64 {
        let place = self.expert_places().map_or(0, |places| places.rank());
        (self.rank.index + self.rank.world * place) as u64
    }

    /// Sums `value` over the parts of a model along foreign axes, in their order.
    pub(crate) fn sum_over_parts(&self, value: f64) -> f64 {
        let Some(Groups { parts, .. }) = &self.groups else { return value };
        let sum = parts.all_reduce(Buffer::F64(vec![value]), ReduceOp::Sum);
        sum.unwrap_or_else(|error| raise(error)).into_f64()[0]
    }

    /// Returns this rank's index among the parts of its model; 0 if there is only one.
    pub(crate) fn part(&self) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups.parts.rank())
    }

    /// Returns whether models have parts along foreign axes.
    pub(crate) fn has_parts(&self) -> bool {
        self.groups.is_some()
    }

    /// Notes that the rank is about to wait for others of `group` within a pass.
    pub(crate) fn waits_in(&self, group: &Arc<dyn Collective>) {
        if group.in_process().is_some() {
            self.step.waits.lock().insert(group.label().to_string(), group.clone());
        }
    }

    /// Makes ranks that have waited for each other in a backward pass, and share autodiff's locks, leave it together. Called after the
    /// pass, when autodiff has released its locks.
    pub(crate) fn end_waits(&self) {
        for group in std::mem::take(&mut *self.step.waits.lock()).into_values() {
            group.execute(Request::Barrier("the end of a backward pass")).unwrap_or_else(|error| raise(error));
        }
    }

    // ---- random numbers ----

    /// Returns the random numbers of one draw for `device` (dropout, noise). They differ at every call and, once a module has been
    /// prepared, on every rank. Before that, modules are built, whose fixed random tensors must be equal on all ranks.
    ///
    /// Threads other than the rank's own, such as a data loader's, have numbers of their own, so that the rank's do not depend on their
    /// progress.
    pub(crate) fn draw(device: &ZeroDevice<B::Device>) -> Stream {
        let is_beside = CURRENT.with_borrow(Option::is_none);
        let running = is_beside.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        let words = match running.map(|context| context.downcast::<Self>()) {
            Some(Ok(context)) => {
                let (seed, draw) = context.draws.next_beside();
                vec![seed, context.place_of_rows(), u64::MAX, draw]
            }
            _ => {
                let context = Self::current();
                let (seed, draw) = context.draws.next();
                // Modules are built from the same numbers on all ranks. From the first `prepare` on, each rank draws its own.
                let is_prepared = context.step.is_prepared.load(Ordering::Relaxed);
                vec![seed, if is_prepared { context.place_of_rows() } else { 0 }, draw]
            }
        };
        Stream::new(&words)
    }
}
