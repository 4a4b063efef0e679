//! The configuration of T5: from a preset or Hugging Face's `config.json`, with parameter counts and shapes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::check_each;
use crate::generate::Sampling;
use crate::hf_config::{check_count, check_tokens, check_values, find_preset, hf_config, named, names, one_end};
use crate::{Activation, ModelError, Result};

/// A variant of T5, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum T5Kind {
    /// T5, of version 1.0 and 1.1, and Flan-T5.
    T5,
    /// mT5: like T5 of version 1.1, for many languages.
    Mt5,
}

hf_config! {
    /// The configuration of T5 or mT5.
    pub struct T5Config of "T5" {
        /// The variant.
        model_type: T5Kind = T5Kind::T5,
        /// Number of tokens in the vocabulary.
        vocab_size: usize = 32128,
        /// Width of the model.
        d_model: usize = 512,
        /// Width of a head; the heads need not add up to `d_model`.
        d_kv: usize = 64,
        /// Width of the feed-forward layers.
        d_ff: usize = 2048,
        /// Number of encoder layers.
        num_layers: usize = 6,
        /// Number of decoder layers; `num_layers` if absent.
        num_decoder_layers: usize = 6,
        /// Number of attention heads.
        num_heads: usize = 8,
        /// Number of buckets of distances, each with a bias per head.
        relative_attention_num_buckets: usize = 32,
        /// Distance from which all larger ones share the last bucket.
        relative_attention_max_distance: usize = 128,
        /// Dropout probability of embeddings, attention probabilities and layer outputs.
        dropout_rate: f64 = 0.1,
        /// Epsilon that norms add to the mean square.
        layer_norm_epsilon: f64 = 1e-6,
        /// Factor of the standard deviations of initial weights.
        initializer_factor: f64 = 1.0,
        /// True if the feed-forward layers are gated.
        is_gated_act: bool = false,
        /// True if the head's weight is the token embedding. The weights alongside a `config.json` decide, as in transformers.
        tie_word_embeddings: bool = true,
        /// True if the head's input is divided by the square root of the width, as in version 1.0.
        scale_decoder_outputs: bool = true,
        /// The padding token.
        pad_token_id: u32 = 0,
        /// The end-of-sequence token.
        eos_token_id: u32 = 1,
        /// The first token that the decoder reads; the padding token if absent.
        decoder_start_token_id: u32 = 0,
    }
    /// The activation of the feed-forward layers (`dense_act_fn` in JSON).
    activation activation = "dense_act_fn": Activation::Relu;
    given complete;
    refused {
        is_encoder_decoder: bool = true,
    }
}

/// Converts a `config.json` of any version to the keys of [`T5Config`].
fn complete(text: &str) -> Result<String> {
    let syntax = |source| ModelError::ConfigSyntax { model: T5Config::FAMILY, source };
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    keys.retain(|_, value| !value.is_null());
    let is_mt5 = keys.get("model_type").is_some_and(|kind| kind == "mt5");
    let defaults: &[(&str, usize)] = match is_mt5 {
        true => &[("vocab_size", 250_112), ("d_ff", 1024), ("num_layers", 8), ("num_heads", 6)],
        false => &[("num_layers", 6)],
    };
    for &(key, default) in defaults {
        keys.entry(key).or_insert(default.into());
    }
    one_end(&mut keys);
    for (key, from, default) in [
        ("num_decoder_layers", "num_layers", Value::Null),
        ("decoder_start_token_id", "pad_token_id", 0.into()),
        // An mT5 is never scaled; a T5 is scaled unless its file says that the head is not tied.
        ("scale_decoder_outputs", "tie_word_embeddings", true.into()),
    ] {
        let of_another = keys.get(from).cloned().unwrap_or(default);
        keys.entry(key).or_insert(of_another);
    }
    if is_mt5 {
        keys.insert("scale_decoder_outputs".into(), false.into());
    }
    let named = keys.remove("feed_forward_proj").unwrap_or(if is_mt5 { GATED_GELU } else { "relu" }.into());
    let (is_gated, activation) = feed_forward(&named)?;
    keys.entry("is_gated_act").or_insert(is_gated.into());
    keys.entry("dense_act_fn").or_insert(activation.hf_name().into());
    Ok(Value::from(keys).to_string())
}

/// The `feed_forward_proj` of newer versions, whose activation is `gelu_new`.
const GATED_GELU: &str = "gated-gelu";

/// Reads a `feed_forward_proj`: returns whether there is a gate, and the activation.
fn feed_forward(named: &Value) -> Result<(bool, Activation)> {
    let (model, key) = (T5Config::FAMILY, "feed_forward_proj");
    let text = named.as_str().unwrap_or_default();
    if text == GATED_GELU {
        return Ok((true, Activation::GeluTanh));
    }
    let name = text.strip_prefix("gated-");
    match Activation::from_hf_name(model, key, name.unwrap_or(text)) {
        Ok(activation) => Ok((name.is_some(), activation)),
        Err(ModelError::Unsupported { supported, .. }) => {
            let supported = format!("{supported}, alone or with the prefix gated-");
            Err(ModelError::Unsupported { model, key, got: named.to_string(), supported })
        }
        Err(error) => Err(error),
    }
}

/// Layers of encoder and decoder, width, width of a head, heads, feed-forward width; true for version 1.1 or Flan.
const PRESETS: [(&str, ([usize; 5], bool)); 7] = [
    ("t5-small", ([6, 512, 64, 8, 2048], false)),
    ("flan-t5-small", ([8, 512, 64, 6, 1024], true)),
    ("t5-base", ([12, 768, 64, 12, 3072], false)),
    ("flan-t5-base", ([12, 768, 64, 12, 2048], true)),
    ("t5-large", ([24, 1024, 64, 16, 4096], false)),
    ("flan-t5-large", ([24, 1024, 64, 16, 2816], true)),
    ("flan-t5-xl", ([24, 2048, 64, 32, 5120], true)),
];

impl T5Config {
    /// Names that [`preset`](Self::preset) accepts, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

    /// Returns the configuration of a preset.
    ///
    /// | preset | parameters | layers of each half | width | heads |
    /// |---|---|---|---|---|
    /// | `t5-small` | 61 M | 6 | 512 | 8 |
    /// | `flan-t5-small` | 77 M | 8 | 512 | 6 |
    /// | `t5-base` | 223 M | 12 | 768 | 12 |
    /// | `flan-t5-base` | 248 M | 12 | 768 | 12 |
    /// | `t5-large` | 738 M | 24 | 1024 | 16 |
    /// | `flan-t5-large` | 783 M | 24 | 1024 | 16 |
    /// | `flan-t5-xl` | 2.85 B | 24 | 2048 | 32 |
    ///
    /// The published models have dropout 0.1; presets have none, as for GPT-2. Values read from a `config.json` are kept.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    pub fn preset(name: &str) -> Result<Self> {
        let (sizes, is_newer) = find_preset(Self::FAMILY, &PRESETS, Self::PRESETS, name)?;
        let [layers, d_model, d_kv, num_heads, d_ff] = sizes;
        Ok(Self {
            d_model,
            d_kv,
            d_ff,
            num_layers: layers,
            num_decoder_layers: layers,
            num_heads,
            dropout_rate: 0.0,
            is_gated_act: is_newer,
            tie_word_embeddings: !is_newer,
            scale_decoder_outputs: !is_newer,
            activation: if is_newer { Activation::GeluTanh } else { Activation::Relu },
            ..Self::published()
        })
    }

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let sizes = named!(self: vocab_size, d_model, d_kv, d_ff, num_layers, num_decoder_layers, num_heads,
            relative_attention_num_buckets, relative_attention_max_distance);
        // Any number of heads goes with any width.
        let heads = ("num_heads", self.num_heads);
        let above_0 = named!(self: layer_norm_epsilon, initializer_factor);
        check_values(Self::FAMILY, &sizes, [heads, heads], &named!(self: dropout_rate), &above_0)?;
        let (buckets, distance) = (self.relative_attention_num_buckets, self.relative_attention_max_distance);
        let farther = format!("more than {}, half of relative_attention_num_buckets", buckets / 2);
        check_each(
            Self::FAMILY,
            [
                (buckets >= 4, "relative_attention_num_buckets", buckets.to_string(), "at least 4"),
                (distance > buckets / 2, "relative_attention_max_distance", distance.to_string(), &*farther),
            ],
        )?;
        let tokens = named!(self: pad_token_id, eos_token_id, decoder_start_token_id);
        check_tokens(Self::FAMILY, self.vocab_size, &tokens)?;
        let is_deeper = self.num_decoder_layers > self.num_layers;
        check_count(Self::FAMILY, if is_deeper { "num_decoder_layers" } else { "num_layers" }, self)
    }

    /// Returns the total width of the heads.
    pub fn inner_width(&self) -> usize {
        self.num_heads.saturating_mul(self.d_kv)
    }

    /// Returns the settings of greedy generation: the end token.
    pub fn sampling(&self) -> Sampling {
        Sampling { stop: vec![self.eos_token_id], ..Sampling::default() }
    }

    /// Returns the class in transformers.
    pub(crate) fn architecture(&self) -> &'static str {
        match self.model_type {
            T5Kind::T5 => "T5ForConditionalGeneration",
            T5Kind::Mt5 => "MT5ForConditionalGeneration",
        }
    }

    /// Returns the keys of `config.json`.
    pub(crate) fn to_keys(&self) -> Value {
        let mut keys = serde_json::to_value(self).expect("a configuration is numbers and texts");
        let gate = if self.is_gated_act { "gated-" } else { "" };
        keys["feed_forward_proj"] = match (self.is_gated_act, self.activation) {
            (true, Activation::GeluTanh) => GATED_GELU.into(),
            (_, activation) => format!("{gate}{}", activation.hf_name()).into(),
        };
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_sizes() {
        for (name, params) in [
            ("t5-small", 60_506_624),
            ("flan-t5-small", 76_961_152),
            ("t5-base", 222_903_552),
            ("flan-t5-base", 247_577_856),
            ("t5-large", 737_668_096),
            ("flan-t5-large", 783_150_080),
            ("flan-t5-xl", 2_849_757_184),
        ] {
            let config = T5Config::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.num_params(), params, "{name}");
            let text = config.to_keys().to_string();
            assert!(text.contains("\"model_type\":\"t5\"") && text.contains("\"is_encoder_decoder\":true"), "{text}");
            assert_eq!(T5Config::from_json(&text).unwrap(), config);
        }
    }

    #[test]
    fn files_of_any_year_are_read() {
        // As published: T5, T5 of version 1.1, and mT5.
        let small = T5Config::preset("t5-small").unwrap();
        let read = |text: &str| T5Config::from_json(text).unwrap();
        let published = r#"{"model_type": "t5", "n_positions": 512, "feed_forward_proj": null}"#;
        assert_eq!(read(published), T5Config { dropout_rate: 0.1, ..small });
        let flan = read(
            r#"{"model_type": "t5", "d_ff": 1024, "num_heads": 6, "num_layers": 8, "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": false, "eos_token_id": [1, 2]}"#,
        );
        let preset = T5Config::preset("flan-t5-small").unwrap();
        assert_eq!(flan, T5Config { dropout_rate: 0.1, ..preset.clone() });
        let mt5 =
            read(r#"{"model_type": "mt5", "tie_word_embeddings": false, "vocab_size": 32128, "dropout_rate": 0}"#);
        assert_eq!(mt5, T5Config { model_type: T5Kind::Mt5, ..preset.clone() });
        let tied = read(r#"{"model_type": "mt5"}"#);
        assert!(tied.tie_word_embeddings && !tied.scale_decoder_outputs && tied.vocab_size == 250_112);
        // As transformers writes since version 5, which ties in name and scales by a key.
        let newer = read(r#"{"tie_word_embeddings": true, "scale_decoder_outputs": false, "num_layers": 3}"#);
        assert!(newer.tie_word_embeddings && !newer.scale_decoder_outputs && newer.num_decoder_layers == 3);
        // The resolved keys win over the name.
        for (keys, expected) in [
            (r#"{"feed_forward_proj": "gated-relu"}"#, (true, Activation::Relu)),
            (r#"{"feed_forward_proj": "gelu"}"#, (false, Activation::GeluErf)),
            (r#"{"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}"#, (true, Activation::GeluErf)),
            (r#"{"dense_act_fn": "gelu_new", "is_gated_act": true}"#, (true, Activation::GeluTanh)),
        ] {
            let config = read(keys);
            assert_eq!((config.is_gated_act, config.activation), expected, "{keys}");
            assert_eq!(read(&config.to_keys().to_string()), config);
        }
    }

    #[test]
    fn refuses_what_would_change_the_results() {
        for (text, expected) in [
            (r#"{"is_encoder_decoder": false}"#, "is_encoder_decoder = false is not implemented"),
            (
                r#"{"feed_forward_proj": "gated-silu"}"#,
                "feed_forward_proj = \"gated-silu\" is not implemented, and ignoring it would change the results; supported: one of gelu_new, gelu_pytorch_tanh,",
            ),
            (r#"{"feed_forward_proj": "relu-gated"}"#, "feed_forward_proj = \"relu-gated\""),
            (r#"{"feed_forward_proj": 3}"#, "feed_forward_proj = 3"),
            (r#"{"dense_act_fn": "swish"}"#, "dense_act_fn = \"swish\""),
            (r#"{"d_kv": 0}"#, "d_kv = 0; change it to at least 1"),
            (r#"{"num_heads": 0}"#, "num_heads = 0; change it to at least 1"),
            (r#"{"d_model": 99999999999}"#, "d_model = 99999999999; change it to 1 to"),
            (r#"{"num_decoder_layers": 4000000000}"#, "num_decoder_layers = 4000000000; change it to at most"),
            (r#"{"d_kv": 4000000000, "num_heads": 4000000000}"#, "parameter count = "),
            (r#"{"relative_attention_num_buckets": 3}"#, "relative_attention_num_buckets = 3; change it to at least 4"),
            (
                r#"{"relative_attention_max_distance": 16}"#,
                "relative_attention_max_distance = 16; change it to more than 16",
            ),
            (r#"{"dropout_rate": 1}"#, "dropout_rate = 1"),
            (r#"{"layer_norm_epsilon": 0}"#, "layer_norm_epsilon = 0; change it to above 0"),
            (r#"{"vocab_size": 1}"#, "eos_token_id = 1; change it to a token id below 1"),
        ] {
            let error = T5Config::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
