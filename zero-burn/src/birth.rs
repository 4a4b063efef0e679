//! Creation of sharded tensors: parameters are initialized, and optimizer state is loaded, as shards.
//!
//! Burn creates and loads parameters inside `Backend::memory_persistent_allocations`. Inside that scope the creating operations of
//! `Zero<B>` keep only this rank's shard (if parameters are sharded), so that a model larger than one rank's memory can be built. DeepSpeed
//! calls this `zero.Init`. A parameter whose values are in a file is created by `zero_ops::parameter_from`, which reads only the elements
//! of this rank's shard.

use std::cell::Cell as StdCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::LocalKey;

use burn_backend::{Backend, Distribution, Scalar, TensorData};
use burn_std::{DType, FloatDType, Shape};
use zero_core::Partition;

use crate::abort::stop;
use crate::asked::computed;
use crate::context::Context;
use crate::engine::{Cell, Kind, Origin, Template, burn_dtype, burn_shape, engine_dtype, engine_shape};
use crate::random::{self, Drawn, Stream, sign, sign_bytes};
use crate::tensor::{Shard, ZeroTensor};
use crate::values::empty;

/// The kind of tensor that creating operations make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Birth {
    /// Ordinary tensors.
    Dense,
    /// Parameters.
    Parameter,
    /// Optimizer state that is the same on all ranks.
    State,
}

thread_local! {
    static SCOPE: StdCell<Birth> = const { StdCell::new(Birth::Dense) };
    /// The part of the full parameters that is drawn.
    static PART: StdCell<Option<u64>> = const { StdCell::new(None) };
}

pub(crate) fn scope() -> Birth {
    SCOPE.get()
}

/// Runs `f`, in which creating operations make `birth`.
pub(crate) fn within<R>(birth: Birth, f: impl FnOnce() -> R) -> R {
    during(&SCOPE, birth, f)
}

/// Runs `f`, in which parameters are drawn for `part`; other parts get other numbers.
pub(crate) fn of_part<R>(part: u64, f: impl FnOnce() -> R) -> R {
    during(&PART, Some(part), f)
}

fn during<T: Copy, R>(key: &'static LocalKey<StdCell<T>>, value: T, f: impl FnOnce() -> R) -> R {
    let _restore = scopeguard::guard(key.replace(value), |before| key.set(before));
    f()
}

/// Loads optimizer state as shards.
///
/// Burn loads an optimizer's record without telling the backend what it is. Inside `f`, every float tensor created from data is kept as
/// this rank's shard, partitioned like its parameter. Each rank must read the same data.
///
/// ```no_run
/// # use burn::{record::{BinFileRecorder, FullPrecisionSettings, Recorder}, optim::Optimizer, tensor::backend::AutodiffBackend, module::AutodiffModule};
/// # fn resume<B: AutodiffBackend, M: AutodiffModule<B>, O: Optimizer<M, B>>(optimizer: O, device: &B::Device) -> O {
/// let recorder = BinFileRecorder::<FullPrecisionSettings>::new();
/// zero_burn::load_state(|| optimizer.load_record(recorder.load("optimizer".into(), device).unwrap()))
/// # }
/// ```
pub fn load_state<R>(f: impl FnOnce() -> R) -> R {
    within(Birth::State, f)
}

/// Loads parameters as shards.
///
/// Burn's recorders tell the backend that they load parameters, so each is sharded when it is read. A reader that creates ordinary tensors,
/// such as `burn-store`'s, leaves the full model on each rank until [`prepare`](crate::module::prepare) shards it. Inside `f`, every float
/// tensor created from data is kept as this rank's shard. Each rank must read the same data, in the same order.
///
/// ```no_run
/// # struct Store;
/// # trait Apply { fn load_from(&mut self, store: &mut Store) -> Result<(), String>; }
/// # fn load(model: &mut impl Apply, mut store: Store) -> Result<(), String> {
/// // `model.load_from` and `SafetensorsStore` are burn-store's.
/// zero_burn::load_parameters(|| model.load_from(&mut store))?;
/// # Ok(())
/// # }
/// ```
pub fn load_parameters<R>(f: impl FnOnce() -> R) -> R {
    within(Birth::Parameter, f)
}

/// The values that a new tensor is filled with.
pub(crate) enum Fill<'a> {
    Data(TensorData),
    /// Called with the range of elements that are kept here.
    Elements(&'a mut dyn FnMut(Range<usize>) -> TensorData),
    Random(Distribution),
    Value(Scalar),
}

impl Fill<'_> {
    /// Returns a hash of the values for a tensor of `shape`.
    fn content(&self, shape: &Shape, dtype: DType) -> u64 {
        let content = match self {
            Fill::Data(data) => sign_bytes(data.as_bytes()),
            Fill::Value(value) => value.elem::<f64>().to_bits(),
            Fill::Elements(_) | Fill::Random(_) => stop(
                "zero_burn::load_state loads only data and constants: do not draw random values inside of it".into(),
            ),
        };
        let dims = shape.iter().map(|&dim| dim as u64);
        sign(&[content, dtype.size() as u64].into_iter().chain(dims).collect::<Vec<_>>())
    }

    /// Creates this rank's shard of the tensor, flat; without a place, the full tensor in its shape.
    fn make<B: Backend>(
        self,
        stream: Option<Stream>,
        (partition, place): (Partition, Option<usize>),
        shape: &Shape,
        dtype: DType,
        device: &B::Device,
    ) -> B::FloatTensorPrimitive {
        if partition.is_empty() && place.is_none() {
            return empty::<B>(shape, dtype, device);
        }
        let range = place.map_or(0..partition.numel(), |place| partition.range(place));
        if range.is_empty() {
            return B::float_zeros(Shape::new([1]), device, dtype.into());
        }
        let shape = match place {
            Some(_) => Shape::new([range.len()]),
            None => shape.clone(),
        };
        match self {
            Fill::Data(data) if range.len() == data.num_elements() => {
                B::float_from_data(TensorData { shape, ..data }, device)
            }
            Fill::Data(data) => {
                let size = dtype.size();
                let bytes = data.as_bytes()[range.start * size..range.end * size].to_vec();
                B::float_from_data(TensorData::from_bytes_vec(bytes, shape, dtype), device)
            }
            Fill::Elements(elements) => {
                let data = TensorData { shape, ..elements(range).convert_dtype(dtype) };
                B::memory_persistent_allocations(device, data, |data| B::float_from_data(data, device))
            }
            Fill::Random(distribution) => {
                let stream = stream.expect("only parameters are drawn at random");
                let data = random::data(stream, range, distribution, shape, dtype);
                B::float_from_data(data, device)
            }
            Fill::Value(value) => B::float_full(shape, value, device, dtype.into()),
        }
    }
}

/// Creates a tensor of `shape`, depending on the scope: an ordinary one, a parameter, or optimizer state.
pub(crate) fn create<B: Backend>(
    fill: Fill<'_>,
    shape: Shape,
    device: &B::Device,
    dtype: FloatDType,
    dense: impl FnOnce(Fill<'_>) -> ZeroTensor<B>,
) -> ZeroTensor<B> {
    let dtype: DType = dtype.into();
    computed();
    match scope() {
        Birth::Dense => dense(fill),
        Birth::Parameter => parameter(fill, shape, device, dtype),
        Birth::State => ZeroTensor::Shard(Shard::new(state(fill, shape, device, dtype))),
    }
}

/// Creates loaded optimizer state. Equal tensors share one cell: they have one name, see [`Origin::Loaded`].
fn state<B: Backend>(fill: Fill<'_>, shape: Shape, device: &B::Device, dtype: DType) -> Arc<Cell<B>> {
    let context = Context::<B>::current();
    let content = fill.content(&shape, dtype);
    let mut loaded = context.loaded.lock();
    if let Some(cell) = loaded.get(&content).and_then(Weak::upgrade) {
        return cell;
    }
    if loaded.len().is_power_of_two() {
        loaded.retain(|_, cell| cell.strong_count() > 0);
    }
    let partition = context.rank.partition(shape.num_elements());
    let place = context.rank.place(partition);
    let local = fill.make::<B>(None, (partition, Some(place)), &shape, dtype, device);
    let (rank, device) = (context.rank.clone(), device.clone());
    let (kind, origin) = (Kind::Optimizer, Origin::Loaded(content));
    let shape = engine_shape(&shape);
    let template = Template { rank, slot: None, partition, shape, device, kind, origin };
    let cell = Cell::ready(template, local);
    loaded.insert(content, Arc::downgrade(&cell));
    cell
}

/// Creates the next version of a parameter, with the first values of `drawn`.
pub(crate) fn drawn_again<B: Backend>(cell: &Cell<B>, drawn: &Drawn) -> Arc<Cell<B>> {
    let partition = cell.partition;
    let sharded = cell.rank.config.stage.shards_parameters() || partition.is_whole();
    let place = sharded.then(|| cell.place());
    let fill = Fill::Random(drawn.distribution);
    let tensor = fill.make::<B>(
        Some(drawn.stream()),
        (partition, place),
        &burn_shape(&cell.shape),
        burn_dtype(cell.dtype),
        &cell.device,
    );
    let template = cell.template(Kind::Parameter, Origin::Version);
    let cell = if sharded { Cell::ready(template, tensor) } else { Cell::full(template, tensor) };
    if let (Some(slot), Some(key)) = (&cell.slot, cell.key) {
        slot.draw.version.store(key.version, Ordering::Relaxed);
    }
    cell
}

/// Creates a parameter: at stage 3 this rank's shard, at stages 1 and 2 the full tensor, at stage 0 the full tensor as the only shard.
pub(crate) fn parameter<B: Backend>(fill: Fill<'_>, shape: Shape, device: &B::Device, dtype: DType) -> ZeroTensor<B> {
    let context = Context::<B>::current();
    let slot = context.rank.new_slot(engine_shape(&shape), engine_dtype(dtype));
    let partition = slot.partition;
    let sharded = context.rank.config.stage.shards_parameters() || partition.is_whole();
    let place = sharded.then(|| context.rank.place(partition));
    let (seed, birth) = context.draws.next_birth();
    let stream = match &fill {
        Fill::Random(distribution) => {
            let drawn = Drawn { seed, birth, part: PART.get(), distribution: *distribution };
            Some(slot.draw.first.get_or_init(|| drawn).stream())
        }
        _ => None,
    };
    let tensor = fill.make::<B>(stream, (partition, place), &shape, dtype, device);
    let template = Template::of(&context.rank, &slot, Kind::Parameter, Origin::Version);
    let template = Template { device: device.clone(), ..template };
    let cell = if sharded { Cell::ready(template, tensor) } else { Cell::full(template, tensor) };
    ZeroTensor::Shard(Shard::new(cell))
}
