//! Hugging Face names of a model's parameters, and lookup of their tensors.
//!
//! Matches the parameters in the table of a [`Family`] with the tensors of a checkpoint. All names, shapes and element types are checked
//! before the first tensor is read.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use zero_core::random::Stream;

use crate::safetensors_file::{Checkpoint, StoredTensor};
use crate::{ModelError, Result, ShapeMismatch};

/// A parameter's place in the module and in a Hugging Face checkpoint, known from a configuration alone, without a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelParam {
    /// Burn's field names from the module down, joined by dots: `h.0.attn.c_attn.weight`.
    pub path: String,
    /// Shape in the module.
    pub shape: Vec<usize>,
    /// Name in the `state_dict` of the Hugging Face model.
    pub name: String,
    /// True if it is stored transposed there: `torch.nn.Linear` has `[out, in]`, Burn `[in, out]`.
    pub transposed: bool,
}

impl ModelParam {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the shape in the Hugging Face checkpoint.
    pub fn hf_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Returns the elements of its tensor in a checkpoint, in the module's layout.
    pub(crate) fn elements(&self, stored: &StoredTensor<'_>) -> Result<Vec<f32>> {
        let all = 0..stored.numel();
        if self.transposed { stored.elements_transposed(all) } else { stored.elements(all) }
    }
}

/// A family of models, by its configuration: its parameters in the module and in a Hugging Face checkpoint.
pub(crate) trait Family: Sized + 'static {
    /// The layers, in the order in which the module visits them.
    const LAYERS: &'static [Layer<Self>];
    /// Names under which a checkpoint may repeat a parameter, each with the parameter's name.
    const REPEATS: &'static [(&'static str, &'static str)];

    /// Returns the parameters, in the order in which the module visits them.
    fn parameters(&self) -> Vec<ModelParam> {
        by_table(self)
    }

    /// Returns the number of blocks that repeat this layer, whose path has a `*`, together with its neighbors in the table.
    fn blocks(&self, layer: &str) -> usize;

    /// Returns `true` if the head's weight is the token embedding.
    fn is_tied(&self) -> bool;

    /// Returns `true` if a model of this configuration has the layer at this path.
    fn has(&self, _layer: &str) -> bool {
        true
    }

    /// Completes the configuration in a folder's `config.json` with settings that follow from the folder's weights.
    fn with_weights_in(self, _dir: &Path) -> Self {
        self
    }

    /// Returns `true` if a tensor of this name belongs to a head, so that checkpoints with other heads lack it.
    fn is_of_head(_name: &str) -> bool {
        false
    }

    /// Checks that the tensors that are not loaded have the values that the model assumes.
    fn check(_checkpoint: &Checkpoint) -> Result<()> {
        Ok(())
    }

    /// Returns the standard deviation of the initial weights of a matrix, by its path.
    fn initial_std(&self, path: &str) -> f64;

    /// Returns the initial value of a vector's elements, by its path.
    fn initial_value(&self, path: &str) -> f64 {
        f64::from(u8::from(path.ends_with("gamma")))
    }

    /// Returns the `state_dict` name of a checkpoint's tensor, whether the model has it or not; `None` for one that is never loaded,
    /// such as a buffer that is computed from the configuration.
    fn in_state_dict(name: &str) -> Option<String>;
}

/// A layer, or a parameter that is a field of its own. A `*` is replaced by the number of a block.
pub(crate) struct Layer<C> {
    /// Burn's field names from the module down, joined by dots.
    path: &'static str,
    /// The name in the `state_dict`.
    name: &'static str,
    kind: Kind,
    /// Rows and columns of the layer's matrix in the module. Other parameters have as many elements as it has columns.
    sizes: fn(&C) -> [usize; 2],
}

/// The kind of a layer, which determines its parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A matrix that is a field of its own.
    Table,
    /// Same as `Table`, but absent if it is tied to the token embedding.
    Head,
    /// A bias that is a field of its own, or an optional bias of a `Weight`.
    Bias,
    /// The factors of a norm without a bias.
    Scale,
    /// A layer norm.
    Norm,
    /// A linear layer, whose weight `torch.nn.Linear` stores transposed.
    Linear,
    /// A linear layer without a bias.
    Weight,
    /// A linear layer that is a `Conv1D` in transformers, which stores the weight in Burn's layout.
    Conv1d,
}

/// Builds a row of [`Family::LAYERS`].
pub(crate) const fn layer<C>(
    path: &'static str,
    name: &'static str,
    kind: Kind,
    sizes: fn(&C) -> [usize; 2],
) -> Layer<C> {
    Layer { path, name, kind, sizes }
}

impl<C> Layer<C> {
    pub(crate) fn path(&self) -> &'static str {
        self.path
    }

    /// Returns the rows and columns of the layer's matrix in the module.
    pub(crate) fn sizes(&self, config: &C) -> [usize; 2] {
        (self.sizes)(config)
    }

    /// Returns `true` if the layer's matrix is stored transposed.
    pub(crate) fn is_transposed(&self) -> bool {
        matches!(self.kind, Kind::Linear | Kind::Weight)
    }

    /// Returns the paths and names of the layer's parameters in a block, and whether each is a matrix.
    pub(crate) fn parameters(&self, block: &str) -> impl Iterator<Item = (String, String, bool)> {
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

/// Returns the parameters of a model of this configuration, in the order in which the module visits them.
pub(crate) fn parameters<C: Family>(config: &C) -> Vec<ModelParam> {
    config.parameters()
}

/// Returns the parameters in a family's table.
pub(crate) fn by_table<C: Family>(config: &C) -> Vec<ModelParam> {
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

/// Returns the initial values of the parameter with this number: those of a module on ranks with this seed.
pub(crate) fn initial<C: Family>(config: &C, param: &ModelParam, number: u64, seed: u64) -> Vec<f32> {
    match param.shape.len() {
        1 => vec![config.initial_value(&param.path) as f32; param.numel()],
        _ => {
            let stream = Stream::of_parameter(seed, number, None);
            stream.normals(0..param.numel(), 0.0, config.initial_std(&param.path), |x| x as f32)
        }
    }
}

/// Pairs parameters with their tensors in a checkpoint.
pub(crate) fn stored<'a>(
    params: Vec<ModelParam>,
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Vec<(ModelParam, StoredTensor<'a>)>> {
    let named: Vec<_> = params.iter().map(|param| (param.name.clone(), param.hf_shape())).collect();
    let sources = sources(&named, checkpoint, rules)?.into_iter().map(|stored| stored.expect("none may be missing"));
    Ok(params.into_iter().zip(sources).collect())
}

/// Same as [`stored`], but parameters of the head may be missing.
pub(crate) fn stored_without_head<'a>(
    params: &[ModelParam],
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Vec<Option<StoredTensor<'a>>>> {
    let named: Vec<_> = params.iter().map(|param| (param.name.clone(), param.hf_shape())).collect();
    sources(&named, checkpoint, Rules { fresh_head: true, ..rules })
}

/// Returns the tensor of each parameter, given by name and shape; `None` if it is missing and may be.
pub(crate) fn sources<'a>(
    params: &[(String, Vec<usize>)],
    checkpoint: &'a Checkpoint,
    rules: Rules<'_>,
) -> Result<Vec<Option<StoredTensor<'a>>>> {
    (rules.check)(checkpoint)?;
    let sources = match_names(params, checkpoint, rules)?;
    check_shapes(params, &sources, checkpoint)?;
    Ok(sources.into_iter().map(|found| found.first().copied()).collect())
}

/// The tensor to load for each parameter, followed by the tensors that repeat it.
type Sources<'a> = Vec<Vec<StoredTensor<'a>>>;

/// The rules by which parameters find their tensors.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// [`Family::in_state_dict`]
    pub(crate) in_state_dict: &'a dyn Fn(&str) -> Option<String>,
    /// [`Family::REPEATS`]
    pub(crate) repeats: &'a [(&'a str, &'a str)],
    /// [`Family::is_of_head`]
    pub(crate) is_of_head: fn(&str) -> bool,
    /// [`Family::check`]
    pub(crate) check: fn(&Checkpoint) -> Result<()>,
    /// True if the parameters of a head may be missing.
    pub(crate) fresh_head: bool,
}

/// Rules for tensors that have the names of parameters.
pub(crate) const AS_NAMED: Rules<'static> = Rules {
    // PEFT saves the table alongside its adapter.
    in_state_dict: &|name| (!name.contains(".base_layer.")).then(|| name.to_string()),
    repeats: &[],
    is_of_head: |_| false,
    check: |_| Ok(()),
    fresh_head: false,
};

/// Returns the rules of a family.
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
        // A name that repeats a parameter in one model is a parameter of its own in another (an untied head), and belongs to the head
        // of a model with another head.
        let first = |name: &str| name.split('.').next().unwrap_or_default().to_string();
        let is_other_head =
            |repeat: &str| (rules.is_of_head)(repeat) && !params.iter().any(|(other, _)| first(other) == first(repeat));
        let repeats = rules.repeats.iter().filter(|(repeat, of)| {
            of == name && !params.iter().any(|(other, _)| other == repeat) && !is_other_head(repeat)
        });
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

/// Rejects a checkpoint where a repeat of a parameter holds other numbers: it belongs to a different model.
fn check_repeats(sources: &Sources<'_>, checkpoint: &Checkpoint) -> Result<()> {
    for found in sources {
        let Some((first, repeats)) = found.split_first() else { continue };
        for repeat in repeats {
            let is_same = match first.dtype == repeat.dtype {
                true => first.has_bytes_of(repeat),
                false => first.to_f32()? == repeat.to_f32()?,
            };
            if !is_same {
                return Err(ModelError::Untied {
                    dir: checkpoint.dir().to_path_buf(),
                    first: first.name.to_string(),
                    second: repeat.name.to_string(),
                });
            }
        }
    }
    Ok(())
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
        return check_repeats(sources, checkpoint);
    }
    Err(ModelError::TensorShapes { dir: checkpoint.dir().to_path_buf(), mismatches })
}
