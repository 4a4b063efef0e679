//! The configuration of BERT and its variants: from a preset or Hugging Face's `config.json`, with parameter counts, shapes and
//! floating-point operations.

use serde_json::{Map, Value, json};

use crate::hf_config::{check_count, check_values, find_preset, hf_config, named, names};
use crate::labels::{CLASSIFIER, HeadKeys, check_labels};
use crate::{Activation, ModelError, ProblemType, Result};

/// A variant of BERT, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BertKind {
    /// BERT.
    Bert,
    /// RoBERTa: positions are counted from the padding token's id, and there is no pooler.
    Roberta,
    /// XLM-RoBERTa, with the architecture of RoBERTa.
    #[serde(rename = "xlm-roberta")]
    XlmRoberta,
    /// CamemBERT, with the architecture of RoBERTa.
    Camembert,
    /// DistilBERT: no segments and no pooler.
    DistilBert,
}

hf_config! {
    /// The configuration of BERT, RoBERTa or DistilBERT.
    pub struct BertConfig of "BERT" {
        /// The variant.
        model_type: BertKind = BertKind::Bert,
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
        /// Number of rows of the position table; [`positions`](Self::positions) is the maximum sequence length.
        max_position_embeddings: usize = 512,
        /// Number of segment types.
        type_vocab_size: usize = 2,
        /// Standard deviation of initial weights.
        initializer_range: f64 = 0.02,
        /// Epsilon that layer norms add to the variance.
        layer_norm_eps: f64 = 1e-12,
        /// True if the prediction head's weight is the word embedding.
        tie_word_embeddings: bool = true,
        /// Dropout probability before a classifier; `hidden_dropout_prob` if absent.
        classifier_dropout: Option<f64> = None,
        /// The kind of labels of a classifier. If absent, the number of labels decides, or the labels themselves.
        #[serde(skip_serializing_if = "Option::is_none")]
        problem_type: Option<ProblemType> = None,
        /// Id of the padding token. The first position of a RoBERTa is row `pad_token_id + 1` of its position table.
        pad_token_id: usize = 0,
        /// The head.
        #[serde(flatten)]
        head: BertHead = BertHead::PreTraining,
    }
    /// The activation of the feed-forward layer and of the prediction head.
    activation hidden_act = "hidden_act": Activation::GeluErf;
    given complete;
    refused {
        is_decoder: bool = false,
        add_cross_attention: bool = false,
        position_embedding_type: String = "absolute".to_string(),
    }
}

/// The head of a BERT, by its class in transformers.
///
/// In a `config.json` it is given by `architectures`, and for a classifier also by the names of its classes, `id2label`. Any other
/// class, or none, is read as `BertForPreTraining`, or as the `ForMaskedLM` class of another variant.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(from = "HeadKeys", into = "HeadKeys")]
pub enum BertHead {
    /// `BertForPreTraining`: predicts masked tokens, and whether the second segment follows the first.
    #[default]
    PreTraining,
    /// `BertForMaskedLM`: predicts masked tokens.
    MaskedLm,
    /// `BertForSequenceClassification`: assigns a sequence to these classes, or predicts a number for each of these labels.
    Classes(Vec<String>),
}

impl BertHead {
    /// Returns the class in transformers, without the variant's prefix.
    fn class(&self) -> &'static str {
        match self {
            Self::PreTraining => "ForPreTraining",
            Self::MaskedLm => "ForMaskedLM",
            Self::Classes(_) => CLASSIFIER,
        }
    }
}

impl From<HeadKeys> for BertHead {
    fn from(keys: HeadKeys) -> Self {
        match keys.labels(2) {
            Some(classes) => Self::Classes(classes),
            None if keys.is(Self::MaskedLm.class()) => Self::MaskedLm,
            None => Self::PreTraining,
        }
    }
}

impl From<BertHead> for HeadKeys {
    fn from(head: BertHead) -> Self {
        // `to_keys` replaces this name by that of the variant.
        Self::new(format!("Bert{}", head.class()), if let BertHead::Classes(classes) = &head { classes } else { &[] })
    }
}

/// The classes of transformers, by variant and head.
const CLASSES: [(BertKind, &str, &str); 11] = [
    (BertKind::Bert, "ForPreTraining", "BertForPreTraining"),
    (BertKind::Bert, "ForMaskedLM", "BertForMaskedLM"),
    (BertKind::Bert, "ForSequenceClassification", "BertForSequenceClassification"),
    (BertKind::Roberta, "ForMaskedLM", "RobertaForMaskedLM"),
    (BertKind::Roberta, "ForSequenceClassification", "RobertaForSequenceClassification"),
    (BertKind::XlmRoberta, "ForMaskedLM", "XLMRobertaForMaskedLM"),
    (BertKind::XlmRoberta, "ForSequenceClassification", "XLMRobertaForSequenceClassification"),
    (BertKind::Camembert, "ForMaskedLM", "CamembertForMaskedLM"),
    (BertKind::Camembert, "ForSequenceClassification", "CamembertForSequenceClassification"),
    (BertKind::DistilBert, "ForMaskedLM", "DistilBertForMaskedLM"),
    (BertKind::DistilBert, "ForSequenceClassification", "DistilBertForSequenceClassification"),
];

/// Layers, width, heads.
const PRESETS: [(&str, [usize; 3]); 3] =
    [("bert-tiny", [2, 128, 2]), ("bert-base", [12, 768, 12]), ("bert-large", [24, 1024, 16])];

impl BertKind {
    /// Returns the prefix of the class names in transformers.
    fn class(self) -> &'static str {
        match self {
            Self::Bert => "Bert",
            Self::Roberta => "Roberta",
            Self::XlmRoberta => "XLMRoberta",
            Self::Camembert => "Camembert",
            Self::DistilBert => "DistilBert",
        }
    }

    /// Returns `true` for RoBERTa, XLM-RoBERTa and CamemBERT.
    pub fn is_roberta(self) -> bool {
        matches!(self, Self::Roberta | Self::XlmRoberta | Self::Camembert)
    }
}

/// Keys of DistilBERT, with the keys of [`BertConfig`] that they stand for.
const DISTILLED: [(&str, &str); 8] = [
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
    ("hidden_dim", "intermediate_size"),
    ("dropout", "hidden_dropout_prob"),
    ("attention_dropout", "attention_probs_dropout_prob"),
    ("seq_classif_dropout", "classifier_dropout"),
    ("activation", "hidden_act"),
];

/// Converts a `config.json` of any variant to the keys of [`BertConfig`], with the variant's own defaults.
fn complete(text: &str) -> Result<String> {
    let syntax = |source| ModelError::ConfigSyntax { model: BertConfig::FAMILY, source };
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    let kind = keys.get("model_type").cloned().unwrap_or("bert".into());
    let defaults: Vec<(&str, Value)> = match kind.as_str() {
        Some("bert") => Vec::new(),
        Some("distilbert") => {
            // DistilBERT's norms always have the default.
            keys.remove("layer_norm_eps");
            for (theirs, ours) in DISTILLED {
                if let Some(value) = keys.remove(theirs) {
                    keys.insert(ours.into(), value);
                }
            }
            vec![("num_hidden_layers", 6.into()), ("classifier_dropout", 0.2.into()), ("type_vocab_size", 1.into())]
        }
        Some("roberta" | "xlm-roberta" | "camembert") => {
            let words = if kind == "roberta" { 50265 } else { 30522 };
            vec![("vocab_size", words.into()), ("pad_token_id", 1.into()), ("type_vocab_size", 2.into())]
        }
        other => {
            let got = other.map_or_else(|| kind.to_string(), str::to_string);
            return Err(ModelError::ModelType { expected: "bert", got });
        }
    };
    for (key, default) in defaults {
        if keys.get(key).is_none_or(Value::is_null) {
            keys.insert(key.into(), default);
        }
    }
    // Unused by these variants, and not a number in some files.
    let is_roberta = !matches!(kind.as_str(), Some("bert" | "distilbert"));
    if !is_roberta && keys.get("pad_token_id").is_some_and(|pad| pad.as_u64().is_none()) {
        keys.remove("pad_token_id");
    }
    if kind == "bert" {
        return Ok(Value::from(keys).to_string());
    }
    // Only BERT has a class for both of its heads.
    let classes = keys.get("architectures").and_then(Value::as_array);
    let has_head = |class: &Value| class.as_str().is_some_and(|class| class.ends_with("ForSequenceClassification"));
    if !classes.is_some_and(|classes| classes.iter().any(has_head)) {
        keys.insert("architectures".into(), json!(["BertForMaskedLM"]));
    }
    Ok(Value::from(keys).to_string())
}

impl BertConfig {
    /// Returns the class in transformers.
    pub fn architecture(&self) -> &'static str {
        let named =
            |kind: BertKind| CLASSES.iter().find(|(known, head, _)| *known == kind && *head == self.head.class());
        named(self.model_type).map_or("BertForPreTraining", |(.., class)| class)
    }

    /// Returns the keys of `config.json`, as the variant names them.
    pub(crate) fn to_keys(&self) -> Value {
        let mut keys = serde_json::to_value(self).expect("a configuration is numbers and texts");
        keys["architectures"] = json!([self.architecture()]);
        if self.model_type == BertKind::DistilBert {
            let keys = keys.as_object_mut().expect("it is an object");
            for (theirs, ours) in DISTILLED {
                if let Some(value) = keys.remove(ours).filter(|value| !value.is_null()) {
                    keys.insert(theirs.into(), value);
                }
            }
            ["type_vocab_size", "layer_norm_eps", "is_decoder", "add_cross_attention", "position_embedding_type"]
                .iter()
                .for_each(|other| drop(keys.remove(*other)));
        }
        keys
    }

    /// Returns the maximum sequence length.
    pub fn positions(&self) -> usize {
        self.max_position_embeddings - self.position_offset()
    }

    /// Returns the row of the first position in the position table.
    pub(super) fn position_offset(&self) -> usize {
        if self.model_type.is_roberta() { self.pad_token_id.saturating_add(1) } else { 0 }
    }

    /// Names that [`preset`](Self::preset) accepts, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

    /// Returns the configuration of a preset, with the vocabulary of the uncased English models.
    ///
    /// | preset | parameters with both heads | layers | width | heads |
    /// |---|---|---|---|---|
    /// | `bert-tiny` | 4.4 M (nearly all word embedding) | 2 | 128 | 2 |
    /// | `bert-base` | 110 M | 12 | 768 | 12 |
    /// | `bert-large` | 336 M | 24 | 1024 | 16 |
    ///
    /// The published models have dropout 0.1; presets have none, as for GPT-2. Values read from a `config.json` are kept.
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

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let [vocabulary, width, layers, heads] =
            named!(self: vocab_size, hidden_size, num_hidden_layers, num_attention_heads);
        let [inner, positions, types] = named!(self: intermediate_size, max_position_embeddings, type_vocab_size);
        let dropout = ("classifier_dropout", self.classifier_dropout.unwrap_or_default());
        let offset = self.position_offset();
        if self.max_position_embeddings <= offset {
            let (field, expected) =
                ("max_position_embeddings", format!("above {offset}, because positions start there"));
            let got = self.max_position_embeddings.to_string();
            return Err(ModelError::ConfigValue { model: Self::FAMILY, field, got, expected });
        }
        if self.model_type != BertKind::Bert && self.head == BertHead::PreTraining {
            let (field, got) = ("architectures", "BertForPreTraining".to_string());
            let expected = format!("{}ForMaskedLM, or a classifier", self.model_type.class());
            return Err(ModelError::ConfigValue { model: Self::FAMILY, field, got, expected });
        }
        if let BertHead::Classes(classes) = &self.head {
            check_labels(Self::FAMILY, self.problem_type, classes)?;
        }
        check_values(
            Self::FAMILY,
            &[vocabulary, width, layers, heads, inner, positions, types],
            [heads, width],
            &[&named!(self: hidden_dropout_prob, attention_probs_dropout_prob)[..], &[dropout]].concat(),
            &named!(self: layer_norm_eps, initializer_range),
        )?;
        check_count(Self::FAMILY, "num_hidden_layers", self)
    }

    /// Returns the floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens, with the
    /// prediction head at every token.
    ///
    /// Each weight of a matrix product counts two operations forward and four backward, and the attention scores and their use count
    /// `12 * num_hidden_layers * hidden_size * seq`. The pooler and the next-sentence head run once per sequence and are not counted.
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
    fn kinds_have_keys_and_classes_of_their_own() {
        let distilled = r#"{"model_type": "distilbert", "dim": 48, "n_heads": 4, "hidden_dim": 96, "dropout": 0.2, "activation": "relu"}"#;
        let config = BertConfig::from_json(distilled).unwrap();
        let sizes =
            [config.hidden_size, config.num_attention_heads, config.intermediate_size, config.num_hidden_layers];
        assert_eq!((sizes, config.hidden_dropout_prob, config.hidden_act), ([48, 4, 96, 6], 0.2, Activation::Relu));
        let written = config.to_keys();
        assert_eq!((&written["dim"], &written["architectures"]), (&json!(48), &json!(["DistilBertForMaskedLM"])));
        assert!(written.get("hidden_size").is_none() && written.get("layer_norm_eps").is_none(), "{written}");
        assert_eq!(BertConfig::from_json(&written.to_string()).unwrap(), config);
        for (kind, class) in [("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")] {
            let read = |head: &str| {
                let text = format!(
                    r#"{{"model_type": "{kind}", "architectures": ["{class}{head}"], "max_position_embeddings": 514}}"#
                );
                BertConfig::from_json(&text).unwrap()
            };
            let config = read("ForSequenceClassification");
            assert_eq!(config.architecture(), format!("{class}ForSequenceClassification"));
            assert_eq!(
                (config.positions(), config.pad_token_id, config.head.clone()),
                (512, 1, read("ForSequenceClassification").head)
            );
            // What has no head of its own predicts tokens.
            assert_eq!(read("Model").architecture(), format!("{class}ForMaskedLM"));
            assert_eq!(BertConfig::from_json(&config.to_keys().to_string()).unwrap(), config);
        }
        let told = BertConfig::from_json(r#"{"model_type": "roberta", "max_position_embeddings": 2}"#)
            .unwrap_err()
            .to_string();
        assert!(told.contains("max_position_embeddings = 2; change it to above 2"), "{told}");
    }

    #[test]
    fn classes_may_be_numbers() {
        let read = |keys: &str| {
            let text = format!(r#"{{"architectures": ["BertForSequenceClassification"], {keys}}}"#);
            BertConfig::from_json(&text).unwrap().head
        };
        let classes = |names: &[&str]| BertHead::Classes(names.iter().map(ToString::to_string).collect());
        assert_eq!(read(r#""id2label": {"0": 0, "1": 1}, "label2id": {"0": 0, "1": 1}"#), classes(&["0", "1"]));
        assert_eq!(read(r#""id2label": {"10": "k", "9": "j"}, "label2id": {"j": "9"}"#), classes(&["j", "k"]));
        assert_eq!(BertConfig::from_json(r#"{"architectures": null}"#).unwrap().head, BertHead::PreTraining);
        // A reranker's one label.
        assert_eq!(read(r#""id2label": {"0": "LABEL_0"}"#), classes(&["LABEL_0"]));
        assert_eq!(read(r#""num_labels": 1"#), classes(&["LABEL_0"]));
        assert_eq!(read(r#""problem_type": null"#), classes(&["LABEL_0", "LABEL_1"]));
    }

    #[test]
    fn is_written_as_it_is_read() {
        for head in [
            BertHead::PreTraining,
            BertHead::MaskedLm,
            BertHead::Classes(["no", "so-so", "yes"].map(String::from).into()),
        ] {
            let problem_type = Some(ProblemType::MultiLabelClassification);
            let config = BertConfig { head, problem_type, ..BertConfig::preset("bert-large").unwrap() };
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
            (
                r#"{"architectures": ["BertForSequenceClassification"], "num_labels": 1, "problem_type": "single_label_classification"}"#,
                "id2label = 1 classes; change it to at least 2 with problem_type \"single_label_classification\"",
            ),
            (
                r#"{"architectures": ["BertForSequenceClassification"], "num_labels": 0}"#,
                "id2label = 0 classes; change it to at least 1",
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
