//! What one rank knows: its place, its parameters, its counters, and the threads that work for it.
//!
//! One [`Context`] per rank and inner backend. A launch installs it in the rank's thread; a thread outside of a launch
//! has the process-wide context of a lone rank. Sharded tensors carry their context; the thread-local serves where a
//! tensor is born and where a dense tensor is asked for its device.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use burn_backend::{Backend, Distribution, TensorData};
use burn_std::{DType, Shape};
use parking_lot::Mutex;
use zero_core::accounting::WireCounter;
use zero_core::collective::threads::alone;
use zero_core::window::{Key, Window, WindowHost};
use zero_core::{Buffer, Collective, CommError, Partition, ReduceOp, Request};
use zero_ops::Shared;

use crate::bulk::Bulk;
use crate::config::{Tier, ZeroConfig};
use crate::current::{CURRENT, Installed, PLACES, RUNNING};
use crate::device::ZeroDevice;
use crate::gather::Gatherer;
use crate::gauges::Gauges;
use crate::mover::Mover;
use crate::optim::disk::Updates;
use crate::random::{Draws, Stream};
use crate::reduce::{Reducer, Settled};
use crate::shard::{Cell, Kind};
use crate::slot::{Parameters, Slot};
use crate::tier::{Disk, Home};
use crate::trouble::{or_stop, raise, stop};

pub(crate) struct Context<B: Backend> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) config: ZeroConfig,
    pub(crate) device: B::Device,
    pub(crate) wire: Arc<WireCounter>,
    pub(crate) gauges: Gauges,
    pub(crate) window: Window<Cell<B>>,
    pub(crate) gatherer: Gatherer<B>,
    /// Reductions beside the backward pass; absent on a lone rank.
    pub(crate) reducer: Option<Reducer<B>>,
    /// Blocking collectives of the rank's own thread; absent on a lone rank.
    main: Option<Arc<dyn Collective>>,
    /// Collectives on tensors, between ranks that are processes.
    pub(crate) bulk: Option<Arc<Bulk>>,
    /// Versions of parameters that all ranks will gather, and keep, before any is used.
    pub(crate) awaited: Mutex<BTreeMap<u64, Weak<Cell<B>>>>,
    /// Those whose gather has begun.
    pub(crate) arriving: Mutex<Vec<Weak<Cell<B>>>>,
    pub(crate) parameters: Parameters<B>,
    /// State that was loaded and is still there, by its content: what is equal is one cell.
    pub(crate) loaded: Mutex<HashMap<u64, Weak<Cell<B>>>>,
    /// Reduced gradients of parameters that only other ranks had a gradient for.
    settled: Mutex<HashMap<u64, Vec<Arc<Cell<B>>>>>,
    /// See [`Context::retire`].
    retired: Mutex<Vec<Arc<Cell<B>>>>,
    /// Whether the backward pass under way leaves gradients unreduced.
    holding: AtomicBool,
    running: AtomicBool,
    pub(crate) draws: Draws,
    /// Pieces that were pending and are no more, so far: whether what a rank waits for gets on.
    pub(crate) settles: AtomicU64,
    /// Set at the end of a backward pass, cleared by the fence before the first update after it.
    fence_due: AtomicBool,
    /// Fences so far, from 1.
    fences: AtomicU64,
    /// Updates so far whose fence has been passed.
    updated: AtomicU64,
    /// For each module by its first slot: the last update that replicas were looked at for, and how many those were.
    checked: Mutex<HashMap<u64, (u64, u64)>>,
    /// Moves pieces from and to where they are kept, if that is not with the backend.
    pub(crate) mover: Mover,
    /// Where pieces lie that are not kept in memory.
    pub(crate) disk: Option<Arc<Disk>>,
    /// Updates of what lies there.
    pub(crate) updates: Option<Updates<B>>,
}

/// The lone rank's context of each inner backend.
static LONE: LazyLock<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

/// Uninstalls the context of a rank's thread.
pub(crate) struct InstallGuard<B: Backend>(Arc<Context<B>>, u64);

impl<B: Backend> Drop for InstallGuard<B> {
    fn drop(&mut self) {
        CURRENT.set(None);
        RUNNING.lock().remove(&self.1);
        self.0.running.store(false, Ordering::Relaxed);
        // Cells hold the context: what the context holds of them ends with the rank.
        drop(std::mem::take(&mut *self.0.settled.lock()));
        drop(std::mem::take(&mut *self.0.awaited.lock()));
        self.0.drop_retired();
        self.0.gatherer.stop();
        if let Some(updates) = &self.0.updates {
            updates.stop();
        }
        if let Some(reducer) = &self.0.reducer {
            reducer.stop();
        }
    }
}

impl<B: Backend> Context<B> {
    /// The context of one of several ranks. A collective: every rank calls it.
    pub(crate) fn new(
        config: ZeroConfig,
        device: B::Device,
        comm: Arc<dyn Collective>,
        window: Window<Cell<B>>,
    ) -> Result<Arc<Self>, CommError> {
        let (rank, world) = (comm.rank(), comm.world());
        let bulk = match world > 1 && comm.in_process().is_none() {
            true => Some(Arc::new(Bulk::new::<B>(comm.duplicate("tensors")?, &device, config.gathers)?)),
            false => None,
        };
        let reducer = match world > 1 {
            true => Some(Reducer::new(comm.duplicate("gradients")?, &config, bulk.clone())),
            false => None,
        };
        let main = if world > 1 { Some(comm.duplicate("parameters")?) } else { None };
        let disk = config.offload.uses(Tier::Disk).then(|| or_stop(Disk::open(rank, &config.offload.disk)));
        let mover = match config.offload.uses(Tier::Host) || disk.is_some() {
            true => Mover::open::<B>(&device, comm.deadline()),
            false => Mover::default(),
        };
        let wire = comm.wire().clone();
        Ok(Self::build(config, device, rank, world, wire, window, reducer, main, bulk, (disk, mover)))
    }

    #[allow(clippy::too_many_arguments)] // the two constructors' common tail
    fn build(
        config: ZeroConfig,
        device: B::Device,
        rank: usize,
        world: usize,
        wire: Arc<WireCounter>,
        window: Window<Cell<B>>,
        reducer: Option<Reducer<B>>,
        main: Option<Arc<dyn Collective>>,
        bulk: Option<Arc<Bulk>>,
        (disk, mover): (Option<Arc<Disk>>, Mover),
    ) -> Arc<Self> {
        let offloads = disk.is_some() || (config.offload.uses(Tier::Host) && !zero_ops::is_host::<B>());
        Arc::new(Self {
            rank,
            world,
            gatherer: Gatherer::new(rank, &config),
            draws: Draws::new(config.seed),
            parameters: Parameters::default(),
            config,
            device,
            wire,
            gauges: Gauges::default(),
            window,
            reducer,
            main,
            bulk,
            awaited: Mutex::default(),
            arriving: Mutex::default(),
            loaded: Mutex::default(),
            settled: Mutex::default(),
            retired: Mutex::default(),
            holding: AtomicBool::new(false),
            running: AtomicBool::new(true),
            settles: AtomicU64::new(0),
            fence_due: AtomicBool::new(false),
            fences: AtomicU64::new(1),
            updated: AtomicU64::new(0),
            checked: Mutex::default(),
            updates: offloads.then(|| Updates::new(rank)),
            mover,
            disk,
        })
    }

    /// Whether this thread may use what belongs to this context: not if it is of a rank of its own.
    pub(crate) fn is_here(&self) -> bool {
        CURRENT.with_borrow(|current| {
            match current.as_ref().map(|installed| installed.context.downcast_ref::<Self>()) {
                Some(Some(installed)) => std::ptr::eq(installed, self),
                _ => true,
            }
        })
    }

    /// Whether this rank is still running.
    pub(crate) fn is_installed(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }

    /// The context of this thread.
    pub(crate) fn current() -> Arc<Self> {
        let installed = CURRENT.with_borrow(|current| current.clone());
        if let Some(Ok(context)) = installed.map(|installed| installed.context.downcast::<Self>()) {
            return context;
        }
        let mut lone = LONE.lock();
        let context = lone.entry(TypeId::of::<B>()).or_insert_with(|| {
            let window = WindowHost::default().alone();
            Self::build(
                ZeroConfig::default(),
                Default::default(),
                0,
                1,
                Arc::default(),
                window,
                None,
                None,
                None,
                Default::default(),
            )
        });
        context.clone().downcast::<Self>().expect("contexts are stored under their own type")
    }

    /// Makes this the context of the current thread until the guard is dropped.
    pub(crate) fn install(self: &Arc<Self>) -> InstallGuard<B> {
        let device = Arc::new(self.device.clone());
        let place = PLACES.fetch_add(1, Ordering::Relaxed);
        RUNNING.lock().insert(place, self.clone());
        CURRENT.set(Some(Installed { rank: self.rank, place, device, context: self.clone() }));
        InstallGuard(self.clone(), place)
    }

    /// A tensor as a cell keeps it. A lone rank that updates nothing beside its own thread uses it on that alone.
    pub(crate) fn share(&self, tensor: B::FloatTensorPrimitive) -> Shared<B> {
        if self.is_on_several_threads() { Shared::new(tensor) } else { Shared::not(tensor) }
    }

    /// [`Context::share`] for many, which costs what one does.
    pub(crate) fn share_many(&self, tensors: Vec<B::FloatTensorPrimitive>) -> Vec<Shared<B>> {
        if self.is_on_several_threads() {
            Shared::many(tensors)
        } else {
            tensors.into_iter().map(Shared::not).collect()
        }
    }

    fn is_on_several_threads(&self) -> bool {
        self.world > 1 || self.updates.is_some()
    }

    // ---- parameters ----

    /// The cut of a tensor of `numel` elements by the policy of the stage.
    pub(crate) fn partition(&self, numel: usize) -> Partition {
        let world = if self.config.stage.shards_optimizer() { self.world } else { 1 };
        Partition::new(numel, world)
    }

    /// Numbers a new parameter.
    pub(crate) fn new_slot(&self, shape: Shape, dtype: DType) -> Arc<Slot<B>> {
        let partition = self.partition(shape.num_elements());
        let resident = self.parameters.is_resident(partition.stride(), self.config.offload.disk.max_in_memory);
        self.parameters.number(shape, dtype, partition, resident)
    }

    /// Numbers a parameter with the first values of another: one that takes its place, in another type, stays in memory if that
    /// did.
    pub(crate) fn replace_slot(&self, slot: &Slot<B>, dtype: DType) -> Arc<Slot<B>> {
        let replaced = match dtype == slot.dtype {
            true => self.new_slot(slot.shape.clone(), dtype),
            false => self.parameters.number(slot.shape.clone(), dtype, slot.partition, slot.resident),
        };
        slot.drawn.get().map(|drawn| replaced.drawn.set(*drawn));
        replaced
    }

    /// Counts `bytes` of a gradient that the backward pass has given and that is neither in a bucket nor reduced yet.
    pub(crate) fn count_unreduced(&self, bytes: i64) {
        let sharded = self.config.stage.shards_gradients();
        let gauge = if sharded { &self.gauges.in_flight } else { &self.gauges.gradients };
        gauge.add(bytes);
    }

    /// The type of reduced gradients of a parameter.
    pub(crate) fn gradient_dtype(&self, slot: &Slot<B>) -> DType {
        self.config.gradient_dtype.map_or(slot.dtype, crate::config::Float::dtype)
    }

    /// Forgets a parameter that is gone on all ranks.
    pub(crate) fn forget_slot(&self, index: u64) {
        self.parameters.forget(index);
        self.window.forget(Key { object: index, version: 0 });
    }

    /// Where pieces of this kind and size are kept.
    pub(crate) fn home(&self, kind: Kind, bytes: usize, slot: Option<&Slot<B>>) -> Home<'_> {
        let (offload, stage) = (&self.config.offload, self.config.stage);
        if bytes < offload.min_bytes.max(1) {
            return Home::Backend;
        }
        let tier = match kind {
            Kind::Parameter if slot.is_some_and(|slot| slot.resident) && offload.parameters == Tier::Disk => Tier::Host,
            Kind::Parameter => offload.parameters,
            // Whole gradients, which are on their way to be reduced, stay where the backward pass gave them.
            Kind::Gradient if offload.optimizer == Tier::Disk && !stage.shards_gradients() => Tier::Memory,
            Kind::Gradient if !stage.shards_optimizer() => Tier::Memory,
            Kind::Gradient | Kind::Optimizer => offload.optimizer,
        };
        match (tier, &self.disk) {
            (Tier::Disk, Some(disk)) => Home::Disk(disk),
            (Tier::Host, _) if !zero_ops::is_host::<B>() => Home::Host,
            _ => Home::Backend,
        }
    }

    /// The disk, if pieces of this kind and size are kept there.
    pub(crate) fn disk_for(&self, kind: Kind, bytes: usize, slot: Option<&Slot<B>>) -> Option<&Arc<Disk>> {
        match self.home(kind, bytes, slot) {
            Home::Disk(disk) => Some(disk),
            Home::Backend | Home::Host => None,
        }
    }

    // ---- phases ----

    /// Gradients are being collected, perhaps of a backward pass that this rank had no part in: it passes the next fence.
    pub(crate) fn join_fence(&self) {
        self.fence_due.store(true, Ordering::Relaxed);
    }

    /// Drops retired versions: every rank has come to the same place, past their last use.
    pub(crate) fn drop_retired(&self) {
        drop(std::mem::take(&mut *self.retired.lock()));
    }

    /// A backward pass has ended: before anything is updated, all ranks must have read what they need.
    pub(crate) fn end_backward(&self, settled: Settled<B>) {
        self.add_settled(settled);
        self.fence_due.store(true, Ordering::Relaxed);
        self.gatherer.end_cycle();
    }

    /// Backward passes leave gradients unreduced from here on, or not.
    pub(crate) fn hold_back(&self, on: bool) {
        self.holding.store(on, Ordering::Relaxed);
    }

    /// Whether the backward pass under way leaves its gradients as they are.
    pub(crate) fn is_holding_back(&self) -> bool {
        !self.config.overlap_comm || self.holding.load(Ordering::Relaxed)
    }

    /// Keeps reduced gradients until [`Context::take_settled`] asks for their parameter.
    pub(crate) fn add_settled(&self, cells: Settled<B>) {
        let mut settled = self.settled.lock();
        for (index, cell) in cells {
            settled.entry(index).or_default().push(cell);
        }
    }

    pub(crate) fn take_settled(&self, index: u64) -> Vec<Arc<Cell<B>>> {
        self.settled.lock().remove(&index).unwrap_or_default()
    }

    /// Before a parameter is updated for the first time after a backward pass: waits until every rank has come this
    /// far, so that none still reads what the others are about to replace.
    pub(crate) fn before_update(&self) {
        if self.fence_due.swap(false, Ordering::Relaxed) {
            self.wait_for_updates();
            if let Some(&index) = self.settled.lock().keys().next() {
                stop(format!(
                    "rank {} has no gradient for {} although other ranks have: call zero_burn::module::collect_grads on \
                     the gradients before the optimizer's step",
                    self.rank,
                    self.parameters.slot(index).map_or_else(|| "a parameter".into(), |slot| slot.to_string())
                ));
            }
            self.fence("before an update");
            self.updated.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of the next update, from 1, and whether replicas of the module whose first parameter is `slot` are to be
    /// compared before it in any case; if that has not been done. Updates are counted for each module: several may be trained
    /// in turn. The same on every rank.
    pub(crate) fn update_to_check(&self, slot: u64) -> Option<(u64, bool)> {
        let update = self.updated.load(Ordering::Relaxed) + 1;
        let mut checked = self.checked.lock();
        let (last, count) = checked.entry(slot).or_default();
        if *last == update {
            return None;
        }
        (*last, *count) = (update, *count + 1);
        Some((update, count.is_multiple_of(self.config.check_replicas)))
    }

    /// Waits for updates that go on beside the rank's own thread; their error ends the rank.
    pub(crate) fn wait_for_updates(&self) {
        if let Some(updates) = &self.updates {
            updates.wait(self).unwrap_or_else(|error| raise(error));
        }
    }

    /// Waits until every rank has come this far: what was loaded before is read by none any more.
    pub(crate) fn fence(&self, purpose: &'static str) {
        self.gather_awaited();
        match (self.collecting(), &self.main) {
            (Some(bulk), Some(main)) => {
                let _span = tracing::trace_span!("wait for ranks", purpose).entered();
                bulk.compare(&**main, purpose).unwrap_or_else(|error| raise(error));
            }
            _ => self.barrier(purpose),
        }
        self.fences.fetch_add(1, Ordering::Relaxed);
        self.drop_retired();
    }

    /// Fences so far.
    pub(crate) fn fences(&self) -> u64 {
        self.fences.load(Ordering::Relaxed)
    }

    /// Waits until every rank has come this far, for the same purpose.
    pub(crate) fn barrier(&self, purpose: &'static str) {
        if let Some(main) = &self.main {
            let _span = tracing::trace_span!("wait for ranks", purpose).entered();
            main.execute(Request::Barrier(purpose)).unwrap_or_else(|error| raise(error));
        }
    }

    /// Keeps a parameter's version that this rank has dropped readable for the other ranks: until the next fence, or until
    /// all ranks have ended.
    pub(crate) fn retire(&self, cell: Arc<Cell<B>>) {
        self.retired.lock().push(cell);
    }

    // ---- collectives of the rank's own thread ----

    /// Reduces one number over the ranks, in rank order.
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

    /// Rank `root`'s bytes on every rank; the others pass as many.
    pub(crate) fn broadcast_bytes_from(&self, bytes: Vec<u8>, root: usize) -> Vec<u8> {
        match &self.main {
            None => bytes,
            Some(main) => main.broadcast(Buffer::U8(bytes), root).unwrap_or_else(|error| raise(error)).into_u8(),
        }
    }

    /// Rank 0's bytes on every rank.
    pub(crate) fn broadcast_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.broadcast_bytes_from(bytes, 0)
    }

    /// The ranks, for other collectives on the rank's own thread.
    pub(crate) fn collective(&self) -> Arc<dyn Collective> {
        self.main.clone().unwrap_or_else(alone)
    }

    // ---- random numbers ----

    /// One draw for `device` (dropout, noise): different on every rank and at every call.
    ///
    /// Other threads than the rank's own, such as a data loader's, have numbers of their own, so that the rank's do not depend on
    /// how far they are.
    pub(crate) fn draw(
        device: &ZeroDevice<B::Device>,
        shape: Shape,
        distribution: Distribution,
        dtype: DType,
    ) -> TensorData {
        let is_beside = CURRENT.with_borrow(Option::is_none);
        let running = is_beside.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        let words = match running.map(|context| context.downcast::<Self>()) {
            Some(Ok(context)) => {
                let (seed, draw) = context.draws.next_beside();
                vec![seed, context.rank as u64, u64::MAX, draw]
            }
            _ => {
                let context = Self::current();
                let (seed, draw) = context.draws.next();
                vec![seed, context.rank as u64, draw]
            }
        };
        Stream::new(&words).data(0..shape.num_elements(), distribution, shape, dtype)
    }
}
