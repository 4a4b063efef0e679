//! What the models have in common: parameters of Hugging Face's files, and layers by fused operations.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_nn::{LayerNorm, Linear};
use safetensors::SafeTensors;
use serde::de::DeserializeOwned;
use zero_param::{layer_norm, linear};

/// `config.json` of a folder. A program's own error handling goes where this and [`load`] panic.
pub fn config<C: DeserializeOwned>(folder: &Path) -> C {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Gives each parameter of `model` the values of a folder's file. `name_of` tells the name there of a path, whose norms have `weight`
/// and `bias` already, and whether the matrix lies transposed.
pub fn load<M: Module>(model: M, folder: &Path, name_of: fn(&str) -> (String, bool)) -> M {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| data.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    let tensors = file.iter().map(|(name, view)| (name.to_string(), floats(view.data()))).collect();
    model.map(&mut Fill { path: Vec::new(), tensors, name_of })
}

struct Fill {
    path: Vec<String>,
    tensors: BTreeMap<String, Vec<f32>>,
    name_of: fn(&str) -> (String, bool),
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".").replace("gamma", "weight").replace("beta", "bias");
        let (name, is_transposed) = (self.name_of)(&path);
        let values = self.tensors.remove(&name).unwrap_or_else(|| panic!("{name} is not in the file"));
        let (id, tensor, mapper) = param.consume();
        let (mut shape, device, train) = (tensor.dims(), tensor.device(), tensor.is_require_grad());
        let loaded = match is_transposed {
            true => {
                shape.reverse();
                // Read back, so that the parameter is no view.
                Tensor::<D>::from_data(TensorData::new(values, shape), &device).inner().transpose().into_data()
            }
            false => TensorData::new(values, shape),
        };
        Param::from_mapped_value(id, Tensor::from_data(loaded, &device).set_require_grad(train), mapper)
    }
}

pub fn norm(norm: &LayerNorm, epsilon: f64, x_nd: Tensor<2>) -> Tensor<2> {
    layer_norm(x_nd, norm.gamma.val(), norm.beta.as_ref().map(Param::val), epsilon)
}

/// `layer` of rows, added to `residual_nf` if there is one.
pub fn dense(layer: &Linear, x_nd: Tensor<2>, residual_nf: Option<Tensor<2>>) -> Tensor<2> {
    linear(x_nd, layer.weight.val(), layer.bias.as_ref().map(Param::val), residual_nf)
}
