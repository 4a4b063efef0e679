//! This rank's pieces of a module's parameters, as bytes in host memory: what checkpoints are made of.
//!
//! * Out ([`pieces`]): each parameter cut by `Partition::new(elements, ranks)` at every stage, so that what is saved does
//!   not depend on the stage; where a rank holds a parameter whole, it gives the part that would be its own.
//! * In ([`load_pieces`]): the elements that this rank holds at its stage, read by their range.
//! * Memory: one piece at a time is copied to the host, when it is asked for.
//!
//! State of layers that is no parameter (a batch norm's running mean) is each rank's own: rank 0's goes out, and in to all.
//!
//! No piece is ever gathered. [`RandomState`] is what dropout's random numbers resume from.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{DType, Shape, Slice};
use zero_core::checkpoint::ElementType;
use zero_core::offload::DiskError;
use zero_core::{Collective, Partition};

use crate::autodiff::{ZeroAutodiff, from_rank_0};
use crate::config::Disk as DiskSettings;
use crate::context::Context;
use crate::gathered::{ParamMeta, next_version};
use crate::preparation::{end_forward, in_place_of};
pub use crate::random::RandomState;
use crate::shard::Cell;
use crate::tensor::{Shard, ZeroTensor};
use crate::tier::{Disk, Stored};
use crate::trouble::stop;
use crate::values::read;

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
                let context = Context::<B>::current();
                part::<B>(flat, Partition::new(numel, context.world).range(context.rank))
            }
        }
    }
}

/// This rank's elements by the cut that does not depend on the stage.
pub(crate) fn cell_bytes<B: Backend>(cell: &Arc<Cell<B>>) -> Vec<u8> {
    let context = &cell.context;
    let range = Partition::new(cell.partition.numel(), context.world).range(context.rank);
    if let Some(Stored::Host(data)) = cell.stored() {
        // Whole at stage 0 alone.
        let start = if cell.partition.is_whole() { range.start } else { 0 };
        let bytes = cell.dtype.size();
        return data.as_bytes()[start * bytes..(start + range.len()) * bytes].to_vec();
    }
    match cell.partition.is_whole() {
        _ if range.is_empty() => Vec::new(),
        true => part::<B>(cell.local(), range),
        false => part::<B>(cell.local(), 0..range.len()),
    }
}

/// Elements `range` of a flat tensor.
fn part<B: Backend>(flat: B::FloatTensorPrimitive, range: Range<usize>) -> Vec<u8> {
    if range.is_empty() {
        return Vec::new();
    }
    let whole = range.len() == flat.shape().num_elements();
    let tensor = if whole { flat } else { B::float_slice(flat, &[Slice::from(range)]) };
    read::<B>(tensor).as_bytes().to_vec()
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
    Some(match element {
        ElementType::F64 => DType::F64,
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
        _ => return None,
    })
}

/// The module's float parameters in the order of its fields, and the paths of those that are of no float type. Every rank
/// calls it.
pub fn pieces<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> (Vec<ParamPiece<A::Base>>, Vec<String>) {
    struct Collect<A: ZeroAutodiff> {
        context: Arc<Context<A::Base>>,
        path: Vec<String>,
        pieces: Vec<ParamPiece<A::Base>>,
        others: Vec<String>,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Collect<A> {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let tensor = param.val();
            let meta = ParamMeta {
                id: param.id,
                path: self.path.join("."),
                shape: tensor.dims().to_vec(),
                trained: tensor.is_require_grad(),
            };
            let TensorPrimitive::Float(primitive) = tensor.inner().into_primitive() else {
                self.others.push(meta.path);
                return;
            };
            let dtype = primitive.dtype();
            let held = match primitive {
                ZeroTensor::Shard(Shard { cell, views }) if views.is_empty() => Held::Cell(cell),
                edited @ ZeroTensor::Shard(_) => Held::Dense(edited.load()),
                dense => {
                    let data = from_rank_0(&self.context, dense);
                    Held::Dense(A::Base::float_from_data(data, &self.context.device))
                }
            };
            self.pieces.push(ParamPiece { meta, dtype, held });
        }

        fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<A, D, Int>>) {
            self.others.push(self.path.join("."));
        }

        fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<A, D, burn::tensor::Bool>>) {
            self.others.push(self.path.join("."));
        }
    }
    end_forward::<A, M>(module);
    let context = Context::current();
    let mut collect = Collect::<A> { context, path: Vec::new(), pieces: Vec::new(), others: Vec::new() };
    module.visit(&mut collect);
    (collect.pieces, collect.others)
}

/// Replaces every float parameter by what `read` gives for its elements in a range: their type, and their bytes,
/// little-endian. Every rank calls it; it reads what it holds at its stage. Not between a backward pass and its update.
///
/// # Errors
///
/// The first error of `read` on this rank, after which the module is a mixture of old and new parameters. Errors are this
/// rank's alone: it is for the caller to tell the others.
pub fn load_pieces<A: ZeroAutodiff, M: AutodiffModule<A>, E>(
    module: M,
    read: impl FnMut(&str, &[usize], Range<usize>) -> Result<(ElementType, Vec<u8>), E>,
) -> (M, Result<(), E>) {
    let context = Context::<A::Base>::current();
    end_forward::<A, M>(&module);
    // Nobody reads the old versions any more; and once all are replaced, nobody needs them.
    context.fence("before parameters are loaded");
    let mut load = Load::<A, _, E> { path: Vec::new(), read, error: None, _backend: PhantomData };
    let module = module.map(&mut load);
    context.keep_awaited_if(load.error.is_none());
    context.fence("after parameters are loaded");
    (module, load.error.map_or(Ok(()), Err))
}

struct Load<A: ZeroAutodiff, F, E> {
    path: Vec<String>,
    read: F,
    error: Option<E>,
    _backend: PhantomData<A>,
}

impl<A, F, E> ModuleMapper<A> for Load<A, F, E>
where
    A: ZeroAutodiff,
    F: FnMut(&str, &[usize], Range<usize>) -> Result<(ElementType, Vec<u8>), E>,
{
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        if self.error.is_some() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let requires_grad = tensor.is_require_grad();
        let path = self.path.join(".");
        let cell = match tensor.clone().inner().into_primitive() {
            TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, .. })) => Some(cell),
            TensorPrimitive::Float(_) if !requires_grad => None,
            _ => stop(format!("parameter {path} is an ordinary tensor: call zero_burn::module::prepare on the model")),
        };
        let shape = tensor.shape();
        let range = match &cell {
            Some(cell) => cell.partition.range(cell.place()),
            None => 0..shape.num_elements(),
        };
        let len = range.len().max(1);
        let bytes = match range.is_empty() {
            // One element of filler, as everywhere.
            true => Ok((ElementType::F32, vec![0; 4])),
            false => (self.read)(&path, shape.as_slice(), range),
        };
        let (element, bytes) = match bytes {
            Ok(bytes) => bytes,
            Err(error) => {
                self.error = Some(error);
                return Param::from_mapped_value(id, tensor, mapper);
            }
        };
        let Some(dtype) = dtype(element) else {
            stop(format!("parameter {path} cannot be made of {element}: expected floats of 16, 32 or 64 bits"));
        };
        let piece = TensorData::from_bytes_vec(bytes, [len], dtype);
        let tensor = match &cell {
            Some(cell) => next_version::<A, D>(id, cell, piece, requires_grad),
            None => in_place_of::<A, D>(&tensor, piece),
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The elements of a flat tensor of `numel` that this rank holds of optimizer state: its piece, or everything at stage 0.
pub fn held_range<B: Backend>(numel: usize) -> Range<usize> {
    let context = Context::<B>::current();
    let partition = context.partition(numel);
    partition.range(if partition.is_whole() { 0 } else { context.rank })
}

/// Model state that has been moved to a disk for a while. What DeepSpeed calls `offload_states`.
///
/// It can be used meanwhile, from the disk. What is updated meanwhile is where it is configured to be from then on. Dropping this
/// leaves the rest there.
pub struct Parked<B: Backend> {
    disk: Arc<Disk>,
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
    pub fn begin(settings: &DiskSettings) -> Result<Self, DiskError> {
        let context = Context::<B>::current();
        context.fence("before states are offloaded");
        Ok(Self { disk: Disk::open(context.rank, settings)?, cells: Vec::new(), bytes: 0 })
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
    match &Context::<B>::current().disk {
        Some(disk) => disk.file.require(bytes),
        None => Ok(()),
    }
}

/// Bytes of this rank's file on a disk, used or reserved; 0 without one.
pub fn disk_bytes<B: Backend>() -> u64 {
    Context::<B>::current().disk.as_ref().map_or(0, |disk| disk.file.reserved_bytes())
}

/// The ranks, for blocking collectives on the rank's own thread.
pub fn collective<B: Backend>() -> Arc<dyn Collective> {
    Context::<B>::current().collective()
}

/// The random state of the current thread's rank over inner backend `B`.
pub fn random_state<B: Backend>() -> RandomState {
    Context::<B>::current().draws.state()
}

/// Resumes from `state`: the next draws are those that came after it.
pub fn set_random_state<B: Backend>(state: RandomState) {
    Context::<B>::current().draws.set_state(state);
}
