//! Loading of Hugging Face's BERT checkpoints.
//!
//! Names are those of `BertForPreTraining`, `BertForMaskedLM` and `BertForSequenceClassification`. The prefix `bert.` may be absent, and
//! layer norms may have `gamma` and `beta`, as in the first published checkpoints. Linear weights are stored as `[out, in]` and
//! transposed on loading.
//!
//! RoBERTa's names begin with `roberta.`, `lm_head.` and `classifier.`, DistilBERT's with `distilbert.`, `vocab_`, `pre_classifier.` and
//! `classifier.`. The pooler of a RoBERTa without a head is not read.
//!
//! These are not loaded:
//! - the buffers `embeddings.position_ids` and `embeddings.token_type_ids`, which count up and are zero;
//! - heads that the model does not have;
//! - tensors that repeat another: `cls.predictions.decoder.bias` repeats `cls.predictions.bias`, and, for a tied head,
//!   `cls.predictions.decoder.weight` repeats the word embedding, with which Hugging Face overwrites it too. A repeat must equal the
//!   original, and replaces it if it is absent.

#[cfg(feature = "burn")]
use super::Bert;
use super::{BertConfig, BertHead, BertKind};
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Bias, Head, Linear, Norm, Table};
use crate::hf_params::{Family, Layer, ModelParam, Rules, by_table, layer, rules};

const PREFIX: &str = "bert.";
const DECODER: &str = "cls.predictions.decoder.weight";
pub(crate) const PREDICTION_BIAS: &str = "cls.predictions.bias";
pub(crate) const DECODER_BIAS: &str = "cls.predictions.decoder.bias";

/// Evaluates `$do` with `$names` as the type that names the parameters of the model's variant.
#[cfg(feature = "burn")]
macro_rules! by_kind {
    ($model:expr, $names:ident => $do:expr) => {
        match $model.kind() {
            BertKind::Bert => {
                type $names = BertConfig;
                $do
            }
            BertKind::DistilBert => {
                type $names = DistilBert;
                $do
            }
            BertKind::Roberta | BertKind::XlmRoberta | BertKind::Camembert => {
                type $names = Roberta;
                $do
            }
        }
    };
}

/// The parameter names of RoBERTa.
pub(crate) struct Roberta(BertConfig);

/// The parameter names of DistilBERT.
pub(crate) struct DistilBert(BertConfig);

#[cfg(feature = "burn")]
hf_weights!(Bert, BertConfig, "BertForPreTraining", by_kind);

/// Loads like [`load_from`], from a checkpoint that may have another head: parameters of the model's head that the checkpoint lacks keep
/// their initial values. Returns the names of these parameters too.
///
/// # Errors
/// Same as [`load`].
#[cfg(feature = "burn")]
pub fn load_without_head<B: zero_ops::FusedBackend>(
    model: Bert<B>,
    checkpoint: &crate::safetensors_file::Checkpoint,
    device: &B::Device,
) -> crate::Result<(Bert<B>, Vec<String>)> {
    by_kind!(model, Names => crate::hf_load::load_without_head::<Names, B, _>(model, checkpoint, device))
}

impl BertConfig {
    /// Returns the number of a classifier's classes.
    pub(super) fn classes(&self) -> usize {
        if let BertHead::Classes(classes) = &self.head { classes.len() } else { 0 }
    }
}

/// Sizes of most layers, which keep the width of the model.
const WIDTH: fn(&BertConfig) -> [usize; 2] = |c| [c.hidden_size; 2];
const WORDS: fn(&BertConfig) -> [usize; 2] = |c| [c.vocab_size, c.hidden_size];
const POSITIONS: fn(&BertConfig) -> [usize; 2] = |c| [c.max_position_embeddings, c.hidden_size];
const SEGMENTS: fn(&BertConfig) -> [usize; 2] = |c| [c.type_vocab_size, c.hidden_size];
const WIDER: fn(&BertConfig) -> [usize; 2] = |c| [c.hidden_size, c.intermediate_size];
const NARROWER: fn(&BertConfig) -> [usize; 2] = |c| [c.intermediate_size, c.hidden_size];

impl Family for BertConfig {
    const LAYERS: &'static [Layer<Self>] = &[
        layer("embeddings.word_embeddings", "bert.embeddings.word_embeddings", Table, WORDS),
        layer("embeddings.position_embeddings", "bert.embeddings.position_embeddings", Table, POSITIONS),
        layer("embeddings.token_type_embeddings", "bert.embeddings.token_type_embeddings", Table, SEGMENTS),
        layer("embeddings.norm", "bert.embeddings.LayerNorm", Norm, WIDTH),
        layer("layers.*.query", "bert.encoder.layer.*.attention.self.query", Linear, WIDTH),
        layer("layers.*.key", "bert.encoder.layer.*.attention.self.key", Linear, WIDTH),
        layer("layers.*.value", "bert.encoder.layer.*.attention.self.value", Linear, WIDTH),
        layer("layers.*.attention_output", "bert.encoder.layer.*.attention.output.dense", Linear, WIDTH),
        layer("layers.*.attention_norm", "bert.encoder.layer.*.attention.output.LayerNorm", Norm, WIDTH),
        layer("layers.*.intermediate", "bert.encoder.layer.*.intermediate.dense", Linear, WIDER),
        layer("layers.*.output", "bert.encoder.layer.*.output.dense", Linear, NARROWER),
        layer("layers.*.output_norm", "bert.encoder.layer.*.output.LayerNorm", Norm, WIDTH),
        layer("pooler", "bert.pooler.dense", Linear, WIDTH),
        layer("transform", "cls.predictions.transform.dense", Linear, WIDTH),
        layer("transform_norm", "cls.predictions.transform.LayerNorm", Norm, WIDTH),
        layer("decoder", "cls.predictions.decoder", Head, WORDS),
        layer("prediction_bias", "cls.predictions", Bias, |c| [1, c.vocab_size]),
        layer("seq_relationship", "cls.seq_relationship", Linear, |c| [c.hidden_size, 2]),
        layer("classifier", "classifier", Linear, |c| [c.hidden_size, c.classes()]),
    ];
    const REPEATS: &'static [(&'static str, &'static str)] =
        &[(DECODER, "bert.embeddings.word_embeddings.weight"), (DECODER_BIAS, PREDICTION_BIAS)];

    fn parameters(&self) -> Vec<ModelParam> {
        match self.model_type {
            BertKind::Bert => by_table(self),
            BertKind::DistilBert => by_table(&DistilBert(self.clone())),
            BertKind::Roberta | BertKind::XlmRoberta | BertKind::Camembert => by_table(&Roberta(self.clone())),
        }
    }

    fn blocks(&self, _layer: &str) -> usize {
        self.num_hidden_layers
    }

    fn is_tied(&self) -> bool {
        self.tie_word_embeddings
    }

    fn initial_std(&self, _: &str) -> f64 {
        self.initializer_range
    }

    fn has(&self, layer: &str) -> bool {
        match layer {
            "embeddings.token_type_embeddings" => self.model_type != BertKind::DistilBert,
            "pooler" => self.head != BertHead::MaskedLm,
            "transform" | "transform_norm" | "decoder" | "prediction_bias" => self.classes() == 0,
            "seq_relationship" => self.head == BertHead::PreTraining,
            "classifier" => self.classes() > 0,
            _ => true,
        }
    }

    fn is_of_head(name: &str) -> bool {
        ["cls.", "classifier.", "bert.pooler."].iter().any(|head| name.starts_with(head))
    }

    fn in_state_dict(name: &str) -> Option<String> {
        let renamed = match name.rsplit_once('.') {
            Some((norm, "gamma")) if norm.ends_with("LayerNorm") => format!("{norm}.weight"),
            Some((norm, "beta")) if norm.ends_with("LayerNorm") => format!("{norm}.bias"),
            _ => name.to_string(),
        };
        if renamed.starts_with("cls.") || renamed.starts_with("classifier.") {
            return Some(renamed);
        }
        match renamed.strip_prefix(PREFIX).unwrap_or(&renamed) {
            "embeddings.position_ids" | "embeddings.token_type_ids" => None,
            name => Some(format!("{PREFIX}{name}")),
        }
    }
}

impl BertConfig {
    /// Returns the rules by which parameters find their tensors.
    pub(crate) fn rules(&self) -> Rules<'static> {
        match self.model_type {
            BertKind::Bert => rules::<Self>(),
            BertKind::DistilBert => rules::<DistilBert>(),
            BertKind::Roberta | BertKind::XlmRoberta | BertKind::Camembert => rules::<Roberta>(),
        }
    }
}

/// Builds the table of layers of a variant that wraps a [`BertConfig`].
macro_rules! of_config {
    ($($path:literal, $name:literal, $kind:ident, $sizes:expr;)*) => {
        &[$(layer($path, $name, $kind, |c| { const SIZES: fn(&BertConfig) -> [usize; 2] = $sizes; SIZES(&c.0) })),*]
    };
}

/// Implements the methods of [`Family`] that a variant takes from its [`BertConfig`].
macro_rules! as_bert {
    () => {
        fn blocks(&self, layer: &str) -> usize {
            self.0.blocks(layer)
        }

        fn is_tied(&self) -> bool {
            self.0.is_tied()
        }

        fn initial_std(&self, path: &str) -> f64 {
            self.0.initial_std(path)
        }

        fn has(&self, layer: &str) -> bool {
            self.0.has(layer)
        }
    };
}

impl Family for Roberta {
    const LAYERS: &'static [Layer<Self>] = of_config! {
        "embeddings.word_embeddings", "roberta.embeddings.word_embeddings", Table, WORDS;
        "embeddings.position_embeddings", "roberta.embeddings.position_embeddings", Table, POSITIONS;
        "embeddings.token_type_embeddings", "roberta.embeddings.token_type_embeddings", Table, SEGMENTS;
        "embeddings.norm", "roberta.embeddings.LayerNorm", Norm, WIDTH;
        "layers.*.query", "roberta.encoder.layer.*.attention.self.query", Linear, WIDTH;
        "layers.*.key", "roberta.encoder.layer.*.attention.self.key", Linear, WIDTH;
        "layers.*.value", "roberta.encoder.layer.*.attention.self.value", Linear, WIDTH;
        "layers.*.attention_output", "roberta.encoder.layer.*.attention.output.dense", Linear, WIDTH;
        "layers.*.attention_norm", "roberta.encoder.layer.*.attention.output.LayerNorm", Norm, WIDTH;
        "layers.*.intermediate", "roberta.encoder.layer.*.intermediate.dense", Linear, WIDER;
        "layers.*.output", "roberta.encoder.layer.*.output.dense", Linear, NARROWER;
        "layers.*.output_norm", "roberta.encoder.layer.*.output.LayerNorm", Norm, WIDTH;
        "pooler", "classifier.dense", Linear, WIDTH;
        "transform", "lm_head.dense", Linear, WIDTH;
        "transform_norm", "lm_head.layer_norm", Norm, WIDTH;
        "decoder", "lm_head.decoder", Head, WORDS;
        "prediction_bias", "lm_head", Bias, |c| [1, c.vocab_size];
        "classifier", "classifier.out_proj", Linear, |c| [c.hidden_size, c.classes()];
    };
    const REPEATS: &'static [(&'static str, &'static str)] = &[
        ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ];

    as_bert!();

    fn is_of_head(name: &str) -> bool {
        ["lm_head.", "classifier.", "roberta.pooler."].iter().any(|head| name.starts_with(head))
    }

    fn in_state_dict(name: &str) -> Option<String> {
        if name.starts_with("lm_head.") || name.starts_with("classifier.") {
            return Some(name.to_string());
        }
        match name.strip_prefix("roberta.").unwrap_or(name) {
            "embeddings.position_ids" | "embeddings.token_type_ids" => None,
            // The pooler of a model without a head; no class with a head reads it.
            pooler if pooler.starts_with("pooler.") => None,
            name => Some(format!("roberta.{name}")),
        }
    }
}

impl Family for DistilBert {
    const LAYERS: &'static [Layer<Self>] = of_config! {
        "embeddings.word_embeddings", "distilbert.embeddings.word_embeddings", Table, WORDS;
        "embeddings.position_embeddings", "distilbert.embeddings.position_embeddings", Table, POSITIONS;
        "embeddings.norm", "distilbert.embeddings.LayerNorm", Norm, WIDTH;
        "layers.*.query", "distilbert.transformer.layer.*.attention.q_lin", Linear, WIDTH;
        "layers.*.key", "distilbert.transformer.layer.*.attention.k_lin", Linear, WIDTH;
        "layers.*.value", "distilbert.transformer.layer.*.attention.v_lin", Linear, WIDTH;
        "layers.*.attention_output", "distilbert.transformer.layer.*.attention.out_lin", Linear, WIDTH;
        "layers.*.attention_norm", "distilbert.transformer.layer.*.sa_layer_norm", Norm, WIDTH;
        "layers.*.intermediate", "distilbert.transformer.layer.*.ffn.lin1", Linear, WIDER;
        "layers.*.output", "distilbert.transformer.layer.*.ffn.lin2", Linear, NARROWER;
        "layers.*.output_norm", "distilbert.transformer.layer.*.output_layer_norm", Norm, WIDTH;
        "pooler", "pre_classifier", Linear, WIDTH;
        "transform", "vocab_transform", Linear, WIDTH;
        "transform_norm", "vocab_layer_norm", Norm, WIDTH;
        "decoder", "vocab_projector", Head, WORDS;
        "prediction_bias", "vocab_projector", Bias, |c| [1, c.vocab_size];
        "classifier", "classifier", Linear, |c| [c.hidden_size, c.classes()];
    };
    const REPEATS: &'static [(&'static str, &'static str)] =
        &[("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight")];

    as_bert!();

    fn is_of_head(name: &str) -> bool {
        ["vocab_", "pre_classifier.", "classifier."].iter().any(|head| name.starts_with(head))
    }

    fn in_state_dict(name: &str) -> Option<String> {
        if Self::is_of_head(name) {
            return Some(name.to_string());
        }
        match name.strip_prefix("distilbert.").unwrap_or(name) {
            "embeddings.position_ids" => None,
            name => Some(format!("distilbert.{name}")),
        }
    }
}
