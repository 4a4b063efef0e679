//! A cell: this rank's shard of one flat tensor and, while it is worth keeping, the gathered full tensor.
//!
//! A cell is written by its owner's thread or the owner's reducer, update and prefetch threads. Other ranks read it through the window; its
//! mutex gives the happens-before edge.

pub mod codes;
pub mod deadline;
mod published;
pub mod rank;
pub mod shard;
pub mod slot;
mod state;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex, MutexGuard};
use zero_core::accounting::Gauge;
use zero_core::offload::DiskError;
use zero_core::window::Key;
use zero_core::{Buffer, CommError, Partition};

use crate::abort::{or_stop, raise};
use crate::backend::{Backend, DType, HostData, Shape, Shared};
use crate::copier::Caller;
use crate::random::sign;
use crate::tier::{Home, Stored, SwapDisk, fetch};
use crate::values::part;
use codes::Codes;
use deadline::Deadline;
use rank::Rank;
use slot::{Names, Slot};
pub use state::{FullState, ShardState, State};

/// The kind of data that a cell's bytes are counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A version of a parameter.
    Parameter,
    /// A reduced gradient.
    Gradient,
    /// Optimizer state, master weights included.
    Optimizer,
    /// A tensor computed from parameters alone, such as a moving average.
    Average,
}

/// A sharded tensor on one rank. Dropping a cell retracts its shard, once no other rank can read it.
// The immutable description comes first, then the state. Thousands of these are created per step, each in one allocation.
pub struct Cell<B: Backend> {
    /// The rank that owns the cell.
    pub rank: Arc<Rank<B>>,
    /// The parameter that this is a version, a gradient or optimizer state of. `None` for optimizer state that was loaded from a
    /// record and not used yet.
    pub slot: Option<Arc<Slot<B>>>,
    /// Key under which the other ranks read this rank's shard.
    pub key: Option<Key>,
    signature: u64,
    /// True for a version of the parameter as a module holds it, false for an optimizer's intermediate.
    is_version: bool,
    /// The partition of the full tensor over the ranks.
    pub partition: Partition,
    /// The full tensor's shape.
    pub shape: Shape,
    /// The type of the elements.
    pub dtype: DType,
    /// The device of the shard and of the full tensor.
    pub device: B::Device,
    kind: AtomicU8,
    /// True if dropping the cell must not retire it ([`Rank::retire`]): it is retired already, or an update has consumed it.
    retired: bool,
    /// Number of fences before the last load. Other ranks load at about the same time.
    loaded: AtomicU64,
    /// The shard and the full tensor.
    pub state: Mutex<State<B>>,
    /// Notified when a pending shard settles, or a gather ends.
    pub changed: Condvar,
    /// Held by the rank that concatenates the shards, on the cell of the first rank that owns one.
    pub joining: Mutex<()>,
    /// For a parameter's version: the cell of this rank's secondary shard, from which its group gathers.
    pub secondary: OnceLock<Arc<Self>>,
    /// The codes that the other ranks read instead of the shard, if it is quantized and stays in memory.
    codes: OnceLock<Arc<Codes<B>>>,
    /// The full tensor that this rank assembled or borrowed last, for the other ranks to borrow.
    pub lent: Mutex<Option<B::Loan>>,
}

/// Fields that a derived cell shares with its source.
pub struct Template<B: Backend> {
    /// The rank that owns the cell.
    pub rank: Arc<Rank<B>>,
    /// The parameter that it belongs to, if there is one.
    pub slot: Option<Arc<Slot<B>>>,
    /// The partition of the full tensor over the ranks.
    pub partition: Partition,
    /// The full tensor's shape.
    pub shape: Shape,
    /// The device of the shard.
    pub device: B::Device,
    /// The kind of data that its bytes are counted as. A version is a parameter whatever the kind.
    pub kind: Kind,
    /// The origin, which determines its name.
    pub origin: Origin,
}

impl<B: Backend> Template<B> {
    /// Returns the template of a tensor that belongs to parameter `slot`, on the rank's device.
    pub fn of(rank: &Arc<Rank<B>>, slot: &Arc<Slot<B>>, kind: Kind, origin: Origin) -> Self {
        let (partition, shape, device) = (slot.partition, slot.shape.clone(), rank.device.clone());
        Self { rank: rank.clone(), slot: Some(slot.clone()), partition, shape, device, kind, origin }
    }
}

/// The origin of a cell, which determines its name; see [`crate::cell::slot::Names`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Creation or update of a parameter.
    Version,
    /// The secondary shard of a version, with that version's name.
    Secondary(Key),
    /// Anything else, by its signature.
    Derived(u64),
    /// Loaded state, by a hash of its full content. Nothing else about it is the same on every rank, because each rank has its own order of
    /// records in a hash map.
    Loaded(u64),
}

/// Signature of a reduced gradient.
pub const GRADIENT: Origin = Origin::Derived(1);
/// Signature of loaded state, and of everything created before the latest version.
const PRIOR_SIGNATURE: u64 = 2;
/// Signature that a version contributes to tensors derived from it.
const VERSION_SIGNATURE: u64 = 3;
/// Bit of a key's object number that distinguishes derived tensors from parameters.
pub const DERIVED: u64 = 1 << 63;

impl<B: Backend> core::fmt::Debug for Cell<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} shard of {self} on rank {}", self.kind(), self.rank.place.rank)
    }
}

/// Names the parameter that the cell belongs to.
impl<B: Backend> core::fmt::Display for Cell<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match &self.slot {
            Some(slot) => slot.fmt(f),
            None => write!(f, "loaded state {:?}", &self.shape[..]),
        }
    }
}

impl<B: Backend> Cell<B> {
    fn new(template: Template<B>, dtype: DType, state: State<B>) -> Arc<Self> {
        let Template { rank, slot, partition, shape, device, kind, origin } = template;
        let key = match (&slot, origin) {
            (_, Origin::Secondary(version)) => Some(Names::secondary(version)),
            (_, Origin::Loaded(content)) => Some(Key { object: content | DERIVED, version: 0 }),
            (Some(slot), Origin::Version) => Some(slot.names.lock().version(slot.index)),
            (Some(slot), Origin::Derived(signature)) => Some(slot.names.lock().derived(slot.index, signature)),
            (None, _) => None,
        };
        let signature = match origin {
            Origin::Version | Origin::Secondary(_) => VERSION_SIGNATURE,
            Origin::Derived(signature) => signature,
            Origin::Loaded(_) => PRIOR_SIGNATURE,
        };
        let cell = Arc::new(Self {
            rank,
            slot,
            key,
            signature,
            is_version: origin == Origin::Version,
            partition,
            shape,
            dtype,
            device,
            kind: AtomicU8::new(kind as u8),
            retired: false,
            loaded: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
            joining: Mutex::new(()),
            secondary: OnceLock::new(),
            codes: OnceLock::new(),
            lent: Mutex::new(None),
        });
        {
            let state = cell.state.lock();
            cell.count(&state, 1);
        }
        cell.names().for_each(|key| cell.rank.window.publish(key, &cell));
        if let Some(slot) = cell.slot.as_ref().filter(|_| cell.is_version) {
            *slot.current.lock() = Arc::downgrade(&cell);
            if cell.kind() == Kind::Parameter {
                cell.begin_secondary();
            }
            cell.rank.await_full(&cell, slot.index);
        }
        cell
    }

    /// Creates a cell whose shard is available.
    pub fn ready(template: Template<B>, local: B::Tensor) -> Arc<Self> {
        let dtype = B::dtype(&local);
        let kind = if template.origin == Origin::Version { Kind::Parameter } else { template.kind };
        let rank = &template.rank;
        let bytes = template.partition.len(rank.place(template.partition)) * dtype.size();
        let counted = rank.counted(kind, template.partition);
        let shard = match rank.home(kind, bytes, template.slot.as_deref()) {
            Home::Backend => ShardState::Tensor(rank.share(local)),
            home => match or_stop(Stored::of(home, Shared::not(local), &rank.copier, counted)) {
                Ok(stored) => ShardState::Stored(stored),
                Err(local) => ShardState::Tensor(local),
            },
        };
        Self::new(template, dtype, State::of(shard))
    }

    /// Creates the cell of a parameter that this rank holds in full.
    pub fn full(template: Template<B>, full: B::Tensor) -> Arc<Self> {
        let dtype = B::dtype(&full);
        let full = FullState::There(template.rank.share(full));
        Self::new(template, dtype, State { full, ..State::of(ShardState::OfFull) })
    }

    /// Creates a cell whose shard is still being reduced or updated.
    pub fn pending(mut template: Template<B>, dtype: DType) -> Arc<Self> {
        if template.origin == Origin::Version {
            template.kind = Kind::Parameter;
        }
        Self::new(template, dtype, State::of(ShardState::Pending))
    }

    /// Creates the cell of the gradient of `slot`, which is still being reduced.
    pub fn gradient(rank: &Arc<Rank<B>>, slot: &Arc<Slot<B>>) -> Arc<Self> {
        Self::pending(Template::of(rank, slot, Kind::Gradient, GRADIENT), rank.gradient_dtype(slot))
    }

    /// Returns the kind of data that its bytes are counted as.
    pub fn kind(&self) -> Kind {
        match self.kind.load(Ordering::Relaxed) {
            0 => Kind::Parameter,
            1 => Kind::Gradient,
            2 => Kind::Optimizer,
            _ => Kind::Average,
        }
    }

    /// Returns whether this is a version of a parameter as a module holds it.
    pub fn is_version(&self) -> bool {
        self.is_version
    }

    /// Returns whether this is the latest version of its parameter.
    pub fn is_current(self: &Arc<Self>) -> bool {
        let is_this = |current: Arc<Self>| Arc::ptr_eq(&current, self);
        self.slot.as_ref().and_then(|slot| slot.current.lock().upgrade()).is_some_and(is_this)
    }

    /// Returns the draw that this parameter's values came from, if it still holds the drawn values.
    pub fn drawn(&self) -> Option<B::Draw> {
        let slot = self.slot.as_ref().filter(|_| self.is_version)?;
        // After `prepare` redraws a tied parameter, its other places in the module still hold the first version.
        let is_drawn = |version| version == 1 || version == slot.draw.version.load(Ordering::Relaxed);
        let is_drawn = self.key.is_some_and(|key| is_drawn(key.version));
        slot.draw.first.get().cloned().filter(|_| is_drawn)
    }

    /// Returns the keys under which the other ranks read this cell.
    fn names(&self) -> impl Iterator<Item = Key> {
        self.key.into_iter().chain(self.codes_key())
    }

    /// Returns this cell's current contribution to the signature of a tensor derived from it.
    fn signature(&self) -> u64 {
        let before_last_version = match (&self.slot, self.key) {
            (Some(slot), Some(key)) => !self.is_version && key.version < slot.names.lock().epoch(),
            _ => true,
        };
        if before_last_version { PRIOR_SIGNATURE } else { self.signature }
    }

    /// Returns the origin of the result of operation `op` on `cells`.
    pub fn derivation(op: &str, cells: &[&Cell<B>]) -> Origin {
        let name = op.bytes().fold(0, |hash: u64, byte| sign(&[hash, u64::from(byte)]));
        let words: Vec<u64> = std::iter::once(name).chain(cells.iter().map(|cell| cell.signature())).collect();
        Origin::Derived(sign(&words))
    }

    /// Returns the template of a cell derived from this one.
    pub fn template(&self, kind: Kind, origin: Origin) -> Template<B> {
        Template {
            rank: self.rank.clone(),
            slot: self.slot.clone(),
            partition: self.partition,
            shape: self.shape.clone(),
            device: self.device.clone(),
            kind,
            origin,
        }
    }

    /// Returns this rank's index in the partition (0 if one rank holds everything).
    pub fn place(&self) -> usize {
        self.rank.place(self.partition)
    }

    /// Returns the range of this rank's shard that the rank counts and saves. Each element of the tensor belongs to exactly one rank.
    pub fn own(&self) -> Range<usize> {
        self.rank.own(self.partition)
    }

    fn gauge(&self, full: bool) -> &Gauge {
        let gauges = &self.rank.gauges;
        match (self.kind(), full) {
            // If parameters are not sharded, the full tensor is the parameter itself.
            (Kind::Parameter, true) if !self.rank.config.stage.shards_parameters() => &gauges.parameters,
            (_, true) => &gauges.gathered,
            (Kind::Parameter, false) => &gauges.parameters,
            (Kind::Gradient, false) => &gauges.gradients,
            (Kind::Optimizer | Kind::Average, false) => &gauges.optimizer,
        }
    }

    fn count(&self, state: &State<B>, sign: i64) {
        let size = self.dtype.size() as i64;
        match &state.shard {
            ShardState::Tensor(_) => self.gauge(false).add(sign * size * self.partition.len(self.place()) as i64),
            ShardState::Stored(Stored::Host(data)) => {
                let gauge = if B::is_host(&self.device) { self.gauge(false) } else { &self.rank.gauges.host };
                gauge.add(sign * data.bytes().len() as i64);
            }
            _ => {}
        }
        if state.full.is_begun() {
            self.gauge(true).add(sign * size * self.partition.numel() as i64);
        }
    }

    /// Changes the state and keeps the byte counts up to date.
    pub fn update<R>(&self, state: &mut State<B>, change: impl FnOnce(&mut State<B>) -> R) -> R {
        self.count(state, -1);
        let result = change(state);
        self.count(state, 1);
        result
    }

    /// Notes that the shard is read now, by the other ranks too: they run the same program.
    pub fn mark_loaded(&self) {
        self.loaded.store(self.rank.fences.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns whether another rank may still be reading this version: it has been loaded since the last fence.
    fn may_be_read(&self) -> bool {
        self.is_version && self.loaded.load(Ordering::Relaxed) == self.rank.fences.load(Ordering::Relaxed)
    }

    /// Counts this cell as a parameter from now on, if it is the next version of one.
    pub fn adopt(self: &Arc<Self>) {
        if self.is_version && self.kind() != Kind::Parameter {
            let state = self.state.lock();
            self.count(&state, -1);
            self.kind.store(Kind::Parameter as u8, Ordering::Relaxed);
            self.count(&state, 1);
            drop(state);
            self.begin_secondary();
            self.slot.iter().for_each(|slot| self.rank.await_full(self, slot.index));
        }
    }

    /// Announces this version's secondary shard to the other ranks, if it is to have one.
    fn begin_secondary(&self) {
        let Some((key, partition)) = self.key.zip(self.rank.secondary(self.partition)) else { return };
        let template = self.template(Kind::Parameter, Origin::Secondary(key));
        let _ = self.secondary.set(Cell::pending(Template { partition, ..template }, self.dtype));
    }

    /// Returns the cell to gather from for use: the secondary shard's, if there is one.
    pub fn nearest(&self) -> &Self {
        self.secondary.get().map_or(self, |secondary| secondary)
    }

    /// Ends the pending state with the shard, or with the reason why there is none.
    pub fn settle(&self, result: Result<Shared<B>, CommError>) {
        // Before the lock: it takes a while.
        let counted = self.rank.counted(self.kind(), self.partition);
        self.settle_as(match result.map(|local| Stored::of(self.home(), local, &self.rank.copier, counted)) {
            Ok(Ok(Ok(stored))) => ShardState::Stored(stored),
            Ok(Ok(Err(local))) => ShardState::Tensor(local),
            Ok(Err(error)) => {
                ShardState::Failed(CommError::Disk { rank: self.rank.place.rank, reason: error.to_string().into() })
            }
            Err(error) => ShardState::Failed(error),
        });
    }

    /// Ends the pending state with the shard, computed in host memory.
    pub fn settle_data(&self, data: B::Data) {
        match self.home() {
            Home::Host => self.settle_as(ShardState::Stored(Stored::Host(Arc::new(data)))),
            _ => {
                let shape = [data.numel()];
                self.settle(Ok(self.rank.copier.to_backend(data, &shape, &self.device, Caller::OtherThread)));
            }
        }
    }

    /// Ends the pending state with the shard as it is stored.
    pub fn settle_as(&self, shard: ShardState<B>) {
        let mut state = self.state.lock();
        self.update(&mut state, |state| state.shard = shard);
        self.rank.settles.fetch_add(1, Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
        self.rank.window.changed();
    }

    /// Returns whether the shard is still being reduced or updated.
    pub fn is_pending(&self) -> bool {
        matches!(self.state.lock().shard, ShardState::Pending)
    }

    /// Returns where this shard is to be kept.
    pub fn home(&self) -> Home<'_> {
        if self.dtype == DType::U8 {
            // Blocks of 8 bits are no tensor.
            return Home::Host;
        }
        let kind = if self.is_version { Kind::Parameter } else { self.kind() };
        self.rank.home(kind, self.partition.len(self.place()) * self.dtype.size(), self.slot.as_deref())
    }

    /// Moves the shard to `disk`, regardless of where shards of this kind are kept, and returns whether it was in memory. Nothing reads it
    /// meanwhile.
    pub fn park(&self, disk: &Arc<SwapDisk>) -> Result<bool, DiskError> {
        let version = || self.slot.as_ref()?.current.lock().upgrade();
        if let Some(version) = version().filter(|_| self.kind() == Kind::Optimizer) {
            version.leave_master();
        }
        let is_in_blocks = self.dtype == DType::U8;
        let is_here = self.settled().stored().is_none_or(|stored| is_in_blocks && stored.host().is_some());
        let is_moved = self.partition.len(self.place()) > 0 && is_here;
        let parked = match is_moved {
            true => {
                let data = if is_in_blocks { self.blocks() } else { B::read(self.local()) };
                Some(ShardState::Stored(Stored::Disk(disk.store(data.bytes(), None)?)))
            }
            // Every rank drops the gathered tensor, even one that moves no shard: the ranks gather it together later.
            false if !self.settled().has_shard() => Some(ShardState::Tensor(self.rank.share(self.local()))),
            false => None,
        };
        let mut state = self.wait_until(|state| !state.is_gathering());
        self.forget_full(&mut state);
        if let Some(parked) = parked {
            self.update(&mut state, |state| state.shard = parked);
        }
        Ok(is_moved)
    }

    /// Gives a version that is its master values of its own, so that the master's memory can go.
    fn leave_master(&self) {
        let mut state = self.state.lock();
        if let ShardState::OfMaster(master) = &state.shard {
            let own = self.rank.share(B::cast(master.tensor(), self.dtype));
            self.update(&mut state, |state| state.shard = ShardState::Tensor(own));
        }
    }

    /// Drops the gathered tensor.
    pub fn forget_full(&self, state: &mut State<B>) {
        self.no_longer_ahead(state);
        self.update(state, |state| state.full = FullState::Absent);
    }

    /// Stops counting the gathered tensor as prefetched: it is used, or dropped.
    pub fn no_longer_ahead(&self, state: &mut State<B>) {
        if std::mem::take(&mut state.prefetched) {
            self.rank.ahead.prefetched.fetch_sub(self.partition.numel(), Ordering::Relaxed);
        }
    }

    /// Moves a parked shard back into memory.
    pub fn unpark(&self) {
        if self.dtype == DType::U8 {
            let blocks = ShardState::Stored(Stored::Host(Arc::new(self.blocks())));
            self.update(&mut self.settled(), |state| state.shard = blocks);
            return;
        }
        let mut state = self.settled();
        if let Some(stored) = state.stored() {
            let local = fetch::<B>(stored, self.dtype, &self.device, &self.rank.copier);
            let local = self.rank.share(local.into_tensor());
            self.update(&mut state, |state| state.shard = ShardState::Tensor(local));
        }
    }

    /// Returns a cell of the same elements in fp32 if they are in blocks of 8 bits.
    pub fn in_fp32(self: &Arc<Self>) -> Arc<Self> {
        if self.dtype != DType::U8 {
            return self.clone();
        }
        let values = B::Data::flat_of(Buffer::F32(self.decoded()));
        let template = self.template(Kind::Optimizer, Self::derivation("fp32", &[self]));
        Self::ready(template, B::from_data(values, &self.device))
    }

    /// Returns this rank's shard, which is in blocks of 8 bits, wherever it is.
    pub fn blocks(&self) -> B::Data {
        match self.stored() {
            Some(Stored::Host(data)) => B::Data::clone(&data),
            Some(Stored::Disk(stored)) => {
                let mut blocks = vec![0; stored.region().bytes()];
                or_stop(stored.read_into(&mut blocks));
                B::Data::flat_of(Buffer::U8(blocks))
            }
            None => unreachable!("blocks of 8 bits are no tensor"),
        }
    }

    /// Returns the elements of this rank's shard, which are in blocks of 8 bits; one filler element if the rank has none.
    fn decoded(&self) -> Vec<f32> {
        let elements = self.partition.len(self.place()).max(1);
        self.rank.blocks(self.partition.numel()).decode(self.blocks().bytes(), elements)
    }

    /// Returns the shard's storage outside the backend, to be overwritten: the storage itself if this was the last use of the cell,
    /// otherwise a copy. Returns the cell as an error if the shard is a tensor of the backend.
    pub fn into_stored(self: Arc<Self>) -> Result<Stored<B>, Arc<Self>> {
        let Some(stored) = self.kept_elsewhere() else { return Err(self) };
        if !self.may_be_read()
            && let Ok(mut cell) = Arc::try_unwrap(self)
        {
            cell.retired = true;
            return Ok(stored);
        }
        Ok(match stored {
            Stored::Host(data) => Stored::Host(Arc::new(B::Data::clone(&data))),
            Stored::Disk(on_disk) => {
                let mut bytes = vec![0; on_disk.region().bytes()];
                or_stop(on_disk.read_into(&mut bytes));
                Stored::Disk(or_stop(on_disk.disk.store(&bytes, on_disk.squares)))
            }
        })
    }

    /// Returns the locked state once it is `ready`. The wait ends when a rank fails, or when nothing makes progress ([`Deadline`]).
    pub fn wait_until(&self, ready: impl Fn(&State<B>) -> bool) -> MutexGuard<'_, State<B>> {
        let mut state = self.state.lock();
        if ready(&state) {
            return state;
        }
        let mut deadline = Deadline::new(&self.rank);
        while !ready(&state) {
            self.changed.wait_for(&mut state, Deadline::POLL);
            if let Err(error) = deadline.check(&self.rank, &format_args!("a wait for a {self:?}")) {
                drop(state);
                raise(error);
            }
        }
        state
    }

    /// Returns the locked state once it is no longer pending.
    pub fn settled(&self) -> MutexGuard<'_, State<B>> {
        let state = self.wait_until(|state| !matches!(state.shard, ShardState::Pending));
        if let ShardState::Failed(error) = &state.shard {
            let error = error.clone();
            drop(state);
            raise(error);
        }
        state
    }

    /// Same as [`Cell::stored`], but ignores a shard that is parked on another disk than the one that updates use.
    pub fn kept_elsewhere(&self) -> Option<Stored<B>> {
        let is_own = |disk: &Arc<SwapDisk>| self.rank.disk.as_ref().is_some_and(|own| Arc::ptr_eq(own, disk));
        self.stored().filter(|stored| match stored {
            Stored::Host(_) => true,
            Stored::Disk(on_disk) => is_own(&on_disk.disk),
        })
    }

    /// Returns the shard's storage, if it is kept outside the backend.
    pub fn stored(&self) -> Option<Stored<B>> {
        self.settled().stored().cloned()
    }

    /// Returns whether the next version needs no memory of its own, as each read rounds its fp32 master: so at stage 3 in host memory, where
    /// a parameter is only read to be gathered.
    pub fn is_rounded_when_read(&self) -> bool {
        let is_cut = !self.partition.is_whole() && self.partition.len(self.place()) > 0;
        B::is_host(&self.device) && self.rank.config.stage.shards_parameters() && is_cut
    }

    /// Drops the handle of an operation that creates the next version without this one's values, as [`Cell::into_local`] does.
    pub fn consume(self: Arc<Self>) {
        if !self.may_be_read()
            && let Ok(mut cell) = Arc::try_unwrap(self)
        {
            cell.retired = true;
        }
    }

    /// Returns the shard by value, without a second handle if this was the last use of the cell, so that the inner backend may compute in
    /// place.
    pub fn into_local(self: Arc<Self>) -> B::Tensor {
        if self.may_be_read() {
            return self.local();
        }
        match Arc::try_unwrap(self) {
            Ok(mut cell) => {
                // Consumed by the operation that creates the next version, after the fence: no other rank needs it any more.
                cell.retired = true;
                let mut state = cell.settled();
                if !matches!(state.shard, ShardState::Tensor(_)) {
                    drop(state);
                    return cell.local();
                }
                match cell.update(&mut state, |state| std::mem::replace(&mut state.shard, ShardState::OfFull)) {
                    ShardState::Tensor(local) => local.into_tensor(),
                    _ => unreachable!("it was a tensor above"),
                }
            }
            Err(cell) => cell.local(),
        }
    }
}

/// Returns elements `range(place)` of a full tensor, flat; one filler element for an empty range.
pub fn slice_shard<B: Backend>(full: B::Tensor, partition: Partition, place: usize) -> B::Tensor {
    let range = partition.range(place);
    if range.is_empty() {
        return B::zeros(&[1], &B::device(&full), B::dtype(&full));
    }
    part::<B>(B::reshape(full, &[partition.numel()]), range)
}
