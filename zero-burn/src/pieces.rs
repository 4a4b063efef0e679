//! This rank's pieces of a module's parameters, as bytes in host memory: what checkpoints are made of.
//!
//! * Out ([`pieces`]): each parameter cut by `Partition::new(elements, ranks)` at every stage and on every mesh, so that what is
//!   saved depends on neither; where a rank holds more of a parameter, it gives the part that is its own.
//! * In ([`load_pieces`]): the elements that this rank holds at its stage, read by their range.
//! * Memory: one piece at a time is copied to the host, when it is asked for.
//!
//! State of layers that is no parameter (a batch norm's running mean) is each rank's own: rank 0's goes out, and in to all.
//!
//! No piece is ever gathered. [`RandomState`] is what dropout's random numbers resume from.

use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::module::AutodiffModule;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{DType, Shape};
use zero_core::Collective;
use zero_core::checkpoint::ElementType;
use zero_core::offload::DiskError;

use crate::autodiff::{ZeroAutodiff, from_rank_0};
use crate::cell::Cell;
use crate::config::Disk;
use crate::context::Context;
use crate::gathered::next_version;
use crate::preparation::{end_forward, in_place_of};
pub use crate::random::RandomState;
use crate::tensor::{Shard, ZeroTensor};
use crate::tier::{Stored, SwapDisk};
use crate::trouble::stop;
use crate::values::{part, read};
use crate::walk::{self, ParamMeta};

/// A parameter of a module, and where this rank has its piece. It keeps the parameter's version alive.
pub struct ParamPiece<B: Backend> {
    /// Which parameter it is.
    pub meta: ParamMeta,
    dtype: DType,
    held: Held<B>,
}

enum Held<B: Backend> {
    Cell(Arc<Cell<B>>),
    /// Rank 0's values of an ordinary tensor, such as a batch norm's running mean; or a parameter that was changed since its
    /// last update.
    Dense(B::FloatTensorPrimitive),
}

impl<B: Backend> ParamPiece<B> {
    /// Whether it is a parameter that is not trained; state of layers is no parameter.
    pub fn is_frozen(&self) -> bool {
        !self.meta.trained && matches!(self.held, Held::Cell(_))
    }

    /// The type that it is kept in.
    pub fn element_type(&self) -> ElementType {
        element_type(self.dtype)
    }

    /// This rank's elements, little-endian; none if it has none.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.held {
            Held::Cell(cell) => cell_bytes(cell),
            Held::Dense(tensor) => {
                let numel = self.meta.shape.iter().product();
                let flat = B::float_reshape(tensor.clone(), Shape::new([numel]));
                let (owners, place) = Context::<B>::current().rank.owners(numel);
                bytes::<B>(flat, owners.range(place))
            }
        }
    }
}

/// This rank's elements by the cut that does not depend on the stage.
pub(crate) fn cell_bytes<B: Backend>(cell: &Arc<Cell<B>>) -> Vec<u8> {
    let own = cell.own();
    if let Some(Stored::Host(data)) = cell.stored() {
        let bytes = cell.dtype.size();
        return data.as_bytes()[own.start * bytes..own.end * bytes].to_vec();
    }
    if own.is_empty() { Vec::new() } else { bytes::<B>(cell.local(), own) }
}

/// Elements `range` of a flat tensor.
fn bytes<B: Backend>(flat: B::FloatTensorPrimitive, range: Range<usize>) -> Vec<u8> {
    if range.is_empty() {
        return Vec::new();
    }
    read::<B>(part::<B>(flat, range)).as_bytes().to_vec()
}

fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::Bf16,
        other => stop(format!("a parameter of type {other:?} cannot be saved: expected floats of 16, 32 or 64 bits")),
    }
}

fn dtype(element: ElementType) -> Option<DType> {
    [DType::F64, DType::F32, DType::F16, DType::BF16].into_iter().find(|&dtype| element_type(dtype) == element)
}

/// The module's float parameters in the order of its fields, and the paths of those that are of no float type. Every rank
/// calls it.
pub fn pieces<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> (Vec<ParamPiece<A::Base>>, Vec<String>) {
    end_forward::<A, M>(module);
    let context = Context::current();
    let (mut pieces, mut others) = (Vec::new(), Vec::new());
    walk::visit::<A, M>(module, |meta, tensor| {
        let Some(tensor) = tensor else { return others.push(meta.path) };
        let dtype = tensor.dtype();
        let held = match tensor {
            ZeroTensor::Shard(Shard { cell, views }) if views.is_empty() => Held::Cell(cell),
            edited @ ZeroTensor::Shard(_) => Held::Dense(edited.load_exact()),
            dense => Held::Dense(A::Base::float_from_data(from_rank_0(&context, dense), &context.rank.device)),
        };
        pieces.push(ParamPiece { meta, dtype, held });
    });
    (pieces, others)
}

/// Replaces every float parameter by what `read` gives for its elements in a range: their type, and their bytes,
/// little-endian; `None` leaves it as it is. Every rank calls it; it reads what it holds at its stage. Not between a backward pass and its update.
///
/// # Errors
///
/// The first error of `read` on this rank, after which the module is a mixture of old and new parameters. Errors are this
/// rank's alone: it is for the caller to tell the others.
pub fn load_pieces<A: ZeroAutodiff, M: AutodiffModule<A>, E>(
    module: M,
    mut read: impl FnMut(&ParamMeta, Range<usize>) -> Result<Option<(ElementType, Vec<u8>)>, E>,
) -> (M, Result<(), E>) {
    replace_pieces(module, |meta, _, range| match range.is_empty() {
        true => Ok(Some((ElementType::F32, Vec::new()))),
        false => read(meta, range),
    })
}

/// As [`load_pieces`], with what each parameter has been; `read` is called for empty ranges too.
pub(crate) fn replace_pieces<A: ZeroAutodiff, M: AutodiffModule<A>, E>(
    module: M,
    mut read: impl FnMut(&ParamMeta, ZeroTensor<A::Base>, Range<usize>) -> Result<Option<(ElementType, Vec<u8>)>, E>,
) -> (M, Result<(), E>) {
    let context = Context::<A::Base>::current();
    end_forward::<A, M>(&module);
    // Nobody reads the old versions any more; and once all are replaced, nobody needs them.
    context.fence("before parameters are loaded");
    let mut failed = None;
    let module = walk::map::<A, M, _>(
        module,
        |meta, tensor| {
            if failed.is_some() {
                return None;
            }
            let path = &meta.path;
            let range = match &tensor {
                ZeroTensor::Shard(Shard { cell, .. }) => cell.partition.range(cell.place()),
                dense if !meta.trained => 0..dense.shape().num_elements(),
                _ => stop(format!(
                    "parameter {path} is an ordinary tensor: call zero_burn::module::prepare on the model"
                )),
            };
            let len = range.len().max(1);
            let is_empty = range.is_empty();
            let (mut element, mut bytes) = read(meta, tensor, range).map_err(|error| failed = Some(error)).ok()??;
            if is_empty {
                // One element of filler, as everywhere.
                (element, bytes) = (ElementType::F32, vec![0; 4]);
            }
            let Some(dtype) = dtype(element) else {
                stop(format!("parameter {path} cannot be made of {element}: expected floats of 16, 32 or 64 bits"));
            };
            Some(TensorData::from_bytes_vec(bytes, [len], dtype))
        },
        |_, piece, tensor| match tensor {
            ZeroTensor::Shard(Shard { cell, .. }) => next_version(&cell, piece),
            dense => in_place_of::<A::Base>(&dense.load(), piece),
        },
    );
    context.keep_awaited_if(failed.is_none());
    context.fence("after parameters are loaded");
    (module, failed.map_or(Ok(()), Err))
}

/// The elements of a flat tensor of `numel` that this rank holds of optimizer state: its piece, or everything at stage 0.
pub fn held_range<B: Backend>(numel: usize) -> Range<usize> {
    let rank = &Context::<B>::current().rank;
    let partition = rank.partition(numel);
    partition.range(rank.place(partition))
}

/// Model state that has been moved to a disk for a while. What DeepSpeed calls `offload_states`.
///
/// It can be used meanwhile, from the disk. What is updated meanwhile is where it is configured to be from then on. Dropping this
/// leaves the rest there.
pub struct Parked<B: Backend> {
    disk: Arc<SwapDisk>,
    /// What is replaced meanwhile is not kept.
    cells: Vec<Weak<Cell<B>>>,
    bytes: u64,
}

impl<B: Backend> Parked<B> {
    /// Makes ready to move state into a file of this rank's own below `settings.path`. Every rank calls it: none still reads
    /// what will be moved.
    ///
    /// # Errors
    ///
    /// [`DiskError`] for a folder or settings that cannot be used.
    pub fn begin(settings: &Disk) -> Result<Self, DiskError> {
        let context = Context::<B>::current();
        context.fence("before states are offloaded");
        Ok(Self { disk: SwapDisk::open(context.rank.place.rank, settings)?, cells: Vec::new(), bytes: 0 })
    }

    /// Moves the parameters of `module`.
    ///
    /// # Errors
    ///
    /// What the disk says; what has been moved so far is kept there.
    pub fn add_module<A: ZeroAutodiff<Base = B>, M: AutodiffModule<A>>(&mut self, module: &M) -> Result<(), DiskError> {
        let (pieces, _) = pieces::<A, M>(module);
        pieces.into_iter().try_for_each(|piece| match piece.held {
            Held::Cell(cell) => self.add(&cell),
            Held::Dense(_) => Ok(()),
        })
    }

    pub(crate) fn add(&mut self, cell: &Arc<Cell<B>>) -> Result<(), DiskError> {
        if cell.park(&self.disk)? {
            self.bytes += (cell.partition.len(cell.place()) * cell.dtype.size()) as u64;
            self.cells.push(Arc::downgrade(cell));
        }
        Ok(())
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves everything back into memory. Every rank calls it.
    pub fn reload(self) {
        self.cells.iter().filter_map(Weak::upgrade).for_each(|cell| cell.unpark());
        Context::<B>::current().fence("after states are reloaded");
    }
}

/// Reserves `bytes` more in this rank's file, if state is kept on a disk, so that no later step finds the disk full.
///
/// # Errors
///
/// [`DiskError::NoSpace`] with what is needed and what there is.
pub fn reserve_on_disk<B: Backend>(bytes: u64) -> Result<(), DiskError> {
    match &Context::<B>::current().rank.disk {
        Some(disk) => disk.file.require(bytes),
        None => Ok(()),
    }
}

/// Bytes of this rank's file on a disk, used or reserved; 0 without one.
pub fn disk_bytes<B: Backend>() -> u64 {
    Context::<B>::current().rank.disk.as_ref().map_or(0, |disk| disk.file.reserved_bytes())
}

/// The ranks, for blocking collectives on the rank's own thread; in the order in which their pieces follow each other.
pub fn collective<B: Backend>() -> Arc<dyn Collective> {
    Context::<B>::current().owners()
}

/// The random state of the current thread's rank over inner backend `B`.
pub fn random_state<B: Backend>() -> RandomState {
    Context::<B>::current().draws.state()
}

/// Resumes from `state`: the next draws are those that came after it.
pub fn set_random_state<B: Backend>(state: RandomState) {
    Context::<B>::current().draws.set_state(state);
}
