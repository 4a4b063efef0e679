//! Layer state: tensors that a forward pass changes in place, such as the running statistics of a batch norm (Burn's `RunningState`). They
//! are no parameters. Each rank has its own, as in Burn, and a checkpoint holds rank 0's.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Shape, Tensor, TensorData};

/// A tensor of layer state.
#[derive(Debug)]
pub(crate) struct LayerState {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    pub(crate) shape: Shape,
}

/// A mark on parameters.
#[derive(Module, Debug)]
struct Mark;

impl Reparameterization for Mark {
    const NAME: &'static str = "mark";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

struct Marker;

impl Reparameterizer for Marker {
    type Reparam = Mark;

    fn reparameterize<const D: usize>(&mut self, _: &str, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<Mark>) {
        (param, Some(Mark))
    }
}

/// Finds the layer state of a module. Visitors cannot tell it from frozen parameters, but it takes no reparameterization.
pub(crate) fn find<M: Module>(model: &M) -> Vec<LayerState> {
    #[derive(Default)]
    struct Unmarked {
        path: Vec<String>,
        found: Vec<LayerState>,
    }

    impl ModuleVisitor for Unmarked {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            if container_type == "Reparameterization" {
                // Of the tensor that was just visited.
                self.found.pop();
            }
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (id, path, shape) = (param.id, self.path.join("."), param.lazy_shape());
            self.found.push(LayerState { id, path, shape });
        }
    }

    let mut unmarked = Unmarked::default();
    model.clone().apply_reparameterization(Marker).visit(&mut unmarked);
    unmarked.found
}

/// Returns the values of a module's layer state in fp32, after its last forward pass.
pub(crate) fn read<M: Module>(model: &M, of: &[LayerState]) -> HashMap<ParamId, Vec<f32>> {
    struct Read(HashSet<ParamId>, HashMap<ParamId, Vec<f32>>);

    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.0.contains(&param.id) {
                self.1.insert(param.id, param.val().into_data().iter::<f32>().collect());
            }
        }
    }

    let mut read = Read(of.iter().map(|state| state.id).collect(), HashMap::new());
    if !of.is_empty() {
        // Burn completes the update of a forward pass when the module is used without gradients.
        drop(model.valid());
        model.visit(&mut read);
    }
    read.1
}

/// Gives a module's layer state these values.
pub(crate) fn write<M: Module>(model: M, values: HashMap<ParamId, Vec<f32>>) -> M {
    struct Write(HashMap<ParamId, Vec<f32>>);

    impl ModuleMapper for Write {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(values) = self.0.remove(&param.id) else { return param };
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, like(&tensor, values), mapper)
        }
    }

    if values.is_empty() { model } else { model.map(&mut Write(values)) }
}

/// Returns a tensor of these values with the shape, type and device of `tensor`.
pub(crate) fn like<const D: usize>(tensor: &Tensor<D>, values: Vec<f32>) -> Tensor<D> {
    let data = TensorData::new(values, tensor.shape());
    let made = Tensor::from_data(data, &tensor.device());
    if tensor.dtype() == DType::F32 { made } else { made.cast(tensor.dtype()) }
}
