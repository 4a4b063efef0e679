//! GPT-2 checkpoints of Hugging Face: in go a model and a folder, out comes the model with the folder's weights.
//!
//! Names are those of `GPT2LMHeadModel`; a checkpoint of `GPT2Model` lacks the prefix `transformer.` and is read too.
//! Hugging Face stores these weights as Burn uses them, `[in, out]`, and a head as `[vocab_size, n_embd]`.
//!
//! Not loaded are the buffers `attn.bias` and `attn.masked_bias`, which are the causal mask, and, for a model with a
//! tied head, `lm_head.weight`: it is the token embedding a second time, which Hugging Face also overwrites with the
//! embedding after loading. It is checked to have that shape, and stands in if the embedding itself is absent.

use std::path::Path;

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use zero_ops::FusedBackend;

use super::{Gpt2, Gpt2Config};
use crate::ModelError;
use crate::hf_params::{FileTensor, HfParam, ModelParam, Names, at_paths, describe, load_checked};
use crate::safetensors_file::Checkpoint;

const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";

const NAMES: Names = Names { of_path, in_file, repeats: &[(HEAD, "transformer.wte.weight")] };

/// Loads the model that lies in a folder, its `config.json` and its weights.
///
/// # Errors
/// As [`Gpt2Config::from_file`] and [`load`].
pub fn from_pretrained<B: FusedBackend>(dir: &Path, device: &B::Device) -> Result<Gpt2<B>, ModelError> {
    let config = Gpt2Config::from_file(&dir.join("config.json"))?;
    load(config.init(device), dir, device)
}

/// Loads all parameters from the checkpoint in a folder, one at a time, onto `device`. Where parameters are sharded, each
/// rank converts the elements of its own pieces only; every rank must read the same checkpoint.
///
/// The parameters keep their ids, and whether they are trained.
///
/// # Errors
/// When the checkpoint cannot be read, or its names, shapes or element types are not the model's. All of that is
/// checked before the first tensor is loaded.
pub fn load<B: FusedBackend>(model: Gpt2<B>, dir: &Path, device: &B::Device) -> Result<Gpt2<B>, ModelError> {
    load_from(model, &Checkpoint::open(dir)?, device)
}

/// As [`load`], from a checkpoint that is open already.
///
/// # Errors
/// When its names, shapes or element types are not the model's.
pub fn load_from<B: FusedBackend>(
    model: Gpt2<B>,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<Gpt2<B>, ModelError> {
    load_checked(model, &NAMES, checkpoint, device)
}

/// Every parameter with its name in the `state_dict` of `GPT2LMHeadModel`, in visiting order.
pub fn hf_names<B: Backend>(model: &Gpt2<B>) -> Vec<(ParamId, String)> {
    hf_params(model).into_iter().map(|param| (param.id, param.name)).collect()
}

/// Every parameter as the `state_dict` of `GPT2LMHeadModel` has it, in visiting order.
pub fn hf_params<B: Backend>(model: &Gpt2<B>) -> Vec<HfParam> {
    describe(model, &NAMES)
}

/// The parameters of a model of this configuration, in visiting order, without a model.
pub fn parameters(config: &Gpt2Config) -> Vec<ModelParam> {
    let mut paths = vec!["wte".to_string(), "wpe".to_string()];
    for i in 0..config.n_layer {
        let layers = [
            ["ln_1.gamma", "ln_1.beta"],
            ["attn.c_attn.weight", "attn.c_attn.bias"],
            ["attn.c_proj.weight", "attn.c_proj.bias"],
            ["ln_2.gamma", "ln_2.beta"],
            ["mlp.c_fc.weight", "mlp.c_fc.bias"],
            ["mlp.c_proj.weight", "mlp.c_proj.bias"],
        ];
        paths.extend(layers.as_flattened().iter().map(|field| format!("h.{i}.{field}")));
    }
    paths.extend(["ln_f.gamma", "ln_f.beta"].map(str::to_string));
    if !config.tie_word_embeddings {
        paths.push("lm_head".to_string());
    }
    at_paths(paths, config.parameter_shapes(), &NAMES)
}

fn of_path(path: &[String]) -> (String, bool) {
    let path = path.join(".");
    let name = match path.rsplit_once('.') {
        None if path == "lm_head" => HEAD.to_string(),
        None => format!("{PREFIX}{path}.weight"),
        Some((layer, "gamma")) => format!("{PREFIX}{layer}.weight"),
        Some((layer, "beta")) => format!("{PREFIX}{layer}.bias"),
        Some(_) => format!("{PREFIX}{path}"),
    };
    (name, false)
}

fn in_file(name: &str) -> FileTensor {
    if name == HEAD {
        return FileTensor::Parameter(name.to_string());
    }
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    if name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")) {
        return FileTensor::Buffer;
    }
    FileTensor::Parameter(format!("{PREFIX}{name}"))
}
