//! Whole parameters for a while: reading and changing them outside of a forward pass. What DeepSpeed calls
//! `GatheredParameters`.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorData;
use burn_backend::distributed::DistributedParamId;
use burn_backend::ops::FloatTensorOps;

use crate::context::{Context, stop};
use crate::module::ZeroAutodiff;
use crate::shard::{Cell, Kind, Origin};
use crate::tensor::{Shard, ZeroTensor};

/// A parameter of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamMeta {
    /// Its identity on this rank; ranks differ.
    pub id: ParamId,
    /// Names of fields from the module down, with dots: "h.0.attn.c_attn.weight".
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether it is trained.
    pub trained: bool,
}

/// The float parameters of a module, in the order of its fields.
pub fn parameters<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> Vec<ParamMeta> {
    struct Metas(Vec<String>, Vec<ParamMeta>);
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Metas {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let tensor = param.val();
            let shape = tensor.dims().to_vec();
            self.1.push(ParamMeta { id: param.id, path: self.0.join("."), shape, trained: tensor.is_require_grad() });
        }
    }
    let mut metas = Metas(Vec::new(), Vec::new());
    module.visit(&mut metas);
    metas.1
}

/// A whole parameter in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// Which parameter it is.
    pub meta: ParamMeta,
    /// Its elements in row-major order, in fp32.
    pub values: Vec<f32>,
}

/// Gathers the parameters that `select` names, runs `f` on them on every rank, and, with `modify_on_rank`, makes what that
/// rank has left in `values` the parameters' values on all ranks. Every rank must call it alike.
///
/// Memory: the selected parameters whole, on every rank; select one at a time where that matters.
///
/// # Panics
///
/// With the launcher's error when a collective fails, when `modify_on_rank` is no rank, or when `f` changes the number of
/// a parameter's values.
pub fn gathered<A: ZeroAutodiff, M: AutodiffModule<A>, R>(
    module: M,
    select: impl Fn(&ParamMeta) -> bool,
    modify_on_rank: Option<usize>,
    f: impl FnOnce(&mut [Gathered]) -> R,
) -> (M, R) {
    struct Read<A: ZeroAutodiff> {
        wanted: HashMap<ParamId, ParamMeta>,
        found: Vec<Gathered>,
        _backend: std::marker::PhantomData<A>,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Read<A> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            if let Some(meta) = self.wanted.remove(&param.id) {
                let values = param.val().inner().into_data().iter::<f32>().collect();
                self.found.push(Gathered { meta, values });
            }
        }
    }
    let context = Context::<A::Base>::current();
    let wanted = parameters::<A, M>(&module).into_iter().filter(|meta| select(meta)).map(|meta| (meta.id, meta));
    let mut read = Read::<A> { wanted: wanted.collect(), found: Vec::new(), _backend: std::marker::PhantomData };
    module.visit(&mut read);
    let mut found = read.found;
    let result = f(&mut found);
    let Some(root) = modify_on_rank else { return (module, result) };
    if root >= context.world {
        stop(format!("modify_on_rank is {root}, but there are {} ranks, from 0", context.world));
    }

    let mut replacements = HashMap::new();
    for Gathered { meta, values } in found {
        let expected: usize = meta.shape.iter().product();
        if values.len() != expected {
            stop(format!("{} has {expected} elements, but {} values were left in its place", meta.path, values.len()));
        }
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = context.broadcast_bytes_from(bytes, root);
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("chunks of four bytes")));
        replacements.insert(meta.id, values.collect::<Vec<f32>>());
    }
    context.barrier("before gathered parameters are replaced");
    (module.map(&mut Replace::<A> { context, replacements, _backend: std::marker::PhantomData }), result)
}

struct Replace<A: ZeroAutodiff> {
    context: Arc<Context<A::Base>>,
    replacements: HashMap<ParamId, Vec<f32>>,
    _backend: std::marker::PhantomData<A>,
}

impl<A: ZeroAutodiff> ModuleMapper<A> for Replace<A> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let Some(values) = self.replacements.remove(&param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let requires_grad = tensor.is_require_grad();
        let TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, .. })) = tensor.inner().into_primitive() else {
            stop(format!(
                "parameter {id} is an ordinary tensor: call zero_burn::module::prepare on the model on rank {}",
                self.context.rank
            ));
        };
        let range = cell.partition.range(cell.place());
        let piece = if range.is_empty() { vec![0.0] } else { values[range].to_vec() };
        let len = piece.len();
        let data = TensorData::new(piece, [len]).convert_dtype(cell.dtype);
        let piece = <A::Base as FloatTensorOps<A::Base>>::float_from_data(data, &cell.device);
        let next = Cell::ready(cell.template(Kind::Parameter, Origin::Version), piece);
        let tensor =
            Tensor::<A::InnerBackend, D>::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(Shard::new(next))));
        let mut tensor = Tensor::<A, D>::from_inner(tensor).set_require_grad(requires_grad);
        if requires_grad {
            tensor = tensor.set_distributed(DistributedParamId::from(id.val()));
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}
