//! The configuration of GPT-2: from a preset or Hugging Face's `config.json`, with parameter counts, shapes and floating-point
//! operations.

use crate::hf_config::{check_count, check_values, find_preset, hf_config, named, names};
use crate::{Activation, Result};

hf_config! {
    /// The configuration of GPT-2.
    pub struct Gpt2Config of "GPT-2", "gpt2" {
        /// Number of tokens in the vocabulary.
        vocab_size: usize = 50257,
        /// Maximum sequence length.
        #[serde(alias = "max_position_embeddings")]
        n_positions: usize = 1024,
        /// Width of the model.
        #[serde(alias = "hidden_size")]
        n_embd: usize = 768,
        /// Number of blocks.
        #[serde(alias = "num_hidden_layers")]
        n_layer: usize = 12,
        /// Number of attention heads; divides `n_embd`.
        #[serde(alias = "num_attention_heads")]
        n_head: usize = 12,
        /// Width of the feed-forward layer; `4 * n_embd` if absent.
        n_inner: Option<usize> = None,
        /// Epsilon that layer norms add to the variance.
        layer_norm_epsilon: f64 = 1e-5,
        /// Dropout probability after the embeddings.
        embd_pdrop: f64 = 0.1,
        /// Dropout probability after attention and after the feed-forward layer.
        resid_pdrop: f64 = 0.1,
        /// Dropout probability of attention probabilities.
        attn_pdrop: f64 = 0.1,
        /// Standard deviation of initial weights.
        initializer_range: f64 = 0.02,
        /// True if scores are divided by the square root of a head's width.
        scale_attn_weights: bool = true,
        /// True if the head's weight is the token embedding.
        tie_word_embeddings: bool = true,
    }
    /// The feed-forward layer's activation (`activation_function` in JSON).
    activation activation = "activation_function": Activation::GeluTanh;
    refused {
        scale_attn_by_inverse_layer_idx: bool = false,
        add_cross_attention: bool = false,
    }
}

/// Blocks, width, heads, positions.
const PRESETS: [(&str, [usize; 4]); 7] = [
    ("tiny", [2, 64, 4, 128]),
    ("mini", [6, 384, 6, 256]),
    ("gpt2", [12, 768, 12, 1024]),
    ("gpt2-medium", [24, 1024, 16, 1024]),
    ("gpt2-large", [36, 1280, 20, 1024]),
    ("gpt2-xl", [48, 1600, 25, 1024]),
    ("gpt2-10b", [50, 4096, 32, 1024]),
];

impl Gpt2Config {
    /// Names that [`preset`](Self::preset) accepts, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

    /// Returns the configuration of a preset.
    ///
    /// | preset | parameters | blocks | width | heads | positions |
    /// |---|---|---|---|---|---|
    /// | `tiny` | 3.3 M (nearly all token embedding) | 2 | 64 | 4 | 128 |
    /// | `mini` | 30 M | 6 | 384 | 6 | 256 |
    /// | `gpt2` | 124 M | 12 | 768 | 12 | 1024 |
    /// | `gpt2-medium` | 355 M | 24 | 1024 | 16 | 1024 |
    /// | `gpt2-large` | 774 M | 36 | 1280 | 20 | 1024 |
    /// | `gpt2-xl` | 1.56 B | 48 | 1600 | 25 | 1024 |
    /// | `gpt2-10b` | 10.3 B | 50 | 4096 | 32 | 1024 |
    ///
    /// The published models have dropout 0.1; presets have none, as today's pre-training runs use none. Values read from a `config.json`
    /// are kept.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`](crate::ModelError::UnknownPreset), with the list of names.
    pub fn preset(name: &str) -> Result<Self> {
        let [n_layer, n_embd, n_head, n_positions] = find_preset(Self::FAMILY, &PRESETS, Self::PRESETS, name)?;
        let [embd_pdrop, resid_pdrop, attn_pdrop] = [0.0; 3];
        Ok(Self { n_layer, n_embd, n_head, n_positions, embd_pdrop, resid_pdrop, attn_pdrop, ..Self::published() })
    }

    /// Returns the standard deviation of projections back into the residual stream; a block has two of them.
    pub(crate) fn residual_std(&self) -> f64 {
        self.initializer_range / (2.0 * self.n_layer as f64).sqrt()
    }

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`](crate::ModelError::ConfigValue) for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let [vocabulary, positions, width, blocks, heads] =
            named!(self: vocab_size, n_positions, n_embd, n_layer, n_head);
        check_values(
            Self::FAMILY,
            &[vocabulary, positions, width, blocks, heads, ("n_inner", self.inner_width())],
            [heads, width],
            &named!(self: embd_pdrop, resid_pdrop, attn_pdrop),
            &named!(self: layer_norm_epsilon, initializer_range),
        )?;
        check_count(Self::FAMILY, "n_layer", self)
    }

    /// Returns the width of the feed-forward layer.
    pub fn inner_width(&self) -> usize {
        // Saturates instead of overflowing, for a crafted configuration.
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// Returns the floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens.
    ///
    /// Each weight of a matrix product counts two operations forward and four backward. The attention scores and their use count
    /// `12 * n_layer * n_embd * seq`, including the half that is masked, as in <https://arxiv.org/abs/2204.02311> (appendix B).
    /// Recomputation in activation checkpointing is not counted.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let (d, f) = (self.n_embd as u64, self.inner_width() as u64);
        let layers = self.n_layer as u64;
        let weights = layers * (4 * d * d + 2 * d * f) + self.vocab_size as u64 * d;
        6 * weights + 12 * layers * d * seq as u64
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
            (
                r#"{"n_layer": "twelve"}"#,
                "a wrong \"n_layer\" (invalid type: string \"twelve\", expected a whole number)",
            ),
        ] {
            let error = Gpt2Config::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        Gpt2Config::from_json(r#"{"reorder_and_upcast_attn": true}"#).unwrap();
    }

    #[test]
    fn presets_have_the_published_sizes() {
        for (name, params) in [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("gpt2-10b", 10_279_047_168),
        ] {
            assert_eq!(Gpt2Config::preset(name).unwrap().num_params(), params);
        }
    }

    #[test]
    fn every_preset_is_valid_and_listed() {
        assert_eq!(Gpt2Config::PRESETS.len(), 7);
        for name in Gpt2Config::PRESETS {
            Gpt2Config::preset(name).unwrap().validate().unwrap();
        }
    }

    #[test]
    fn an_unknown_preset_lists_the_known_ones() {
        let error = Gpt2Config::preset("gpt2-meduim").unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no GPT-2 preset \"gpt2-meduim\", did you mean \"gpt2-medium\"?; choose one of tiny, mini, gpt2, \
             gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b"
        );
    }

    #[test]
    fn wrong_values_are_named() {
        let tiny = Gpt2Config::preset("tiny").unwrap();
        let cases: [(Gpt2Config, &str); 4] = [
            (
                Gpt2Config { n_head: 5, ..tiny.clone() },
                "GPT-2 cannot have n_head = 5; change it to a divisor of n_embd = 64",
            ),
            (Gpt2Config { n_layer: 0, ..tiny.clone() }, "n_layer = 0"),
            (Gpt2Config { attn_pdrop: 1.0, ..tiny.clone() }, "attn_pdrop = 1"),
            (Gpt2Config { layer_norm_epsilon: f64::NAN, ..tiny }, "layer_norm_epsilon = NaN"),
        ];
        for (config, expected) in cases {
            let text = config.validate().unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn flops_are_six_per_matrix_weight_and_attention() {
        let config = Gpt2Config::preset("gpt2").unwrap();
        let positions_and_vectors = 1024 * 768 + 12 * 13 * 768 + 2 * 768;
        let matrices = config.num_params() - positions_and_vectors;
        assert_eq!(config.flops_per_token(1024), 6 * matrices as u64 + 12 * 12 * 768 * 1024);
    }
}
