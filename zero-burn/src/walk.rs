//! Traversal of a module's parameters, and of a set of gradients, independent of their number of dimensions.
//!
//! Burn passes each parameter to a visitor as a tensor of `D` dimensions. Nothing here depends on `D`: the functions read and replace
//! [`Zero`](crate::Zero)'s own tensor below autodiff's.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::distributed::DistributedParamId;

use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::{Cell, Slot};
use crate::tensor::ZeroTensor;

/// A parameter of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamMeta {
    /// Its identity on this rank. Burn draws it at random, so it differs from rank to rank and from run to run. Use `path` to compare or
    /// send parameters.
    pub id: ParamId,
    /// Names of the fields from the module down, separated by dots: "h.0.attn.c_attn.weight".
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// True if it is trained.
    pub trained: bool,
}

/// Calls `each` for every parameter of `module`, in the order of its fields. A parameter that is not a float tensor comes without its
/// tensor.
pub(crate) fn visit<A: ZeroAutodiff, M: Module<A>>(
    module: &M,
    each: impl FnMut(ParamMeta, Option<ZeroTensor<A::Base>>),
) {
    module.visit(&mut Visit { path: Vec::new(), each, _backend: PhantomData::<A> });
}

/// Replaces each parameter for which `select` returns a value by the result of `replace` for that value. Parameters are trained as before.
/// `replace` gets the only handle of the tensor that the module had.
pub(crate) fn map<A: ZeroAutodiff, M: Module<A>, T>(
    module: M,
    select: impl FnMut(&ParamMeta, ZeroTensor<A::Base>) -> Option<T>,
    replace: impl FnMut(&ParamMeta, T, ZeroTensor<A::Base>) -> ZeroTensor<A::Base>,
) -> M {
    module.map(&mut Map { path: Vec::new(), select, replace, leaves: HashMap::new(), _types: PhantomData::<(A, T)> })
}

/// Returns a tensor that is a leaf of the graph, if it is trained; its gradient is reduced as that of parameter `id`.
pub(crate) fn leaf<A: ZeroAutodiff, const D: usize>(
    tensor: ZeroTensor<A::Base>,
    id: ParamId,
    trained: bool,
) -> Tensor<A, D> {
    let tensor = Tensor::<A::InnerBackend, D>::from_primitive(TensorPrimitive::Float(tensor));
    let tensor = Tensor::<A, D>::from_inner(tensor).set_require_grad(trained);
    if trained { tensor.set_distributed(DistributedParamId::from(id.val())) } else { tensor }
}

/// Returns [`Zero`](crate::Zero)'s tensor below autodiff's, if it is a float tensor.
pub(crate) fn below<A: ZeroAutodiff, const D: usize>(tensor: Tensor<A, D>) -> Option<ZeroTensor<A::Base>> {
    match tensor.inner().into_primitive() {
        TensorPrimitive::Float(tensor) => Some(tensor),
        TensorPrimitive::QFloat(_) => None,
    }
}

/// Returns a parameter's gradient.
pub(crate) fn gradient<A: ZeroAutodiff>(grads: &GradientsParams, id: ParamId) -> Option<ZeroTensor<A::Base>> {
    grads.get::<A::InnerBackend, 1>(id).map(primitive::<A>)
}

/// Removes and returns a parameter's gradient.
pub(crate) fn take_gradient<A: ZeroAutodiff>(grads: &mut GradientsParams, id: ParamId) -> Option<ZeroTensor<A::Base>> {
    grads.remove::<A::InnerBackend, 1>(id).map(primitive::<A>)
}

/// Inserts a parameter's gradient.
pub(crate) fn put_gradient<A: ZeroAutodiff>(grads: &mut GradientsParams, id: ParamId, tensor: ZeroTensor<A::Base>) {
    let tensor = Tensor::<A::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
    grads.register(id, tensor);
}

fn primitive<A: ZeroAutodiff>(tensor: Tensor<A::InnerBackend, 1>) -> ZeroTensor<A::Base> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(tensor) => tensor,
        TensorPrimitive::QFloat(_) => unreachable!("gradients are floats"),
    }
}

struct Visit<A, F> {
    path: Vec<String>,
    each: F,
    _backend: PhantomData<A>,
}

impl<A: ZeroAutodiff, F: FnMut(ParamMeta, Option<ZeroTensor<A::Base>>)> Visit<A, F> {
    fn other(&mut self, id: ParamId, shape: Vec<usize>) {
        (self.each)(ParamMeta { id, path: self.path.join("."), shape, trained: false }, None);
    }
}

impl<A: ZeroAutodiff, F: FnMut(ParamMeta, Option<ZeroTensor<A::Base>>)> ModuleVisitor<A> for Visit<A, F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let tensor = param.val();
        (self.each)(meta(param.id, &self.path, &tensor), below(tensor));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<A, D, Int>>) {
        self.other(param.id, param.val().dims().to_vec());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<A, D, Bool>>) {
        self.other(param.id, param.val().dims().to_vec());
    }
}

struct Map<A: ZeroAutodiff, T, S, R> {
    path: Vec<String>,
    select: S,
    replace: R,
    /// Leaves created so far, by identity and cell: a clone of a parameter stays the same leaf.
    leaves: HashMap<(ParamId, *const Cell<A::Base>), TensorPrimitive<A>>,
    _types: PhantomData<(A, T)>,
}

impl<A, T, S, R> ModuleMapper<A> for Map<A, T, S, R>
where
    A: ZeroAutodiff,
    S: FnMut(&ParamMeta, ZeroTensor<A::Base>) -> Option<T>,
    R: FnMut(&ParamMeta, T, ZeroTensor<A::Base>) -> ZeroTensor<A::Base>,
{
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let tensor = param.val();
        let meta = meta(param.id, &self.path, &tensor);
        let Some(selected) = below(tensor).and_then(|tensor| (self.select)(&meta, tensor)) else { return param };
        let (id, tensor, mapper) = param.consume();
        let tensor = below(tensor).expect("it was one of floats");
        let tensor = (self.replace)(&meta, selected, tensor);
        let tensor = match &tensor {
            ZeroTensor::Shard(shard) => {
                let key = (id, Arc::as_ptr(&shard.cell));
                let new = || leaf::<A, D>(tensor.clone(), id, meta.trained).into_primitive();
                Tensor::from_primitive(self.leaves.entry(key).or_insert_with(new).clone())
            }
            _ => leaf(tensor, id, meta.trained),
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

fn meta<A: ZeroAutodiff, const D: usize>(id: ParamId, path: &[String], tensor: &Tensor<A, D>) -> ParamMeta {
    ParamMeta { id, path: path.join("."), shape: tensor.dims().to_vec(), trained: tensor.is_require_grad() }
}

/// Returns the slot of a prepared parameter. The slot of its own tensor takes precedence, because modules loaded from one record have the
/// same identities.
pub(crate) fn slot_of<B: Backend>(
    context: &Context<B>,
    id: ParamId,
    tensor: Option<&ZeroTensor<B>>,
) -> Option<Arc<Slot<B>>> {
    let own = match tensor {
        Some(ZeroTensor::Shard(shard)) if shard.is_parameter() => shard.cell.slot.clone(),
        _ => None,
    };
    let known = || context.rank.parameters.slots_of(DistributedParamId::from(id.val())).into_iter().next();
    own.filter(|slot| slot.id.get().is_some()).or_else(known)
}
