//! Hugging Face's `config.json` of a BERT: in goes its text, out comes a validated [`BertConfig`].

use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::config::FAMILY;
use crate::{Activation, BertConfig, ModelError};

/// The keys of `config.json` that matter, with Hugging Face's defaults for those that are absent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct HfBertConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    hidden_act: String,
    hidden_dropout_prob: f64,
    attention_probs_dropout_prob: f64,
    max_position_embeddings: usize,
    type_vocab_size: usize,
    initializer_range: f64,
    layer_norm_eps: f64,
    position_embedding_type: String,
    is_decoder: bool,
    add_cross_attention: bool,
    tie_word_embeddings: bool,
}

const MODEL_TYPE: &str = "bert";
const POSITIONS: &str = "absolute";

impl Default for HfBertConfig {
    fn default() -> Self {
        Self {
            model_type: MODEL_TYPE.to_string(),
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::GeluErf.hf_name().to_string(),
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            position_embedding_type: POSITIONS.to_string(),
            is_decoder: false,
            add_cross_attention: false,
            tie_word_embeddings: true,
        }
    }
}

impl TryFrom<HfBertConfig> for BertConfig {
    type Error = ModelError;

    fn try_from(hf: HfBertConfig) -> Result<Self, ModelError> {
        if hf.model_type != MODEL_TYPE {
            return Err(ModelError::ModelType { expected: MODEL_TYPE, got: hf.model_type });
        }
        let unsupported = |key, got: String, supported: &str| {
            Err(ModelError::Unsupported { model: FAMILY, key, got, supported: supported.to_string() })
        };
        if hf.is_decoder {
            return unsupported("is_decoder", "true".to_string(), "false");
        }
        if hf.add_cross_attention {
            return unsupported("add_cross_attention", "true".to_string(), "false");
        }
        if hf.position_embedding_type != POSITIONS {
            let got = format!("\"{}\"", hf.position_embedding_type);
            return unsupported("position_embedding_type", got, "\"absolute\"");
        }
        let config = Self {
            vocab_size: hf.vocab_size,
            hidden_size: hf.hidden_size,
            num_hidden_layers: hf.num_hidden_layers,
            num_attention_heads: hf.num_attention_heads,
            intermediate_size: hf.intermediate_size,
            hidden_act: Activation::from_hf_name(FAMILY, "hidden_act", &hf.hidden_act)?,
            hidden_dropout_prob: hf.hidden_dropout_prob,
            attention_probs_dropout_prob: hf.attention_probs_dropout_prob,
            max_position_embeddings: hf.max_position_embeddings,
            type_vocab_size: hf.type_vocab_size,
            initializer_range: hf.initializer_range,
            layer_norm_eps: hf.layer_norm_eps,
            tie_word_embeddings: hf.tie_word_embeddings,
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<BertConfig> for HfBertConfig {
    fn from(config: BertConfig) -> Self {
        Self {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            intermediate_size: config.intermediate_size,
            hidden_act: config.hidden_act.hf_name().to_string(),
            hidden_dropout_prob: config.hidden_dropout_prob,
            attention_probs_dropout_prob: config.attention_probs_dropout_prob,
            max_position_embeddings: config.max_position_embeddings,
            type_vocab_size: config.type_vocab_size,
            initializer_range: config.initializer_range,
            layer_norm_eps: config.layer_norm_eps,
            tie_word_embeddings: config.tie_word_embeddings,
            ..Self::default()
        }
    }
}

impl BertConfig {
    /// Reads the text of a Hugging Face `config.json`.
    ///
    /// # Errors
    /// When it is not JSON, of another model, not a possible model, or asks for what is not implemented.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let hf: HfBertConfig =
            serde_json::from_str(text).map_err(|source| ModelError::ConfigSyntax { model: FAMILY, source })?;
        hf.try_into()
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and when the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path).map_err(|source| ModelError::Io {
            action: "read",
            path: path.to_path_buf(),
            source,
        })?;
        Self::from_json(&text).map_err(|error| ModelError::InFile { path: path.to_path_buf(), error: Box::new(error) })
    }
}

impl Serialize for BertConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        HfBertConfig::from(self.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for BertConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        HfBertConfig::deserialize(deserializer)?.try_into().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shaped as the file on the hub.
    const BASE: &str = r#"{
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": false,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522
    }"#;

    #[test]
    fn reads_the_published_config() {
        let config = BertConfig::from_json(BASE).unwrap();
        let preset = BertConfig::preset("bert-base").unwrap();
        let with_dropout = BertConfig { hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, ..preset };
        assert_eq!(config, with_dropout);
        assert_eq!(BertConfig::from_json("{}").unwrap(), config);
    }

    #[test]
    fn is_written_as_it_is_read() {
        let config = BertConfig::preset("bert-large").unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(BertConfig::from_json(&text).unwrap(), config);
    }

    #[test]
    fn refuses_what_would_change_the_results() {
        for (text, expected) in [
            (r#"{"model_type": "gpt2"}"#, "model_type \"gpt2\", expected \"bert\""),
            (r#"{"is_decoder": true}"#, "is_decoder = true"),
            (r#"{"add_cross_attention": true}"#, "add_cross_attention = true"),
            (
                r#"{"position_embedding_type": "relative_key"}"#,
                "position_embedding_type = \"relative_key\" is not implemented",
            ),
            (r#"{"hidden_act": "silu"}"#, "hidden_act = \"silu\""),
            (r#"{"hidden_size": 0}"#, "hidden_size = 0"),
            ("", "cannot be read as JSON"),
        ] {
            let error = BertConfig::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
