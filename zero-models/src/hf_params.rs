//! Hugging Face names of a module's parameters, and loading by them.
//!
//! In go a module, the table of its [`Family`] and a checkpoint; out comes the module with loaded parameters. Names,
//! shapes and element types of everything are checked before the first tensor is loaded. Then one parameter at a time
//! is created on the device by [`zero_ops::parameter_from`]: of a sharded parameter a rank converts its piece.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};
use zero_ops::FusedBackend;

use crate::safetensors_file::{Checkpoint, StoredTensor};
use crate::{KeyMap, ModelError, Result, ShapeMismatch};

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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// A family of models, by its configuration: which parameters it has, in the module and in a Hugging Face checkpoint.
pub(crate) trait Family: Sized + 'static {
    /// The layers, in the order in which the module visits them.
    const LAYERS: &'static [Layer<Self>];
    /// Names under which a checkpoint may repeat a parameter, with the parameter.
    const REPEATS: &'static [(&'static str, &'static str)];

    /// How many blocks there are of a layer that has a `*` in its path, and of those beside it.
    fn blocks(&self, layer: &str) -> usize;

    /// Whether the head's weight is the embedding of the tokens.
    fn is_tied(&self) -> bool;

    /// Whether a model of this configuration has this layer, by its path.
    fn has(&self, _layer: &str) -> bool {
        true
    }

    /// Whether a tensor of this name is a head's, which checkpoints of other heads have not.
    fn is_of_head(_name: &str) -> bool {
        false
    }

    /// Whether what is not loaded from a checkpoint is as the model takes it to be.
    fn check(_checkpoint: &Checkpoint) -> Result<()> {
        Ok(())
    }

    /// The name in the `state_dict` of a tensor of this name in a checkpoint, whether the model has it or not; `None` for a
    /// buffer that is computed from the configuration and not loaded.
    fn in_state_dict(name: &str) -> Option<String>;
}

/// A layer, or a parameter that is a field of its own. A `*` stands for the number of a block.
pub(crate) struct Layer<C> {
    /// Burn's field names from the module down, with dots.
    path: &'static str,
    /// The name in the `state_dict`.
    name: &'static str,
    kind: Kind,
    /// The rows of the layer's matrix in the module, and its columns, which are as many as other parameters' elements.
    sizes: fn(&C) -> [usize; 2],
}

/// What parameters a layer has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A matrix without a layer.
    Table,
    /// As a table; absent if it is the embedding of the tokens.
    Head,
    /// A bias without a layer, or of one without.
    Bias,
    /// The factors of a norm that adds nothing.
    Scale,
    /// A layer norm.
    Norm,
    /// A linear layer, whose weight `torch.nn.Linear` has transposed.
    Linear,
    /// As a linear layer, without a bias.
    Weight,
    /// A linear layer that is transformers' `Conv1D`, which has the weight as Burn has it.
    Conv1d,
}

/// A row of [`Family::LAYERS`].
pub(crate) const fn layer<C>(
    path: &'static str,
    name: &'static str,
    kind: Kind,
    sizes: fn(&C) -> [usize; 2],
) -> Layer<C> {
    Layer { path, name, kind, sizes }
}

impl<C> Layer<C> {
    /// Whether the layer's matrix is stored transposed.
    fn is_transposed(&self) -> bool {
        matches!(self.kind, Kind::Linear | Kind::Weight)
    }

    /// The parameters' paths and names in a block, and whether they are matrices.
    fn parameters(&self, block: &str) -> impl Iterator<Item = (String, String, bool)> {
        let fields: &[_] = match self.kind {
            Kind::Table | Kind::Head => &[("", ".weight", true)],
            Kind::Bias => &[("", ".bias", false)],
            Kind::Scale => &[("", ".weight", false)],
            Kind::Weight => &[(".weight", ".weight", true)],
            Kind::Norm => &[(".gamma", ".weight", false), (".beta", ".bias", false)],
            Kind::Linear | Kind::Conv1d => &[(".weight", ".weight", true), (".bias", ".bias", false)],
        };
        let [path, name] = [self.path, self.name].map(|text| text.replace('*', block));
        fields.iter().map(move |(field, leaf, matrix)| (format!("{path}{field}"), format!("{name}{leaf}"), *matrix))
    }
}

/// The parameters of a model of this configuration, in the order in which the module visits them.
pub(crate) fn parameters<C: Family>(config: &C) -> Vec<ModelParam> {
    let in_blocks = |layer: &Layer<C>| layer.path.contains('*');
    let mut found = Vec::new();
    for layers in C::LAYERS.chunk_by(|a, b| in_blocks(a) == in_blocks(b)) {
        let blocks = if in_blocks(&layers[0]) { config.blocks(layers[0].path) } else { 1 };
        for block in 0..blocks {
            let tied = |layer: &Layer<C>| layer.kind == Kind::Head && config.is_tied();
            for layer in layers.iter().filter(|layer| config.has(layer.path) && !tied(layer)) {
                let sizes = (layer.sizes)(config);
                found.extend(layer.parameters(&block.to_string()).map(|(path, name, matrix)| ModelParam {
                    path,
                    shape: if matrix { sizes.to_vec() } else { vec![sizes[1]] },
                    name,
                    transposed: matrix && layer.is_transposed(),
                }));
            }
        }
    }
    found
}

/// The Hugging Face name of the parameter at a path of Burn's field names, and whether it is transposed there.
fn hf_name<C: Family>(path: &[String]) -> (String, bool) {
    if let [before @ .., adapter, field] = path
        && let Some(table) = adapter.strip_suffix("adapter")
    {
        // Of the table that it is named by, or of the layer that it is in.
        let (is_table, of) = (!table.is_empty(), if table.is_empty() { "weight" } else { table.trim_end_matches('_') });
        let of: Vec<String> = before.iter().cloned().chain([of.to_string()]).collect();
        let (name, _) = hf_name::<C>(&of);
        return (crate::lora::peft_name(name.trim_end_matches(".weight"), field, is_table), true);
    }
    let block = path.iter().find(|field| field.parse::<usize>().is_ok()).map_or("", String::as_str);
    let path = path.join(".");
    for layer in C::LAYERS {
        if let Some((_, name, matrix)) = layer.parameters(block).find(|(at, ..)| *at == path) {
            return (name, matrix && layer.is_transposed());
        }
    }
    unreachable!("no parameter of the family is at {path}")
}

/// The parameters in the order in which the module visits them. No lazy parameter is allocated.
pub(crate) fn describe<C: Family, B: Backend>(model: &impl Module<B>) -> Vec<HfParam> {
    described(model, &|path, _| hf_name::<C>(path))
}

fn described<B: Backend>(model: &impl Module<B>, name: Name<'_>) -> Vec<HfParam> {
    let mut visitor = Describe { name, path: Vec::new(), found: Vec::new() };
    model.visit(&mut visitor);
    visitor.found
}

/// The name of the parameter at a path of the module with so many dimensions, and whether it is transposed.
type Name<'a> = &'a dyn Fn(&[String], usize) -> (String, bool);

/// Loads every parameter of any module from a folder with safetensors files (`model.safetensors`, or shards with an index), of
/// another family than this crate has. `names` gives each its name there, from its path in the module; all tensors must be
/// parameters. Over a backend that shards parameters each rank reads its own part.
///
/// # Errors
/// As [`gpt2::weights::load`](crate::gpt2::weights::load).
pub fn load_module<B: FusedBackend, M: Module<B>>(
    module: M,
    dir: &Path,
    names: &KeyMap,
    device: &B::Device,
) -> Result<M> {
    let checkpoint = Checkpoint::open(dir)?;
    let params = described(&module, &|path, dims| {
        let name = names.name(&path.join("."));
        let transposed = dims == 2 && names.transposes(&name);
        (name, transposed)
    });
    load_params(module, params, &checkpoint, AS_NAMED, device)
}

/// Loads every parameter of the model from the checkpoint.
pub(crate) fn load_checked<C: Family, B: FusedBackend, M: Module<B>>(
    model: M,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<M> {
    let params = describe::<C, B>(&model);
    load_params(model, params, checkpoint, rules::<C>(), device)
}

/// As [`load_checked`]; parameters of a head that the checkpoint has not stay as they are, and are named.
pub(crate) fn load_beneath_head<C: Family, B: FusedBackend, M: Module<B>>(
    model: M,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<(M, Vec<String>)> {
    let params = describe::<C, B>(&model);
    let fresh = params.iter().map(|param| param.name.clone()).filter(|name| {
        C::is_of_head(name) && !checkpoint.names().any(|stored| C::in_state_dict(stored).as_deref() == Some(name))
    });
    let fresh: Vec<String> = fresh.collect();
    let rules = Rules { fresh_head: true, ..rules::<C>() };
    Ok((load_params(model, params, checkpoint, rules, device)?, fresh))
}

fn load_params<B: FusedBackend, M: Module<B>>(
    model: M,
    params: Vec<HfParam>,
    checkpoint: &Checkpoint,
    rules: Rules<'_>,
    device: &B::Device,
) -> Result<M> {
    let transposed: Vec<bool> = params.iter().map(|param| param.transposed).collect();
    let named: Vec<_> = params.into_iter().map(|param| (param.name, param.shape)).collect();
    let sources = sources(&named, checkpoint, rules)?;
    let tensors: Vec<_> =
        sources.into_iter().zip(transposed).map(|(stored, transposed)| Some((stored?, transposed))).collect();
    load_all(model, tensors, checkpoint, device)
}

/// Loads these parameters alone, each under its own name, and leaves the others.
pub(crate) fn load_some<B: FusedBackend, M: Module<B>>(
    module: M,
    params: &[ModelParam],
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<M> {
    let stored: BTreeMap<String, _> = stored(params.to_vec(), checkpoint, AS_NAMED)?
        .into_iter()
        .map(|(param, stored)| (param.path, (stored, param.transposed)))
        .collect();
    let paths = described(&module, &|path, _| (path.join("."), false));
    let tensors: Vec<_> = paths.iter().map(|param| stored.get(&param.name).copied()).collect();
    load_all(module, tensors, checkpoint, device)
}

/// Parameters with their tensors in a checkpoint.
pub(crate) fn stored<'a>(
    params: Vec<ModelParam>,
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Vec<(ModelParam, StoredTensor<'a>)>> {
    let named: Vec<_> = params.iter().map(|param| (param.name.clone(), param.hf_shape())).collect();
    let sources = sources(&named, checkpoint, rules)?.into_iter().map(|stored| stored.expect("none may be missing"));
    Ok(params.into_iter().zip(sources).collect())
}

/// Of each parameter, by name and shape, its tensor, if it is not one that may be missing.
fn sources<'a>(
    params: &[(String, Vec<usize>)],
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Vec<Option<StoredTensor<'a>>>> {
    (rules.check)(checkpoint)?;
    let sources = match_names(params, checkpoint, rules)?;
    check_shapes(params, &sources, checkpoint)?;
    Ok(sources.into_iter().map(|found| found.first().copied()).collect())
}

/// For each parameter the tensor to load, and then the tensors that repeat it.
type Sources<'a> = Vec<Vec<StoredTensor<'a>>>;

/// How parameters find their tensors.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// [`Family::in_state_dict`]
    in_state_dict: &'a dyn Fn(&str) -> Option<String>,
    /// [`Family::REPEATS`]
    repeats: &'a [(&'a str, &'a str)],
    /// [`Family::is_of_head`]
    is_of_head: fn(&str) -> bool,
    /// [`Family::check`]
    check: fn(&Checkpoint) -> Result<()>,
    /// Whether a head may be missing.
    fresh_head: bool,
}

/// Tensors under the names of parameters.
pub(crate) const AS_NAMED: Rules<'static> = Rules {
    // PEFT saves the table beside its adapter.
    in_state_dict: &|name| (!name.contains(".base_layer.")).then(|| name.to_string()),
    repeats: &[],
    is_of_head: |_| false,
    check: |_| Ok(()),
    fresh_head: false,
};

/// Those of a family.
pub(crate) fn rules<C: Family>() -> Rules<'static> {
    let (in_state_dict, repeats) = (&C::in_state_dict, C::REPEATS);
    Rules { in_state_dict, repeats, is_of_head: C::is_of_head, check: C::check, fresh_head: false }
}

fn match_names<'a>(
    params: &[(String, Vec<usize>)],
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Sources<'a>> {
    let mut in_file: BTreeMap<String, StoredTensor<'a>> = BTreeMap::new();
    for name in checkpoint.names() {
        let Some(parameter) = (rules.in_state_dict)(name) else { continue };
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
    for (name, _) in params {
        // A name that repeats another parameter in one model is a parameter of its own in another (an untied head).
        let repeats =
            rules.repeats.iter().filter(|(repeat, of)| of == name && !params.iter().any(|(other, _)| other == repeat));
        let names = std::iter::once(name.as_str()).chain(repeats.map(|(repeat, _)| *repeat));
        let found: Vec<_> = names.filter_map(|name| in_file.remove(name)).collect();
        if found.is_empty() && !(rules.fresh_head && (rules.is_of_head)(name)) {
            missing.push(name.clone());
        }
        sources.push(found);
    }
    in_file.retain(|name, _| !(rules.is_of_head)(name));
    if missing.is_empty() && in_file.is_empty() {
        return Ok(sources);
    }
    Err(ModelError::TensorNames {
        dir: checkpoint.dir().to_path_buf(),
        missing,
        unexpected: in_file.values().map(|stored| stored.name.to_string()).collect(),
    })
}

fn check_shapes(params: &[(String, Vec<usize>)], sources: &Sources<'_>, checkpoint: &Checkpoint) -> Result<()> {
    let mut mismatches = Vec::new();
    for ((_, shape), found) in params.iter().zip(sources) {
        for stored in found {
            stored.check_dtype()?;
            if stored.shape != shape {
                mismatches.push(ShapeMismatch {
                    name: stored.name.to_string(),
                    path: stored.path.to_path_buf(),
                    expected: shape.clone(),
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
    name: Name<'a>,
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
        let (name, transposed) = (self.name)(&self.path, D);
        let mut shape = param.lazy_shape().dims::<D>().to_vec();
        if transposed {
            shape.reverse();
        }
        self.found.push(HfParam { id: param.id, name, shape, transposed });
    }
}

fn load_all<B: FusedBackend, M: Module<B>>(
    module: M,
    tensors: Vec<Option<(StoredTensor<'_>, bool)>>,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<M> {
    let mut load = Load::<B> { tensors: tensors.into_iter(), checkpoint, device, failed: None };
    let module = module.map(&mut load);
    load.failed.map_or(Ok(module), Err)
}

struct Load<'a, B: Backend> {
    /// Of each parameter, in visiting order, and whether it is transposed; `None` for one that stays.
    tensors: std::vec::IntoIter<Option<(StoredTensor<'a>, bool)>>,
    checkpoint: &'a Checkpoint,
    device: &'a B::Device,
    failed: Option<ModelError>,
}

impl<B: FusedBackend> ModuleMapper<B> for Load<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some((stored, transposed)) = self.tensors.next().expect("a module maps the parameters that it visits")
        else {
            return param;
        };
        let mut shape: [usize; D] = stored.shape.try_into().expect("shapes were checked");
        if transposed {
            shape.reverse();
        }
        let (device, id) = (self.device, param.id);
        let elements = |range| {
            let elements = if transposed { stored.elements_transposed(range) } else { stored.elements(range) };
            elements.expect("element types were checked")
        };
        let quantized = self.checkpoint.quantized.as_ref().filter(|(_, weights)| weights.contains(&id));
        if let (Some((format, _)), Ok(shape)) = (quantized, <[usize; 2]>::try_from(&shape[..])) {
            let mut finite = true;
            let rows = zero_ops::quantized_parameter::<B>(shape, *format, device, |range| {
                let elements = elements(range);
                finite &= elements.iter().all(|x| x.is_finite());
                elements
            });
            if !finite {
                let (name, path) = (stored.name.to_string(), stored.path.to_path_buf());
                self.failed.get_or_insert(ModelError::NotFinite { name, path });
            }
            let rows: Tensor<B, D> = Tensor::from_primitive(rows.into_primitive());
            return Param::initialized(id, rows.set_require_grad(false));
        }
        let tensor = zero_ops::parameter_from::<B, D>(shape, device, elements);
        let configured_for = param.lazy_device();
        // Keeps the id, and whether the parameter is trained, without drawing the values it would start from.
        let loaded = param.transform_for_load(tensor, id);
        if configured_for == *device { loaded } else { loaded.fork(device) }
    }
}

/// What a module `weights` offers for its family's model, whose class in transformers is `$class`.
macro_rules! hf_weights {
    ($model:ident, $config:ident, $class:literal) => {
        /// Loads the model that lies in a folder, its `config.json` and its weights.
        ///
        /// # Errors
        #[doc = concat!("As [`", stringify!($config), "::from_file`] and [`load`].")]
        pub fn from_pretrained<B: zero_ops::FusedBackend>(
            dir: &std::path::Path,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            let config = $config::from_file(&dir.join("config.json"))?;
            load(config.init(device), dir, device)
        }

        /// Loads all parameters from the checkpoint in a folder, one at a time, onto `device`. Where parameters are sharded,
        /// each rank converts the elements of its own pieces only; every rank must read the same checkpoint.
        ///
        /// The parameters keep their ids, and whether they are trained.
        ///
        /// # Errors
        /// When the checkpoint cannot be read, or its names, shapes or element types are not the model's. All of that is
        /// checked before the first tensor is loaded.
        pub fn load<B: zero_ops::FusedBackend>(
            model: $model<B>,
            dir: &std::path::Path,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            load_from(model, &$crate::safetensors_file::Checkpoint::open(dir)?, device)
        }

        /// As [`load`], from a checkpoint that is open already.
        ///
        /// # Errors
        /// When its names, shapes or element types are not the model's.
        pub fn load_from<B: zero_ops::FusedBackend>(
            model: $model<B>,
            checkpoint: &$crate::safetensors_file::Checkpoint,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            $crate::hf_params::load_checked::<$config, B, _>(model, checkpoint, device)
        }

        #[doc = concat!("Every parameter with its name in the `state_dict` of `", $class, "`, in visiting order.")]
        pub fn hf_names<B: burn::tensor::backend::Backend>(model: &$model<B>) -> Vec<(burn::module::ParamId, String)> {
            hf_params(model).into_iter().map(|param| (param.id, param.name)).collect()
        }

        #[doc = concat!("Every parameter as the `state_dict` of `", $class, "` has it, in visiting order.")]
        pub fn hf_params<B: burn::tensor::backend::Backend>(model: &$model<B>) -> Vec<$crate::HfParam> {
            $crate::hf_params::describe::<$config, B>(model)
        }

        /// The parameters of a model of this configuration, in visiting order, without a model.
        pub fn parameters(config: &$config) -> Vec<$crate::ModelParam> {
            $crate::hf_params::parameters(config)
        }
    };
}
pub(crate) use hf_weights;
