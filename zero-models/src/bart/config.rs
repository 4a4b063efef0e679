//! The configuration of BART: from a preset or Hugging Face's `config.json`, with parameter counts and shapes.

use serde_json::{Map, Value};

use crate::generate::Sampling;
use crate::hf_config::{check_count, check_tokens, check_values, find_preset, hf_config, named, names, one_end};
use crate::labels::{HeadKeys, check_labels};
use crate::{Activation, ModelError, ProblemType, Result};

/// Number of rows in a position table before the row of the first position.
pub const OFFSET: usize = 2;

hf_config! {
    /// The configuration of BART.
    pub struct BartConfig of "BART", "bart" {
        /// Number of tokens in the vocabulary.
        vocab_size: usize = 50265,
        /// Width of the model.
        #[serde(alias = "hidden_size")]
        d_model: usize = 1024,
        /// Number of encoder layers.
        encoder_layers: usize = 12,
        /// Number of attention heads of the encoder; divides `d_model`.
        encoder_attention_heads: usize = 16,
        /// Width of the encoder's feed-forward layers.
        encoder_ffn_dim: usize = 4096,
        /// Number of decoder layers.
        decoder_layers: usize = 12,
        /// Number of attention heads of the decoder; divides `d_model`.
        decoder_attention_heads: usize = 16,
        /// Width of the decoder's feed-forward layers.
        decoder_ffn_dim: usize = 4096,
        /// Maximum sequence length, of encoder and decoder.
        max_position_embeddings: usize = 1024,
        /// Dropout probability after the embeddings, attention and the feed-forward layer.
        dropout: f64 = 0.1,
        /// Dropout probability of attention probabilities.
        attention_dropout: f64 = 0.0,
        /// Dropout probability after the activation.
        activation_dropout: f64 = 0.0,
        /// Dropout probability before each layer of a classifier's head.
        classifier_dropout: f64 = 0.0,
        /// Standard deviation of initial weights.
        init_std: f64 = 0.02,
        /// True if token embeddings are multiplied by the square root of the width.
        scale_embedding: bool = false,
        /// The padding token.
        pad_token_id: u32 = 1,
        /// The end-of-sequence token.
        eos_token_id: u32 = 2,
        /// The first token that the decoder reads.
        decoder_start_token_id: u32 = 2,
        /// The first token of every generated sequence, if it is forced.
        forced_bos_token_id: Option<u32> = None,
        /// The last token of a generated sequence that reaches its maximum length, if it is forced.
        forced_eos_token_id: Option<u32> = Some(2),
        /// The kind of labels of a classifier. If absent, the number of labels decides, or the labels themselves.
        #[serde(skip_serializing_if = "Option::is_none")]
        problem_type: Option<ProblemType> = None,
        /// The head that reads the decoder's last layer.
        #[serde(flatten)]
        head: BartHead = BartHead::Generation,
    }
    /// The activation of the feed-forward layers (`activation_function` in JSON).
    activation activation = "activation_function": Activation::GeluErf;
    given complete;
    refused {
        is_encoder_decoder: bool = true,
        tie_word_embeddings: bool = true,
        encoder_layerdrop: f64 = 0.0,
        decoder_layerdrop: f64 = 0.0,
    }
}

/// The head of a BART, by its class in transformers.
///
/// In a `config.json` it is given by `architectures`, and for a classifier also by the names of its labels, `id2label`. Any other class,
/// or none, is read as `BartForConditionalGeneration`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(from = "HeadKeys", into = "HeadKeys")]
pub enum BartHead {
    /// `BartForConditionalGeneration`: predicts the next token; the head's weight is the token embedding.
    #[default]
    Generation,
    /// `BartForSequenceClassification`: assigns a sequence to these classes, or predicts a number for each of these labels.
    Classes(Vec<String>),
}

impl BartHead {
    /// Returns the class in transformers.
    fn class(&self) -> &'static str {
        match self {
            Self::Generation => "BartForConditionalGeneration",
            Self::Classes(_) => "BartForSequenceClassification",
        }
    }
}

impl From<HeadKeys> for BartHead {
    fn from(keys: HeadKeys) -> Self {
        keys.labels(3).map_or(Self::Generation, Self::Classes)
    }
}

impl From<BartHead> for HeadKeys {
    fn from(head: BartHead) -> Self {
        Self::new(head.class().into(), if let BartHead::Classes(classes) = &head { classes } else { &[] })
    }
}

/// Reduces an `eos_token_id` that is a list, as for generation, to its first token.
fn complete(text: &str) -> Result<String> {
    let syntax = |source| ModelError::ConfigSyntax { model: BartConfig::FAMILY, source };
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    one_end(&mut keys);
    Ok(Value::from(keys).to_string())
}

/// Layers, width, heads, feed-forward width, positions.
const PRESETS: [(&str, [usize; 5]); 3] = [
    ("bart-tiny", [2, 64, 4, 256, 128]),
    ("bart-base", [6, 768, 12, 3072, 1024]),
    ("bart-large", [12, 1024, 16, 4096, 1024]),
];

impl BartConfig {
    /// Names that [`preset`](Self::preset) accepts, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

    /// Returns the configuration of a preset.
    ///
    /// | preset | parameters | layers of each half | width | heads |
    /// |---|---|---|---|---|
    /// | `bart-tiny` | 3.5 M (nearly all token embedding) | 2 | 64 | 4 |
    /// | `bart-base` | 139 M | 6 | 768 | 12 |
    /// | `bart-large` | 406 M | 12 | 1024 | 16 |
    ///
    /// The published models have dropout 0.1; presets have none, as for GPT-2. Values read from a `config.json` are kept.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    pub fn preset(name: &str) -> Result<Self> {
        let [layers, d_model, heads, ffn, max_position_embeddings] =
            find_preset(Self::FAMILY, &PRESETS, Self::PRESETS, name)?;
        Ok(Self {
            d_model,
            encoder_layers: layers,
            encoder_attention_heads: heads,
            encoder_ffn_dim: ffn,
            decoder_layers: layers,
            decoder_attention_heads: heads,
            decoder_ffn_dim: ffn,
            max_position_embeddings,
            dropout: 0.0,
            ..Self::published()
        })
    }

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let [words, width, positions] = named!(self: vocab_size, d_model, max_position_embeddings);
        let encoder = named!(self: encoder_attention_heads, encoder_layers, encoder_ffn_dim);
        let decoder = named!(self: decoder_attention_heads, decoder_layers, decoder_ffn_dim);
        let dropouts = named!(self: dropout, attention_dropout, activation_dropout, classifier_dropout);
        if let BartHead::Classes(classes) = &self.head {
            check_labels(Self::FAMILY, self.problem_type, classes)?;
        }
        for [heads, layers, inner] in [encoder, decoder] {
            let sizes = [words, width, positions, heads, layers, inner];
            check_values(Self::FAMILY, &sizes, [heads, width], &dropouts, &named!(self: init_std))?;
        }
        let tokens = named!(self: pad_token_id, eos_token_id, decoder_start_token_id).into_iter();
        let forced =
            [("forced_bos_token_id", self.forced_bos_token_id), ("forced_eos_token_id", self.forced_eos_token_id)];
        let forced = forced.into_iter().filter_map(|(field, token)| Some((field, token?)));
        check_tokens(Self::FAMILY, self.vocab_size, &tokens.chain(forced).collect::<Vec<_>>())?;
        let deeper = if self.decoder_layers > self.encoder_layers { "decoder_layers" } else { "encoder_layers" };
        check_count(Self::FAMILY, deeper, self)
    }

    /// Returns the class in transformers.
    pub fn architecture(&self) -> &'static str {
        self.head.class()
    }

    /// Returns the names of a classifier's labels; empty for another head.
    pub fn classes(&self) -> &[String] {
        if let BartHead::Classes(classes) = &self.head { classes } else { &[] }
    }

    /// Returns the settings of greedy generation: the end token and the forced first and last tokens.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            stop: vec![self.eos_token_id],
            forced_first: self.forced_bos_token_id,
            forced_last: self.forced_eos_token_id,
            ..Sampling::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_sizes() {
        for (name, params) in [("bart-base", 139_420_416), ("bart-large", 406_291_456)] {
            assert_eq!(BartConfig::preset(name).unwrap().num_params(), params);
        }
    }

    #[test]
    fn is_written_as_it_is_read() {
        for name in BartConfig::PRESETS {
            let config = BartConfig::preset(name).unwrap();
            config.validate().unwrap();
            let text = serde_json::to_string(&config).unwrap();
            assert!(text.contains("\"model_type\":\"bart\"") && text.contains("\"is_encoder_decoder\":true"), "{text}");
            assert_eq!(BartConfig::from_json(&text).unwrap(), config);
        }
        let cnn =
            r#"{"model_type": "bart", "forced_bos_token_id": 0, "normalize_before": false, "extra_pos_embeddings": 2}"#;
        let config = BartConfig::from_json(cnn).unwrap();
        assert_eq!(config, BartConfig { forced_bos_token_id: Some(0), ..BartConfig::published() });
        let how = config.sampling();
        assert_eq!((how.stop, how.forced_first, how.forced_last), (vec![2], Some(0), Some(2)));
    }

    #[test]
    fn a_classifier_has_labels() {
        let read = |keys: &str| {
            let text = format!(r#"{{"architectures": ["BartForSequenceClassification"], {keys}}}"#);
            BartConfig::from_json(&text)
        };
        // As bart-large-mnli's file has them.
        let mnli = read(
            r#""id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"}, "classifier_dropout": 0.1, "_num_labels": 3"#,
        );
        let mnli = mnli.unwrap();
        assert_eq!(
            (mnli.classes(), mnli.classifier_dropout),
            (&["contradiction", "neutral", "entailment"].map(String::from)[..], 0.1)
        );
        assert_eq!(BartConfig::from_json(&serde_json::to_string(&mnli).unwrap()).unwrap(), mnli);
        assert_eq!(
            mnli.num_params(),
            BartConfig::preset("bart-large").unwrap().num_params() + 1024 * 1024 + 1024 + 3 * 1025
        );
        // As many as transformers takes where a file has none, and one of a reranker.
        assert_eq!(read(r#""problem_type": null"#).unwrap().classes().len(), 3);
        let ranked = read(r#""num_labels": 1, "problem_type": "regression""#).unwrap();
        assert_eq!((ranked.classes().len(), ranked.problem_type), (1, Some(ProblemType::Regression)));
        let told = read(r#""num_labels": 1, "problem_type": "single_label_classification""#).unwrap_err().to_string();
        assert!(told.contains("BART cannot have id2label = 1 classes"), "{told}");
        // Labels of a model with another head are nothing.
        let cnn = BartConfig::from_json(r#"{"architectures": ["BartModel"], "id2label": {"0": "a"}}"#).unwrap();
        assert_eq!(cnn, BartConfig::published());
    }

    #[test]
    fn refuses_what_would_change_the_results() {
        for (text, expected) in [
            (r#"{"model_type": "mbart"}"#, "model_type \"mbart\", expected \"bart\""),
            (r#"{"tie_word_embeddings": false}"#, "tie_word_embeddings = false is not implemented"),
            (r#"{"decoder_layerdrop": 0.1}"#, "decoder_layerdrop = 0.1"),
            (
                r#"{"decoder_attention_heads": 7}"#,
                "decoder_attention_heads = 7; change it to a divisor of d_model = 1024",
            ),
            (r#"{"encoder_layers": 0}"#, "encoder_layers = 0"),
            (r#"{"vocab_size": 2}"#, "eos_token_id = 2; change it to a token id below 2"),
            (r#"{"activation_function": "swish"}"#, "activation_function = \"swish\""),
        ] {
            let error = BartConfig::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
