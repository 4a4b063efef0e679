//! Model configurations of any family, as stored in a checkpoint.

mod adapted;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::adapted::AdaptedModel;
use crate::bert::weights::{DECODER_BIAS, PREDICTION_BIAS};
use crate::error::io_at;
use crate::generate::Sampling;
use crate::hf_params::{AS_NAMED, Family, Rules, initial, parameters, rules, stored, stored_without_head};
use crate::safetensors_file::{ADAPTER, Checkpoint, SINGLE, StoredTensor};
use crate::suggest::closest;
use crate::{
    BartConfig, BertConfig, BertHead, BertKind, Gpt2Config, LlamaConfig, ModelError, ModelParam, ModuleConfig, Result,
    T5Config,
};

/// A model's configuration with its family, serialized as `{"family": "gpt2", "config": {...}}`.
///
/// ```
/// use zero_models::{Gpt2Config, ModelConfig};
///
/// let config = ModelConfig::from(Gpt2Config::preset("tiny")?);
/// assert_eq!(config.parameters()[2].path, "h.0.ln_1.gamma");
/// assert_eq!(config.parameters()[2].name, "transformer.h.0.ln_1.weight");
/// # Ok::<(), zero_models::ModelError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "family", content = "config", rename_all = "lowercase")]
pub enum ModelConfig {
    /// GPT-2 with its language-model head.
    Gpt2(Gpt2Config),
    /// BERT with its heads.
    Bert(BertConfig),
    /// Llama or a variant with its language-model head.
    Llama(LlamaConfig),
    /// BART with its head.
    Bart(BartConfig),
    /// T5 or mT5 with its language-model head.
    T5(T5Config),
    /// Any other module.
    Module(ModuleConfig),
    /// The LoRA adapter of a model of any of these families, with the modules that are trained alongside it.
    Adapted(AdaptedModel),
}

/// Settings for the source and target texts of an encoder-decoder model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq2SeqSettings {
    /// The padding token.
    pub pad_token: u32,
    /// The end-of-sequence token.
    pub end_token: u32,
    /// True if texts begin with a beginning-of-text token even if the tokenizer adds none.
    pub has_begin: bool,
    /// Maximum number of tokens of a text; `usize::MAX` if there is no limit.
    pub positions: usize,
}

impl ModelConfig {
    /// Returns the names of all presets that begin with `family`, such as `qwen3`.
    pub fn presets(family: &str) -> Vec<&'static str> {
        let all =
            [Gpt2Config::PRESETS, LlamaConfig::PRESETS, BertConfig::PRESETS, BartConfig::PRESETS, T5Config::PRESETS];
        all.concat().into_iter().filter(|name| name.starts_with(family)).collect()
    }

    /// Returns the configuration of a preset of any family.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the presets of the family that has the most similar name.
    pub fn preset(name: &str) -> Result<Self> {
        let similar = closest(name, &Self::presets("")).unwrap_or(name);
        let is_of = |families: &[&str]| families.iter().any(|family| similar.starts_with(family));
        Ok(match similar {
            _ if is_of(&["bert"]) => BertConfig::preset(name)?.into(),
            _ if is_of(&["bart"]) => BartConfig::preset(name)?.into(),
            _ if is_of(&["t5", "flan-t5"]) => T5Config::preset(name)?.into(),
            _ if is_of(&["llama", "mistral", "qwen", "gemma", "phi"]) => LlamaConfig::preset(name)?.into(),
            _ => Gpt2Config::preset(name)?.into(),
        })
    }

    /// Reads a Hugging Face `config.json` of any family.
    ///
    /// # Errors
    /// Same as [`from_json`](Self::from_json), and if the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(io_at("read", path))?;
        let read = Self::from_json(&text);
        let config = read.map_err(|error| ModelError::InFile { path: path.to_path_buf(), error: Box::new(error) })?;
        Ok(match (config, path.parent()) {
            (Self::T5(config), Some(dir)) => Self::T5(config.with_weights_in(dir)),
            (config, _) => config,
        })
    }

    /// Reads the text of a Hugging Face `config.json`. The family follows from `model_type`; without that, from `architectures` or from
    /// keys that only one family has.
    ///
    /// # Errors
    /// [`ModelError::Family`] for an unknown family, and the errors of the family's `from_json`, such as [`Gpt2Config::from_json`].
    pub fn from_json(text: &str) -> Result<Self> {
        // GPT-2's reader reports text that is not JSON.
        let mut keys: Value = serde_json::from_str(text).unwrap_or_default();
        let family = family(&keys)?;
        if let Some(quantized) = keys.get("quantization_config").filter(|keys| keys.is_object()) {
            let method = quantized["quant_method"].as_str().unwrap_or("an unknown method");
            let (key, got) = ("quantization_config", format!("\"{method}\""));
            let supported = "checkpoints that are not quantized (--quantize quantizes them on loading)".to_string();
            return Err(ModelError::Unsupported { model: "a model", key, got, supported });
        }
        let text = match keys.as_object_mut() {
            Some(keys) if !keys.contains_key("model_type") => {
                keys.insert("model_type".into(), family.into());
                &serde_json::to_string(keys).expect("it was JSON")
            }
            _ => text,
        };
        match family {
            "bart" => BartConfig::from_json(text).map(Self::Bart),
            "t5" | "mt5" => T5Config::from_json(text).map(Self::T5),
            "bert" | "roberta" | "xlm-roberta" | "camembert" | "distilbert" => {
                BertConfig::from_json(text).map(Self::Bert)
            }
            "llama" | "mistral" | "qwen2" | "qwen3" | "gemma" | "gemma2" | "gemma3_text" | "phi3" => {
                LlamaConfig::from_json(text).map(Self::Llama)
            }
            _ => Gpt2Config::from_json(text).map(Self::Gpt2),
        }
    }

    /// Returns every parameter, in the order in which the module visits them. A tied head is not listed; an adapted model lists only its
    /// trained parameters.
    pub fn parameters(&self) -> Vec<ModelParam> {
        match self {
            Self::Gpt2(config) => parameters(config),
            Self::Bert(config) => parameters(config),
            Self::Llama(config) => parameters(config),
            Self::Bart(config) => parameters(config),
            Self::T5(config) => parameters(config),
            Self::Module(module) => module.parameters.clone(),
            Self::Adapted(adapted) => adapted.parameters(),
        }
    }

    /// Returns the number of layers; 0 if the family has none.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_layer,
            Self::Bert(config) => config.num_hidden_layers,
            Self::Llama(config) => config.num_hidden_layers,
            Self::Bart(config) => config.encoder_layers + config.decoder_layers,
            Self::T5(config) => config.num_layers + config.num_decoder_layers,
            Self::Module(_) => 0,
            Self::Adapted(adapted) => adapted.base.blocks(),
        }
    }

    /// Returns the width of the layers, if the family has one.
    pub fn hidden_size(&self) -> Option<usize> {
        match self {
            Self::Gpt2(config) => Some(config.n_embd),
            Self::Bert(config) => Some(config.hidden_size),
            Self::Llama(config) => Some(config.hidden_size),
            Self::Bart(config) => Some(config.d_model),
            Self::T5(config) => Some(config.d_model),
            Self::Module(_) => None,
            Self::Adapted(adapted) => adapted.base.hidden_size(),
        }
    }

    /// Returns the sizes of the family's arrays in this configuration; empty for a family that lists its parameters itself.
    pub fn widths(&self) -> Vec<usize> {
        match self {
            Self::Gpt2(config) => vec![config.vocab_size, config.n_positions, config.n_embd, config.inner_width()],
            Self::Bert(config) => {
                vec![config.vocab_size, config.max_position_embeddings, config.hidden_size, config.intermediate_size]
            }
            Self::Bart(config) => {
                vec![config.vocab_size, config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim]
            }
            Self::T5(config) => vec![config.vocab_size, config.d_model, config.d_ff, config.inner_width()],
            Self::Llama(config) => {
                vec![config.vocab_size, config.hidden_size, config.intermediate_size, config.query_width()]
            }
            Self::Module(_) | Self::Adapted(_) => Vec::new(),
        }
    }

    /// Returns the text settings of an encoder-decoder model; `None` for another family.
    pub fn seq2seq(&self) -> Option<Seq2SeqSettings> {
        match self {
            Self::Bart(config) => Some(Seq2SeqSettings {
                pad_token: config.pad_token_id,
                end_token: config.eos_token_id,
                has_begin: true,
                positions: config.max_position_embeddings,
            }),
            Self::T5(config) => Some(Seq2SeqSettings {
                pad_token: config.pad_token_id,
                end_token: config.eos_token_id,
                has_begin: false,
                positions: usize::MAX,
            }),
            _ => None,
        }
    }

    /// Returns the settings of greedy generation in the configuration: the end token and forced tokens.
    pub fn sampling(&self) -> Sampling {
        match self {
            Self::Bart(config) => config.sampling(),
            Self::T5(config) => config.sampling(),
            _ => Sampling::default(),
        }
    }

    /// Returns `Some` if the folder holds an adapter of PEFT; the inner value is the base model's folder, if the adapter's file names an
    /// existing one.
    pub fn adapter_base(dir: &Path) -> Option<Option<PathBuf>> {
        let text = std::fs::read_to_string(dir.join(crate::peft::CONFIG)).ok()?;
        let keys: Value = serde_json::from_str(&text).unwrap_or_default();
        Some(keys["base_model_name_or_path"].as_str().map(PathBuf::from).filter(|base| base.is_dir()))
    }

    /// Returns the class in transformers that has these parameters, if there is one.
    pub fn architecture(&self) -> Option<&str> {
        match self {
            Self::Gpt2(_) => Some("GPT2LMHeadModel"),
            Self::Bert(config) => Some(config.architecture()),
            Self::Llama(config) => Some(config.architecture()),
            Self::Bart(config) => Some(config.architecture()),
            Self::T5(config) => Some(config.architecture()),
            Self::Module(module) => module.architecture.as_deref(),
            Self::Adapted(_) => None,
        }
    }

    /// Returns the names of a classifier's labels; empty for another head.
    pub fn classes(&self) -> &[String] {
        match self {
            Self::Bert(BertConfig { head: BertHead::Classes(classes), .. }) => classes,
            Self::Bart(config) => config.classes(),
            Self::Adapted(adapted) => adapted.base.classes(),
            _ => &[],
        }
    }

    /// Returns the layers that PEFT adapts by default.
    pub(crate) fn lora_targets(&self) -> Result<&'static [&'static str]> {
        match self {
            Self::Gpt2(_) => Ok(&["c_attn"]),
            Self::Bert(config) if config.model_type == BertKind::DistilBert => Ok(&["q_lin", "v_lin"]),
            Self::Bert(_) => Ok(&["query", "value"]),
            // PEFT has no default.
            Self::Llama(config) if config.is_fused() => Ok(&["qkv_proj"]),
            Self::Llama(_) | Self::Bart(_) => Ok(&["q_proj", "v_proj"]),
            Self::T5(_) => Ok(&["q", "v"]),
            Self::Adapted(adapted) => adapted.base.lora_targets(),
            Self::Module(_) => {
                let problem = "target_modules is empty: name the layers of this module that get adapters".into();
                Err(ModelError::Adapter { problem })
            }
        }
    }

    /// Returns the path of the token embedding that can have an adapter, and whether the head is the same table.
    pub(crate) fn adaptable_table(&self) -> Option<(&'static str, bool)> {
        match self {
            Self::Gpt2(config) => Some(("wte", config.tie_word_embeddings)),
            Self::Llama(config) => Some(("embed_tokens", config.tie_word_embeddings)),
            Self::Bert(config) => {
                Some(("embeddings.word_embeddings", config.tie_word_embeddings && self.classes().is_empty()))
            }
            Self::Bart(_) | Self::T5(_) | Self::Module(_) => None,
            Self::Adapted(adapted) => adapted.base.adaptable_table(),
        }
    }

    /// Returns PEFT's name of the model's task.
    pub(crate) fn task_type(&self) -> Option<&'static str> {
        match self {
            _ if !self.classes().is_empty() => Some("SEQ_CLS"),
            Self::Gpt2(_) | Self::Llama(_) => Some("CAUSAL_LM"),
            Self::Bart(_) | Self::T5(_) => Some("SEQ_2_SEQ_LM"),
            Self::Adapted(adapted) => adapted.base.task_type(),
            _ => None,
        }
    }

    /// Returns the names of the file with all tensors and of the configuration file.
    pub(crate) fn files(&self) -> [&'static str; 2] {
        match self {
            Self::Adapted(_) => [ADAPTER, crate::peft::CONFIG],
            _ => [SINGLE, "config.json"],
        }
    }

    /// Pairs the parameters with their tensors in the checkpoint.
    pub(crate) fn stored<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Vec<(ModelParam, StoredTensor<'a>)>> {
        match self {
            Self::Adapted(adapted) => adapted.stored(checkpoint),
            _ => stored(self.parameters(), checkpoint, self.rules()),
        }
    }

    /// Returns the rules by which parameters find their tensors.
    fn rules(&self) -> Rules<'static> {
        match self {
            Self::Gpt2(_) => rules::<Gpt2Config>(),
            Self::Bert(config) => config.rules(),
            Self::Llama(_) => rules::<LlamaConfig>(),
            Self::Bart(_) => rules::<BartConfig>(),
            Self::T5(_) => rules::<T5Config>(),
            Self::Module(_) | Self::Adapted(_) => AS_NAMED,
        }
    }

    /// Checks that the tensors in a folder have the names, shapes and types of this configuration, before a model is created.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or is of another model.
    pub fn check(&self, dir: &Path) -> Result<()> {
        self.stored(&Checkpoint::open(dir)?).map(drop)
    }

    /// Calls `each` with every parameter in a folder, in the order in which a module visits them, and its elements in the module's
    /// layout. Names, shapes and types are checked before the first call.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or is of another model.
    pub fn read(&self, dir: &Path, mut each: impl FnMut(ModelParam, Vec<f32>)) -> Result<()> {
        self.read_from(&Checkpoint::open(dir)?, &mut each)
    }

    /// Calls `each` with every parameter, in the order in which a module visits them, and its initial values: those of the family's module
    /// on ranks with this seed.
    ///
    /// # Panics
    /// For a module of one's own, or an adapter.
    pub fn fresh(&self, seed: u64, mut each: impl FnMut(ModelParam, Vec<f32>)) {
        for (param, number) in self.parameters().into_iter().zip(0..) {
            let values = self.initial(&param, number, seed);
            each(param, values);
        }
    }

    fn initial(&self, param: &ModelParam, number: u64, seed: u64) -> Vec<f32> {
        match self {
            Self::Gpt2(config) => initial(config, param, number, seed),
            Self::Bert(config) => initial(config, param, number, seed),
            Self::Llama(config) => initial(config, param, number, seed),
            Self::Bart(config) => initial(config, param, number, seed),
            Self::T5(config) => initial(config, param, number, seed),
            Self::Module(_) | Self::Adapted(_) => panic!("only a family of this crate knows its initial values"),
        }
    }

    /// Same as [`ModelConfig::check`], but the folder may lack parameters of the head.
    ///
    /// # Errors
    /// Same as [`ModelConfig::check`].
    pub fn check_without_head(&self, dir: &Path) -> Result<()> {
        stored_without_head(&self.parameters(), &Checkpoint::open(dir)?, self.rules()).map(drop)
    }

    /// Same as [`ModelConfig::read`], but parameters of the head that the folder lacks get initial values, those of [`ModelConfig::fresh`].
    ///
    /// # Errors
    /// Same as [`ModelConfig::read`].
    pub fn read_without_head(&self, dir: &Path, seed: u64, mut each: impl FnMut(ModelParam, Vec<f32>)) -> Result<()> {
        let (checkpoint, params) = (Checkpoint::open(dir)?, self.parameters());
        let found = stored_without_head(&params, &checkpoint, self.rules())?;
        for ((param, stored), number) in params.into_iter().zip(found).zip(0..) {
            let values = match stored {
                Some(stored) => param.elements(&stored)?,
                None => self.initial(&param, number, seed),
            };
            each(param, values);
        }
        Ok(())
    }

    /// Same as [`ModelConfig::read`], from an open checkpoint.
    pub(crate) fn read_from(&self, checkpoint: &Checkpoint, each: &mut dyn FnMut(ModelParam, Vec<f32>)) -> Result<()> {
        for (param, stored) in self.stored(checkpoint)? {
            let values = param.elements(&stored)?;
            each(param, values);
        }
        Ok(())
    }

    /// Returns the keys of Hugging Face's `config.json`; null if there are none.
    pub(crate) fn to_hf(&self) -> Value {
        match self {
            Self::Module(module) => return module.config.clone(),
            Self::Adapted(adapted) => return adapted.to_peft(),
            Self::Bert(config) => return config.to_keys(),
            Self::Llama(config) => return config.to_keys(),
            Self::T5(config) => return config.to_keys(),
            _ => {}
        }
        let mut value = serde_json::to_value(self).expect("a configuration is numbers and texts");
        value["config"].take()
    }

    /// Returns another name under which a checkpoint must repeat a parameter. Transformers ties the bias of BERT's decoder to the
    /// prediction bias only together with the decoder's weight, so an untied model has the bias under both names.
    pub(crate) fn repeated_as(&self, param: &ModelParam) -> Option<&'static str> {
        match self {
            Self::Bert(config) if !config.tie_word_embeddings => match &*param.name {
                PREDICTION_BIAS => Some(DECODER_BIAS),
                "lm_head.bias" => Some("lm_head.decoder.bias"),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Families by `model_type`, with the prefix of their class names, and keys that no earlier family has.
const FAMILIES: [(&str, &str, &[&str]); 17] = [
    ("gpt2", "GPT2", &["n_embd", "n_layer", "n_head"]),
    ("bart", "Bart", &["encoder_layers", "decoder_layers"]),
    ("t5", "T5", &["relative_attention_num_buckets"]),
    ("mt5", "MT5", &[]),
    ("bert", "Bert", &["type_vocab_size"]),
    ("roberta", "Roberta", &[]),
    ("xlm-roberta", "XLMRoberta", &[]),
    ("camembert", "Camembert", &[]),
    ("distilbert", "DistilBert", &["sinusoidal_pos_embds"]),
    ("qwen2", "Qwen2", &[]),
    ("qwen3", "Qwen3", &[]),
    ("gemma", "Gemma", &[]),
    ("gemma2", "Gemma2", &[]),
    ("gemma3_text", "Gemma3", &[]),
    ("phi3", "Phi3", &[]),
    ("mistral", "Mistral", &[]),
    ("llama", "Llama", &["rms_norm_eps"]),
];

/// Returns the `model_type` of the family of a `config.json`.
fn family(keys: &Value) -> Result<&'static str> {
    let refused = |got: String| {
        let known = FAMILIES.map(|(family, ..)| family).join(", ");
        ModelError::Family { got, known }
    };
    if let Some(given) = keys["model_type"].as_str() {
        let known = FAMILIES.iter().find(|(family, ..)| *family == given);
        return known.map(|(family, ..)| *family).ok_or_else(|| refused(format!("model_type {given:?}")));
    }
    let class = keys["architectures"][0].as_str();
    // A Qwen2MoeForCausalLM is no Qwen2.
    let is_kind = |rest: &str| ["For", "Model", "LMHead", "DoubleHeads"].iter().any(|kind| rest.starts_with(kind));
    let by_class = |class: &str| FAMILIES.iter().find(|(_, begins, _)| class.strip_prefix(begins).is_some_and(is_kind));
    let by_keys = || FAMILIES.iter().find(|(.., own)| own.iter().any(|key| keys.get(key).is_some()));
    match (class.and_then(by_class).or_else(by_keys), class) {
        (Some((family, ..)), _) => Ok(family),
        (None, Some(class)) => Err(refused(format!("the architecture {class:?}"))),
        // The family's reader reports JSON that is not an object.
        (None, None) if keys.as_object().is_none_or(|keys| keys.is_empty()) => Ok("gpt2"),
        (None, None) => Err(refused("no model_type".into())),
    }
}

macro_rules! from_family {
    ($($family:ident: $config:ty),*) => {$(
        impl From<$config> for ModelConfig {
            fn from(config: $config) -> Self {
                Self::$family(config)
            }
        }
    )*};
}

from_family!(Gpt2: Gpt2Config, Bert: BertConfig, Llama: LlamaConfig, Bart: BartConfig, T5: T5Config);
from_family!(Module: ModuleConfig, Adapted: AdaptedModel);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_read_as_it_is_written() {
        let gpt2 = ModelConfig::from(Gpt2Config::preset("gpt2-xl").unwrap());
        let bert = ModelConfig::from(BertConfig::preset("bert-base").unwrap());
        let llama = ModelConfig::from(LlamaConfig::preset("llama-3-8b").unwrap());
        let bart = ModelConfig::from(BartConfig::preset("bart-large").unwrap());
        let t5 = ModelConfig::from(T5Config::preset("flan-t5-xl").unwrap());
        for (config, family) in [(gpt2, "gpt2"), (bert, "bert"), (llama, "llama"), (bart, "bart"), (t5, "t5")] {
            let value = serde_json::to_value(&config).unwrap();
            assert_eq!(value["family"], family);
            assert_eq!(value["config"]["model_type"], family);
            assert_eq!(serde_json::from_value::<ModelConfig>(value).unwrap(), config);
        }
        let wrong = serde_json::json!({"family": "gpt2", "config": {"n_head": 5}});
        assert!(serde_json::from_value::<ModelConfig>(wrong).unwrap_err().to_string().contains("n_head = 5"));
    }

    #[test]
    fn a_config_file_says_its_family() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            ModelConfig::from_file(&path)
        };
        assert!(matches!(read(r#"{"model_type": "gpt2"}"#), Ok(ModelConfig::Gpt2(_))));
        assert!(matches!(read(r#"{"model_type": "bert"}"#), Ok(ModelConfig::Bert(_))));
        assert!(matches!(read(r#"{"model_type": "bart"}"#), Ok(ModelConfig::Bart(_))));
        assert!(matches!(read(r#"{"model_type": "qwen2"}"#), Ok(ModelConfig::Llama(_))));
        assert!(matches!(read(r#"{"model_type": "t5"}"#), Ok(ModelConfig::T5(_))));
        assert!(matches!(read(r#"{"model_type": "mt5"}"#), Ok(ModelConfig::T5(_))));
        assert!(read(r#"{"model_type": "umt5"}"#).unwrap_err().to_string().contains("umt5"));
        assert!(read(r#"{"model_type": "bert", "is_decoder": true}"#).unwrap_err().to_string().contains("is_decoder"));
    }
}
