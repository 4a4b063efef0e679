//! The state of a rank that its cells use: its indices, its counters, and where its shards are kept.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use zero_core::accounting::WireCounter;
use zero_core::collective::launcher::Topology;
use zero_core::window::{Key, Window};
use zero_core::{Collective, Mesh, Partition};
use zero_kernels::quantized::Format;
use zero_kernels::update::Layout;

use super::slot::{Names, Parameters, Slot};
use super::{Cell, Kind};
use crate::backend::{Backend, DType, Shape, Shared};
use crate::copier::Copier;
use crate::gauges::Gauges;
use crate::tier::{Home, SwapDisk};
use zero_core::config::{Float, Tier, ZeroConfig};

/// One rank, as its cells see it. Fields that are fixed at the start come first, then those that change.
pub struct Rank<B: Backend> {
    /// Index among the ranks that share the model's state, along the data axis of a mesh. [`Rank::place`] has the number in the run.
    pub index: usize,
    /// Number of these ranks.
    pub world: usize,
    /// The groups of ranks that hold the model state between them.
    pub mesh: Mesh,
    /// The groups of ranks that hold a secondary partition of parameters between them, if there is one.
    secondary: Option<Mesh>,
    /// The settings of the run.
    pub config: ZeroConfig,
    /// The rank's device.
    pub device: B::Device,
    /// True if all ranks gather parameters collectively ([`crate::tensor_collectives`]).
    pub gathers_together: bool,
    /// True if updates run concurrently with the rank's own thread.
    pub overlaps_updates: bool,
    /// The longest that a wait for another rank may take.
    pub deadline: Duration,
    /// Publishes this rank's shards, and reads those of the other ranks.
    pub window: Window<Cell<B>>,
    /// Moves shards to and from storage outside the backend.
    pub copier: Copier,
    /// The disk for shards that are not kept in memory.
    pub disk: Option<Arc<SwapDisk>>,
    /// Counts the bytes that this rank receives.
    pub wire: Arc<WireCounter>,
    /// The rank's number in the run, and its machine.
    pub place: Topology,
    /// Counts the bytes that this rank holds.
    pub gauges: Gauges,
    /// Counts the elements that are gathered ahead of their use.
    pub ahead: Ahead,
    /// The rank's parameters.
    pub parameters: Parameters<B>,
    /// Versions of parameters that all ranks gather before any is used: to keep the full parameter, or for their secondary shards.
    pub awaited: Mutex<BTreeMap<u64, Weak<Cell<B>>>>,
    /// Dropped versions that other ranks may still read; see [`Rank::retire`].
    retired: Mutex<Vec<Arc<Cell<B>>>>,
    /// Number of shards that have stopped being pending so far: shows whether a wait makes progress.
    pub settles: AtomicU64,
    /// Number of fences so far, from 1. After a fence, no rank reads what was loaded before it.
    pub fences: AtomicU64,
    /// False once the rank has ended: dropped versions are no longer kept for others.
    pub running: AtomicBool,
    /// The rank's `Context`, which belongs to the layer above this one.
    pub owner: OnceLock<Weak<dyn Any + Send + Sync>>,
}

/// Least number of elements of a parameter whose optimizer state is in blocks of 8 bits, as in bitsandbytes.
const LEAST_IN_BLOCKS: usize = 4096;

/// Numbers of parameter elements that are gathered ahead of their use.
#[derive(Default)]
pub struct Ahead {
    /// Gathered or about to be, and not used yet.
    pub prefetched: AtomicUsize,
    /// The part of them that has not arrived yet.
    pub in_flight: AtomicUsize,
}

impl<B: Backend> Rank<B> {
    /// Creates the state of a rank of `comm`. `gathers_together`: all ranks gather parameters collectively.
    pub fn new(
        comm: &dyn Collective,
        config: ZeroConfig,
        device: B::Device,
        gathers_together: bool,
        window: Window<Cell<B>>,
        (disk, copier): (Option<Arc<SwapDisk>>, Copier),
    ) -> Arc<Self> {
        let (index, world) = (comm.rank(), comm.world());
        let mesh = config.mesh(world).expect("the configuration was validated");
        let secondary = config.secondary_mesh(world);
        // Blocks of 8 bits are in host memory.
        let keeps_on_host = config.offload.keeps_state(Tier::Host) || config.int8_optimizer_states;
        let overlaps_updates = config.offload.keeps_state(Tier::Disk) || (keeps_on_host && !B::is_host(&device));
        Arc::new(Self {
            index,
            world,
            mesh,
            secondary,
            config,
            device,
            gathers_together,
            overlaps_updates,
            deadline: comm.deadline(),
            window,
            copier,
            disk,
            wire: comm.wire().clone(),
            place: comm.place().clone(),
            gauges: Gauges::default(),
            ahead: Ahead::default(),
            parameters: Parameters::default(),
            awaited: Mutex::default(),
            retired: Mutex::default(),
            settles: AtomicU64::new(0),
            fences: AtomicU64::new(1),
            running: AtomicBool::new(true),
            owner: OnceLock::new(),
        })
    }

    /// Wraps a tensor for a cell. A single rank without concurrent updates uses it on its own thread only.
    pub fn share(&self, tensor: B::Tensor) -> Shared<B> {
        if self.is_on_several_threads() { Shared::new(tensor) } else { Shared::not(tensor) }
    }

    /// Same as [`Rank::share`] for many tensors, at the cost of one.
    pub fn share_many(&self, tensors: Vec<B::Tensor>) -> Vec<Shared<B>> {
        match self.is_on_several_threads() {
            true => Shared::many(tensors),
            false => tensors.into_iter().map(Shared::not).collect(),
        }
    }

    fn is_on_several_threads(&self) -> bool {
        self.world > 1 || self.overlaps_updates
    }

    /// Returns the partition of a tensor of `numel` elements under the configured stage.
    pub fn partition(&self, numel: usize) -> Partition {
        match self.config.stage.shards_optimizer() {
            true => self.mesh.partition(numel),
            false => Partition::new(numel, 1),
        }
    }

    /// Returns this rank's index in a partition: 0 if one rank holds everything.
    pub fn place(&self, partition: Partition) -> usize {
        if partition.is_whole() { 0 } else { self.mesh_of(partition).shard(self.index) }
    }

    /// Returns the mesh in whose groups `partition` shards; this rank gathers from its own group.
    pub fn mesh_of(&self, partition: Partition) -> Mesh {
        self.secondary.filter(|mesh| mesh.shards() == partition.world()).unwrap_or(self.mesh)
    }

    /// Returns the secondary partition of a parameter with partition `partition`, if it has one. A small parameter has none: it stays
    /// gathered.
    pub(super) fn secondary(&self, partition: Partition) -> Option<Partition> {
        let numel = partition.numel();
        let is_gathered_often = numel > self.config.param_persistence_threshold && !partition.is_whole();
        self.secondary.filter(|_| is_gathered_often).map(|mesh| mesh.partition(numel))
    }

    /// Returns the partition by which all ranks count and save, at every stage, and this rank's index in it.
    pub fn owners(&self, numel: usize) -> (Partition, usize) {
        (Partition::new(numel, self.world), self.mesh.place(self.index))
    }

    /// Returns the range of this rank's shard of a tensor that the rank counts and saves.
    pub(super) fn own(&self, partition: Partition) -> Range<usize> {
        let (owners, place) = self.owners(partition.numel());
        let (own, begin) = (owners.range(place), partition.range(self.place(partition)).start);
        own.start - begin..own.end - begin
    }

    /// Returns the range of a gradient shard whose sum of squares is needed; `None` for other kinds.
    pub(super) fn counted(&self, kind: Kind, partition: Partition) -> Option<Range<usize>> {
        (kind == Kind::Gradient).then(|| self.own(partition))
    }

    /// Creates the slot of a new parameter.
    pub fn new_slot(&self, shape: Shape, dtype: DType) -> Arc<Slot<B>> {
        // A parameter created in fp16 may hold rows of quantized codes, which are not numbers.
        let formats = self.formats(shape.iter().product(), dtype).map(|how| how.filter(|_| dtype != DType::F16));
        self.slot(shape, dtype, formats)
    }

    /// Creates the slot of a parameter that every rank holds and updates in full, at every stage. Kernels for buckets on devices have none.
    pub fn new_replicated_slot(&self, shape: Shape, dtype: DType) -> Arc<Slot<B>> {
        let partition = Partition::new(shape.iter().product(), 1);
        self.parameters.number((shape, dtype), partition, true, [None; 2])
    }

    /// Returns whether every rank holds a parameter in full although this stage shards parameters of its size.
    pub fn is_replicated(&self, slot: &Slot<B>) -> bool {
        slot.partition.is_whole() && !self.partition(slot.partition.numel()).is_whole()
    }

    fn slot(&self, shape: Shape, dtype: DType, formats: [Option<Format>; 2]) -> Arc<Slot<B>> {
        let partition = self.partition(shape.iter().product());
        let resident = self.parameters.is_resident(partition.stride(), self.config.offload.disk.max_in_memory);
        self.parameters.number((shape, dtype), partition, resident, formats)
    }

    /// Returns the formats in which a parameter is gathered for use. A small one, which stays gathered, is not quantized.
    fn formats(&self, numel: usize, dtype: DType) -> [Option<Format>; 2] {
        let is_gathered_often = numel > self.config.param_persistence_threshold && self.mesh.shards() > 1;
        let has_codes = matches!(dtype, DType::F16 | DType::Bf16 | DType::F32);
        self.config.weights().map(|how| how.filter(|_| is_gathered_often && has_codes))
    }

    /// Creates the slot of a parameter that replaces another and has the same first values. If its type differs, it stays in memory if the
    /// other did.
    pub fn replace_slot(&self, slot: &Slot<B>, dtype: DType) -> Arc<Slot<B>> {
        let replaced = match dtype == slot.dtype {
            true => self.slot(slot.shape.clone(), dtype, slot.quantization.formats),
            false => {
                let formats = self.formats(slot.partition.numel(), dtype);
                self.parameters.number((slot.shape.clone(), dtype), slot.partition, slot.offload.resident, formats)
            }
        };
        slot.draw.first.get().map(|drawn| replaced.draw.first.set(drawn.clone()));
        replaced.mesh.is_counted.store(slot.mesh.is_counted.load(Ordering::Relaxed), Ordering::Relaxed);
        replaced.mesh.is_averaged.store(slot.mesh.is_averaged.load(Ordering::Relaxed), Ordering::Relaxed);
        replaced
    }

    /// Forgets a parameter that was dropped on all ranks.
    pub fn forget_slot(&self, index: u64) {
        self.parameters.forget(index);
        let key = Key { object: index, version: 0 };
        [key, Names::codes(key)].into_iter().for_each(|key| self.window.forget(key));
    }

    /// Counts `bytes` of a gradient that the backward pass has produced and that is neither in a bucket nor reduced yet.
    pub fn count_unreduced(&self, bytes: i64) {
        let sharded = self.config.stage.shards_gradients();
        let gauge = if sharded { &self.gauges.in_flight } else { &self.gauges.gradients };
        gauge.add(bytes);
    }

    /// Returns the type of a parameter's optimizer state other than master weights, for one of `numel` elements: `U8` stands for blocks of
    /// 8 bits ([`Layout`]).
    pub fn state_dtype(&self, numel: usize) -> DType {
        match self.config.optimizer_state_dtype() {
            DType::U8 if numel < LEAST_IN_BLOCKS => DType::F32,
            dtype => dtype,
        }
    }

    /// Returns the type in which loaded state is held until the next update, which encodes blocks of 8 bits.
    pub fn loaded_state_dtype(&self, numel: usize) -> DType {
        Some(self.state_dtype(numel)).filter(|dtype| *dtype != DType::U8).unwrap_or(DType::F32)
    }

    /// Returns the layout of this rank's blocks of a tensor of `numel` elements.
    pub fn blocks(&self, numel: usize) -> Layout {
        Layout { stride: self.owners(numel).0.stride().max(1) }
    }

    /// Returns the type of a parameter's reduced gradients.
    pub fn gradient_dtype(&self, slot: &Slot<B>) -> DType {
        self.config.gradient_dtype.map_or(slot.dtype, Float::wire_dtype)
    }

    /// Returns where shards of this kind and size are kept.
    pub fn home(&self, kind: Kind, bytes: usize, slot: Option<&Slot<B>>) -> Home<'_> {
        let (offload, stage) = (&self.config.offload, self.config.stage);
        if bytes < offload.min_bytes.max(1) {
            return Home::Backend;
        }
        let tier = match kind {
            Kind::Parameter if slot.is_some_and(|slot| slot.offload.resident) && offload.parameters == Tier::Disk => {
                Tier::Host
            }
            Kind::Parameter => offload.parameters,
            // Full gradients, which are about to be reduced, stay where the backward pass put them.
            Kind::Gradient if offload.optimizer == Tier::Disk && !stage.shards_gradients() => Tier::Memory,
            Kind::Gradient if !stage.shards_optimizer() => Tier::Memory,
            Kind::Gradient if slot.is_some_and(|slot| slot.offload.gradient_stays.load(Ordering::Relaxed)) => {
                Tier::Memory
            }
            Kind::Optimizer | Kind::Average
                if slot.is_some_and(|slot| slot.offload.state_stays.load(Ordering::Relaxed)) =>
            {
                Tier::Memory
            }
            Kind::Gradient | Kind::Optimizer | Kind::Average => offload.optimizer,
        };
        self.home_of(tier)
    }

    /// Chooses the trained parameters whose gradients and optimizer state stay with the backend. `trained` is in module order, and earlier
    /// ones are preferred: the forward pass after an update need not wait for them, and their gradients come last.
    pub fn keep_states(&self, trained: &[Arc<Slot<B>>]) {
        let elements = |slot: &Slot<B>| slot.partition.len(self.place(slot.partition));
        let all: usize = trained.iter().map(|slot| elements(slot)).sum();
        let marks: [fn(&Slot<B>) -> &AtomicBool; 2] =
            [|slot| &slot.offload.gradient_stays, |slot| &slot.offload.state_stays];
        for (leaves, mark) in self.config.offloaded_shares().into_iter().zip(marks) {
            let mut room = ((1.0 - leaves) * all as f64).round() as usize;
            for slot in trained {
                let stays = elements(slot) <= room;
                room -= if stays { elements(slot) } else { 0 };
                mark(slot).store(stays, Ordering::Relaxed);
            }
        }
        // The gradient that comes last is used at once: the next forward pass would wait until it is read back from the disk.
        let offload = &self.config.offload;
        let is_kept = (offload.optimizer, offload.parameters) == (Tier::Disk, Tier::Memory) && B::is_host(&self.device);
        if let Some(first) = trained.first().filter(|_| is_kept) {
            first.offload.gradient_stays.store(true, Ordering::Relaxed);
        }
    }

    /// Returns where an input of `bytes` bytes of a checkpointed block is kept, or `None` if it stays with the backend.
    pub fn activations_home(&self, bytes: usize) -> Option<Home<'_>> {
        let is_large = bytes >= self.config.offload.min_bytes.max(1);
        let home = self.home_of(self.config.offload.activations);
        Some(home).filter(|home| is_large && !matches!(home, Home::Backend))
    }

    fn home_of(&self, tier: Tier) -> Home<'_> {
        match (tier, &self.disk) {
            (Tier::Disk, Some(disk)) => Home::Disk(disk),
            (Tier::Host, _) if !B::is_host(&self.device) => Home::Host,
            _ => Home::Backend,
        }
    }

    /// Returns the disk, if shards of this kind and size are kept there.
    pub fn disk_for(&self, kind: Kind, bytes: usize, slot: Option<&Slot<B>>) -> Option<&Arc<SwapDisk>> {
        match self.home(kind, bytes, slot) {
            Home::Disk(disk) => Some(disk),
            Home::Backend | Home::Host => None,
        }
    }

    /// Queues a new version of parameter `slot` for gathering, if it has a secondary shard, or if all ranks gather it collectively and keep
    /// it until the next version. Every rank queues the same versions: nothing here depends on a rank's own shard.
    pub(super) fn await_full(&self, cell: &Arc<Cell<B>>, slot: u64) {
        let config = &self.config;
        let is_kept = !config.stage.shards_parameters() || cell.partition.numel() <= config.param_persistence_threshold;
        // Updates that overlap the next forward pass end one by one: each parameter is gathered when it is used.
        let is_late = config.offload.optimizer != Tier::Memory || config.offload.parameters != Tier::Memory;
        let is_cut = !cell.partition.is_whole() && !cell.partition.is_empty();
        if cell.secondary.get().is_some() || (self.gathers_together && is_kept && !is_late && is_cut) {
            self.awaited.lock().insert(slot, Arc::downgrade(cell));
        }
    }

    /// Keeps a version that this rank has dropped readable for the other ranks: until the next fence, or until all ranks have ended.
    pub(super) fn retire(&self, cell: Arc<Cell<B>>) {
        self.retired.lock().push(cell);
    }

    /// Drops retired versions: every rank has passed their last use.
    pub fn drop_retired(&self) {
        drop(std::mem::take(&mut *self.retired.lock()));
    }

    /// Ends the rank: drops the cells held here, which hold the rank.
    pub fn end(&self) {
        self.running.store(false, Ordering::Relaxed);
        drop(std::mem::take(&mut *self.awaited.lock()));
        self.drop_retired();
    }
}
