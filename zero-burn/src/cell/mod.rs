//! A cell: this rank's shard of one flat tensor and, while it is worth keeping, the gathered full tensor.
//!
//! A cell is written by its owner's thread or the owner's reducer, update and prefetch threads. Other ranks read it through the window; its
//! mutex gives the happens-before edge.

pub(crate) mod codes;
pub(crate) mod patience;
mod published;
pub(crate) mod rank;
pub(crate) mod slot;
mod state;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{DType, Shape};
use parking_lot::{Condvar, Mutex, MutexGuard};
use zero_core::accounting::Gauge;
use zero_core::offload::DiskError;
use zero_core::window::Key;
use zero_core::{CommError, Partition};
use zero_ops::Shared;

use crate::mover::For;
use crate::random::sign;
use crate::tier::{Home, Stored, SwapDisk, fetch};
use crate::trouble::{or_stop, raise};
use crate::values::{flat, part, read};
use codes::Codes;
use patience::Patience;
use rank::Rank;
use slot::{Drawn, Names, Slot};
pub(crate) use state::{Piece, State, Whole};

/// The kind of data that a cell's bytes are counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Parameter,
    Gradient,
    Optimizer,
    /// A tensor computed from parameters alone, such as a moving average.
    Average,
}

// The immutable description comes first, then the state. Thousands of these are created per step, each in one allocation.
pub(crate) struct Cell<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    /// The parameter that this is a version, a gradient or optimizer state of. `None` for optimizer state that Burn has loaded from a
    /// record and not used yet.
    pub(crate) slot: Option<Arc<Slot<B>>>,
    /// Key under which the other ranks read this rank's shard.
    pub(crate) key: Option<Key>,
    signature: u64,
    /// True for a version of the parameter as a module holds it, false for an optimizer's intermediate.
    is_version: bool,
    pub(crate) partition: Partition,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    kind: AtomicU8,
    /// True if dropping the cell must not retire it ([`Rank::retire`]): it is retired already, or an update has consumed it.
    retired: bool,
    /// Number of fences before the last load. Other ranks load at about the same time.
    loaded: AtomicU64,
    pub(crate) state: Mutex<State<B>>,
    pub(crate) changed: Condvar,
    /// Held by the rank that concatenates the shards, on the cell of the first rank that owns one.
    pub(crate) joining: Mutex<()>,
    /// For a parameter's version: the cell of this rank's secondary shard, from which its group gathers.
    pub(crate) secondary: OnceLock<Arc<Self>>,
    /// The codes that the other ranks read instead of the shard, if it is quantized and stays in memory.
    codes: OnceLock<Arc<Codes<B>>>,
    /// The full tensor that this rank assembled or borrowed last, for the other ranks to borrow.
    pub(crate) lent: Mutex<Option<zero_ops::Lent>>,
}

/// Fields that a derived cell shares with its source.
pub(crate) struct Template<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    pub(crate) slot: Option<Arc<Slot<B>>>,
    pub(crate) partition: Partition,
    pub(crate) shape: Shape,
    pub(crate) device: B::Device,
    pub(crate) kind: Kind,
    pub(crate) origin: Origin,
}

/// The origin of a cell, which determines its name; see [`crate::cell::slot::Names`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
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
pub(crate) const GRADIENT: Origin = Origin::Derived(1);
/// Signature of loaded state, and of everything created before the latest version.
const PRIOR_SIGNATURE: u64 = 2;
/// Signature that a version contributes to tensors derived from it.
const VERSION_SIGNATURE: u64 = 3;
/// Bit of a key's object number that distinguishes derived tensors from parameters.
pub(crate) const DERIVED: u64 = 1 << 63;

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
            None => write!(f, "loaded state {:?}", self.shape.as_slice()),
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
            cell.rank.await_whole(&cell, slot.index);
        }
        cell
    }

    /// Creates a cell whose shard is available.
    pub(crate) fn ready(template: Template<B>, local: B::FloatTensorPrimitive) -> Arc<Self> {
        let dtype = local.dtype();
        let kind = if template.origin == Origin::Version { Kind::Parameter } else { template.kind };
        let rank = &template.rank;
        let bytes = template.partition.len(rank.place(template.partition)) * dtype.size();
        let counted = rank.counted(kind, template.partition);
        let piece = match rank.home(kind, bytes, template.slot.as_deref()) {
            Home::Backend => Piece::Tensor(rank.share(local)),
            home => match or_stop(Stored::of(home, Shared::not(local), &rank.mover, counted)) {
                Ok(stored) => Piece::Stored(stored),
                Err(local) => Piece::Tensor(local),
            },
        };
        Self::new(template, dtype, State::of(piece))
    }

    /// Creates the cell of a parameter that this rank holds in full.
    pub(crate) fn whole(template: Template<B>, whole: B::FloatTensorPrimitive) -> Arc<Self> {
        let dtype = whole.dtype();
        let whole = Whole::There(template.rank.share(whole));
        Self::new(template, dtype, State { whole, ..State::of(Piece::OfWhole) })
    }

    /// Creates a cell whose shard is still being reduced or updated.
    pub(crate) fn pending(mut template: Template<B>, dtype: DType) -> Arc<Self> {
        if template.origin == Origin::Version {
            template.kind = Kind::Parameter;
        }
        Self::new(template, dtype, State::of(Piece::Pending))
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.kind.load(Ordering::Relaxed) {
            0 => Kind::Parameter,
            1 => Kind::Gradient,
            2 => Kind::Optimizer,
            _ => Kind::Average,
        }
    }

    pub(crate) fn is_version(&self) -> bool {
        self.is_version
    }

    /// Returns whether this is the latest version of its parameter.
    pub(crate) fn is_current(self: &Arc<Self>) -> bool {
        let is_this = |current: Arc<Self>| Arc::ptr_eq(&current, self);
        self.slot.as_ref().and_then(|slot| slot.current.lock().upgrade()).is_some_and(is_this)
    }

    /// Returns the draw that this parameter's values came from, if it still holds the drawn values.
    pub(crate) fn drawn(&self) -> Option<Drawn> {
        let slot = self.slot.as_ref().filter(|_| self.is_version)?;
        // After `prepare` redraws a tied parameter, its other places in the module still hold the first version.
        let is_drawn = |version| version == 1 || version == slot.drawn_version.load(Ordering::Relaxed);
        let is_drawn = self.key.is_some_and(|key| is_drawn(key.version));
        slot.drawn.get().copied().filter(|_| is_drawn)
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
    pub(crate) fn derivation(op: &str, cells: &[&Cell<B>]) -> Origin {
        let name = op.bytes().fold(0, |hash: u64, byte| sign(&[hash, u64::from(byte)]));
        let words: Vec<u64> = std::iter::once(name).chain(cells.iter().map(|cell| cell.signature())).collect();
        Origin::Derived(sign(&words))
    }

    /// Returns the template of a cell derived from this one.
    pub(crate) fn template(&self, kind: Kind, origin: Origin) -> Template<B> {
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
    pub(crate) fn place(&self) -> usize {
        self.rank.place(self.partition)
    }

    /// Returns the range of this rank's shard that the rank counts and saves. Each element of the tensor belongs to exactly one rank.
    pub(crate) fn own(&self) -> Range<usize> {
        self.rank.own(self.partition)
    }

    fn gauge(&self, whole: bool) -> &Gauge {
        let gauges = &self.rank.gauges;
        match (self.kind(), whole) {
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
        match &state.piece {
            Piece::Tensor(_) => self.gauge(false).add(sign * size * self.partition.len(self.place()) as i64),
            Piece::Stored(Stored::Host(data)) => self.rank.gauges.host.add(sign * data.as_bytes().len() as i64),
            _ => {}
        }
        if state.whole.is_begun() {
            self.gauge(true).add(sign * size * self.partition.numel() as i64);
        }
    }

    /// Changes the state and keeps the byte counts up to date.
    pub(crate) fn update<R>(&self, state: &mut State<B>, change: impl FnOnce(&mut State<B>) -> R) -> R {
        self.count(state, -1);
        let result = change(state);
        self.count(state, 1);
        result
    }

    pub(crate) fn mark_loaded(&self) {
        self.loaded.store(self.rank.fences.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns whether another rank may still be reading this version: it has been loaded since the last fence.
    fn may_be_read(&self) -> bool {
        self.is_version && self.loaded.load(Ordering::Relaxed) == self.rank.fences.load(Ordering::Relaxed)
    }

    /// Counts this cell as a parameter from now on, if it is the next version of one.
    pub(crate) fn adopt(self: &Arc<Self>) {
        if self.is_version && self.kind() != Kind::Parameter {
            let state = self.state.lock();
            self.count(&state, -1);
            self.kind.store(Kind::Parameter as u8, Ordering::Relaxed);
            self.count(&state, 1);
            drop(state);
            self.begin_secondary();
            self.slot.iter().for_each(|slot| self.rank.await_whole(self, slot.index));
        }
    }

    /// Announces this version's secondary shard to the other ranks, if it is to have one.
    fn begin_secondary(&self) {
        let Some((key, partition)) = self.key.zip(self.rank.secondary(self.partition)) else { return };
        let template = self.template(Kind::Parameter, Origin::Secondary(key));
        let _ = self.secondary.set(Cell::pending(Template { partition, ..template }, self.dtype));
    }

    /// Returns the cell to gather from for use: the secondary shard's, if there is one.
    pub(crate) fn nearest(&self) -> &Self {
        self.secondary.get().map_or(self, |secondary| secondary)
    }

    /// Ends the pending state with the shard, or with the reason why there is none.
    pub(crate) fn settle(&self, result: Result<Shared<B>, CommError>) {
        // Before the lock: it takes a while.
        let counted = self.rank.counted(self.kind(), self.partition);
        self.settle_as(match result.map(|local| Stored::of(self.home(), local, &self.rank.mover, counted)) {
            Ok(Ok(Ok(stored))) => Piece::Stored(stored),
            Ok(Ok(Err(local))) => Piece::Tensor(local),
            Ok(Err(error)) => {
                Piece::Failed(CommError::Disk { rank: self.rank.place.rank, reason: error.to_string().into() })
            }
            Err(error) => Piece::Failed(error),
        });
    }

    /// Ends the pending state with the shard, computed in host memory.
    pub(crate) fn settle_data(&self, data: TensorData) {
        match self.home() {
            Home::Host => self.settle_as(Piece::Stored(Stored::Host(Arc::new(data)))),
            _ => {
                let shape = data.shape.clone();
                self.settle(Ok(self.rank.mover.to_backend(data, shape, &self.device, For::Beside)));
            }
        }
    }

    /// Ends the pending state with the shard as it is stored.
    pub(crate) fn settle_as(&self, piece: Piece<B>) {
        let mut state = self.state.lock();
        self.update(&mut state, |state| state.piece = piece);
        self.rank.settles.fetch_add(1, Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
        self.rank.window.changed();
    }

    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.state.lock().piece, Piece::Pending)
    }

    /// Returns where this shard is to be kept.
    pub(crate) fn home(&self) -> Home<'_> {
        let kind = if self.is_version { Kind::Parameter } else { self.kind() };
        self.rank.home(kind, self.partition.len(self.place()) * self.dtype.size(), self.slot.as_deref())
    }

    /// Moves the shard to `disk`, regardless of where shards of this kind are kept, and returns whether it was in memory. Nothing reads it
    /// meanwhile.
    pub(crate) fn park(&self, disk: &Arc<SwapDisk>) -> Result<bool, DiskError> {
        let is_moved = self.partition.len(self.place()) > 0 && self.settled().stored().is_none();
        let parked = match is_moved {
            true => Some(Piece::Stored(Stored::Disk(disk.store(read::<B>(self.local()).as_bytes(), None)?))),
            // Every rank drops the gathered tensor, even one that moves no shard: the ranks gather it together later.
            false if !self.settled().has_piece() => Some(Piece::Tensor(self.rank.share(self.local()))),
            false => None,
        };
        let mut state = self.wait_until(|state| !state.is_gathering());
        self.forget_whole(&mut state);
        if let Some(parked) = parked {
            self.update(&mut state, |state| state.piece = parked);
        }
        Ok(is_moved)
    }

    /// Drops the gathered tensor.
    pub(crate) fn forget_whole(&self, state: &mut State<B>) {
        self.no_longer_ahead(state);
        self.update(state, |state| state.whole = Whole::Absent);
    }

    /// Stops counting the gathered tensor as prefetched: it is used, or dropped.
    pub(crate) fn no_longer_ahead(&self, state: &mut State<B>) {
        if std::mem::take(&mut state.prefetched) {
            self.rank.ahead.prefetched.fetch_sub(self.partition.numel(), Ordering::Relaxed);
        }
    }

    /// Moves a parked shard back into memory.
    pub(crate) fn unpark(&self) {
        let mut state = self.settled();
        if let Some(stored) = state.stored() {
            let local = fetch::<B>(stored, self.dtype, &self.device, &self.rank.mover);
            let local = self.rank.share(local.into_tensor());
            self.update(&mut state, |state| state.piece = Piece::Tensor(local));
        }
    }

    /// Returns the shard's storage outside the backend, to be overwritten: the storage itself if this was the last use of the cell,
    /// otherwise a copy. Returns the cell as an error if the shard is a tensor of the backend.
    pub(crate) fn into_stored(self: Arc<Self>) -> Result<Stored, Arc<Self>> {
        let Some(stored) = self.kept_elsewhere() else { return Err(self) };
        if !self.may_be_read()
            && let Ok(mut cell) = Arc::try_unwrap(self)
        {
            cell.retired = true;
            return Ok(stored);
        }
        Ok(match stored {
            Stored::Host(data) => Stored::Host(Arc::new(TensorData::clone(&data))),
            Stored::Disk(on_disk) => {
                let mut bytes = vec![0; on_disk.region().bytes()];
                or_stop(on_disk.read_into(&mut bytes));
                Stored::Disk(or_stop(on_disk.disk.store(&bytes, on_disk.squares)))
            }
        })
    }

    /// Returns the locked state once it is `ready`. The wait ends when a rank fails, or when nothing makes progress ([`Patience`]).
    pub(crate) fn wait_until(&self, ready: impl Fn(&State<B>) -> bool) -> MutexGuard<'_, State<B>> {
        let mut state = self.state.lock();
        if ready(&state) {
            return state;
        }
        let mut patience = Patience::new(&self.rank);
        while !ready(&state) {
            self.changed.wait_for(&mut state, Patience::POLL);
            if let Err(error) = patience.check(&self.rank, &format_args!("a wait for a {self:?}")) {
                drop(state);
                raise(error);
            }
        }
        state
    }

    /// Returns the locked state once it is no longer pending.
    pub(crate) fn settled(&self) -> MutexGuard<'_, State<B>> {
        let state = self.wait_until(|state| !matches!(state.piece, Piece::Pending));
        if let Piece::Failed(error) = &state.piece {
            let error = error.clone();
            drop(state);
            raise(error);
        }
        state
    }

    /// Returns this rank's shard, flat; one filler element if the rank owns none.
    pub(crate) fn local(&self) -> B::FloatTensorPrimitive {
        let state = self.settled();
        match (&state.piece, state.whole.tensor()) {
            (Piece::Tensor(local), _) => local.tensor(),
            (_, Some(whole)) => slice_piece::<B>(whole, self.partition, self.place()),
            (Piece::Stored(stored), None) => {
                let stored = stored.clone();
                drop(state);
                fetch::<B>(&stored, self.dtype, &self.device, &self.rank.mover).into_tensor()
            }
            _ => unreachable!("a settled cell holds its shard or the full tensor"),
        }
    }

    /// Returns the shard's data, flat, in host memory; one filler element if the rank owns none.
    pub(crate) fn data(&self) -> TensorData {
        match self.stored() {
            Some(Stored::Host(data)) => TensorData::clone(&data),
            _ => flat(read::<B>(self.local())),
        }
    }

    /// Same as [`Cell::stored`], but ignores a shard that is parked on another disk than the one that updates use.
    pub(crate) fn kept_elsewhere(&self) -> Option<Stored> {
        let is_own = |disk: &Arc<SwapDisk>| self.rank.disk.as_ref().is_some_and(|own| Arc::ptr_eq(own, disk));
        self.stored().filter(|stored| match stored {
            Stored::Host(_) => true,
            Stored::Disk(on_disk) => is_own(&on_disk.disk),
        })
    }

    /// Returns the shard's storage, if it is kept outside the backend.
    pub(crate) fn stored(&self) -> Option<Stored> {
        self.settled().stored().cloned()
    }

    /// Returns the shard by value, without a second handle if this was the last use of the cell, so that the inner backend may compute in
    /// place.
    pub(crate) fn into_local(self: Arc<Self>) -> B::FloatTensorPrimitive {
        if self.may_be_read() {
            return self.local();
        }
        match Arc::try_unwrap(self) {
            Ok(mut cell) => {
                // Consumed by the operation that creates the next version, after the fence: no other rank needs it any more.
                cell.retired = true;
                let mut state = cell.settled();
                if !matches!(state.piece, Piece::Tensor(_)) {
                    drop(state);
                    return cell.local();
                }
                match cell.update(&mut state, |state| std::mem::replace(&mut state.piece, Piece::OfWhole)) {
                    Piece::Tensor(local) => local.into_tensor(),
                    _ => unreachable!("it was a tensor above"),
                }
            }
            Err(cell) => cell.local(),
        }
    }
}

/// Returns elements `range(place)` of a full tensor, flat; one filler element for an empty range.
pub(crate) fn slice_piece<B: Backend>(
    whole: B::FloatTensorPrimitive,
    partition: Partition,
    place: usize,
) -> B::FloatTensorPrimitive {
    let range = partition.range(place);
    if range.is_empty() {
        return B::float_zeros(Shape::new([1]), &B::float_device(&whole), whole.dtype().into());
    }
    part::<B>(B::float_reshape(whole, Shape::new([partition.numel()])), range)
}
