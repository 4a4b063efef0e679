//! Helpers that the models share: setting parameters by path, and layers of fused operations.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_nn::{LayerNorm, Linear};
use zero_models::{ModelConfig, ModelError, ModelParam};
use zero_param::{dropout, layer_norm, linear};

/// Fills `model` with the values in a Hugging Face folder, or, without a folder, with those that `fresh` generates.
pub fn begin<M: Module, E: From<ModelError>>(
    model: M,
    config: &ModelConfig,
    folder: Option<&Path>,
    fresh: impl FnOnce(&mut dyn FnMut(ModelParam, Vec<f32>)),
) -> Result<M, E> {
    let mut values = BTreeMap::new();
    let mut each = |param: ModelParam, of| drop(values.insert(param.path, of));
    match folder {
        Some(folder) => config.read(folder, &mut each)?,
        None => fresh(&mut each),
    }
    Ok(model.map(&mut Fill { path: Vec::new(), values }))
}

/// Returns an error for the first key of a configuration whose value the model does not support.
pub fn check(model: &'static str, keys: &[(&'static str, bool, &str)]) -> Result<(), ModelError> {
    let other = keys.iter().find(|(_, is_so, _)| !is_so);
    other.map_or(Ok(()), |&(key, _, supported)| {
        let (got, supported) = ("another value".into(), supported.into());
        Err(ModelError::Unsupported { model, key, got, supported })
    })
}

struct Fill {
    path: Vec<String>,
    values: BTreeMap<String, Vec<f32>>,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let values = self.values.remove(&path).unwrap_or_else(|| panic!("no values for parameter {path}"));
        let (id, tensor, mapper) = param.consume();
        let (shape, device, train) = (tensor.shape(), tensor.device(), tensor.is_require_grad());
        let filled = Tensor::from_data(TensorData::new(values, shape), &device);
        Param::from_mapped_value(id, filled.set_require_grad(train), mapper)
    }
}

pub fn norm(norm: &LayerNorm, epsilon: f64, x_nd: Tensor<2>) -> Tensor<2> {
    layer_norm(x_nd, norm.gamma.val(), norm.beta.as_ref().map(Param::val), epsilon)
}

/// Applies `layer` to rows, and adds `residual_nf` if there is one.
pub fn dense(layer: &Linear, x_nd: Tensor<2>, residual_nf: Option<Tensor<2>>) -> Tensor<2> {
    linear(x_nd, layer.weight.val(), layer.bias.as_ref().map(Param::val), residual_nf)
}

/// Applies `layer` to rows, then dropout with `probability`, and adds `residual_nf`.
pub fn dense_onto(layer: &Linear, x_nd: Tensor<2>, probability: f64, residual_nf: Tensor<2>) -> Tensor<2> {
    match probability {
        0.0 => dense(layer, x_nd, Some(residual_nf)),
        _ => residual_nf + dropout(dense(layer, x_nd, None), probability),
    }
}
