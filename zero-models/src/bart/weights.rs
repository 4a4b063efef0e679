//! Loading of Hugging Face's BART checkpoints.
//!
//! Names are those of `BartForConditionalGeneration` and `BartForSequenceClassification`. A checkpoint of `BartModel`, whose names lack
//! the prefix `model.`, is read too. A classification head that the model does not have is ignored. Linear weights are stored as
//! `[out, in]` and transposed on loading.
//!
//! `lm_head.weight` and the `embed_tokens.weight` of encoder and decoder repeat the token embedding: they must equal it, and replace it
//! if it is absent. `final_logits_bias` is not loaded, as transformers does not train it: it must be zero, as in every published BART,
//! and is not written, as transformers reads an absent one as zero.

#[cfg(feature = "burn")]
use super::Bart;
use super::BartConfig;
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Linear, Norm, Table};
use crate::hf_params::{Family, Layer, layer};
use crate::safetensors_file::Checkpoint;
use crate::{ModelError, Result};

const PREFIX: &str = "model.";
const SHARED: &str = "model.shared.weight";
const HEAD: &str = "lm_head.weight";
const CLASSIFIER: &str = "classification_head.";
const HEAD_BIAS: &str = "final_logits_bias";

#[cfg(feature = "burn")]
hf_weights!(Bart, BartConfig, "BartForConditionalGeneration");

/// Loads like [`load_from`], from a checkpoint that may have another head: parameters of the model's head that the checkpoint lacks keep
/// their initial values. Returns the names of these parameters too.
///
/// # Errors
/// Same as [`load`].
#[cfg(feature = "burn")]
pub fn load_without_head<B: zero_ops::FusedBackend>(
    model: Bart<B>,
    checkpoint: &Checkpoint,
    device: &B::Device,
) -> Result<(Bart<B>, Vec<String>)> {
    crate::hf_load::load_without_head::<BartConfig, B, _>(model, checkpoint, device)
}

/// Sizes of most layers, which keep the width of the model.
const WIDTH: fn(&BartConfig) -> [usize; 2] = |c| [c.d_model; 2];
/// Sizes of a position table. Like Hugging Face's, it has two rows more than positions, as padding was once counted.
const POSITIONS: fn(&BartConfig) -> [usize; 2] = |c| [c.max_position_embeddings + super::config::OFFSET, c.d_model];

macro_rules! stacks {
    ($(($part:literal, $ffn:ident, [$($attention:literal),*]))*) => {
        &[
            layer("shared", "model.shared", Table, |c| [c.vocab_size, c.d_model]),
            $(
                layer(concat!($part, ".embed_positions"), concat!("model.", $part, ".embed_positions"), Table, POSITIONS),
                stacks!(@ $part, "layernorm_embedding", Norm, WIDTH),
                $(
                    stacks!(@ $part, concat!("layers.*.", $attention, ".q_proj"), Linear, WIDTH),
                    stacks!(@ $part, concat!("layers.*.", $attention, ".k_proj"), Linear, WIDTH),
                    stacks!(@ $part, concat!("layers.*.", $attention, ".v_proj"), Linear, WIDTH),
                    stacks!(@ $part, concat!("layers.*.", $attention, ".out_proj"), Linear, WIDTH),
                    stacks!(@ $part, concat!("layers.*.", $attention, "_layer_norm"), Norm, WIDTH),
                )*
                stacks!(@ $part, "layers.*.fc1", Linear, |c| [c.d_model, c.$ffn]),
                stacks!(@ $part, "layers.*.fc2", Linear, |c| [c.$ffn, c.d_model]),
                stacks!(@ $part, "layers.*.final_layer_norm", Norm, WIDTH),
            )*
            layer("classification_head.dense", "classification_head.dense", Linear, WIDTH),
            layer("classification_head.out_proj", "classification_head.out_proj", Linear, |c| [c.d_model, c.classes().len()]),
        ]
    };
    (@ $part:literal, $name:expr, $kind:ident, $sizes:expr) => {
        layer(concat!($part, ".", $name), concat!("model.", $part, ".", $name), $kind, $sizes)
    };
}

impl Family for BartConfig {
    const LAYERS: &'static [Layer<Self>] = stacks! {
        ("encoder", encoder_ffn_dim, ["self_attn"])
        ("decoder", decoder_ffn_dim, ["self_attn", "encoder_attn"])
    };
    const REPEATS: &'static [(&'static str, &'static str)] =
        &[(HEAD, SHARED), ("model.encoder.embed_tokens.weight", SHARED), ("model.decoder.embed_tokens.weight", SHARED)];

    fn blocks(&self, layer: &str) -> usize {
        if layer.starts_with("encoder") { self.encoder_layers } else { self.decoder_layers }
    }

    fn is_tied(&self) -> bool {
        true
    }

    fn initial_std(&self, _: &str) -> f64 {
        self.init_std
    }

    fn has(&self, layer: &str) -> bool {
        !layer.starts_with(CLASSIFIER) || !self.classes().is_empty()
    }

    fn is_of_head(name: &str) -> bool {
        name.starts_with(CLASSIFIER)
    }

    fn check(checkpoint: &Checkpoint) -> Result<()> {
        let Some(bias) = checkpoint.get(HEAD_BIAS) else { return Ok(()) };
        bias.check_dtype()?;
        if bias.to_f32()?.iter().all(|&x| x == 0.0) {
            return Ok(());
        }
        let (got, supported) = ("values that are not 0".into(), "a bias of zeros, or none".into());
        Err(ModelError::Unsupported { model: Self::FAMILY, key: HEAD_BIAS, got, supported })
    }

    fn in_state_dict(name: &str) -> Option<String> {
        match name {
            _ if name == HEAD || name.starts_with(CLASSIFIER) => Some(name.to_string()),
            HEAD_BIAS => None,
            _ => Some(format!("{PREFIX}{}", name.strip_prefix(PREFIX).unwrap_or(name))),
        }
    }
}
