//! Hugging Face's `config.json` of a GPT-2: in goes its text, out comes a validated [`Gpt2Config`].

use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::config::FAMILY;
use crate::{Activation, Gpt2Config, ModelError};

/// The keys of `config.json` that matter, with Hugging Face's defaults for those that are absent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct HfGpt2Config {
    model_type: String,
    vocab_size: usize,
    #[serde(alias = "max_position_embeddings")]
    n_positions: usize,
    #[serde(alias = "hidden_size")]
    n_embd: usize,
    #[serde(alias = "num_hidden_layers")]
    n_layer: usize,
    #[serde(alias = "num_attention_heads")]
    n_head: usize,
    n_inner: Option<usize>,
    activation_function: String,
    resid_pdrop: f64,
    embd_pdrop: f64,
    attn_pdrop: f64,
    layer_norm_epsilon: f64,
    initializer_range: f64,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    add_cross_attention: bool,
    tie_word_embeddings: bool,
}

const MODEL_TYPE: &str = "gpt2";

impl Default for HfGpt2Config {
    fn default() -> Self {
        Self {
            model_type: MODEL_TYPE.to_string(),
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluTanh.hf_name().to_string(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            add_cross_attention: false,
            tie_word_embeddings: true,
        }
    }
}

impl TryFrom<HfGpt2Config> for Gpt2Config {
    type Error = ModelError;

    fn try_from(hf: HfGpt2Config) -> Result<Self, ModelError> {
        if hf.model_type != MODEL_TYPE {
            return Err(ModelError::ModelType { expected: MODEL_TYPE, got: hf.model_type });
        }
        for (key, value) in [
            ("scale_attn_by_inverse_layer_idx", hf.scale_attn_by_inverse_layer_idx),
            ("add_cross_attention", hf.add_cross_attention),
        ] {
            if value {
                return Err(ModelError::Unsupported {
                    model: FAMILY,
                    key,
                    got: "true".to_string(),
                    supported: "false".to_string(),
                });
            }
        }
        let config = Self {
            vocab_size: hf.vocab_size,
            n_positions: hf.n_positions,
            n_embd: hf.n_embd,
            n_layer: hf.n_layer,
            n_head: hf.n_head,
            n_inner: hf.n_inner,
            activation: Activation::from_hf_name(FAMILY, "activation_function", &hf.activation_function)?,
            layer_norm_epsilon: hf.layer_norm_epsilon,
            embd_pdrop: hf.embd_pdrop,
            resid_pdrop: hf.resid_pdrop,
            attn_pdrop: hf.attn_pdrop,
            initializer_range: hf.initializer_range,
            scale_attn_weights: hf.scale_attn_weights,
            tie_word_embeddings: hf.tie_word_embeddings,
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<Gpt2Config> for HfGpt2Config {
    fn from(config: Gpt2Config) -> Self {
        Self {
            vocab_size: config.vocab_size,
            n_positions: config.n_positions,
            n_embd: config.n_embd,
            n_layer: config.n_layer,
            n_head: config.n_head,
            n_inner: config.n_inner,
            activation_function: config.activation.hf_name().to_string(),
            resid_pdrop: config.resid_pdrop,
            embd_pdrop: config.embd_pdrop,
            attn_pdrop: config.attn_pdrop,
            layer_norm_epsilon: config.layer_norm_epsilon,
            initializer_range: config.initializer_range,
            scale_attn_weights: config.scale_attn_weights,
            tie_word_embeddings: config.tie_word_embeddings,
            ..Self::default()
        }
    }
}

impl Gpt2Config {
    /// Reads the text of a Hugging Face `config.json`.
    ///
    /// # Errors
    /// When it is not JSON, of another model, not a possible model, or asks for what is not implemented.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let hf: HfGpt2Config =
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

impl Serialize for Gpt2Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        HfGpt2Config::from(self.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Gpt2Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        HfGpt2Config::deserialize(deserializer)?.try_into().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shaped as the file on the hub: legacy keys, keys of the tokenizer and of generation.
    const GPT2: &str = r#"{
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
    }"#;

    #[test]
    fn reads_the_published_config() {
        let config = Gpt2Config::from_json(GPT2).unwrap();
        let preset = Gpt2Config::preset("gpt2").unwrap();
        let with_dropout = Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, attn_pdrop: 0.1, ..preset };
        assert_eq!(config, with_dropout);
    }

    #[test]
    fn absent_keys_have_hugging_faces_defaults_and_aliases_are_read() {
        assert_eq!(Gpt2Config::from_json("{}").unwrap(), Gpt2Config::from_json(GPT2).unwrap());
        let config = Gpt2Config::from_json(
            r#"{"hidden_size": 60, "num_attention_heads": 6, "num_hidden_layers": 3, "n_inner": 100,
                "activation_function": "gelu", "tie_word_embeddings": false, "scale_attn_weights": false}"#,
        )
        .unwrap();
        assert_eq!((config.n_embd, config.n_head, config.n_layer), (60, 6, 3));
        assert_eq!(config.inner_width(), 100);
        assert_eq!(config.activation, Activation::GeluErf);
        assert!(!config.tie_word_embeddings && !config.scale_attn_weights);
    }

    #[test]
    fn is_written_as_it_is_read() {
        for name in Gpt2Config::PRESETS {
            let config = Gpt2Config::preset(name).unwrap();
            let text = serde_json::to_string(&config).unwrap();
            assert!(text.contains("\"model_type\":\"gpt2\""), "{text}");
            assert_eq!(Gpt2Config::from_json(&text).unwrap(), config);
            assert_eq!(serde_json::from_str::<Gpt2Config>(&text).unwrap(), config);
        }
    }

    #[test]
    fn refuses_what_would_change_the_results() {
        for (text, expected) in [
            (r#"{"model_type": "bert"}"#, "model_type \"bert\", expected \"gpt2\""),
            (
                r#"{"scale_attn_by_inverse_layer_idx": true}"#,
                "scale_attn_by_inverse_layer_idx = true is not implemented",
            ),
            (r#"{"add_cross_attention": true}"#, "add_cross_attention = true"),
            (r#"{"activation_function": "swish"}"#, "activation_function = \"swish\""),
            (r#"{"n_head": 7}"#, "n_head = 7"),
            ("[1", "cannot be read as JSON"),
            (r#"{"n_layer": "twelve"}"#, "cannot be read as JSON"),
        ] {
            let error = Gpt2Config::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        Gpt2Config::from_json(r#"{"reorder_and_upcast_attn": true}"#).unwrap();
    }
}
