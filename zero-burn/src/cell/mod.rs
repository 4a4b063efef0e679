//! A cell: this rank's piece of one flat tensor, and, while it is worth keeping, the gathered whole.
//!
//! A cell is written by its owner's thread or by the owner's reducer, update and prefetch threads, and read by other ranks
//! through the window; its mutex gives the happens-before edge.

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

/// What a cell's bytes are counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Parameter,
    Gradient,
    Optimizer,
    /// A result of parameters alone, such as a moving average.
    Average,
}

// What it is, which never changes, then its state: thousands of these are made a step, each in one allocation.
pub(crate) struct Cell<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    /// The parameter that this belongs to: as a version of it, its gradient, or optimizer state. Absent of what Burn has
    /// loaded of an optimizer's record and not used yet.
    pub(crate) slot: Option<Arc<Slot<B>>>,
    /// Under which the other ranks read this rank's piece.
    pub(crate) key: Option<Key>,
    signature: u64,
    /// A version of the parameter as a module holds it, not something an optimizer derives on the way.
    is_version: bool,
    pub(crate) partition: Partition,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    kind: AtomicU8,
    /// Not to be retired when dropped, see [`Rank::retire`]: it is retired already, or an update has consumed it.
    retired: bool,
    /// Fences before the last load; other ranks load about when this one does.
    loaded: AtomicU64,
    pub(crate) state: Mutex<State<B>>,
    pub(crate) changed: Condvar,
    /// Held by the rank that joins the pieces, on the cell of the first rank that has one.
    pub(crate) joining: Mutex<()>,
    /// Of a parameter's version: this rank's piece of the second cut, from which its group gathers.
    pub(crate) secondary: OnceLock<Arc<Self>>,
    /// What the other ranks read of the piece, if it is quantised and stays in memory.
    codes: OnceLock<Arc<Codes<B>>>,
    /// The whole that this rank joined or borrowed last, for the other ranks.
    pub(crate) lent: Mutex<Option<zero_ops::Lent>>,
}

/// What a cell derived from another has in common with it.
pub(crate) struct Template<B: Backend> {
    pub(crate) rank: Arc<Rank<B>>,
    pub(crate) slot: Option<Arc<Slot<B>>>,
    pub(crate) partition: Partition,
    pub(crate) shape: Shape,
    pub(crate) device: B::Device,
    pub(crate) kind: Kind,
    pub(crate) origin: Origin,
}

/// How a cell came to be, see [`crate::cell::slot::Names`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A parameter's birth or update.
    Version,
    /// The second cut of a version, by that one's name.
    Secondary(Key),
    /// Anything else, by its signature.
    Derived(u64),
    /// State that was loaded, by a hash of the whole: nothing else of it is the same on every rank, as each has a hash map
    /// of records in an order of its own.
    Loaded(u64),
}

/// Signature of a reduced gradient.
pub(crate) const GRADIENT: Origin = Origin::Derived(1);
/// Signature of loaded state, and of whatever was there before the last version.
const PRIOR_SIGNATURE: u64 = 2;
/// Signature of a version in what is derived from it.
const VERSION_SIGNATURE: u64 = 3;
/// The bit of a name that sets what is derived apart from parameters' own numbers.
pub(crate) const DERIVED: u64 = 1 << 63;

impl<B: Backend> core::fmt::Debug for Cell<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} shard of {self} on rank {}", self.kind(), self.rank.place.rank)
    }
}

/// What it belongs to.
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

    /// A cell whose piece is there.
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

    /// A parameter that this rank holds whole.
    pub(crate) fn whole(template: Template<B>, whole: B::FloatTensorPrimitive) -> Arc<Self> {
        let dtype = whole.dtype();
        let whole = Whole::There(template.rank.share(whole));
        Self::new(template, dtype, State { whole, ..State::of(Piece::OfWhole) })
    }

    /// A cell whose piece is still being reduced or updated.
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

    /// Returns true if this is the last version of a parameter that there is.
    pub(crate) fn is_current(self: &Arc<Self>) -> bool {
        let is_this = |current: Arc<Self>| Arc::ptr_eq(&current, self);
        self.slot.as_ref().and_then(|slot| slot.current.lock().upgrade()).is_some_and(is_this)
    }

    /// What this parameter's values were drawn from, if they still are what was drawn.
    pub(crate) fn drawn(&self) -> Option<Drawn> {
        let slot = self.slot.as_ref().filter(|_| self.is_version)?;
        // What has been drawn again is still held in other places of the module, by parameters that are one.
        let is_drawn = |version| version == 1 || version == slot.drawn_version.load(Ordering::Relaxed);
        let is_drawn = self.key.is_some_and(|key| is_drawn(key.version));
        slot.drawn.get().copied().filter(|_| is_drawn)
    }

    /// Under which the other ranks read of this.
    fn names(&self) -> impl Iterator<Item = Key> {
        self.key.into_iter().chain(self.codes_key())
    }

    /// What this contributes to the signature of something derived from it now.
    fn signature(&self) -> u64 {
        let before_last_version = match (&self.slot, self.key) {
            (Some(slot), Some(key)) => !self.is_version && key.version < slot.names.lock().epoch(),
            _ => true,
        };
        if before_last_version { PRIOR_SIGNATURE } else { self.signature }
    }

    /// The origin of what operation `op` makes of cells.
    pub(crate) fn derivation(op: &str, cells: &[&Cell<B>]) -> Origin {
        let name = op.bytes().fold(0, |hash: u64, byte| sign(&[hash, u64::from(byte)]));
        let words: Vec<u64> = std::iter::once(name).chain(cells.iter().map(|cell| cell.signature())).collect();
        Origin::Derived(sign(&words))
    }

    /// The same description for a derived cell.
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

    /// The rank of the piece within the partition (0 where one rank's piece is everything).
    pub(crate) fn place(&self) -> usize {
        self.rank.place(self.partition)
    }

    /// The elements of what is held here that are this rank's to count and to save: each of the tensor's is one rank's.
    pub(crate) fn own(&self) -> Range<usize> {
        self.rank.own(self.partition)
    }

    fn gauge(&self, whole: bool) -> &Gauge {
        let gauges = &self.rank.gauges;
        match (self.kind(), whole) {
            // Where parameters are not sharded, the whole is the parameter itself.
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

    /// Changes the state and keeps the byte counts true.
    pub(crate) fn update<R>(&self, state: &mut State<B>, change: impl FnOnce(&mut State<B>) -> R) -> R {
        self.count(state, -1);
        let result = change(state);
        self.count(state, 1);
        result
    }

    pub(crate) fn mark_loaded(&self) {
        self.loaded.store(self.rank.fences.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether another rank may still be reading this: it has been loaded since the last fence.
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

    /// Shows the other ranks that there will be a second cut of this version, if it is to have one.
    fn begin_secondary(&self) {
        let Some((key, partition)) = self.key.zip(self.rank.secondary(self.partition)) else { return };
        let template = self.template(Kind::Parameter, Origin::Secondary(key));
        let _ = self.secondary.set(Cell::pending(Template { partition, ..template }, self.dtype));
    }

    /// What is gathered where this version is used.
    pub(crate) fn nearest(&self) -> &Self {
        self.secondary.get().map_or(self, |secondary| secondary)
    }

    /// Ends *pending*: the piece, or why there is none.
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

    /// Ends *pending*: the piece, computed in the host's memory.
    pub(crate) fn settle_data(&self, data: TensorData) {
        match self.home() {
            Home::Host => self.settle_as(Piece::Stored(Stored::Host(Arc::new(data)))),
            _ => {
                let shape = data.shape.clone();
                self.settle(Ok(self.rank.mover.to_backend(data, shape, &self.device, For::Beside)));
            }
        }
    }

    /// Ends *pending*: the piece, where it is kept.
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

    /// Where this piece is to be kept.
    pub(crate) fn home(&self) -> Home<'_> {
        let kind = if self.is_version { Kind::Parameter } else { self.kind() };
        self.rank.home(kind, self.partition.len(self.place()) * self.dtype.size(), self.slot.as_deref())
    }

    /// Moves the piece to the disk, wherever pieces of this kind are kept; whether it was in memory. Nobody reads it
    /// meanwhile.
    pub(crate) fn park(&self, disk: &Arc<SwapDisk>) -> Result<bool, DiskError> {
        let is_moved = self.partition.len(self.place()) > 0 && self.settled().stored().is_none();
        let parked = match is_moved {
            true => Some(Piece::Stored(Stored::Disk(disk.store(read::<B>(self.local()).as_bytes(), None)?))),
            // What is gathered goes on every rank, whatever it has of it itself: they gather it together later.
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

    /// Drops what was gathered.
    pub(crate) fn forget_whole(&self, state: &mut State<B>) {
        self.no_longer_ahead(state);
        self.update(state, |state| state.whole = Whole::Absent);
    }

    /// What was gathered ahead is used, or dropped.
    pub(crate) fn no_longer_ahead(&self, state: &mut State<B>) {
        if std::mem::take(&mut state.prefetched) {
            self.rank.ahead.prefetched.fetch_sub(self.partition.numel(), Ordering::Relaxed);
        }
    }

    /// Moves a parked piece back into memory.
    pub(crate) fn unpark(&self) {
        let mut state = self.settled();
        if let Some(stored) = state.stored() {
            let local = fetch::<B>(stored, self.dtype, &self.device, &self.rank.mover);
            let local = self.rank.share(local.into_tensor());
            self.update(&mut state, |state| state.piece = Piece::Tensor(local));
        }
    }

    /// The piece where it is kept if that is elsewhere, to be written over: its own place if this was the last use of the
    /// cell, otherwise a copy. The cell itself if it is a tensor.
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

    /// The state once `ready`. The wait ends when a rank fails, or when nothing gets on ([`Patience`]).
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

    /// The state once it is no longer pending.
    pub(crate) fn settled(&self) -> MutexGuard<'_, State<B>> {
        let state = self.wait_until(|state| !matches!(state.piece, Piece::Pending));
        if let Piece::Failed(error) = &state.piece {
            let error = error.clone();
            drop(state);
            raise(error);
        }
        state
    }

    /// This rank's piece, flat. One element of filler when the rank owns none.
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
            _ => unreachable!("a settled cell holds its piece or the whole"),
        }
    }

    /// The piece's data, flat, in the host's memory. One element of filler when the rank owns none.
    pub(crate) fn data(&self) -> TensorData {
        match self.stored() {
            Some(Stored::Host(data)) => TensorData::clone(&data),
            _ => flat(read::<B>(self.local())),
        }
    }

    /// As [`Cell::stored`], but for what is on a disk for a while only, which is not the one that updates work on.
    pub(crate) fn kept_elsewhere(&self) -> Option<Stored> {
        let is_own = |disk: &Arc<SwapDisk>| self.rank.disk.as_ref().is_some_and(|own| Arc::ptr_eq(own, disk));
        self.stored().filter(|stored| match stored {
            Stored::Host(_) => true,
            Stored::Disk(on_disk) => is_own(&on_disk.disk),
        })
    }

    /// The piece where it is kept, if that is elsewhere than with the backend.
    pub(crate) fn stored(&self) -> Option<Stored> {
        self.settled().stored().cloned()
    }

    /// The piece by value: without a second handle when this was the last use of the cell, so that the inner backend
    /// may compute in place.
    pub(crate) fn into_local(self: Arc<Self>) -> B::FloatTensorPrimitive {
        if self.may_be_read() {
            return self.local();
        }
        match Arc::try_unwrap(self) {
            Ok(mut cell) => {
                // Consumed by what makes the next version, after the fence: no other rank needs it any more.
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

/// Elements `range(place)` of a whole tensor, flat; one element of filler for an empty range.
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
