//! This rank's shards of a module's parameters, as bytes in host memory: the content of checkpoints.
//!
//! * Out ([`param_shards`]): each parameter is partitioned by `Partition::new(elements, ranks)` at every stage and on every mesh, so that saved
//!   data depends on neither. A rank that holds more of a parameter provides only its own part.
//! * In ([`load_shards`]): the elements that this rank holds at its stage are read by their range.
//! * Memory: one shard at a time is copied to the host, on demand.
//!
//! Layer state that is not a parameter (a batch norm's running mean) is each rank's own: rank 0's is saved, and all ranks load it.
//!
//! No shard is ever gathered. Dropout's random numbers resume from [`RandomState`].

use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::module::AutodiffModule;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{DType, Shape};
use zero_core::Collective;
use zero_core::checkpoint::ElementType;
use zero_core::offload::DiskError;
use zero_engine::values::part;

use crate::abort::stop;
use crate::autodiff::{ZeroAutodiff, from_rank_0};
use crate::config::Disk;
use crate::context::Context;
use crate::engine::{Cell, Inner, SwapDisk, engine_dtype};
use crate::gathered::next_version;
use crate::preparation::{end_forward, in_place_of};
pub use crate::random::RandomState;
use crate::tensor::{Shard, ZeroTensor};
use crate::values::read;
use crate::walk::{self, ParamMeta};

/// A parameter of a module, and this rank's shard of it. Keeps the parameter's version alive.
pub struct ParamShard<B: Backend> {
    /// The parameter.
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

impl<B: Backend> ParamShard<B> {
    /// Returns whether it is a parameter that is not trained; layer state is not a parameter.
    pub fn is_frozen(&self) -> bool {
        !self.meta.trained && matches!(self.held, Held::Cell(_))
    }

    /// Returns the type that it is kept in.
    pub fn element_type(&self) -> ElementType {
        engine_dtype(self.dtype).into()
    }

    /// Returns this rank's elements, little-endian; empty if it has none.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.held {
            Held::Cell(cell) => cell.own_bytes(cell.dtype),
            Held::Dense(tensor) => {
                let numel = self.meta.shape.iter().product();
                let flat = B::float_reshape(tensor.clone(), Shape::new([numel]));
                let (owners, place) = Context::<B>::current().rank.owners(numel);
                match owners.range(place) {
                    own if own.is_empty() => Vec::new(),
                    own => read::<B>(part::<Inner<B>>(flat, own)).as_bytes().to_vec(),
                }
            }
        }
    }
}

fn dtype(element: ElementType) -> Option<DType> {
    [DType::F64, DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .find(|&dtype| ElementType::from(engine_dtype(dtype)) == element)
}

/// Returns the module's float parameters in the order of its fields, and the paths of the parameters of other types. Every rank calls it.
pub fn param_shards<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> (Vec<ParamShard<A::Base>>, Vec<String>) {
    end_forward::<A, M>(module);
    let context = Context::current();
    let (mut shards, mut others) = (Vec::new(), Vec::new());
    walk::visit::<A, M>(module, |meta, tensor| {
        let Some(tensor) = tensor else { return others.push(meta.path) };
        let dtype = tensor.dtype();
        let held = match tensor {
            ZeroTensor::Shard(Shard { cell, views }) if views.is_empty() => Held::Cell(cell),
            edited @ ZeroTensor::Shard(_) => Held::Dense(edited.load_exact()),
            dense => Held::Dense(A::Base::float_from_data(from_rank_0(&context, dense), &context.rank.device)),
        };
        shards.push(ParamShard { meta, dtype, held });
    });
    (shards, others)
}

/// Replaces every float parameter by the result of `read` for a range of its elements: their type and their bytes, little-endian. `None`
/// leaves the parameter unchanged. Every rank calls it, and reads the elements that it holds at its stage. Not allowed between a backward
/// pass and its update.
///
/// # Errors
///
/// The first error of `read` on this rank, after which the module is a mixture of old and new parameters. Other ranks do not see the error:
/// the caller must tell them.
pub fn load_shards<A: ZeroAutodiff, M: AutodiffModule<A>, E>(
    module: M,
    mut read: impl FnMut(&ParamMeta, Range<usize>) -> Result<Option<(ElementType, Vec<u8>)>, E>,
) -> (M, Result<(), E>) {
    replace_shards(module, |meta, _, range| match range.is_empty() {
        true => Ok(Some((ElementType::F32, Vec::new()))),
        false => read(meta, range),
    })
}

/// Same as [`load_shards`], but `read` also gets the parameter's old tensor, and is called for empty ranges too.
pub(crate) fn replace_shards<A: ZeroAutodiff, M: AutodiffModule<A>, E>(
    module: M,
    mut read: impl FnMut(&ParamMeta, ZeroTensor<A::Base>, Range<usize>) -> Result<Option<(ElementType, Vec<u8>)>, E>,
) -> (M, Result<(), E>) {
    let context = Context::<A::Base>::current();
    end_forward::<A, M>(&module);
    // No rank reads the old versions any more; once all are replaced, no rank needs them.
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
                // One filler element, as everywhere.
                (element, bytes) = (ElementType::F32, vec![0; 4]);
            }
            let Some(dtype) = dtype(element) else {
                stop(format!("parameter {path} cannot be loaded from {element}: expected floats of 16, 32 or 64 bits"));
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

/// Returns the elements of a flat tensor of `numel` elements whose optimizer state this rank holds: its shard, or everything at stage 0.
pub fn held_range<B: Backend>(numel: usize) -> Range<usize> {
    let rank = &Context::<B>::current().rank;
    let partition = rank.partition(numel);
    partition.range(rank.place(partition))
}

/// Model state that has been moved to a disk temporarily. DeepSpeed calls this `offload_states`.
///
/// The state can be used meanwhile, from the disk. State that is updated meanwhile is kept where it is configured to be from then on.
/// Dropping this leaves the rest on the disk.
pub struct OffloadedStates<B: Backend> {
    disk: Arc<SwapDisk>,
    /// Weak, so that state that is replaced meanwhile is dropped.
    cells: Vec<Weak<Cell<B>>>,
    bytes: u64,
}

impl<B: Backend> OffloadedStates<B> {
    /// Prepares to move state into this rank's own file below `settings.path`. Every rank calls it, so that none still reads the state that
    /// will be moved.
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
    /// [`DiskError`]; the parameters moved so far stay on the disk.
    pub fn add_module<A: ZeroAutodiff<Base = B>, M: AutodiffModule<A>>(&mut self, module: &M) -> Result<(), DiskError> {
        let (shards, _) = param_shards::<A, M>(module);
        shards.into_iter().try_for_each(|shard| match shard.held {
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

    /// Returns the number of bytes moved.
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
/// [`DiskError::NoSpace`] with the needed and the available space.
pub fn reserve_on_disk<B: Backend>(bytes: u64) -> Result<(), DiskError> {
    match &Context::<B>::current().rank.disk {
        Some(disk) => disk.file.require(bytes),
        None => Ok(()),
    }
}

/// Returns the bytes of this rank's file on a disk, used or reserved; 0 without a file.
pub fn disk_bytes<B: Backend>() -> u64 {
    Context::<B>::current().rank.disk.as_ref().map_or(0, |disk| disk.file.reserved_bytes())
}

/// Returns the group of ranks for blocking collectives on the rank's own thread, in the order of the ranks' shards.
pub fn collective<B: Backend>() -> Arc<dyn Collective> {
    Context::<B>::current().owners()
}

/// Returns the random state of the current thread's rank over inner backend `B`.
pub fn random_state<B: Backend>() -> RandomState {
    Context::<B>::current().draws.state()
}

/// Resumes from `state`: the next draws are those that followed it.
pub fn set_random_state<B: Backend>(state: RandomState) {
    Context::<B>::current().draws.set_state(state);
}
