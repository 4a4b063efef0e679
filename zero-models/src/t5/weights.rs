//! Loading of Hugging Face's T5 checkpoints.
//!
//! Names are those of `T5ForConditionalGeneration`, which `MT5ForConditionalGeneration` shares. Linear weights are stored as `[out, in]`
//! and transposed on loading. The biases of distances, which all layers of the encoder or the decoder share, are stored in its first
//! block.
//!
//! The `embed_tokens.weight` of encoder and decoder, and `lm_head.weight` of a tied head, repeat the token embedding: they must equal
//! it, and replace it if it is absent. The bias of distances in cross-attention, which old files have, is ignored, as nothing reads it.

use std::path::Path;

#[cfg(feature = "burn")]
use super::T5;
use super::T5Config;
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Head, Scale, Table, Weight};
use crate::hf_params::{Family, Layer, layer};
use crate::safetensors_file::Checkpoint;

const SHARED: &str = "shared.weight";
const HEAD: &str = "lm_head.weight";
const UNUSED: &str = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";

#[cfg(feature = "burn")]
hf_weights!(T5, T5Config, "T5ForConditionalGeneration");

const WORDS: fn(&T5Config) -> [usize; 2] = |c| [c.vocab_size, c.d_model];
const WIDTH: fn(&T5Config) -> [usize; 2] = |c| [1, c.d_model];
const BIASES: fn(&T5Config) -> [usize; 2] = |c| [c.relative_attention_num_buckets, c.num_heads];
const HEADS: fn(&T5Config) -> [usize; 2] = |c| [c.d_model, c.inner_width()];
const MIXED: fn(&T5Config) -> [usize; 2] = |c| [c.inner_width(), c.d_model];
const WIDER: fn(&T5Config) -> [usize; 2] = |c| [c.d_model, c.d_ff];
const NARROWER: fn(&T5Config) -> [usize; 2] = |c| [c.d_ff, c.d_model];

macro_rules! stacks {
    ($(($part:literal, [$(($attention:literal, $at:literal, $name:literal)),*], $last:literal))*) => {
        &[
            layer("shared", "shared", Table, WORDS),
            $(
                layer(
                    concat!($part, ".relative_attention_bias"),
                    concat!($part, ".block.0.layer.0.SelfAttention.relative_attention_bias"),
                    Table,
                    BIASES,
                ),
                $(
                    stacks!(@ $part, concat!($attention, ".layer_norm"), concat!($at, ".layer_norm"), Scale, WIDTH),
                    stacks!(@ $part, concat!($attention, ".q"), concat!($at, ".", $name, ".q"), Weight, HEADS),
                    stacks!(@ $part, concat!($attention, ".k"), concat!($at, ".", $name, ".k"), Weight, HEADS),
                    stacks!(@ $part, concat!($attention, ".v"), concat!($at, ".", $name, ".v"), Weight, HEADS),
                    stacks!(@ $part, concat!($attention, ".o"), concat!($at, ".", $name, ".o"), Weight, MIXED),
                )*
                stacks!(@ $part, "feed_forward.layer_norm", concat!($last, ".layer_norm"), Scale, WIDTH),
                stacks!(@ $part, "feed_forward.wi", concat!($last, ".DenseReluDense.wi"), Weight, WIDER),
                stacks!(@ $part, "feed_forward.wi_0", concat!($last, ".DenseReluDense.wi_0"), Weight, WIDER),
                stacks!(@ $part, "feed_forward.wi_1", concat!($last, ".DenseReluDense.wi_1"), Weight, WIDER),
                stacks!(@ $part, "feed_forward.wo", concat!($last, ".DenseReluDense.wo"), Weight, NARROWER),
                layer(concat!($part, ".final_layer_norm"), concat!($part, ".final_layer_norm"), Scale, WIDTH),
            )*
            layer("lm_head", "lm_head", Head, WORDS),
        ]
    };
    (@ $part:literal, $path:expr, $name:expr, $kind:ident, $sizes:expr) => {
        layer(concat!($part, ".block.*.", $path), concat!($part, ".block.*.layer.", $name), $kind, $sizes)
    };
}

impl Family for T5Config {
    const LAYERS: &'static [Layer<Self>] = stacks! {
        ("encoder", [("self_attention", "0", "SelfAttention")], "1")
        ("decoder", [("self_attention", "0", "SelfAttention"), ("cross_attention", "1", "EncDecAttention")], "2")
    };
    const REPEATS: &'static [(&'static str, &'static str)] =
        &[(HEAD, SHARED), ("encoder.embed_tokens.weight", SHARED), ("decoder.embed_tokens.weight", SHARED)];

    fn blocks(&self, layer: &str) -> usize {
        if layer.starts_with("encoder") { self.num_layers } else { self.num_decoder_layers }
    }

    fn is_tied(&self) -> bool {
        self.tie_word_embeddings
    }

    fn initial_std(&self, path: &str) -> f64 {
        let width = match path.strip_suffix(".weight").and_then(|path| path.rsplit('.').next()) {
            Some("q") => self.d_model * self.d_kv,
            Some("o") => self.inner_width(),
            Some("wo") => self.d_ff,
            None if !path.ends_with("relative_attention_bias") => 1,
            _ => self.d_model,
        };
        self.initializer_factor * (width as f64).powf(-0.5)
    }

    fn initial_value(&self, _: &str) -> f64 {
        self.initializer_factor
    }

    fn has(&self, layer: &str) -> bool {
        match layer.rsplit('.').next() {
            Some("wi") => !self.is_gated_act,
            Some("wi_0" | "wi_1") => self.is_gated_act,
            _ => true,
        }
    }

    /// Unties the head if it differs from the embedding, as transformers does since version 5, whose files say that every head is tied.
    fn with_weights_in(self, dir: &Path) -> Self {
        let Ok(checkpoint) = Checkpoint::open(dir) else { return self };
        let tie_word_embeddings = match (checkpoint.get(SHARED), checkpoint.get(HEAD)) {
            (Some(shared), Some(head)) => shared.has_bytes_of(&head),
            (None, None) => self.tie_word_embeddings,
            _ => true,
        };
        Self { tie_word_embeddings, ..self }
    }

    fn in_state_dict(name: &str) -> Option<String> {
        (name != UNUSED).then(|| name.to_string())
    }
}
