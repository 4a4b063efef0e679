//! The sizes of a BERT: in goes a preset's name or Hugging Face's `config.json`, out come parameter counts, shapes and
//! floating-point operations.

use std::collections::BTreeMap;

use crate::hf_config::{check_values, find_preset, hf_config, named, names};
use crate::hf_params::fresh;
use crate::{Activation, ModelError, ModelParam, Result};

hf_config! {
    /// The configuration of a BERT.
    pub struct BertConfig of "BERT", "bert" {
        /// Number of tokens in the vocabulary.
        vocab_size: usize = 30522,
        /// Width of the model.
        hidden_size: usize = 768,
        /// Number of layers.
        num_hidden_layers: usize = 12,
        /// Number of attention heads; divides `hidden_size`.
        num_attention_heads: usize = 12,
        /// Width of the feed-forward layer.
        intermediate_size: usize = 3072,
        /// Dropout probability after the embeddings, attention and the feed-forward layer.
        hidden_dropout_prob: f64 = 0.1,
        /// Dropout probability of attention probabilities.
        attention_probs_dropout_prob: f64 = 0.1,
        /// The longest sequence.
        max_position_embeddings: usize = 512,
        /// Number of kinds of segments.
        type_vocab_size: usize = 2,
        /// Standard deviation of fresh weights.
        initializer_range: f64 = 0.02,
        /// What layer norms add to the variance.
        layer_norm_eps: f64 = 1e-12,
        /// Whether the prediction head's weight is the word embedding.
        tie_word_embeddings: bool = true,
        /// Dropout probability before a classifier; that after the layers if it is absent.
        classifier_dropout: Option<f64> = None,
        /// What reads the last layer.
        #[serde(flatten)]
        head: BertHead = BertHead::PreTraining,
    }
    /// The activation of the feed-forward layer and of the prediction head.
    activation hidden_act = "hidden_act": Activation::GeluErf;
    refused {
        is_decoder: bool = false,
        add_cross_attention: bool = false,
        position_embedding_type: String = "absolute".to_string(),
    }
}

/// What reads the last layer of a BERT: which of transformers' classes it is.
///
/// In a `config.json` it is `architectures`, and for a classifier the names of its classes, `id2label`. What names another
/// class, or none, is taken for `BertForPreTraining`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(from = "HeadKeys", into = "HeadKeys")]
pub enum BertHead {
    /// `BertForPreTraining`: masked tokens, and whether one text follows another.
    #[default]
    PreTraining,
    /// `BertForMaskedLM`: masked tokens.
    MaskedLm,
    /// `BertForSequenceClassification`: which of these classes a text is of.
    Classes(Vec<String>),
}

/// The keys of `config.json` that say it.
#[derive(Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
struct HeadKeys {
    architectures: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    id2label: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    label2id: BTreeMap<String, usize>,
    #[serde(skip_serializing)]
    num_labels: Option<usize>,
}

impl BertHead {
    /// The class of transformers.
    pub fn architecture(&self) -> &'static str {
        match self {
            Self::PreTraining => "BertForPreTraining",
            Self::MaskedLm => "BertForMaskedLM",
            Self::Classes(_) => "BertForSequenceClassification",
        }
    }
}

impl From<HeadKeys> for BertHead {
    fn from(keys: HeadKeys) -> Self {
        let is = |head: &Self| keys.architectures.iter().any(|name| name == head.architecture());
        // As transformers: two, where a file names none.
        let unnamed = || (0..keys.num_labels.unwrap_or(2)).map(|class| format!("LABEL_{class}")).collect();
        // Numbers are texts in JSON's keys.
        let number = |id: &String| id.parse::<usize>().unwrap_or(usize::MAX);
        let mut named: Vec<_> = keys.id2label.iter().map(|(id, class)| (number(id), class.clone())).collect();
        named.sort();
        let classes: Vec<String> = named.into_iter().map(|(_, class)| class).collect();
        let classes = Self::Classes(if classes.is_empty() { unnamed() } else { classes });
        [classes, Self::MaskedLm].into_iter().find(is).unwrap_or_default()
    }
}

impl From<BertHead> for HeadKeys {
    fn from(head: BertHead) -> Self {
        let architectures = vec![head.architecture().to_string()];
        let BertHead::Classes(classes) = head else { return Self { architectures, ..Self::default() } };
        let label2id = classes.iter().cloned().enumerate().map(|(id, class)| (class, id)).collect();
        Self {
            architectures,
            id2label: classes.into_iter().enumerate().map(|(id, class)| (id.to_string(), class)).collect(),
            label2id,
            num_labels: None,
        }
    }
}

/// Layers, width, heads.
const PRESETS: [(&str, [usize; 3]); 3] =
    [("bert-tiny", [2, 128, 2]), ("bert-base", [12, 768, 12]), ("bert-large", [24, 1024, 16])];

impl BertConfig {
    /// The names that [`preset`](Self::preset) knows, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

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
    pub fn preset(name: &str) -> Result<Self> {
        let [num_hidden_layers, hidden_size, num_attention_heads] =
            find_preset(Self::FAMILY, &PRESETS, Self::PRESETS, name)?;
        Ok(Self {
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size: 4 * hidden_size,
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            ..Self::published()
        })
    }

    /// The parameters, in the order in which a module visits them, each with the values that it begins with: those of
    /// `BertConfig::init` on ranks with this seed.
    pub fn fresh(&self, seed: u64, mut each: impl FnMut(ModelParam, Vec<f32>)) {
        fresh(self, seed, |_| self.initializer_range, &mut each);
    }

    /// Whether a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let [vocabulary, width, layers, heads] =
            named!(self: vocab_size, hidden_size, num_hidden_layers, num_attention_heads);
        let [inner, positions, types] = named!(self: intermediate_size, max_position_embeddings, type_vocab_size);
        let dropout = ("classifier_dropout", self.classifier_dropout.unwrap_or_default());
        if let BertHead::Classes(classes) = &self.head
            && classes.len() < 2
        {
            let (field, got) = ("id2label", format!("{} classes", classes.len()));
            return Err(ModelError::ConfigValue { model: Self::FAMILY, field, got, expected: "at least 2".into() });
        }
        check_values(
            Self::FAMILY,
            &[vocabulary, width, layers, heads, inner, positions, types],
            [heads, width],
            &[&named!(self: hidden_dropout_prob, attention_probs_dropout_prob)[..], &[dropout]].concat(),
            &named!(self: layer_norm_eps, initializer_range),
        )
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
        let preset = BertConfig { head: BertHead::MaskedLm, ..BertConfig::preset("bert-base").unwrap() };
        let with_dropout = BertConfig { hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, ..preset };
        assert_eq!(config, with_dropout);
        assert_eq!(BertConfig::from_json("{}").unwrap(), BertConfig { head: BertHead::PreTraining, ..config });
    }

    #[test]
    fn is_written_as_it_is_read() {
        for head in [
            BertHead::PreTraining,
            BertHead::MaskedLm,
            BertHead::Classes(["no", "so-so", "yes"].map(String::from).into()),
        ] {
            let config = BertConfig { head, ..BertConfig::preset("bert-large").unwrap() };
            let text = serde_json::to_string(&config).unwrap();
            assert_eq!(BertConfig::from_json(&text).unwrap(), config);
        }
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
