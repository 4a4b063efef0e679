//! A sharded parameter on one rank.
//!
//! The module holds the parameter's *base*: this rank's shard in fp32, or the full parameter where nothing is sharded. The engine holds the
//! same values as a cell, in the type that the model computes in, which the other ranks read. Both share memory in fp32. In 16 bit the base
//! is the master (and so, at stage 3 after an update, are the cell's values: ADR 29). If shards are kept on a device or a disk, and for a frozen parameter in 16 bit or quantized, the base is a placeholder that only
//! identifies the version.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchDevice, TensorMetadata};
use burn::tensor::{Bytes, DType, Device, Shape};
use half::f16;
use parking_lot::Mutex;
use zero_core::config::Tier;
use zero_engine::abort::{raise, stop};
use zero_engine::backend::{Backend, DType as EngineDType};
use zero_engine::cell::{FullState, Kind, Origin, Template, slice_shard};
use zero_engine::copier::Caller;
use zero_engine::current::CURRENT;
use zero_engine::gather::read_exact;
#[cfg(feature = "trainer")]
use zero_engine::values::numbers_of;
use zero_engine::values::{here, of_type};
use zero_kernels::cpu::{buffer, quantized};
use zero_kernels::quantized::{Format, Quantized};

use crate::device::Target;
use crate::engine::{Burn, Cell, Loan, Place, Runtime, Slot, burn_dtype, burn_shape, flat};
use crate::reduce::{Member, Passes};
use crate::tensors::{Floats, Raw, as_host, floats, host, packed_of, tensor, values as elements};

/// State that all parameters of a sharded module share on one rank.
pub(crate) struct Shared {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) passes: Passes,
    /// Dropout of the inputs of adapters: the bits of an f64. Relaxed: a rank sets and reads it on its own thread.
    pub(crate) adapter_dropout: AtomicU64,
}

impl core::fmt::Debug for Shared {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Shared(rank {})", self.runtime.rank.place.rank)
    }
}

impl Shared {
    /// Returns whether shards are in host memory, and not on the model's device.
    pub(crate) fn is_on_host(&self) -> bool {
        Burn::is_host(&self.runtime.rank.device)
    }

    /// Returns whether bases are the shards themselves: nothing is kept on a device or on a disk.
    pub(crate) fn holds_shards(&self) -> bool {
        self.is_on_host() && !self.runtime.rank.config.offload.keeps_state(Tier::Disk)
    }
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

#[derive(Default)]
struct State {
    /// The version in use. `None` while an update replaces it.
    cell: Option<Arc<Cell>>,
    /// The base that the module holds. The handle keeps its memory alive, so that no other tensor can be mistaken for it.
    base: Option<Raw>,
    /// True if the base is a copy of a shard on a device, for one of Burn's optimizers to update.
    is_copy: bool,
    /// The full parameter that was gathered last, if it is in memory still.
    gathered: Option<Loan>,
    /// The full parameter on the model's device (a backend's tensor), if that is not host memory and the parameter stays gathered.
    on_device: Option<Box<dyn Any + Send>>,
    uses: Uses,
}

/// A parameter of a sharded module.
pub struct Parameter {
    pub(crate) index: usize,
    pub(crate) path: String,
    pub(crate) shape: Shape,
    /// Its form if it is frozen and has 8 or 4 bits: the engine then holds rows of codes.
    pub(crate) quantized: Option<Quantized>,
    /// The device on which the model computes.
    pub(crate) device: Device,
    pub(crate) shared: Arc<Shared>,
    pub(crate) slot: Arc<Slot>,
    state: Mutex<State>,
    pub(crate) member: Arc<Member>,
}

impl core::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{self} {:?}", self.shape)
    }
}

impl core::fmt::Display for Parameter {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "parameter '{}'", self.path)
    }
}

/// A gather that autodiff has recorded.
#[derive(Debug)]
pub(crate) struct Recorded(Arc<Parameter>);

impl Recorded {
    pub(crate) fn new(parameter: &Arc<Parameter>) -> Arc<Self> {
        // Relaxed: a rank's graph is built and run by one thread at a time.
        parameter.member.recorded.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self(parameter.clone()))
    }

    /// Returns whether it is a use of this parameter.
    pub(crate) fn is_of(&self, parameter: &Arc<Parameter>) -> bool {
        Arc::ptr_eq(&self.0, parameter)
    }

    /// Takes the gradient of this use, or of the `rows` that it read. Reduces the sum after the parameter's last use.
    pub(crate) fn hand_over(self: Arc<Self>, gradient: Floats, rows: Option<Arc<[i64]>>) {
        let parameter = self.0.clone();
        drop(self);
        let is_complete = parameter.member.recorded.load(Ordering::Relaxed) == 0;
        let Shared { runtime, passes, .. } = &*parameter.shared;
        passes.push((runtime, &parameter.member), gradient, rows, is_complete);
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.0.member.recorded.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Identifies a tensor: the address of its first element, and its number of elements.
pub(crate) type Address = (usize, usize);

pub(crate) fn address(x: &Raw) -> Address {
    let offset = x.layout().start_offset() * x.dtype().size();
    (x.bytes().as_ptr() as usize + offset, x.shape().num_elements())
}

impl Parameter {
    /// Creates a parameter of this shape. If `is_measured`, a layer of Burn reads its number of rows from what the module holds.
    pub(crate) fn new(
        (index, path): (usize, &str),
        (shape, is_measured, format): (Shape, bool, Option<Format>),
        device: Device,
        shared: &Arc<Shared>,
    ) -> Self {
        let rank = &shared.runtime.rank;
        let quantized = format.map(|format| Quantized { format, width: shape[1] });
        let (sizes, dtype) = (shape.as_slice(), rank.config.param_dtype.wire_dtype());
        // Layers of Burn read the shape of a vector too.
        let partition = rank.mesh.partition(shape.num_elements());
        let has_rows = |place| partition.len(place).is_multiple_of(shape[0]);
        let slot = match (quantized, shape.num_dims() == 1 || is_measured && !(0..partition.world()).all(has_rows)) {
            (Some(how), _) => rank.new_slot([shape[0], how.format.words(how.width)].into(), EngineDType::F16),
            (None, true) => rank.new_replicated_slot(sizes.into(), dtype),
            (None, false) => rank.new_slot(sizes.into(), dtype),
        };
        let [recorded, reduced] = [0; 2].map(AtomicUsize::new);
        let member = Arc::new(Member { index, slot: slot.clone(), recorded, reduced });
        Self {
            index,
            path: path.to_string(),
            shape,
            quantized,
            device,
            shared: shared.clone(),
            slot,
            state: Mutex::default(),
            member,
        }
    }

    /// Returns whether the full parameter is made for each use, gathered or decoded, so that the backward pass makes it again instead of
    /// keeping it.
    pub(crate) fn is_gathered_for_each_use(&self) -> bool {
        if self.quantized.is_some() {
            return true;
        }
        let (rank, partition) = (&self.shared.runtime.rank, self.slot.partition);
        let bytes = partition.len(rank.place(partition)) * self.slot.dtype.size();
        let is_on_disk = partition.is_whole() && rank.disk_for(Kind::Parameter, bytes, Some(&self.slot)).is_some();
        let is_sharded = rank.config.stage.shards_parameters() && !partition.is_whole();
        is_on_disk || is_sharded && partition.numel() > rank.config.param_persistence_threshold
    }

    /// Returns whether it is not trained.
    pub(crate) fn is_frozen(&self) -> bool {
        self.slot.quantization.is_frozen.load(Ordering::Relaxed)
    }

    /// Returns whether the base is the shard itself, and not a placeholder.
    pub(crate) fn holds_shard(&self) -> bool {
        self.shared.holds_shards() && (self.slot.dtype == EngineDType::F32 || !self.is_frozen())
    }

    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.device.as_dispatch(), DispatchDevice::Flex(_))
    }

    pub(crate) fn uses(&self) -> Uses {
        Uses { reduced: self.member.reduced.load(Ordering::Relaxed), ..self.state.lock().uses }
    }

    /// Returns the template of a tensor that belongs to this parameter.
    pub(crate) fn template(&self, kind: Kind, origin: Origin) -> Template<Burn> {
        let template = Template::of(&self.shared.runtime.rank, &self.slot, kind, origin);
        Template { device: self.place().clone(), ..template }
    }

    /// Returns the device of its shard. Codes are in host memory, where they are decoded.
    pub(crate) fn place(&self) -> &Place {
        if self.quantized.is_some() { &Place::Host } else { &self.shared.runtime.rank.device }
    }

    /// Returns the shape of the base: that of the parameter if nothing is sharded. Otherwise a shard has the parameter's first dimension if
    /// that divides its length, and is a row if not; its length is at least 1.
    fn base_shape(&self) -> Shape {
        let partition = self.slot.partition;
        if partition.is_whole() {
            return self.shape.clone();
        }
        let len = partition.len(self.shared.runtime.rank.place(partition)).max(1);
        let (dimensions, first) = (self.shape.num_dims(), self.shape[0]);
        let mut shape = vec![1; dimensions];
        if dimensions > 1 && len.is_multiple_of(first) {
            (shape[0], shape[dimensions - 1]) = (first, len / first);
        } else {
            shape[dimensions - 1] = len;
        }
        burn_shape(&shape)
    }

    /// Returns a tensor of this rank's elements in host memory, in the base's shape.
    pub(crate) fn shaped(&self, flat: Floats) -> Raw {
        host(flat).reshape(self.base_shape())
    }

    /// Returns a base that is no shard: one element, in the shape of the parameter, which layers of Burn may read.
    pub(crate) fn placeholder(&self) -> Raw {
        let layout = Layout::new(self.shape.clone(), vec![0; self.shape.num_dims()], 0);
        FlexTensor::new(Bytes::from_elems(vec![0f32]), layout, DType::F32)
    }

    /// Sets the first version: the full parameter's `values`. Returns the base.
    pub(crate) fn begin(&self, values: Raw) -> Raw {
        let rank = &self.shared.runtime.rank;
        let partition = self.slot.partition;
        if let Some(how) = self.quantized {
            let own =
                how.encode(partition.range(rank.place(partition)), |part| elements::<f32>(&values)[part].to_vec());
            let codes = own.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).chain([f16::ZERO]);
            let codes: Vec<f16> = codes.take((own.len() / 2).max(1)).collect();
            let (len, base) = (codes.len(), self.placeholder());
            let codes = floats(tensor(codes, [len]));
            self.set(Cell::ready(self.template(Kind::Parameter, Origin::Version), codes), base.clone());
            return base;
        }
        let own = match partition.is_whole() {
            true => floats(values),
            // A copy, as a view would keep the full parameter alive.
            false => copied(slice_shard::<Burn>(floats(values), partition, rank.place(partition))),
        };
        // In the type that the model computes in: a master begins with these values.
        let own = of_type::<Burn>(own, self.slot.dtype);
        self.replace(of_type::<Burn>(own, EngineDType::F32))
    }

    /// Makes this rank's elements `own`, in fp32, the next version. Returns the base.
    pub(crate) fn replace(&self, own: Floats) -> Raw {
        let base = match self.holds_shard() {
            true => self.shaped(own.clone()),
            false => self.placeholder(),
        };
        self.set_next(own, base.clone());
        base
    }

    /// Makes this rank's elements `own` the next version, of which the module holds `base`.
    fn set_next(&self, own: Floats, base: Raw) {
        let values = flat(here::<Burn>(of_type::<Burn>(own, self.slot.dtype), self.place()));
        self.set(Cell::ready(self.template(Kind::Parameter, Origin::Version), values), base);
    }

    /// Sets the version in use, and what the module holds of it.
    pub(crate) fn set(&self, cell: Arc<Cell>, base: Raw) {
        let mut state = self.state.lock();
        (state.on_device, state.is_copy) = (None, false);
        let before = state.cell.replace(cell);
        state.base = Some(base);
        drop(state);
        // Dropping a cell may publish it again.
        drop(before);
    }

    /// Sets what the module holds of the version in use.
    pub(crate) fn set_base(&self, base: Raw) {
        self.state.lock().base = Some(base);
    }

    /// Takes the version, for an update that replaces it. Called after a fence.
    pub(crate) fn take(&self) -> Option<Arc<Cell>> {
        let mut state = self.state.lock();
        (state.on_device, state.base) = (None, None);
        state.cell.take()
    }

    /// Copies a shard from its device to the base, for one of Burn's optimizers.
    pub(crate) fn copy_to_base(&self) {
        let base = self.shaped(self.cell().local());
        let mut state = self.state.lock();
        (state.base, state.is_copy) = (Some(base), true);
    }

    /// Gives up the version, so that one of Burn's optimizers may update the base in place. Called after a fence.
    pub(crate) fn withdraw(&self) {
        self.take().into_iter().for_each(Cell::consume);
    }

    /// Returns the version in use.
    pub(crate) fn cell(&self) -> Arc<Cell> {
        self.state.lock().cell.clone().unwrap_or_else(|| stop(format!("{self} is used while an update replaces it")))
    }

    /// Returns what the module holds of the version in use.
    pub(crate) fn base(&self) -> Option<Raw> {
        self.state.lock().base.clone()
    }

    /// Returns whether `base` differs from what the module holds of the version in use.
    pub(crate) fn is_changed(&self, base: &Raw) -> bool {
        self.state.lock().base.as_ref().is_none_or(|known| address(known) != address(base))
    }

    /// Makes `base` the next version.
    pub(crate) fn publish(&self, base: Raw) {
        let (got, expected) = (base.shape().num_elements(), self.base_shape().num_elements());
        let is_copy = self.state.lock().is_copy;
        if !self.holds_shard() && !is_copy || got != expected {
            stop(format!(
                "{self} was changed to {got} elements, but this rank holds {expected} of it: change a shard elementwise; a module holds no \
                 shards of model state on a device or a disk, which only an optimizer or a checkpoint can change, and none of a parameter that is \
                 frozen in 16 bit or quantized"
            ));
        }
        let own = floats(base.clone());
        self.set_next(own, if is_copy { self.placeholder() } else { base });
    }

    /// Gathers the parameter if this stage keeps it in full. The base becomes a view of it, so that the shard is not stored twice.
    pub(crate) fn keep_full(&self) {
        let (runtime, partition) = (&self.shared.runtime, self.slot.partition);
        let is_kept = !runtime.rank.config.stage.shards_parameters() && self.shared.holds_shards() && self.is_on_host();
        if !is_kept || partition.is_whole() {
            return;
        }
        let cell = self.cell();
        if partition.is_empty() || matches!(cell.settled().full, FullState::There(_)) {
            return;
        }
        drop(runtime.load(&cell, cell.quantized()));
        if self.slot.dtype == EngineDType::F32 {
            self.set_base(self.shaped(cell.local()));
        }
    }

    /// Stops with an error unless `base`, which the model holds, is this rank's, and of the version in use.
    pub(crate) fn check(&self, base: &Raw) {
        let rank = self.shared.runtime.rank.place.rank;
        let current = CURRENT.with_borrow(|current| current.as_ref().map(|current| current.rank));
        if let Some(other) = current.filter(|&current| current != rank) {
            stop(format!(
                "{self} was sharded by rank {rank}, but rank {other} uses it: the ranks' graphs would share leaves and could deadlock; \
                 let each rank shard its own model, or its own clone of a model that is not sharded yet"
            ));
        }
        if self.is_changed(base) {
            stop(format!(
                "{self} differs from the version that the other ranks read: it was changed without `Optimizer::step`, or comes from \
                 a model before the last step; use the model that the step returned, or publish the change with `Zero::publish_changes`"
            ));
        }
    }

    /// Returns the type of the full parameter.
    pub(crate) fn dtype(&self) -> DType {
        burn_dtype(match self.quantized {
            Some(_) => self.shared.runtime.rank.config.param_dtype.wire_dtype(),
            None => self.slot.dtype,
        })
    }

    /// Returns the full parameter on `device`, for a forward pass or, with `again`, for a backward pass. `base` is what the model holds.
    pub(crate) fn load<B: Target>(&self, base: &Raw, device: &B::Device, again: bool) -> FloatTensor<B> {
        self.check(base);
        let state = self.state.lock();
        if let Some(full) = &state.on_device {
            return full.downcast_ref::<FloatTensor<B>>().expect("a parameter has one device").clone();
        }
        let cell = state.cell.clone().expect("a version in use has a cell");
        drop(state);
        let full = self.dequantized(self.full(&cell, again));
        self.state.lock().gathered = Burn::lend(&full);
        let full = B::put(full, device);
        if !B::IS_HOST && self.shared.is_on_host() && !self.is_gathered_for_each_use() {
            self.state.lock().on_device = Some(Box::new(full.clone()));
        }
        full
    }

    /// Returns whether the full parameter that was gathered last is in host memory still.
    pub(crate) fn is_full(&self) -> bool {
        self.state.lock().gathered.as_ref().and_then(Burn::borrow).is_some()
    }

    /// Gathers the rows of codes `[d, words]` of a quantized parameter, for a forward pass.
    pub(crate) fn load_codes(&self) -> Raw {
        host(self.full(&self.cell(), false))
    }

    /// Decodes a full parameter if it is quantized, to the type that the model computes in.
    fn dequantized(&self, full: Floats) -> Floats {
        let Some(how) = self.quantized else { return full };
        let full = packed_of::<f16>(host(full));
        let mut out = buffer(self.shape.num_elements());
        quantized::dequantized(how, bytemuck::cast_slice(elements::<f16>(&full)), &mut out);
        of_type::<Burn>(
            floats(tensor(out, self.shape.clone())),
            self.shared.runtime.rank.config.param_dtype.wire_dtype(),
        )
    }

    fn full(&self, cell: &Arc<Cell>, again: bool) -> Floats {
        if cell.partition.is_empty() {
            return Burn::zeros(&cell.shape, &cell.device, cell.dtype);
        }
        if cell.partition.is_whole() {
            return Burn::reshape(cell.local(), &cell.shape);
        }
        let (is_there, is_ahead) = {
            let state = cell.state.lock();
            let is_ahead = state.prefetched || state.is_gathering();
            (matches!(state.full, FullState::There(_)) && !is_ahead, is_ahead)
        };
        if !is_there {
            let uses = &mut self.state.lock().uses;
            *if again { &mut uses.gathered_backward } else { &mut uses.gathered_forward } += 1;
            uses.gathered_ahead += usize::from(is_ahead);
        }
        if self.is_on_host() || !self.shared.is_on_host() || self.is_gathered_for_each_use() {
            return self.shared.runtime.load(cell, cell.quantized());
        }
        // It stays on the device.
        cell.mark_loaded();
        read_exact(cell, Caller::OwnThread).unwrap_or_else(|error| raise(error))
    }

    /// Returns the full parameter in fp32, as it is updated: not quantized.
    #[cfg(feature = "trainer")]
    pub(crate) fn exact(&self) -> Vec<f32> {
        let cell = self.cell();
        let full = if cell.partition.is_whole() { cell.local() } else { self.shared.runtime.load(&cell, None) };
        numbers_of(&Burn::read(self.dequantized(full))).map(|number| number as f32).collect()
    }
}

/// Returns a copy in memory of its own. On a device each operation makes one.
pub(crate) fn copied(x: Floats) -> Floats {
    if as_host(&x).is_some() { Burn::from_data(Burn::read(x), &Place::Host) } else { x }
}
