//! Hugging Face names of a module's parameters, and loading by them.
//!
//! In go a module, the [`Names`] of its family and a checkpoint; out comes the module with loaded parameters. Names,
//! shapes and element types of everything are checked before the first tensor is loaded. Then one parameter at a time
//! is created on the device by [`zero_ops::parameter_from`]: of a sharded parameter a rank converts its piece.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zero_ops::FusedBackend;

use crate::safetensors_file::{Checkpoint, StoredTensor};
use crate::{ModelError, ShapeMismatch};

/// A parameter of a model as Hugging Face knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfParam {
    /// Burn's id of the parameter.
    pub id: ParamId,
    /// Its name in the `state_dict` of the Hugging Face model.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// Whether it is stored there transposed: `torch.nn.Linear` has `[out, in]`, Burn `[in, out]`.
    pub transposed: bool,
}

/// A parameter by its place in the module and its place in a Hugging Face checkpoint: known from a configuration alone,
/// without a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelParam {
    /// Burn's field names from the module down, with dots: `h.0.attn.c_attn.weight`.
    pub path: String,
    /// Its shape in the module.
    pub shape: Vec<usize>,
    /// Its name in the `state_dict` of the Hugging Face model.
    pub name: String,
    /// Whether it is stored there transposed: `torch.nn.Linear` has `[out, in]`, Burn `[in, out]`.
    pub transposed: bool,
}

impl ModelParam {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its shape in the Hugging Face checkpoint.
    pub fn hf_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        shape
    }
}

/// How a family of models names its parameters.
pub(crate) struct Names {
    /// The Hugging Face name of the parameter at a path of Burn field names, and whether it is transposed there.
    pub of_path: fn(&[String]) -> (String, bool),
    /// What a tensor in a checkpoint is.
    pub in_file: fn(&str) -> FileTensor,
    /// Names under which a checkpoint may repeat a parameter, with the parameter.
    pub repeats: &'static [(&'static str, &'static str)],
}

/// What a tensor in a checkpoint is.
pub(crate) enum FileTensor {
    /// A parameter, of this name in the `state_dict`; whether the model has it is checked later.
    Parameter(String),
    /// A buffer that is computed from the configuration and not loaded.
    Buffer,
}

/// The parameters in the order in which the module visits them. No lazy parameter is allocated.
pub(crate) fn describe<B: Backend, M: Module<B>>(model: &M, names: &Names) -> Vec<HfParam> {
    let mut visitor = Describe { names, path: Vec::new(), found: Vec::new() };
    model.visit(&mut visitor);
    visitor.found
}

/// The parameters at `paths`, whose Hugging Face names and shapes are `hf_shapes`, in the same order.
pub(crate) fn at_paths(paths: Vec<String>, hf_shapes: Vec<(String, Vec<usize>)>, names: &Names) -> Vec<ModelParam> {
    assert_eq!(paths.len(), hf_shapes.len(), "one path for each parameter");
    let param = |(path, (name, mut shape)): (String, (String, Vec<usize>))| {
        let fields: Vec<String> = path.split('.').map(str::to_string).collect();
        let (named, transposed) = (names.of_path)(&fields);
        assert_eq!(named, name, "paths and names have one order");
        if transposed {
            shape.reverse();
        }
        ModelParam { path, shape, name, transposed }
    };
    paths.into_iter().zip(hf_shapes).map(param).collect()
}

/// Loads every parameter of the model from the checkpoint.
pub(crate) fn load_checked<B: FusedBackend, M: Module<B>>(
    model: M,
    names: &Names,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<M, ModelError> {
    let params = describe(&model, names);
    let sources = match_names(&params, names, checkpoint)?;
    check_shapes(&params, &sources, checkpoint)?;
    Ok(model.map(&mut Load {
        names,
        path: Vec::new(),
        sources: sources.into_iter().map(|(name, (stored, _))| (name, stored)).collect(),
        device,
    }))
}

/// For each parameter the tensor to load, and the tensors that repeat it.
type Sources<'a> = BTreeMap<String, (StoredTensor<'a>, Vec<StoredTensor<'a>>)>;

fn match_names<'a>(params: &[HfParam], names: &Names, checkpoint: &'a Checkpoint) -> Result<Sources<'a>, ModelError> {
    let mut in_file: BTreeMap<String, StoredTensor<'a>> = BTreeMap::new();
    for name in checkpoint.names() {
        let FileTensor::Parameter(parameter) = (names.in_file)(name) else {
            continue;
        };
        let stored = checkpoint.get(name).expect("it is one of its names");
        if let Some(first) = in_file.insert(parameter, stored) {
            return Err(ModelError::SameParameter {
                dir: checkpoint.dir().to_path_buf(),
                first: first.name.to_string(),
                second: name.to_string(),
            });
        }
    }

    let mut sources = Sources::new();
    let mut missing = Vec::new();
    for param in params {
        // A name that repeats another parameter in one model is a parameter of its own in another (an untied head).
        let repeats = names
            .repeats
            .iter()
            .filter(|(repeat, of)| *of == param.name && !params.iter().any(|other| other.name == *repeat));
        let mut found: Vec<_> = std::iter::once(param.name.as_str())
            .chain(repeats.map(|(repeat, _)| *repeat))
            .filter_map(|name| in_file.remove(name))
            .collect();
        if found.is_empty() {
            missing.push(param.name.clone());
        } else {
            let first = found.remove(0);
            sources.insert(param.name.clone(), (first, found));
        }
    }
    if missing.is_empty() && in_file.is_empty() {
        return Ok(sources);
    }
    Err(ModelError::TensorNames {
        dir: checkpoint.dir().to_path_buf(),
        missing,
        unexpected: in_file.values().map(|stored| stored.name.to_string()).collect(),
    })
}

fn check_shapes(params: &[HfParam], sources: &Sources<'_>, checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let mut mismatches = Vec::new();
    for param in params {
        let (first, repeats) = &sources[&param.name];
        for stored in std::iter::once(first).chain(repeats) {
            stored.check_dtype()?;
            if stored.shape != param.shape {
                mismatches.push(ShapeMismatch {
                    name: stored.name.to_string(),
                    path: stored.path.to_path_buf(),
                    expected: param.shape.clone(),
                    got: stored.shape.to_vec(),
                });
            }
        }
    }
    if mismatches.is_empty() {
        return Ok(());
    }
    Err(ModelError::TensorShapes { dir: checkpoint.dir().to_path_buf(), mismatches })
}

struct Describe<'a> {
    names: &'a Names,
    path: Vec<String>,
    found: Vec<HfParam>,
}

impl<B: Backend> ModuleVisitor<B> for Describe<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let (name, transposed) = (self.names.of_path)(&self.path);
        let mut shape = param.lazy_shape().dims::<D>().to_vec();
        if transposed {
            shape.reverse();
        }
        self.found.push(HfParam { id: param.id, name, shape, transposed });
    }
}

struct Load<'a, B: Backend> {
    names: &'a Names,
    path: Vec<String>,
    sources: BTreeMap<String, StoredTensor<'a>>,
    device: &'a B::Device,
}

impl<B: FusedBackend> ModuleMapper<B> for Load<'_, B> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (name, transposed) = (self.names.of_path)(&self.path);
        let stored = &self.sources[&name];
        let mut shape: [usize; D] = stored.shape.try_into().expect("shapes were checked");
        if transposed {
            shape.reverse();
        }
        let device = self.device;
        let tensor = zero_ops::parameter_from::<B, D>(shape, device, |range| {
            let elements = if transposed { stored.elements_transposed(range) } else { stored.elements(range) };
            elements.expect("element types were checked")
        });
        let configured_for = param.lazy_device();
        let id = param.id;
        // Keeps the id, and whether the parameter is trained, without drawing the values it would start from.
        let loaded = param.transform_for_load(tensor, id);
        if configured_for == *device { loaded } else { loaded.fork(device) }
    }
}
