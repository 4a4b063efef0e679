//! The initial parameters of a language model: fresh or from weights, and a LoRA adapter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use zero_core::checkpoint::SideFile;
use zero_kernels::quantized::Format;
#[cfg(feature = "burn")]
use zero_models::ModelError;
use zero_models::hf_export::side_files;
#[cfg(feature = "burn")]
use zero_models::lora::Adaptable;
use zero_models::lora::{self, LoraConfig};
#[cfg(feature = "burn")]
use zero_models::quantize;
#[cfg(feature = "burn")]
use zero_models::safetensors_file::Checkpoint;
use zero_models::{AdaptedModel, ModelConfig, ModelParam};
#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

use super::Options;
use crate::data::Tokenizer;
use crate::error::{Result, wrong, wrong_data};
use crate::trainer::{InitialAdapter, Profile, matrices};

/// Returns an adapter as it begins: the one in the folder `dir`, or a fresh one by `seed`.
pub(super) fn initial_adapter(adapted: &AdaptedModel, dir: Option<&Path>, seed: u64) -> Result<InitialAdapter> {
    let mut values = BTreeMap::new();
    let mut each = |param: ModelParam, of| drop(values.insert(param.path, (param.shape, of)));
    match dir {
        Some(dir) => lora::read(&adapted.base, dir, &mut each)?,
        None => adapted.fresh(seed, &mut each),
    }
    let trained = adapted.parameters().into_iter().map(|param| param.path).collect();
    Ok(InitialAdapter { scale: adapted.lora.scale(), trained, values })
}

/// LoRA options: train an adapter, and freeze the base model.
#[derive(Debug, Clone, Default, Args)]
#[group(id = "lora")]
#[command(next_help_heading = "LoRA")]
pub struct LoraOptions {
    /// Train a LoRA adapter with this rank (LoRA's r) instead of the model; needs --weights
    #[arg(long, value_name = "RANK")]
    pub lora_r: Option<usize>,
    /// Scale the adapter's output by ALPHA / RANK [default: 8]
    #[arg(long, value_name = "ALPHA", requires = "lora_r")]
    pub lora_alpha: Option<f64>,
    /// Dropout probability of the adapter's inputs [default: 0]
    #[arg(long, value_name = "P", requires = "lora_r")]
    pub lora_dropout: Option<f64>,
    /// Adapt these layers, separated by commas: their names in the Hugging Face model, or the last parts of the names,
    /// such as q_proj; or `all-linear` [default: PEFT's default for the model family]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora_r")]
    pub lora_targets: Vec<String>,
    /// Scale the adapter's output by ALPHA / sqrt(RANK) instead of ALPHA / RANK (rsLoRA)
    #[arg(long, requires = "lora_r")]
    pub lora_rslora: bool,
    /// Train these modules in full, in addition to the adapter; separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora_r")]
    pub lora_save: Vec<String>,
    /// Quantize the frozen base weights under the adapter to 8 or 4 bits: int8, int4 or nf4 (QLoRA)
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Continue training the adapter in this folder, written by PEFT or `zero export`
    #[arg(long, value_name = "DIR", conflicts_with = "lora_r")]
    pub adapter: Option<PathBuf>,
}

/// The source of a model's parameters, and which of them are trained.
pub(super) struct Start {
    /// A folder in Hugging Face's format.
    weights: Option<PathBuf>,
    adapted: Option<AdaptedModel>,
    /// The folder of the adapter, if it is not fresh.
    #[cfg_attr(not(feature = "burn"), allow(dead_code))] // Read where models are made.
    adapter: Option<PathBuf>,
    /// The format that frozen linear layers are quantised to.
    quantize: Option<Format>,
    /// The model's files other than its weights.
    files: Vec<SideFile>,
}

impl Start {
    /// Reads the options for a model of this configuration, with this tokenizer. `heads` are fresh modules, which are
    /// trained in full alongside an adapter.
    pub(super) fn new(
        options: &Options,
        tokenizer: Option<&Tokenizer>,
        model: ModelConfig,
        heads: &[&str],
    ) -> Result<Self> {
        let (weights, given) = (options.weights.clone(), &options.lora);
        // The one that describes the model, as in `Options::chosen`.
        let folder = options.folders().into_iter().rev().find(|folder| folder.join("config.json").is_file());
        let mut files = folder.map(side_files).transpose()?.unwrap_or_default();
        if let Some(tokenizer) = tokenizer {
            files.retain(|file| file.name.contains("config.json") && file.name != "tokenizer_config.json");
            files.extend(tokenizer.files());
        }
        let lora = match (&given.adapter, given.lora_r) {
            (Some(dir), _) => Some(LoraConfig::from_dir(dir)?),
            (None, Some(r)) => {
                let default = LoraConfig::default();
                let heads = heads.iter().map(ToString::to_string);
                Some(LoraConfig {
                    r,
                    lora_alpha: given.lora_alpha.unwrap_or(default.lora_alpha),
                    lora_dropout: given.lora_dropout.unwrap_or(default.lora_dropout),
                    target_modules: given.lora_targets.clone(),
                    use_rslora: given.lora_rslora,
                    modules_to_save: heads.chain(given.lora_save.iter().cloned()).collect(),
                })
            }
            (None, None) => None,
        };
        let quantize = given.quantize;
        let Some(lora) = lora else {
            let expected = "expected --lora-r or --adapter as well: quantized weights are not trained";
            let start = Self { weights, adapted: None, adapter: None, quantize, files };
            return quantize.map_or(Ok(start), |format| Err(wrong("quantize", format, expected)));
        };
        let Some(base) = weights.clone() else {
            let option = if given.adapter.is_some() { "adapter" } else { "lora-r" };
            let got = given.adapter.as_ref().map_or(lora.r.to_string(), |dir| dir.display().to_string());
            let expected = "expected --weights DIR as well: an adapter adds to trained weights";
            return Err(wrong(option, got, expected));
        };
        if let Some(dir) = &given.adapter
            && let Some(table) = zero_models::lora::full_embeddings(&model, dir)?.first()
        {
            let problem = format!(
                "holds {table} in full, and training would lose it: name it in modules_to_save of \
                 adapter_config.json to train it too, or merge the adapter with its base and train a new one"
            );
            return Err(wrong_data(dir, problem));
        }
        let adapted = AdaptedModel::new(model, lora, Some(base))?;
        Ok(Self { weights, adapted: Some(adapted), adapter: given.adapter.clone(), quantize, files })
    }

    /// Returns the model with its initial parameters. `load` loads weights.
    #[cfg(feature = "burn")]
    pub(super) fn model<B: FusedBackend, M: Adaptable<B>>(
        &self,
        fresh: M,
        load: impl FnOnce(M, &Checkpoint, &B::Device) -> Result<M, ModelError>,
        device: &B::Device,
    ) -> Result<M> {
        let model = match (&self.weights, self.quantize) {
            (Some(dir), Some(format)) => {
                let is_kept = |path: &str| !self.is_quantized(&format!("{path}.weight"));
                quantize::load(fresh, dir, format, is_kept, |model, checkpoint| load(model, checkpoint, device))?
            }
            (Some(dir), None) => load(fresh, &Checkpoint::open(dir)?, device)?,
            (None, _) => fresh,
        };
        Ok(match (&self.adapted, &self.adapter) {
            (Some(adapted), Some(dir)) => lora::load(model, &adapted.base, dir, device)?,
            (Some(adapted), None) => lora::adapt(model, &adapted.base, &adapted.lora, device)?,
            (None, _) => model,
        })
    }

    /// Returns the adapter, if there is one, as it begins.
    pub(super) fn initial_adapter(&self, seed: u64) -> Result<Option<InitialAdapter>> {
        let Some(adapted) = &self.adapted else { return Ok(None) };
        initial_adapter(adapted, self.adapter.as_deref(), seed).map(Some)
    }

    /// Returns whether an adapter is trained, and not the full model.
    pub(super) fn has_adapter(&self) -> bool {
        self.adapted.is_some()
    }

    /// Returns the folder of weights, if there is one.
    pub(super) fn weights(&self) -> Option<&Path> {
        self.weights.as_deref()
    }

    /// Returns the model's files other than its weights, for checkpoints and exports.
    pub(super) fn files(&self) -> &[SideFile] {
        &self.files
    }

    /// Returns the configuration of the trained model, for checkpoints and exports.
    pub(super) fn config(&self, model: ModelConfig) -> ModelConfig {
        self.adapted.clone().map_or(model, ModelConfig::from)
    }

    /// Returns the profile of this training, from that of training the full model.
    pub(super) fn profile(&self, whole: Profile) -> Profile {
        let Some(adapted) = &self.adapted else { return whole };
        let trained = adapted.parameters();
        let saved = |path: &str| trained.iter().any(|param| param.path == path);
        let base = adapted.base.parameters();
        let frozen = base.iter().filter(|param| !saved(&param.path));
        let (packed, frozen): (Vec<&ModelParam>, Vec<_>) = frozen.partition(|param| self.is_quantized(&param.path));
        let frozen = frozen.iter().map(|param| param.numel()).collect();
        let bytes = |param: &ModelParam| 2 * param.shape[0] * self.quantize.map_or(0, |how| how.words(param.shape[1]));
        let quantized = packed.iter().map(|param| [param.numel(), bytes(param)]).collect();
        let matrices = matrices(trained.iter().map(|param| (&*param.path, &*param.shape)));
        let parameters = trained.iter().map(|param| param.numel()).collect();
        // Of the three products of a layer, the one for its weight's gradient is not made.
        Profile { parameters, matrices, frozen, quantized, flops_per_row: whole.flops_per_row * 2.0 / 3.0, ..whole }
    }

    /// Returns whether the parameter at this path of the base is quantised: a linear layer's weight that is not trained.
    fn is_quantized(&self, path: &str) -> bool {
        let Some(adapted) = self.adapted.as_ref().filter(|_| self.quantize.is_some()) else { return false };
        adapted.is_linear(path) && !adapted.parameters().iter().any(|param| param.path == path)
    }

    /// Returns the value of [`Task::settings`](crate::trainer::Task::settings).
    pub(super) fn settings(&self) -> Value {
        let mut settings = json!({ "pretrained": self.weights.is_some() });
        if let Some(adapted) = &self.adapted {
            settings["lora"] = json!(adapted.lora);
        }
        if let Some(format) = self.quantize {
            settings["quantize"] = json!(format);
        }
        settings
    }
}
