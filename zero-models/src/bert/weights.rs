//! BERT checkpoints of Hugging Face: in go a model and a folder, out comes the model with the folder's weights.
//!
//! Names are those of `BertForPreTraining`; the prefix `bert.` may be absent, and layer norms may have `gamma` and
//! `beta`, as the first published checkpoints do. Linear weights are `[out, in]` there and transposed on loading.
//!
//! Not loaded are the buffers `embeddings.position_ids` and `embeddings.token_type_ids`, which count up and are zero;
//! the second name `cls.predictions.decoder.bias` of `cls.predictions.bias`; and, for a model with a tied head,
//! `cls.predictions.decoder.weight`: it is the word embedding a second time, which Hugging Face also overwrites with
//! the embedding after loading. Second names are checked to have the right shape, and stand in if the first is absent.

use std::path::Path;

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use zero_ops::FusedBackend;

use super::{Bert, BertConfig};
use crate::ModelError;
use crate::hf_params::{FileTensor, HfParam, ModelParam, Names, at_paths, describe, load_checked};
use crate::safetensors_file::Checkpoint;

const PREFIX: &str = "bert.";
const DECODER: &str = "cls.predictions.decoder.weight";
pub(crate) const PREDICTION_BIAS: &str = "cls.predictions.bias";
pub(crate) const DECODER_BIAS: &str = "cls.predictions.decoder.bias";

const NAMES: Names = Names {
    of_path,
    in_file,
    repeats: &[(DECODER, "bert.embeddings.word_embeddings.weight"), (DECODER_BIAS, PREDICTION_BIAS)],
};

/// Loads the model that lies in a folder, its `config.json` and its weights.
///
/// # Errors
/// As [`BertConfig::from_file`] and [`load`].
pub fn from_pretrained<B: FusedBackend>(dir: &Path, device: &B::Device) -> Result<Bert<B>, ModelError> {
    let config = BertConfig::from_file(&dir.join("config.json"))?;
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
pub fn load<B: FusedBackend>(model: Bert<B>, dir: &Path, device: &B::Device) -> Result<Bert<B>, ModelError> {
    load_from(model, &Checkpoint::open(dir)?, device)
}

/// As [`load`], from a checkpoint that is open already.
///
/// # Errors
/// When its names, shapes or element types are not the model's.
pub fn load_from<B: FusedBackend>(
    model: Bert<B>,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<Bert<B>, ModelError> {
    load_checked(model, &NAMES, checkpoint, device)
}

/// Every parameter with its name in the `state_dict` of `BertForPreTraining`, in visiting order.
pub fn hf_names<B: Backend>(model: &Bert<B>) -> Vec<(ParamId, String)> {
    hf_params(model).into_iter().map(|param| (param.id, param.name)).collect()
}

/// Every parameter as the `state_dict` of `BertForPreTraining` has it, in visiting order.
pub fn hf_params<B: Backend>(model: &Bert<B>) -> Vec<HfParam> {
    describe(model, &NAMES)
}

/// The parameters of a model of this configuration, in visiting order, without a model.
pub fn parameters(config: &BertConfig) -> Vec<ModelParam> {
    let linear = |layer: String| [format!("{layer}.weight"), format!("{layer}.bias")];
    let norm = |layer: String| [format!("{layer}.gamma"), format!("{layer}.beta")];
    let table = |name: &str| format!("embeddings.{name}_embeddings");
    let mut paths = vec![table("word"), table("position"), table("token_type")];
    paths.extend(norm("embeddings.norm".to_string()));
    for i in 0..config.num_hidden_layers {
        let projections = ["query", "key", "value", "attention_output"];
        paths.extend(projections.into_iter().flat_map(|layer| linear(format!("layers.{i}.{layer}"))));
        paths.extend(norm(format!("layers.{i}.attention_norm")));
        paths.extend(linear(format!("layers.{i}.intermediate")));
        paths.extend(linear(format!("layers.{i}.output")));
        paths.extend(norm(format!("layers.{i}.output_norm")));
    }
    paths.extend(linear("pooler".to_string()));
    paths.extend(linear("transform".to_string()));
    paths.extend(norm("transform_norm".to_string()));
    if !config.tie_word_embeddings {
        paths.push("decoder".to_string());
    }
    paths.push("prediction_bias".to_string());
    paths.extend(linear("seq_relationship".to_string()));
    at_paths(paths, config.parameter_shapes(), &NAMES)
}

fn of_path(path: &[String]) -> (String, bool) {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let (layer, leaf) = match path.as_slice() {
        ["embeddings", "norm", leaf] => ("bert.embeddings.LayerNorm".to_string(), *leaf),
        ["embeddings", table] => (format!("bert.embeddings.{table}"), "table"),
        ["layers", i, layer, leaf] => {
            let layer = match *layer {
                "attention_output" => "attention.output.dense".to_string(),
                "attention_norm" => "attention.output.LayerNorm".to_string(),
                "intermediate" => "intermediate.dense".to_string(),
                "output" => "output.dense".to_string(),
                "output_norm" => "output.LayerNorm".to_string(),
                projection => format!("attention.self.{projection}"),
            };
            (format!("bert.encoder.layer.{i}.{layer}"), *leaf)
        }
        ["pooler", leaf] => ("bert.pooler.dense".to_string(), *leaf),
        ["transform", leaf] => ("cls.predictions.transform.dense".to_string(), *leaf),
        ["transform_norm", leaf] => ("cls.predictions.transform.LayerNorm".to_string(), *leaf),
        ["decoder"] => ("cls.predictions.decoder".to_string(), "table"),
        ["prediction_bias"] => ("cls.predictions".to_string(), "bias"),
        ["seq_relationship", leaf] => ("cls.seq_relationship".to_string(), *leaf),
        other => unreachable!("no field of Bert is at {other:?}"),
    };
    match leaf {
        // Only a linear layer has a field of this name.
        "weight" => (format!("{layer}.weight"), true),
        "table" | "gamma" => (format!("{layer}.weight"), false),
        _ => (format!("{layer}.bias"), false),
    }
}

fn in_file(name: &str) -> FileTensor {
    let renamed = if let Some(norm) = name.strip_suffix("LayerNorm.gamma") {
        format!("{norm}LayerNorm.weight")
    } else if let Some(norm) = name.strip_suffix("LayerNorm.beta") {
        format!("{norm}LayerNorm.bias")
    } else {
        name.to_string()
    };
    if renamed.starts_with("cls.") {
        return FileTensor::Parameter(renamed);
    }
    match renamed.strip_prefix(PREFIX).unwrap_or(&renamed) {
        "embeddings.position_ids" | "embeddings.token_type_ids" => FileTensor::Buffer,
        name => FileTensor::Parameter(format!("{PREFIX}{name}")),
    }
}
