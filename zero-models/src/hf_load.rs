//! Loading of a module's parameters by their Hugging Face names.
//!
//! Takes a module, the table of its [`Family`] and a checkpoint, and returns the module with loaded parameters.
//! [`zero_ops::parameter_from`] creates the parameters on the device, one at a time; for a sharded parameter, a rank converts only its
//! shard.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zero_ops::FusedBackend;

use crate::hf_params::{AS_NAMED, Family, ModelParam, Rules, rules, sources};
use crate::peft::peft_name;
use crate::safetensors_file::{Checkpoint, StoredTensor};
use crate::{KeyMap, ModelError, Result};

/// A parameter's name and layout in Hugging Face's model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfParam {
    /// Burn's id of the parameter.
    pub id: ParamId,
    /// Name in the `state_dict` of the Hugging Face model.
    pub name: String,
    /// Shape there.
    pub shape: Vec<usize>,
    /// True if it is stored transposed there: `torch.nn.Linear` has `[out, in]`, Burn `[in, out]`.
    pub transposed: bool,
}

/// Returns the Hugging Face name of the parameter at a path of Burn's field names, and whether it is stored transposed.
fn hf_name<C: Family>(path: &[String]) -> (String, bool) {
    if let [before @ .., adapter, field] = path
        && let Some(table) = adapter.strip_suffix("adapter")
    {
        // The table that the field is named after, or the layer that contains the adapter.
        let (is_table, of) = (!table.is_empty(), if table.is_empty() { "weight" } else { table.trim_end_matches('_') });
        let of: Vec<String> = before.iter().cloned().chain([of.to_string()]).collect();
        let (name, _) = hf_name::<C>(&of);
        return (peft_name(name.trim_end_matches(".weight"), field, is_table), true);
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

/// Describes the parameters in the order in which the module visits them. Lazy parameters are not allocated.
pub(crate) fn describe<C: Family, B: Backend>(model: &impl Module<B>) -> Vec<HfParam> {
    described(model, &|path, _| hf_name::<C>(path))
}

fn described<B: Backend>(model: &impl Module<B>, name: Name<'_>) -> Vec<HfParam> {
    let mut visitor = Describe { name, path: Vec::new(), found: Vec::new() };
    model.visit(&mut visitor);
    visitor.found
}

/// A function from a parameter's path and number of dimensions to its name, and whether it is stored transposed.
type Name<'a> = &'a dyn Fn(&[String], usize) -> (String, bool);

/// Loads every parameter of any module, including one outside this crate's families, from a folder with safetensors files
/// (`model.safetensors`, or shards with an index). `names` maps a parameter's path in the module to its name in the files; every tensor
/// must be a parameter. On a backend that shards parameters, each rank reads its own part.
///
/// # Errors
/// Same as [`gpt2::weights::load`](crate::gpt2::weights::load).
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

/// Same as [`load_checked`], but parameters of the head that the checkpoint lacks keep their values. Returns their names.
pub(crate) fn load_without_head<C: Family, B: FusedBackend, M: Module<B>>(
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

/// Loads only these parameters; the others keep their values.
pub(crate) fn load_some<B: FusedBackend, M: Module<B>>(
    module: M,
    found: Vec<(ModelParam, StoredTensor<'_>)>,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<M> {
    let stored: BTreeMap<String, _> =
        found.into_iter().map(|(param, stored)| (param.path, (stored, param.transposed))).collect();
    let paths = described(&module, &|path, _| (path.join("."), false));
    let tensors: Vec<_> = paths.iter().map(|param| stored.get(&param.name).copied()).collect();
    load_all(module, tensors, checkpoint, device)
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
    /// Each parameter's tensor, in visiting order, and whether it is transposed; `None` for a parameter that keeps its value.
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
        let quantized = self.checkpoint.quantized.as_ref().filter(|(_, weights)| weights.contains(&id.val()));
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
        // Keeps the id, and whether the parameter is trained, without drawing its initial values.
        let loaded = param.transform_for_load(tensor, id);
        if configured_for == *device { loaded } else { loaded.fork(device) }
    }
}

/// Defines the functions of a `weights` module for its family's model, whose class in transformers is `$class`. If variants of the model
/// have other parameter names, the macro `$by` selects the family by the model.
macro_rules! hf_weights {
    (@by $config:ident, , $model:expr, $family:ident => $do:expr) => {{
        type $family = $config;
        $do
    }};
    (@by $config:ident, $by:ident, $model:expr, $family:ident => $do:expr) => { $by!($model, $family => $do) };
    ($model:ident, $config:ident, $class:literal $(, $by:ident)?) => {
        /// Loads the model in a folder, from its `config.json` and its weights.
        ///
        /// # Errors
        #[doc = concat!("Same as [`", stringify!($config), "::from_file`] and [`load`].")]
        pub fn from_pretrained<B: zero_ops::FusedBackend>(
            dir: &std::path::Path,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            let config = $config::from_file(&dir.join("config.json"))?;
            load(config.init(device), dir, device)
        }

        /// Loads all parameters from the checkpoint in a folder, one at a time, onto `device`. If parameters are sharded, each rank
        /// converts only the elements of its own shards; every rank must read the same checkpoint.
        ///
        /// The parameters keep their ids, and whether they are trained.
        ///
        /// # Errors
        /// If the checkpoint cannot be read, or its names, shapes or element types are not the model's. All of that is checked before
        /// the first tensor is loaded.
        pub fn load<B: zero_ops::FusedBackend>(
            model: $model<B>,
            dir: &std::path::Path,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            load_from(model, &$crate::safetensors_file::Checkpoint::open(dir)?, device)
        }

        /// Same as [`load`], from an open checkpoint.
        ///
        /// # Errors
        /// If its names, shapes or element types are not the model's.
        pub fn load_from<B: zero_ops::FusedBackend>(
            model: $model<B>,
            checkpoint: &$crate::safetensors_file::Checkpoint,
            device: &B::Device,
        ) -> $crate::Result<$model<B>> {
            $crate::hf_load::hf_weights!(@by $config, $($by)?, model, Names => {
                $crate::hf_load::load_checked::<Names, B, _>(model, checkpoint, device)
            })
        }

        #[doc = concat!("Every parameter with its name in the `state_dict` of `", $class, "`, in visiting order.")]
        pub fn hf_names<B: burn::tensor::backend::Backend>(model: &$model<B>) -> Vec<(burn::module::ParamId, String)> {
            hf_params(model).into_iter().map(|param| (param.id, param.name)).collect()
        }

        #[doc = concat!("Every parameter as the `state_dict` of `", $class, "` has it, in visiting order.")]
        pub fn hf_params<B: burn::tensor::backend::Backend>(model: &$model<B>) -> Vec<$crate::HfParam> {
            $crate::hf_load::hf_weights!(@by $config, $($by)?, model, Names => {
                $crate::hf_load::describe::<Names, B>(model)
            })
        }

        /// Returns the parameters of a model of this configuration, in visiting order, without creating the model.
        pub fn parameters(config: &$config) -> Vec<$crate::ModelParam> {
            $crate::hf_params::parameters(config)
        }
    };
}
pub(crate) use hf_weights;
