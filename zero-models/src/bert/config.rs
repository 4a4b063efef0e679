//! The sizes of a BERT: in goes a preset's name, out come parameter counts, shapes and floating-point operations.

use crate::suggest::closest;
use crate::{Activation, ModelError};

/// The name of the family in messages.
pub(super) const FAMILY: &str = "BERT";

/// The configuration of a BERT, named as in Hugging Face's `config.json`, which is what it is serialised as.
///
/// Reading one refuses what is not implemented and would change the results; keys without an effect on the
/// mathematics are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the model.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads; divides `hidden_size`.
    pub num_attention_heads: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// The activation of the feed-forward layer and of the prediction head.
    pub hidden_act: Activation,
    /// Dropout probability after the embeddings, attention and the feed-forward layer.
    pub hidden_dropout_prob: f64,
    /// Dropout probability of attention probabilities.
    pub attention_probs_dropout_prob: f64,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// Number of kinds of segments.
    pub type_vocab_size: usize,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// What layer norms add to the variance.
    pub layer_norm_eps: f64,
    /// Whether the prediction head's weight is the word embedding.
    pub tie_word_embeddings: bool,
}

/// Name, layers, width, heads.
type Preset = (&'static str, usize, usize, usize);

const PRESETS: &[Preset] = &[("bert-tiny", 2, 128, 2), ("bert-base", 12, 768, 12), ("bert-large", 24, 1024, 16)];

impl BertConfig {
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

    /// A configuration by name, with the vocabulary of the uncased English models.
    ///
    /// | preset | parameters with both heads | layers | width | heads |
    /// |---|---|---|---|---|
    /// | `bert-tiny` | 4.4 M (nearly all word embedding) | 2 | 128 | 2 |
    /// | `bert-base` | 110 M | 12 | 768 | 12 |
    /// | `bert-large` | 336 M | 24 | 1024 | 16 |
    ///
    /// The published models have dropout 0.1; presets have none, as for GPT-2. What is read from a `config.json` is
    /// taken as it stands there.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let Some(&(_, num_hidden_layers, hidden_size, num_attention_heads)) =
            PRESETS.iter().find(|preset| preset.0 == name)
        else {
            return Err(ModelError::UnknownPreset {
                model: FAMILY,
                got: name.to_string(),
                presets: Self::PRESETS,
                suggestion: closest(name, Self::PRESETS),
            });
        };
        Ok(Self {
            vocab_size: 30522,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size: 4 * hidden_size,
            hidden_act: Activation::GeluErf,
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
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
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
        ] {
            if value == 0 {
                return wrong(field, value.to_string(), "at least 1");
            }
        }
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let expected = format!("a divisor of hidden_size = {}", self.hidden_size);
            return wrong("num_attention_heads", self.num_attention_heads.to_string(), &expected);
        }
        for (field, value) in [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ] {
            if !(0.0..1.0).contains(&value) {
                return wrong(field, value.to_string(), "at least 0 and below 1");
            }
        }
        for (field, value) in [("layer_norm_eps", self.layer_norm_eps), ("initializer_range", self.initializer_range)] {
            if !(value.is_finite() && value > 0.0) {
                return wrong(field, value.to_string(), "above 0");
            }
        }
        Ok(())
    }

    /// Number of parameters with both heads; a tied head counts once.
    pub fn num_params(&self) -> usize {
        self.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Names and shapes of the parameters in the `state_dict` of Hugging Face's `BertForPreTraining`, in the order in
    /// which the module visits them. Linear weights are `[out, in]` there. A tied head is not listed.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (v, d, f) = (self.vocab_size, self.hidden_size, self.intermediate_size);
        let mut shapes = Vec::new();
        let mut add = |name: String, shape: &[usize]| shapes.push((name, shape.to_vec()));

        for (table, rows) in
            [("word", v), ("position", self.max_position_embeddings), ("token_type", self.type_vocab_size)]
        {
            add(format!("bert.embeddings.{table}_embeddings.weight"), &[rows, d]);
        }
        add("bert.embeddings.LayerNorm.weight".to_string(), &[d]);
        add("bert.embeddings.LayerNorm.bias".to_string(), &[d]);
        for i in 0..self.num_hidden_layers {
            for (layer, weight) in [
                ("attention.self.query", vec![d, d]),
                ("attention.self.key", vec![d, d]),
                ("attention.self.value", vec![d, d]),
                ("attention.output.dense", vec![d, d]),
                ("attention.output.LayerNorm", vec![d]),
                ("intermediate.dense", vec![f, d]),
                ("output.dense", vec![d, f]),
                ("output.LayerNorm", vec![d]),
            ] {
                add(format!("bert.encoder.layer.{i}.{layer}.weight"), &weight);
                add(format!("bert.encoder.layer.{i}.{layer}.bias"), &weight[..1]);
            }
        }
        add("bert.pooler.dense.weight".to_string(), &[d, d]);
        add("bert.pooler.dense.bias".to_string(), &[d]);
        let head = "cls.predictions";
        add(format!("{head}.transform.dense.weight"), &[d, d]);
        add(format!("{head}.transform.dense.bias"), &[d]);
        add(format!("{head}.transform.LayerNorm.weight"), &[d]);
        add(format!("{head}.transform.LayerNorm.bias"), &[d]);
        if !self.tie_word_embeddings {
            add(format!("{head}.decoder.weight"), &[v, d]);
        }
        add(format!("{head}.bias"), &[v]);
        add("cls.seq_relationship.weight".to_string(), &[2, d]);
        add("cls.seq_relationship.bias".to_string(), &[2]);
        shapes
    }

    /// Floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens, with the
    /// prediction head at every token.
    ///
    /// Two per weight of a matrix product forward and four backward, and
    /// `12 * num_hidden_layers * hidden_size * seq` for the attention scores and their use. The pooler and the
    /// next-sentence head run once per sequence and are left out.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let (d, f) = (self.hidden_size as u64, self.intermediate_size as u64);
        let layers = self.num_hidden_layers as u64;
        let weights = layers * (4 * d * d + 2 * d * f) + d * d + self.vocab_size as u64 * d;
        6 * weights + 12 * layers * d * seq as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_sizes() {
        for (name, params) in [("bert-tiny", 4_433_468), ("bert-base", 110_106_428), ("bert-large", 336_226_108)] {
            let config = BertConfig::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.num_params(), params, "{name}");
        }
    }

    #[test]
    fn an_unknown_preset_lists_the_known_ones() {
        let text = BertConfig::preset("bert-bsae").unwrap_err().to_string();
        assert!(text.contains("did you mean \"bert-base\"?"), "{text}");
        assert!(text.contains("bert-tiny, bert-base, bert-large"), "{text}");
    }

    #[test]
    fn wrong_values_are_named() {
        let tiny = BertConfig::preset("bert-tiny").unwrap();
        let heads = BertConfig { num_attention_heads: 3, ..tiny.clone() };
        let text = heads.validate().unwrap_err().to_string();
        assert!(text.contains("num_attention_heads = 3"), "{text}");
        let dropout = BertConfig { hidden_dropout_prob: -0.1, ..tiny };
        let text = dropout.validate().unwrap_err().to_string();
        assert!(text.contains("hidden_dropout_prob = -0.1"), "{text}");
    }
}
