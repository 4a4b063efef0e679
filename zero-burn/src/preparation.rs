//! The parts of [`prepare`](crate::module::prepare) other than sharding: it finds the tensors of a module that are layer state and not
//! parameters, and gives ranks that were seeded differently the first values of one seed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{AutodiffModule, Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::{DType, Shape};

use crate::autodiff::{ZeroAutodiff, from_rank_0};
use crate::birth::drawn_again;
use crate::context::Context;
use crate::engine::{Cell, burn_dtype};
use crate::random::{Drawn, words};
use crate::tensor::{Shard, ZeroTensor};
use crate::walk;

/// Redraws the parameters that still hold their drawn values, from rank 0's seed. Every rank calls it, with the same module.
pub(crate) fn draw_as_rank_0<A: ZeroAutodiff, M: Module<A>>(
    context: &Context<A::Base>,
    module: M,
    own: &[(u64, u64)],
) -> M {
    let bytes = own.iter().flat_map(|&(seed, birth)| [seed, birth]).flat_map(u64::to_le_bytes).collect();
    let bytes = context.broadcast_bytes(bytes);
    let mut words = words(&bytes);
    // By identity and cell: a clone of a parameter stays the same parameter.
    let mut again: HashMap<_, Arc<Cell<A::Base>>> = HashMap::new();
    walk::map::<A, M, _>(
        module,
        |_, tensor| match tensor {
            ZeroTensor::Shard(Shard { cell, .. }) => cell.drawn().map(|own| (own, cell)),
            _ => None,
        },
        |meta, (own, cell), _| {
            let cell = again.entry((meta.id, cell.key)).or_insert_with(|| {
                let mut word = || words.next().expect("ranks with the same modules draw the same number of parameters");
                let (seed, birth) = (word(), word());
                drawn_again(&cell, &Drawn { seed, birth, ..own })
            });
            ZeroTensor::Shard(Shard::new(cell.clone()))
        },
    )
}

/// Returns a layer's state as each rank begins with it: rank 0's, in full.
pub(crate) fn buffer<B: Backend>(context: &Context<B>, tensor: ZeroTensor<B>, device: &B::Device) -> ZeroTensor<B> {
    let data = from_rank_0(context, tensor);
    let wanted = burn_dtype(context.rank.config.param_dtype.wire_dtype());
    let data = if data.dtype == DType::F32 { data.convert_dtype(wanted) } else { data };
    ZeroTensor::Dense(B::float_from_data(data, device))
}

/// Returns an ordinary tensor like `dense`, with other values.
pub(crate) fn in_place_of<B: Backend>(dense: &B::FloatTensorPrimitive, values: TensorData) -> ZeroTensor<B> {
    let data = TensorData { shape: dense.shape(), ..values.convert_dtype(dense.dtype()) };
    ZeroTensor::Dense(B::float_from_data(data, &B::float_device(dense)))
}

/// Completes the update of layer state by the last forward pass. Burn applies the update only when the next pass begins, or when the module
/// is used without gradients.
pub(crate) fn end_forward<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) {
    drop(module.valid());
}

/// Finds the tensors of `module` that are layer state and not parameters: a forward pass changes them in place (Burn's `RunningState`, such
/// as a batch norm's mean and variance). A visitor cannot tell them apart, but a module shares such state with its clone. So this replaces
/// a clone's tensors. Those that change in the module too are layer state, and are restored.
pub(crate) fn buffers<A: ZeroAutodiff, M: Module<A>>(module: &M) -> HashSet<ParamId> {
    /// Mapper that replaces all tensors by a stamp: a kind of tensor that no module has.
    struct Replace<A: ZeroAutodiff> {
        taken: Vec<Option<TensorPrimitive<A>>>,
    }
    impl<A: ZeroAutodiff> ModuleMapper<A> for Replace<A> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
            // A trained tensor is not layer state. A tensor of the stamp's kind could not be distinguished from a stamp.
            let may_be_state = || {
                let tensor = param.val();
                let primitive = tensor.clone().inner().into_primitive();
                !tensor.is_require_grad()
                    && matches!(primitive, TensorPrimitive::Float(tensor) if !matches!(tensor, ZeroTensor::Replicated(_)))
            };
            if !param.is_initialized() || !may_be_state() {
                self.taken.push(None);
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            let (shape, device) = (Shape::from(vec![1; D]), tensor.device());
            self.taken.push(Some(tensor.into_primitive()));
            let zero = <A::Base as FloatTensorOps<A::Base>>::float_zeros(shape, device.inner(), DType::F32.into());
            let stamp = TensorPrimitive::Float(ZeroTensor::Replicated(zero));
            Param::from_mapped_value(id, Tensor::from_inner(Tensor::from_primitive(stamp)), mapper)
        }
    }
    struct Restore<A: ZeroAutodiff> {
        taken: std::vec::IntoIter<Option<TensorPrimitive<A>>>,
        found: HashSet<ParamId>,
    }
    impl<A: ZeroAutodiff> ModuleMapper<A> for Restore<A> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
            let Some(taken) = self.taken.next().flatten() else { return param };
            match param.val().inner().into_primitive() {
                TensorPrimitive::Float(ZeroTensor::Replicated(_)) => {
                    self.found.insert(param.id);
                    let (id, _, mapper) = param.consume();
                    Param::from_mapped_value(id, Tensor::from_primitive(taken), mapper)
                }
                _ => param,
            }
        }
    }
    let mut replace = Replace::<A> { taken: Vec::new() };
    drop(module.clone().map(&mut replace));
    let mut restore = Restore::<A> { taken: replace.taken.into_iter(), found: HashSet::new() };
    drop(module.clone().map(&mut restore));
    restore.found
}
