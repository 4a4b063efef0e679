//! What [`prepare`](crate::module::prepare) does beside making shards: it finds the tensors of a module that are no parameters but
//! state of its layers, and gives ranks that were seeded differently the first values of one seed.

use std::collections::{HashMap, HashSet};

use burn::module::{AutodiffModule, Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::distributed::DistributedParamId;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{BackendTypes, TensorData};
use burn_std::{DType, Shape};
use zero_core::window::Key;

use crate::autodiff::{ZeroAutodiff, from_rank_0};
use crate::birth::drawn_again;
use crate::context::Context;
use crate::slot::Drawn;
use crate::tensor::{Shard, ZeroTensor};

/// Gives the parameters that were drawn, and are as they were born, the values that rank 0's seed gives. Every rank calls it, with
/// the same module.
pub(crate) fn draw_as_rank_0<A: ZeroAutodiff, M: Module<A>>(
    context: &Context<A::Base>,
    module: M,
    own: &[(u64, u64)],
) -> M {
    let bytes = own.iter().flat_map(|&(seed, birth)| [seed, birth]).flat_map(u64::to_le_bytes).collect();
    let bytes = context.broadcast_bytes(bytes);
    let mut words = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("chunks of eight bytes")));
    let mut first = Vec::with_capacity(own.len());
    while let (Some(seed), Some(birth)) = (words.next(), words.next()) {
        first.push((seed, birth));
    }
    module.map(&mut DrawAgain::<A> { first: first.into_iter(), again: HashMap::new() })
}

struct DrawAgain<A: ZeroAutodiff> {
    /// Seed and birth of rank 0's parameters that were drawn.
    first: std::vec::IntoIter<(u64, u64)>,
    /// By identity and cell: a clone of a parameter stays the same parameter.
    again: HashMap<(ParamId, Option<Key>), A::FloatTensorPrimitive>,
}

impl<A: ZeroAutodiff> ModuleMapper<A> for DrawAgain<A> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, .. })) = param.val().inner().into_primitive() else {
            return param;
        };
        let Some(own) = cell.drawn() else { return param };
        let (id, tensor, mapper) = param.consume();
        if let Some(again) = self.again.get(&(id, cell.key)) {
            return Param::from_mapped_value(id, Tensor::from_primitive(TensorPrimitive::Float(again.clone())), mapper);
        }
        let (seed, birth) = self.first.next().expect("ranks with the same modules have drawn as many parameters");
        let requires_grad = tensor.is_require_grad();
        let again = Shard::new(drawn_again(&cell, &Drawn { seed, birth, ..own }));
        let tensor = Tensor::<A::InnerBackend, D>::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(again)));
        let tensor = Tensor::<A, D>::from_inner(tensor).set_require_grad(requires_grad);
        let tensor = if requires_grad { tensor.set_distributed(DistributedParamId::from(id.val())) } else { tensor };
        if let TensorPrimitive::Float(again) = tensor.clone().into_primitive() {
            self.again.insert((id, cell.key), again);
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// A layer's state as each rank begins with it: rank 0's, whole.
pub(crate) fn buffer<A: ZeroAutodiff, const D: usize>(
    context: &Context<A::Base>,
    tensor: ZeroTensor<A::Base>,
    device: &A::Device,
) -> Tensor<A, D> {
    let data = from_rank_0(context, tensor);
    let wanted = context.config.param_dtype.dtype();
    let data = if data.dtype == DType::F32 { data.convert_dtype(wanted) } else { data };
    dense(data, device.inner())
}

/// An ordinary tensor with other values.
pub(crate) fn in_place_of<A: ZeroAutodiff, const D: usize>(tensor: &Tensor<A, D>, values: TensorData) -> Tensor<A, D> {
    let data = TensorData { shape: tensor.shape(), ..values.convert_dtype(tensor.dtype()) };
    dense(data, tensor.device().inner())
}

/// An ordinary tensor that needs no gradient.
fn dense<A: ZeroAutodiff, const D: usize>(
    data: TensorData,
    device: &<A::Base as BackendTypes>::Device,
) -> Tensor<A, D> {
    let tensor = ZeroTensor::Dense(<A::Base as FloatTensorOps<A::Base>>::float_from_data(data, device));
    Tensor::from_inner(Tensor::from_primitive(TensorPrimitive::Float(tensor)))
}

/// The state of layers as the last forward pass has left it: Burn takes an update in when the next one comes, or when the module
/// is used without gradients.
pub(crate) fn end_forward<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) {
    drop(module.valid());
}

/// The tensors of `module` that are state of its layers, which a forward pass changes in place (Burn's `RunningState`: a batch
/// norm's mean and variance), and no parameters. To a visitor both look alike; but such state is what a module shares with its
/// clone. So a clone's tensors are replaced, and what has changed in the module is put back.
pub(crate) fn buffers<A: ZeroAutodiff, M: Module<A>>(module: &M) -> HashSet<ParamId> {
    /// Replaces all tensors by a stamp, a kind of tensor that no module has.
    struct Replace<A: ZeroAutodiff> {
        taken: Vec<Option<TensorPrimitive<A>>>,
    }
    impl<A: ZeroAutodiff> ModuleMapper<A> for Replace<A> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
            // What is trained is no such state; what is like a stamp by itself could not be told from one.
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
