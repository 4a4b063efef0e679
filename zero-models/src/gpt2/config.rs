//! The sizes of a GPT-2: in goes a preset's name, out come parameter counts, shapes and floating-point operations.

use crate::suggest::closest;
use crate::{Activation, ModelError};

/// The name of the family in messages.
pub(super) const FAMILY: &str = "GPT-2";

/// The configuration of a GPT-2, named as in Hugging Face's `config.json`, which is what it is serialised as.
///
/// Reading one refuses what is not implemented and would change the results; keys without an effect on the
/// mathematics are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The longest sequence.
    pub n_positions: usize,
    /// Width of the model.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads; divides `n_embd`.
    pub n_head: usize,
    /// Width of the feed-forward layer; `4 * n_embd` if not given.
    pub n_inner: Option<usize>,
    /// The feed-forward layer's activation (`activation_function` in JSON).
    pub activation: Activation,
    /// What layer norms add to the variance.
    pub layer_norm_epsilon: f64,
    /// Dropout probability after the embeddings.
    pub embd_pdrop: f64,
    /// Dropout probability after attention and after the feed-forward layer.
    pub resid_pdrop: f64,
    /// Dropout probability of attention probabilities.
    pub attn_pdrop: f64,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Whether scores are divided by the square root of a head's width.
    pub scale_attn_weights: bool,
    /// Whether the head's weight is the token embedding.
    pub tie_word_embeddings: bool,
}

/// Name, blocks, width, heads, positions.
type Preset = (&'static str, usize, usize, usize, usize);

const PRESETS: &[Preset] = &[
    ("tiny", 2, 64, 4, 128),
    ("mini", 6, 384, 6, 256),
    ("gpt2", 12, 768, 12, 1024),
    ("gpt2-medium", 24, 1024, 16, 1024),
    ("gpt2-large", 36, 1280, 20, 1024),
    ("gpt2-xl", 48, 1600, 25, 1024),
    ("gpt2-10b", 50, 4096, 32, 1024),
];

impl Gpt2Config {
    /// The names that [`preset`](Self::preset) knows, small to large.
    pub const PRESETS: &'static [&'static str] = &{
        let mut names = [""; PRESETS.len()];
        let mut i = 0;
        while i < names.len() {
            names[i] = PRESETS[i].0;
            i += 1;
        }
        names
    };

    /// A configuration by name.
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
    /// The published models have dropout 0.1; presets have none, as today's pre-training runs use none. What is read
    /// from a `config.json` is taken as it stands there.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let Some(&(_, n_layer, n_embd, n_head, n_positions)) = PRESETS.iter().find(|preset| preset.0 == name) else {
            return Err(ModelError::UnknownPreset {
                model: FAMILY,
                got: name.to_string(),
                presets: Self::PRESETS,
                suggestion: closest(name, Self::PRESETS),
            });
        };
        Ok(Self {
            vocab_size: 50257,
            n_positions,
            n_embd,
            n_layer,
            n_head,
            n_inner: None,
            activation: Activation::GeluTanh,
            layer_norm_epsilon: 1e-5,
            embd_pdrop: 0.0,
            resid_pdrop: 0.0,
            attn_pdrop: 0.0,
            initializer_range: 0.02,
            scale_attn_weights: true,
            tie_word_embeddings: true,
        })
    }

    /// Whether a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<(), ModelError> {
        let wrong = |field, got: String, expected: &str| {
            Err(ModelError::ConfigValue { model: FAMILY, field, got, expected: expected.to_string() })
        };
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_inner", self.inner_width()),
        ] {
            if value == 0 {
                return wrong(field, value.to_string(), "at least 1");
            }
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            let expected = format!("a divisor of n_embd = {}", self.n_embd);
            return wrong("n_head", self.n_head.to_string(), &expected);
        }
        for (field, value) in
            [("embd_pdrop", self.embd_pdrop), ("resid_pdrop", self.resid_pdrop), ("attn_pdrop", self.attn_pdrop)]
        {
            if !(0.0..1.0).contains(&value) {
                return wrong(field, value.to_string(), "at least 0 and below 1");
            }
        }
        for (field, value) in
            [("layer_norm_epsilon", self.layer_norm_epsilon), ("initializer_range", self.initializer_range)]
        {
            if !(value.is_finite() && value > 0.0) {
                return wrong(field, value.to_string(), "above 0");
            }
        }
        Ok(())
    }

    /// Width of the feed-forward layer.
    pub fn inner_width(&self) -> usize {
        // Not above what a number holds, for a configuration that somebody made up.
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// Number of parameters; a tied head counts once.
    pub fn num_params(&self) -> usize {
        self.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Names and shapes of the parameters in the `state_dict` of Hugging Face's `GPT2LMHeadModel`, in the order in
    /// which the module visits them. A tied head is not listed.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (d, f) = (self.n_embd, self.inner_width());
        let mut shapes = vec![
            ("transformer.wte.weight".to_string(), vec![self.vocab_size, d]),
            ("transformer.wpe.weight".to_string(), vec![self.n_positions, d]),
        ];
        for i in 0..self.n_layer {
            let in_block = [
                ("ln_1.weight", vec![d]),
                ("ln_1.bias", vec![d]),
                ("attn.c_attn.weight", vec![d, 3 * d]),
                ("attn.c_attn.bias", vec![3 * d]),
                ("attn.c_proj.weight", vec![d, d]),
                ("attn.c_proj.bias", vec![d]),
                ("ln_2.weight", vec![d]),
                ("ln_2.bias", vec![d]),
                ("mlp.c_fc.weight", vec![d, f]),
                ("mlp.c_fc.bias", vec![f]),
                ("mlp.c_proj.weight", vec![f, d]),
                ("mlp.c_proj.bias", vec![d]),
            ];
            shapes.extend(in_block.into_iter().map(|(name, shape)| (format!("transformer.h.{i}.{name}"), shape)));
        }
        shapes.push(("transformer.ln_f.weight".to_string(), vec![d]));
        shapes.push(("transformer.ln_f.bias".to_string(), vec![d]));
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_string(), vec![self.vocab_size, d]));
        }
        shapes
    }

    /// Floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens.
    ///
    /// Two per weight of a matrix product forward and four backward, and `12 * n_layer * n_embd * seq` for the
    /// attention scores and their use, which are counted whole although half of them are masked, as in
    /// <https://arxiv.org/abs/2204.02311> (appendix B). Recomputation in activation checkpointing is not counted.
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
