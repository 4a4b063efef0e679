//! What works for one rank: its gathers, reductions and updates, and where it is in its step.
//!
//! One [`Context`] per rank and inner backend. A launch installs it in the rank's thread; a thread outside of a launch
//! has the process-wide context of a lone rank. Cells know their [`Rank`], which leads here ([`Context::of`]); the thread-local
//! serves where a tensor is born and where a dense tensor is asked for its device.

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

use crate::activations::Offloader;
use crate::bulk::Bulk;
use crate::cell::Cell;
use crate::cell::rank::Rank;
use crate::config::{Tier, ZeroConfig};
use crate::current::{CURRENT, Installed, PLACES, RUNNING};
use crate::device::ZeroDevice;
use crate::gather::{Gatherer, read_exact};
use crate::mover::{For, Mover};
use crate::random::{Draws, Stream};
use crate::reduce::{Foreign, Means, Outcome, Phase, Reducer, Told};
use crate::tier::SwapDisk;
use crate::trouble::{or_stop, raise, stop, stop_foreign};
use crate::update::beside::Updates;
use crate::values::empty;

pub(crate) struct Context<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    pub(crate) gatherer: Gatherer<B>,
    /// Reductions beside the backward pass; absent on a lone rank.
    pub(crate) reducer: Option<Reducer<B>>,
    /// Updates of what lies in the host's memory or on a disk.
    pub(crate) updates: Option<Updates<B>>,
    /// Moves inputs of checkpointed blocks out of memory and back.
    pub(crate) offloader: Option<Arc<Offloader<B>>>,
    /// Blocking collectives of the rank's own thread; absent on a lone rank.
    main: Option<Arc<dyn Collective>>,
    /// Groups along the axes of a mesh, where there is another than the data axis.
    groups: Option<Groups>,
    /// The same ranks in the order of their own pieces ([`Rank::owners`]), where that is another.
    owners: Option<Arc<dyn Collective>>,
    pub(crate) draws: Draws,
    /// State that was loaded and is still there, by its content: what is equal is one cell.
    pub(crate) loaded: Mutex<HashMap<u64, Weak<Cell<B>>>>,
    step: Step<B>,
}

/// A rank's groups where its run has foreign axes.
struct Groups {
    run: Arc<dyn Collective>,
    /// Along each axis, by its name.
    along: HashMap<String, Arc<dyn Collective>>,
    /// Along all axes but that of data: the parts of a model.
    parts: Arc<dyn Collective>,
}

impl Groups {
    /// A collective of `run`.
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
    /// Parameters whose gradients they have reduced.
    reduced: HashSet<u64>,
    /// True once one that reduced nothing has been noticed.
    has_unmarked: bool,
}

impl Passes {
    /// Counts a backward pass, or one that gradients tell of which it has left for a parameter whose gradient is reduced already.
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

/// Where a rank is in its step.
struct Step<B: Backend> {
    /// Reduced gradients of parameters that only other ranks had a gradient for.
    foreign: Mutex<HashMap<u64, Vec<Arc<Cell<B>>>>>,
    /// Whether the backward pass under way leaves gradients unreduced.
    holding: AtomicBool,
    passes: Mutex<Passes>,
    /// True once a module has been prepared.
    is_prepared: AtomicBool,
    /// Blocks of the model that the pass under way has come to.
    blocks: AtomicUsize,
    /// Groups that the rank has waited in within the pass under way, by their labels.
    waits: Mutex<BTreeMap<String, Arc<dyn Collective>>>,
    /// Set at the end of a backward pass, cleared by the fence before the first update after it.
    fence_due: AtomicBool,
    /// Updates so far whose fence has been passed.
    updated: AtomicU64,
    /// For each module by its first slot: the last update that replicas were looked at for, and how many those were.
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

/// The lone rank's context of each inner backend.
static LONE: LazyLock<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

/// Uninstalls the context of a rank's thread.
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
    /// The context of one of several ranks, the members of `run`. A collective: every rank calls it.
    pub(crate) fn new(
        config: ZeroConfig,
        device: B::Device,
        run: Arc<dyn Collective>,
        window: Window<Cell<B>>,
    ) -> Result<Arc<Self>, CommError> {
        let is_flat = config.axes.foreign().is_empty();
        let groups = if is_flat { None } else { Some(Groups::new(&config.axes, &*run)?) };
        // From here on there are no other ranks than those along the data axis.
        let comm = groups.as_ref().map_or(run, |groups| groups.along[Axes::DATA].clone());
        let window = if is_flat { window } else { window.of_group(&*comm) };
        let (index, world) = (comm.rank(), comm.world());
        let mesh = config.mesh(world).expect("it was validated");
        let is_meshed = mesh.replicas() > 1;
        let bulk = match world > 1 && comm.in_process().is_none() && !config.reduces_on_hosts() {
            true => Some(Arc::new(Bulk::new::<B>(comm.duplicate("tensors")?, mesh, &device, config.gathers(world))?)),
            false => None,
        };
        let disk =
            config.offload.uses(Tier::Disk).then(|| or_stop(SwapDisk::open(comm.place().rank, &config.offload.disk)));
        let mover = match config.offload.uses(Tier::Host) || disk.is_some() {
            true => Mover::open::<B>(&device, comm.deadline()),
            false => Mover::default(),
        };
        let together = bulk.as_ref().is_some_and(|bulk| bulk.gathers());
        let rank = Rank::new(&*comm, config, device, together, window, (disk, mover));
        let gradients = match world > 1 {
            true => Some(Means::new(comm.duplicate("gradients")?, mesh, &rank.config, bulk.clone())?),
            false => None,
        };
        let main = if world > 1 { Some(comm.duplicate("parameters")?) } else { None };
        let owners = if is_meshed { Some(comm.split_by("owners", 0, mesh.place(index) as u64)?) } else { None };
        Ok(Self::build(rank, gradients, main, owners, groups, bulk))
    }

    fn build(
        rank: Arc<Rank<B>>,
        gradients: Option<Means>,
        main: Option<Arc<dyn Collective>>,
        owners: Option<Arc<dyn Collective>>,
        groups: Option<Groups>,
        bulk: Option<Arc<Bulk>>,
    ) -> Arc<Self> {
        let context = Arc::new(Self {
            gatherer: Gatherer::new(rank.clone(), bulk.as_ref()),
            reducer: gradients.map(Reducer::new),
            updates: rank.updates_beside.then(|| Updates::new(rank.place.rank)),
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

    /// The context of this thread, if it is a rank's.
    fn installed() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)?.context.downcast().ok()
    }

    /// The context of this thread.
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

    /// Stops a thread that is nobody's and makes a parameter of a rank: two such threads would number the rank's parameters in an order
    /// that differs from rank to rank.
    pub(crate) fn check_thread(device: &ZeroDevice<B::Device>) {
        if CURRENT.with_borrow(Option::is_none) && RUNNING.lock().contains_key(&device.place()) {
            let thread = std::thread::current();
            stop(format!(
                "a parameter of rank {} is made on thread {:?}, which the launch has not started: make the module on the thread that \
                 runs the body, or call zero_burn::module::prepare on it before its parameters are used on a thread of your own",
                device.rank(),
                thread.name().unwrap_or("without a name")
            ));
        }
    }

    /// The context of the rank that `device` is of. A thread that the rank's body has started becomes the rank's, if it was nobody's: the
    /// body waits for it meanwhile, or does other things.
    pub(crate) fn of_device(device: &ZeroDevice<B::Device>) -> Arc<Self> {
        let is_free = CURRENT.with_borrow(Option::is_none);
        let running = is_free.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        if let Some(context) = running.and_then(|context| context.downcast::<Self>().ok()) {
            if !zero_ops::is_host::<B>() {
                let thread = std::thread::current();
                stop(format!(
                    "a module of rank {} was prepared or trained on thread {:?}, which the launch has not started: on a device all work \
                     of a rank is done by the thread that runs its body",
                    context.rank.index,
                    thread.name().unwrap_or("without a name")
                ));
            }
            context.become_this_threads(device.place());
        }
        Self::current()
    }

    /// The context of the rank that `cell` is of. On a thread of another rank, and after the end of its own, a cell is of no use.
    pub(crate) fn of(cell: &Cell<B>) -> Arc<Self> {
        let owner = || cell.rank.owner.get()?.upgrade()?.downcast().ok();
        match Self::installed() {
            Some(context) => Some(context).filter(|context| Arc::ptr_eq(&context.rank, &cell.rank)),
            None => owner(),
        }
        .unwrap_or_else(|| stop_foreign(&cell.shape))
    }

    /// Makes this the context of the current thread until the guard is dropped.
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

    /// The whole tensor of `cell` in its own shape.
    ///
    /// Gradients and optimizer state are read like parameters when they are saved or inspected, in any order, and never kept;
    /// every rank must do so, as their owners wait until all have read. Only what was computed of loaded state before its first
    /// use has no name that other ranks know: it is gathered by a collective, in the same order on every rank.
    pub(crate) fn load(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
        Self::gather(cell, cell.quantized())
    }

    /// As [`Context::load`], with all digits of what is quantised where it is used.
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
            return empty::<B>(&cell.shape, cell.dtype, &cell.device);
        }
        if cell.partition.is_whole() {
            return B::float_reshape(cell.local(), cell.shape.clone());
        }
        let context = installed.unwrap_or_else(|| Self::of(cell));
        match (&cell.slot, cell.key) {
            (Some(slot), _) if cell.is_version() && how == cell.quantized() => context.gatherer.load(cell, slot),
            (Some(_), _) if cell.is_version() => {
                cell.mark_loaded();
                read_exact(cell, For::Own).unwrap_or_else(|error| raise(error))
            }
            (_, Some(_)) => {
                let whole = read_exact(cell, For::Own).unwrap_or_else(|error| raise(error));
                // Optimizers replace their state at once: not before every rank has read it.
                context.barrier("after reading a gradient or optimizer state out");
                whole
            }
            (_, None) => context.gather_nameless(cell),
        }
    }

    /// Gathers a tensor that has no name; every rank must call it.
    fn gather_nameless(&self, cell: &Cell<B>) -> B::FloatTensorPrimitive {
        let (partition, size) = (cell.partition, cell.dtype.size());
        let mut bytes = cell.data().into_bytes().to_vec();
        bytes.truncate(partition.len(cell.place()) * size);
        bytes.resize(partition.stride() * size, 0);
        let mut whole = self.gather_bytes(bytes);
        // Every group gathers the same: this rank takes its own group's.
        whole.drain(..self.rank.mesh.replica(self.rank.index) * partition.world() * partition.stride() * size);
        whole.truncate(partition.numel() * size);
        B::float_from_data(TensorData::from_bytes_vec(whole, cell.shape.clone(), cell.dtype), &cell.device)
    }

    /// Gathers what all ranks will use and keep, now that every rank is here: later one may use a parameter alone.
    pub(crate) fn gather_awaited(&self) {
        self.gatherer.begin_awaited();
        self.gatherer.end_awaited();
    }

    /// After what may go well on one rank and not on another: gathers what waits for it only if it is `sound` on all of them.
    /// Otherwise ranks have made different versions, whose gathers would not match; the caller has an error to tell. A
    /// collective, where ranks gather together.
    pub(crate) fn keep_awaited_if(&self, sound: bool) {
        let is_odd = || self.reduce_scalars(vec![f64::from(u8::from(!sound))], ReduceOp::Max)[0] > 0.0;
        if self.rank.gathers_together && is_odd() {
            self.rank.awaited.lock().clear();
        }
    }

    // ---- phases of a step ----

    /// A pass begins that will give gradients for the parameters `indices` on this rank, and will be ended. `named` are those that
    /// the gradients which are being collected are of, and `edits` a hash of what has taken the place of parameters.
    pub(crate) fn begin_reduction(&self, phase: Phase, indices: Vec<u64>, (named, edits): (Vec<u64>, Option<u64>)) {
        if let Some(reducer) = &self.reducer {
            self.gatherer.begin_awaited();
            let passes = self.step.passes.lock().count(phase, &indices);
            if phase == Phase::Backward && passes == 1 {
                // Of the step before, and no rank's optimizer has asked for it.
                self.step.foreign.lock().clear();
            }
            reducer.begin(self.rank.clone(), Told { phase, indices, named, passes, edits });
        }
    }

    /// The gradients of the backward passes so far have been collected.
    pub(crate) fn end_passes(&self) {
        *self.step.passes.lock() = Passes::default();
    }

    /// Waits until all gradients of this pass are reduced; nothing to a lone rank.
    pub(crate) fn end_reduction(&self) -> Option<Outcome<B>> {
        let reducer = self.reducer.as_ref()?;
        Some(reducer.end(&self.rank).unwrap_or_else(|error| raise(error)))
    }

    /// Gradients are being collected, perhaps of a backward pass that this rank had no part in: it passes the next fence.
    pub(crate) fn join_fence(&self) {
        self.step.fence_due.store(true, Ordering::Relaxed);
    }

    /// Whether the next block of this pass, as models count theirs, is to be checkpointed.
    pub(crate) fn next_block(&self) -> bool {
        self.step.blocks.fetch_add(1, Ordering::Relaxed) < self.rank.config.checkpointed_blocks
    }

    /// A backward pass has ended: before anything is updated, all ranks must have read what they need.
    pub(crate) fn end_backward(&self, foreign: Foreign<B>) {
        self.add_foreign(foreign);
        self.join_fence();
        self.step.blocks.store(0, Ordering::Relaxed);
        self.gatherer.end_cycle();
        self.gatherer.drop_unused();
    }

    /// Backward passes leave gradients unreduced from here on, or not.
    pub(crate) fn hold_back(&self, on: bool) {
        self.step.holding.store(on, Ordering::Relaxed);
    }

    /// Whether the backward pass under way leaves its gradients as they are.
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

    /// Before a parameter is updated for the first time after a backward pass: waits until every rank has come this
    /// far, so that none still reads what the others are about to replace.
    pub(crate) fn before_update(&self) {
        if self.step.fence_due.swap(false, Ordering::Relaxed) {
            self.wait_for_updates();
            let is_collected = self.step.passes.lock().made == 0;
            if let Some(&slot) = self.step.foreign.lock().keys().next().filter(|_| !is_collected) {
                stop(format!(
                    "rank {} has no gradient for {} although other ranks have: call zero_burn::module::collect_grads on \
                     the gradients before the optimizer's step",
                    self.rank.place.rank,
                    self.rank.parameters.slot(slot).map_or_else(|| "a parameter".into(), |slot| slot.to_string())
                ));
            }
            self.fence("before an update");
            self.step.updated.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of the next update, from 1, and whether replicas of the module whose first parameter is `slot` are to be
    /// compared before it in any case; if that has not been done. Updates are counted for each module: several may be trained
    /// in turn. The same on every rank.
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

    /// A module has been prepared: what is drawn from here on is each rank's own.
    pub(crate) fn end_building(&self) {
        self.step.is_prepared.store(true, Ordering::Relaxed);
    }

    /// Waits for updates that go on beside the rank's own thread; their error ends the rank.
    pub(crate) fn wait_for_updates(&self) {
        if let Some(updates) = &self.updates {
            updates.wait(&self.rank).unwrap_or_else(|error| raise(error));
        }
    }

    /// Waits until every rank has come this far: what was loaded before is read by none any more.
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

    /// Waits until every rank has come this far, for the same purpose.
    pub(crate) fn barrier(&self, purpose: &'static str) {
        if let Some(main) = &self.main {
            let _span = tracing::trace_span!("wait for ranks", purpose).entered();
            main.execute(Request::Barrier(purpose)).unwrap_or_else(|error| raise(error));
        }
    }

    // ---- collectives of the rank's own thread ----

    /// Reduces numbers over the ranks, in rank order.
    pub(crate) fn reduce_scalars(&self, values: Vec<f64>, op: ReduceOp) -> Vec<f64> {
        match &self.main {
            None => values,
            Some(main) => main.all_reduce(Buffer::F64(values), op).unwrap_or_else(|error| raise(error)).into_f64(),
        }
    }

    /// Gathers equally long byte strings in rank order.
    pub(crate) fn gather_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        match &self.main {
            None => bytes,
            Some(main) => main.all_gather(Buffer::U8(bytes)).unwrap_or_else(|error| raise(error)).into_u8(),
        }
    }

    /// Rank `root`'s values on every rank; the others pass as many.
    pub(crate) fn broadcast(&self, values: Buffer, root: usize) -> Buffer {
        match &self.main {
            None => values,
            Some(main) => main.broadcast(values, root).unwrap_or_else(|error| raise(error)),
        }
    }

    /// Rank 0's bytes on every rank.
    pub(crate) fn broadcast_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.broadcast(Buffer::U8(bytes), 0).into_u8()
    }

    /// The ranks in the order of their own pieces, for checkpoints. What ranks do in a step goes by one group, so that one that does
    /// something else is told at once.
    pub(crate) fn owners(&self) -> Arc<dyn Collective> {
        self.owners.clone().unwrap_or_else(|| self.collective())
    }

    /// The ranks, for other collectives on the rank's own thread.
    pub(crate) fn collective(&self) -> Arc<dyn Collective> {
        self.main.clone().unwrap_or_else(alone)
    }

    /// The ranks of the run, those with places of their own on foreign axes included, for collectives on the rank's own thread.
    pub(crate) fn everyone(&self) -> Arc<dyn Collective> {
        self.groups.as_ref().map_or_else(|| self.collective(), |groups| groups.run.clone())
    }

    /// The ranks along an axis.
    pub(crate) fn group(&self, axis: &str) -> Arc<dyn Collective> {
        let is_data = axis == Axes::DATA;
        match self.groups.as_ref().map(|groups| groups.along.get(axis)) {
            Some(Some(group)) => group.clone(),
            None if is_data => self.collective(),
            _ => stop(format!(
                "the mesh has no axis {axis:?}: expected one of {:?}, or name it in ZeroConfig::axes",
                self.rank.config.axes.names().collect::<Vec<_>>()
            )),
        }
    }

    /// The places on the mesh's expert axis, which train on rows of their own, if it has one.
    pub(crate) fn expert_places(&self) -> Option<&Arc<dyn Collective>> {
        self.groups.as_ref()?.along.get(Axes::EXPERT)
    }

    /// This rank among those that train on rows of their own.
    fn place_of_rows(&self) -> u64 {
        let place = self.expert_places().map_or(0, |places| places.rank());
        (self.rank.index + self.rank.world * place) as u64
    }

    /// The sum over the parts of a model along foreign axes, in their order.
    pub(crate) fn sum_over_parts(&self, value: f64) -> f64 {
        let Some(Groups { parts, .. }) = &self.groups else { return value };
        let sum = parts.all_reduce(Buffer::F64(vec![value]), ReduceOp::Sum);
        sum.unwrap_or_else(|error| raise(error)).into_f64()[0]
    }

    /// This rank's place among the parts of its model; 0 where there is one.
    pub(crate) fn part(&self) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups.parts.rank())
    }

    /// Whether models have parts along foreign axes.
    pub(crate) fn has_parts(&self) -> bool {
        self.groups.is_some()
    }

    /// The rank is about to wait for others of `group` within a pass.
    pub(crate) fn waits_in(&self, group: &Arc<dyn Collective>) {
        if group.in_process().is_some() {
            self.step.waits.lock().insert(group.label().to_string(), group.clone());
        }
    }

    /// A backward pass has ended, and autodiff has released its locks: ranks that have waited for each other in it, and share
    /// autodiff's locks, come out of it together.
    pub(crate) fn end_waits(&self) {
        for group in std::mem::take(&mut *self.step.waits.lock()).into_values() {
            group.execute(Request::Barrier("the end of a backward pass")).unwrap_or_else(|error| raise(error));
        }
    }

    // ---- random numbers ----

    /// The numbers of one draw for `device` (dropout, noise): different at every call and, once a module has been prepared, on every
    /// rank. Before, modules are built, whose fixed random tensors must be alike.
    ///
    /// Other threads than the rank's own, such as a data loader's, have numbers of their own, so that the rank's do not depend on
    /// how far they are.
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
                // What a module is made of is alike on all ranks; from the first `prepare` on each draws for its own rows.
                let is_prepared = context.step.is_prepared.load(Ordering::Relaxed);
                vec![seed, if is_prepared { context.place_of_rows() } else { 0 }, draw]
            }
        };
        Stream::new(&words)
    }
}
