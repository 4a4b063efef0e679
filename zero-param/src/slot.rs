//! A sharded parameter on one rank: its partition, this rank's published shard, and the gather of the full parameter.
//!
//! A version of a shard is published before any pass uses it, and replaced only by the optimizer's step, after a barrier. So a gather needs
//! no other rank to take part (docs/adr/0002-one-sided-gathers.md).

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchDevice, Flex};
use burn::tensor::{Device, Shape, Slice, TensorData};
use parking_lot::Mutex;
use zero_core::accounting::WireKind;
use zero_core::window::{GatherRequest, Key};
use zero_core::{Buffer, CommError, Partition};

use crate::ahead::Planned;
use crate::config::Float;
use crate::current;
use crate::device::Target;
use crate::error::{raise, stop};
use crate::piece::{Piece, Raw, bytes, same, tag};
use crate::shared::Shared;

/// Timeout of a rank's wait for another rank that assembles the same parameter, before it does so itself: longer than copies take.
const JOINING: Duration = Duration::from_secs(1);

/// Storage of a parameter on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The full parameter; gradients are all-reduced.
    Replicated,
    /// A shard to update, and the full parameter from one update to the next: stages 1 and 2.
    Kept,
    /// A shard only; the full parameter is gathered for each use: stage 3.
    Sharded,
}

/// Number of gathers of a parameter and of reductions of its gradient, since it was sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Uses {
    /// Gathers in forward passes.
    pub gathered_forward: usize,
    /// Gathers in backward passes.
    pub gathered_backward: usize,
    /// Gathers of both kinds that were prefetched.
    pub gathered_ahead: usize,
    /// Reductions of its gradient.
    pub reduced: usize,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    piece: Option<Arc<Piece>>,
    /// The full parameter of [`Policy::Kept`], if the model computes in host memory.
    whole: Option<Raw>,
    /// The shard from which a full parameter was made, and that parameter in the model's type and on its device (a backend's tensor), kept
    /// until the next update.
    made: Option<(Raw, Box<dyn Any + Send>)>,
    uses: Uses,
}

/// A parameter of a sharded module.
#[derive(Debug)]
pub struct Slot {
    pub(crate) index: usize,
    pub(crate) path: String,
    pub(crate) whole: Shape,
    /// Shape of the part that this rank updates: the full shape, or a row of the shard's length.
    pub(crate) base: Shape,
    pub(crate) partition: Partition,
    pub(crate) policy: Policy,
    /// The device on which the model computes.
    pub(crate) device: Device,
    pub(crate) shared: Arc<Shared>,
    object: u64,
    state: Mutex<State>,
    /// Number of gathers recorded in graphs whose backward pass is still to come.
    recorded: AtomicUsize,
}

impl core::fmt::Display for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "parameter '{}'", self.path)
    }
}

/// A gather that autodiff has recorded.
#[derive(Debug)]
pub(crate) struct Recorded(Arc<Slot>);

impl Recorded {
    pub(crate) fn new(slot: &Arc<Slot>) -> Arc<Self> {
        // Relaxed: a rank's graph is built and run by one thread at a time.
        slot.recorded.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self(slot.clone()))
    }

    /// Takes the gradient of this use, or of the `rows` that it read. Reduces the sum after the parameter's last use.
    pub(crate) fn hand_over(self: Arc<Self>, gradient: TensorData, rows: Option<Arc<[i64]>>) {
        let slot = self.0.clone();
        drop(self);
        let complete = slot.recorded.load(Ordering::Relaxed) == 0;
        slot.shared.reducer().push(slot.index, gradient, rows, complete);
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.0.recorded.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Planned for Slot {
    fn begin_ahead(self: Arc<Self>) {
        let shared = self.shared.clone();
        let at_most = shared.config.prefetch_bucket_size;
        let state = self.state.lock();
        let Some(own) = state.piece.clone().filter(|_| self.partition.numel() <= at_most) else {
            return;
        };
        let key = self.key(state.version);
        drop(state);
        shared.ahead.begin(shared.rank(), key, move || self.join(&own, key));
    }
}

impl Slot {
    pub(crate) fn new(
        index: usize,
        path: &str,
        whole: Shape,
        policy: Policy,
        device: Device,
        shared: &Arc<Shared>,
        object: u64,
    ) -> Self {
        let partition = Partition::new(whole.num_elements(), shared.world());
        let base = match policy {
            Policy::Replicated => whole.clone(),
            Policy::Kept | Policy::Sharded => {
                let mut row = vec![1; whole.num_dims()];
                row[whole.num_dims() - 1] = partition.len(shared.rank());
                Shape::from(row)
            }
        };
        let (path, shared) = (path.to_string(), shared.clone());
        Self {
            index,
            path,
            whole,
            base,
            partition,
            policy,
            device,
            shared,
            object,
            state: Mutex::default(),
            recorded: AtomicUsize::new(0),
        }
    }

    /// Returns the elements of the full parameter that this rank updates.
    pub(crate) fn own(&self) -> Range<usize> {
        match self.policy {
            Policy::Replicated => 0..self.partition.numel(),
            Policy::Kept | Policy::Sharded => self.partition.range(self.shared.rank()),
        }
    }

    /// Returns, within the elements that this rank updates, those that it alone counts in norms and saves.
    pub(crate) fn counted(&self) -> Range<usize> {
        let own = self.partition.range(self.shared.rank());
        match self.policy {
            Policy::Replicated => own,
            Policy::Kept | Policy::Sharded => 0..own.len(),
        }
    }

    /// Returns whether the full parameter is gathered for each use, so that the backward pass gathers again instead of keeping it.
    pub(crate) fn is_made(&self) -> bool {
        self.policy == Policy::Sharded
    }

    pub(crate) fn uses(&self) -> Uses {
        self.state.lock().uses
    }

    pub(crate) fn count_reduced(&self) {
        self.state.lock().uses.reduced += 1;
    }

    fn count_gathered(&self, again: bool) {
        let uses = &mut self.state.lock().uses;
        *if again { &mut uses.gathered_backward } else { &mut uses.gathered_forward } += 1;
    }

    fn key(&self, version: u64) -> Key {
        Key { object: self.object, version }
    }

    /// Publishes `base` as the next version of this rank's shard, unless it is the published version already.
    pub(crate) fn publish(&self, base: &Raw) {
        let mut state = self.state.lock();
        if self.policy == Policy::Replicated || state.piece.as_ref().is_some_and(|piece| same(&piece.master, base)) {
            return;
        }
        let version = state.version + u64::from(state.piece.is_some());
        let piece = Arc::new(Piece::new(base.clone(), self.shared.cast(base.clone())));
        self.shared.window.publish(self.key(version), &piece);
        let next = State { version, piece: Some(piece), whole: None, made: None, uses: state.uses };
        let before = std::mem::replace(&mut *state, next);
        drop(state);
        if let Some(piece) = before.piece {
            drop(piece);
            self.shared.window.retract(self.key(before.version));
        }
    }

    /// Retracts the published version, so that an update may overwrite it. Called after a fence.
    pub(crate) fn withdraw(&self) {
        let mut state = self.state.lock();
        (state.whole, state.made) = (None, None);
        if state.piece.take().is_some() {
            let key = self.key(state.version);
            state.version += 1;
            drop(state);
            self.shared.window.retract(key);
        }
    }

    /// Gathers the full parameter of [`Policy::Kept`], and returns this rank's shard as a view of it, so that it is not stored twice.
    pub(crate) fn rebase(&self, base: Raw) -> Raw {
        if self.policy != Policy::Kept || !self.computes_here() || self.state.lock().whole.is_some() {
            return base;
        }
        let whole = self.gather(&base);
        let mut state = self.state.lock();
        let rebased = match self.shared.config.param_dtype {
            Float::Bf16 => base,
            Float::F32 => {
                let own = self.own();
                let flat = Flex::float_reshape(whole.clone(), Shape::new([self.partition.numel()]));
                let view = Flex::float_reshape(Flex::float_slice(flat, &[Slice::from(own)]), self.base.clone());
                // The same version: concurrent readers get the same values.
                let piece = Arc::new(Piece::new(view.clone(), view.clone()));
                self.shared.window.publish(self.key(state.version), &piece);
                state.piece = Some(piece);
                view
            }
        };
        state.whole = Some(whole);
        rebased
    }

    fn computes_here(&self) -> bool {
        matches!(self.device.as_dispatch(), DispatchDevice::Flex(_))
    }

    /// Returns the full parameter on `device`, for a forward pass or, with `again`, for a backward pass.
    pub(crate) fn load<B: Target>(self: &Arc<Self>, base: &Raw, device: &B::Device, again: bool) -> FloatTensor<B> {
        let rank = self.shared.rank();
        if let Some(other) = current::rank().filter(|&current| current != rank) {
            stop(format!(
                "{self} was sharded by rank {rank}, but rank {other} uses it: the ranks' graphs would share leaves and could deadlock; \
                 let each rank shard its own model, or its own clone of a model that is not sharded yet"
            ));
        }
        // In host memory, a parameter that is not cast is used directly, or was kept when it was gathered.
        let is_kept = match self.policy {
            Policy::Sharded => false,
            Policy::Kept => !B::IS_HOST,
            Policy::Replicated => !B::IS_HOST || self.computes_here() && self.shared.config.param_dtype != Float::F32,
        };
        if is_kept
            && let Some((of, whole)) = &self.state.lock().made
            && same(of, base)
        {
            return whole.downcast_ref::<FloatTensor<B>>().expect("a parameter has one device").clone();
        }
        let whole = B::put(self.whole(base, again), device);
        if is_kept {
            self.state.lock().made = Some((base.clone(), Box::new(whole.clone())));
        }
        whole
    }

    fn whole(self: &Arc<Self>, base: &Raw, again: bool) -> Raw {
        let state = self.state.lock();
        match (self.policy, &state.whole) {
            (Policy::Replicated, _) => {
                drop(state);
                self.shared.cast(base.clone())
            }
            (Policy::Kept, Some(whole)) => {
                self.check(&state, base);
                whole.clone()
            }
            _ => {
                drop(state);
                self.count_gathered(again);
                self.gather_in_order(base)
            }
        }
    }

    /// Checks that `base` is the version that the other ranks read from this one.
    fn check(&self, state: &State, base: &Raw) {
        if !state.piece.as_ref().is_some_and(|piece| same(&piece.master, base)) {
            stop(format!(
                "{self} differs from the version that the other ranks read: it was changed without `Optimizer::step`, or comes from \
                 a model before the last step; use the model that the step returned, or publish the change with `Zero::publish_changes`"
            ));
        }
    }

    /// Returns the full parameter, which may have been prefetched, and starts the prefetch of the next one.
    fn gather_in_order(self: &Arc<Self>, base: &Raw) -> Raw {
        let Shared { ahead, window, .. } = &*self.shared;
        if !window.is_remote() {
            return self.gather(base);
        }
        let next = ahead.record(Arc::downgrade(self) as _);
        let begun = ahead.take(self.published(base).1);
        self.state.lock().uses.gathered_ahead += usize::from(begun.is_some());
        let whole = begun.unwrap_or_else(|| self.gather(base));
        if let Some(next) = next {
            next.begin_ahead();
        }
        whole
    }

    fn gather(&self, base: &Raw) -> Raw {
        let (own, key) = self.published(base);
        self.join(&own, key).unwrap_or_else(|error| raise(error))
    }

    /// Returns the version that the other ranks read, after checking that it is `base`.
    fn published(&self, base: &Raw) -> (Arc<Piece>, Key) {
        let state = self.state.lock();
        self.check(&state, base);
        (state.piece.clone().expect("it has been compared"), self.key(state.version))
    }

    fn tensor(&self, whole: Buffer) -> Raw {
        let data = match whole {
            Buffer::F32(values) => TensorData::new(values, self.whole.clone()),
            Buffer::Bf16(values) => TensorData::new(values, self.whole.clone()),
            other => unreachable!("pieces are not {}", other.dtype().name()),
        };
        Raw::from_data(data)
    }

    /// Concatenates all ranks' shards of a version, or borrows the result of another rank of the process.
    fn join(&self, own: &Arc<Piece>, key: Key) -> Result<Raw, CommError> {
        let Shared { window, comm, config, .. } = &*self.shared;
        let (me, dtype) = (comm.rank(), config.param_dtype.wire_dtype());
        let bytes_of = |rank: usize| {
            let Range { start, end } = self.partition.range(rank);
            start * dtype.size()..end * dtype.size()
        };
        let others: Vec<_> = (0..comm.world()).filter(|&rank| rank != me).map(|rank| (rank, bytes_of(rank))).collect();
        for (rank, bytes) in &others {
            comm.wire().add(WireKind::AllGather, bytes.len());
            comm.wire().add_from_other_machines(comm.place().from_other_machines(bytes.len(), &[*rank]));
        }
        let sent = &own.sent;
        if window.is_remote() {
            let (elements, tag) = (self.partition.numel(), tag(sent));
            let own = Some((bytes_of(me).start, bytes(sent)));
            let whole = GatherRequest { dtype, elements, tag: &tag, own, pieces: &others };
            return window.gather(whole, key, self).map(|whole| self.tensor(whole));
        }
        let mut pieces = Vec::with_capacity(comm.world());
        for rank in 0..comm.world() {
            pieces.push(match rank == me {
                true => own.clone(),
                false => window.read(rank, key, self)?.here().expect("the ranks share memory"),
            });
        }
        // A kept full parameter belongs to one rank, as its shard is a part of it. A copy on a device is not lent.
        let is_lent = self.policy == Policy::Sharded && self.computes_here();
        let _joining = is_lent.then(|| pieces[0].joining.try_lock_for(JOINING)).flatten();
        if let Some(whole) = pieces.iter().filter(|_| is_lent).find_map(|piece| piece.borrow(&self.whole)) {
            own.lend(&whole);
            return Ok(whole);
        }
        macro_rules! joined {
            ($variant:ident) => {{
                let mut whole = Vec::with_capacity(self.partition.numel());
                for piece in &pieces {
                    whole.extend_from_slice(piece.sent.as_slice().expect("pieces are contiguous, and of one type"));
                }
                Buffer::$variant(whole)
            }};
        }
        let whole = self.tensor(match config.param_dtype {
            Float::F32 => joined!(F32),
            Float::Bf16 => joined!(Bf16),
        });
        if is_lent {
            own.lend(&whole);
        }
        Ok(whole)
    }
}
