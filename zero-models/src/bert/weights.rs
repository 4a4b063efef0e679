//! BERT checkpoints of Hugging Face: in go a model and a folder, out comes the model with the folder's weights.
//!
//! Names are those of `BertForPreTraining`, `BertForMaskedLM` and `BertForSequenceClassification`; the prefix `bert.` may be absent, and layer norms may have `gamma` and
//! `beta`, as the first published checkpoints do. Linear weights are `[out, in]` there and transposed on loading.
//!
//! Not loaded are the buffers `embeddings.position_ids` and `embeddings.token_type_ids`, which count up and are zero;
//! the second name `cls.predictions.decoder.bias` of `cls.predictions.bias`; heads that the model has not; and, for a model with a tied head,
//! `cls.predictions.decoder.weight`: it is the word embedding a second time, which Hugging Face also overwrites with
//! the embedding after loading. Second names are checked to have the right shape, and stand in if the first is absent.

#[cfg(feature = "burn")]
use super::Bert;
use super::{BertConfig, BertHead};
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Bias, Head, Linear, Norm, Table};
use crate::hf_params::{Family, Layer, layer};

const PREFIX: &str = "bert.";
const DECODER: &str = "cls.predictions.decoder.weight";
pub(crate) const PREDICTION_BIAS: &str = "cls.predictions.bias";
pub(crate) const DECODER_BIAS: &str = "cls.predictions.decoder.bias";

#[cfg(feature = "burn")]
hf_weights!(Bert, BertConfig, "BertForPreTraining");

/// As [`load_from`], of a checkpoint with another head: what the model's own head has and the checkpoint has not stays fresh. Returns
/// the names of these parameters too.
///
/// # Errors
/// As [`load`].
#[cfg(feature = "burn")]
pub fn load_beneath_head<B: zero_ops::FusedBackend>(
    model: Bert<B>,
    checkpoint: &crate::safetensors_file::Checkpoint,
    device: &B::Device,
) -> crate::Result<(Bert<B>, Vec<String>)> {
    crate::hf_load::load_beneath_head::<BertConfig, B, _>(model, checkpoint, device)
}

impl BertConfig {
    /// Number of a classifier's classes.
    pub(super) fn classes(&self) -> usize {
        if let BertHead::Classes(classes) = &self.head { classes.len() } else { 0 }
    }
}

/// From the width of the model to the same: most layers.
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

    fn blocks(&self, _layer: &str) -> usize {
        self.num_hidden_layers
    }

    fn is_tied(&self) -> bool {
        self.tie_word_embeddings
    }

    fn has(&self, layer: &str) -> bool {
        match layer {
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
