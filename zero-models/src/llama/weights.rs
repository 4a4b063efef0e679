//! Loading of Hugging Face's checkpoints of Llama and its variants.
//!
//! Names are those of `LlamaForCausalLM`, which its variants share. A checkpoint of the model without its head, whose names lack the
//! prefix `model.`, is read too if the head is tied. Linear weights are stored as `[out, in]` and transposed on loading.
//!
//! The buffers `rotary_emb.inv_freq`, which follow from the configuration, are not loaded. For a model with a tied head, neither is
//! `lm_head.weight`, which repeats the token embedding: it must equal the embedding, and replaces it if it is absent.

#[cfg(feature = "burn")]
use super::Llama;
use super::LlamaConfig;
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Bias, Head, Scale, Table, Weight};
use crate::hf_params::{Family, Layer, layer};

const PREFIX: &str = "model.";
const HEAD: &str = "lm_head.weight";

#[cfg(feature = "burn")]
hf_weights!(Llama, LlamaConfig, "LlamaForCausalLM");

const WORDS: fn(&LlamaConfig) -> [usize; 2] = |c| [c.vocab_size, c.hidden_size];
const WIDTH: fn(&LlamaConfig) -> [usize; 2] = |c| [1, c.hidden_size];
const QUERIES: fn(&LlamaConfig) -> [usize; 2] = |c| [c.hidden_size, c.query_width()];
const KEYS: fn(&LlamaConfig) -> [usize; 2] = |c| [c.hidden_size, c.key_width()];
const QUERIES_KEYS_VALUES: fn(&LlamaConfig) -> [usize; 2] =
    |c| [c.hidden_size, c.query_width().saturating_add(c.key_width().saturating_mul(2))];
const MIXED: fn(&LlamaConfig) -> [usize; 2] = |c| [c.query_width(), c.hidden_size];
const HEAD_WIDTH: fn(&LlamaConfig) -> [usize; 2] = |c| [1, c.head_width()];
const WIDER: fn(&LlamaConfig) -> [usize; 2] = |c| [c.hidden_size, c.intermediate_size];
const GATE_AND_UP: fn(&LlamaConfig) -> [usize; 2] = |c| [c.hidden_size, c.intermediate_size.saturating_mul(2)];
const NARROWER: fn(&LlamaConfig) -> [usize; 2] = |c| [c.intermediate_size, c.hidden_size];

/// The bias of a linear layer that only some variants have.
macro_rules! bias {
    ($layer:literal, $sizes:expr) => {
        layer(concat!("layers.*.", $layer, ".bias"), concat!("model.layers.*.", $layer), Bias, $sizes)
    };
}

impl Family for LlamaConfig {
    const LAYERS: &'static [Layer<Self>] = &[
        layer("embed_tokens", "model.embed_tokens", Table, WORDS),
        layer("layers.*.input_layernorm", "model.layers.*.input_layernorm", Scale, WIDTH),
        layer("layers.*.self_attn.qkv_proj", "model.layers.*.self_attn.qkv_proj", Weight, QUERIES_KEYS_VALUES),
        layer("layers.*.self_attn.q_proj", "model.layers.*.self_attn.q_proj", Weight, QUERIES),
        bias!("self_attn.q_proj", QUERIES),
        layer("layers.*.self_attn.k_proj", "model.layers.*.self_attn.k_proj", Weight, KEYS),
        bias!("self_attn.k_proj", KEYS),
        layer("layers.*.self_attn.v_proj", "model.layers.*.self_attn.v_proj", Weight, KEYS),
        bias!("self_attn.v_proj", KEYS),
        layer("layers.*.self_attn.o_proj", "model.layers.*.self_attn.o_proj", Weight, MIXED),
        bias!("self_attn.o_proj", MIXED),
        layer("layers.*.self_attn.q_norm", "model.layers.*.self_attn.q_norm", Scale, HEAD_WIDTH),
        layer("layers.*.self_attn.k_norm", "model.layers.*.self_attn.k_norm", Scale, HEAD_WIDTH),
        layer("layers.*.post_attention_layernorm", "model.layers.*.post_attention_layernorm", Scale, WIDTH),
        layer("layers.*.pre_feedforward_layernorm", "model.layers.*.pre_feedforward_layernorm", Scale, WIDTH),
        layer("layers.*.post_feedforward_layernorm", "model.layers.*.post_feedforward_layernorm", Scale, WIDTH),
        layer("layers.*.mlp.gate_up_proj", "model.layers.*.mlp.gate_up_proj", Weight, GATE_AND_UP),
        layer("layers.*.mlp.gate_proj", "model.layers.*.mlp.gate_proj", Weight, WIDER),
        layer("layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj", Weight, WIDER),
        layer("layers.*.mlp.down_proj", "model.layers.*.mlp.down_proj", Weight, NARROWER),
        layer("norm", "model.norm", Scale, WIDTH),
        layer("lm_head", "lm_head", Head, WORDS),
    ];
    const REPEATS: &'static [(&'static str, &'static str)] = &[(HEAD, "model.embed_tokens.weight")];

    fn blocks(&self, _layer: &str) -> usize {
        self.num_hidden_layers
    }

    fn is_tied(&self) -> bool {
        self.tie_word_embeddings
    }

    fn initial_std(&self, _: &str) -> f64 {
        self.initializer_range
    }

    fn initial_value(&self, path: &str) -> f64 {
        if self.is_gemma() || path.ends_with(".bias") { 0.0 } else { 1.0 }
    }

    fn has(&self, layer: &str) -> bool {
        match layer.strip_suffix(".bias") {
            Some(of) if of.ends_with("o_proj") => self.has_output_bias(),
            Some(_) => self.has_qkv_biases(),
            None if layer.ends_with("feedforward_layernorm") => self.has_four_norms(),
            None if layer.ends_with("qkv_proj") || layer.ends_with("gate_up_proj") => self.is_fused(),
            None if ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"].iter().any(|end| layer.ends_with(end)) => {
                !self.is_fused()
            }
            None if layer.ends_with("q_norm") || layer.ends_with("k_norm") => self.has_head_norms(),
            None => true,
        }
    }

    fn in_state_dict(name: &str) -> Option<String> {
        if name == HEAD {
            return Some(name.to_string());
        }
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        (!name.ends_with("rotary_emb.inv_freq")).then(|| format!("{PREFIX}{name}"))
    }
}
