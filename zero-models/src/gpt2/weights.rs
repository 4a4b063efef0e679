//! Loading of Hugging Face's GPT-2 checkpoints.
//!
//! Names are those of `GPT2LMHeadModel`. A checkpoint of `GPT2Model`, whose names lack the prefix `transformer.`, is read too. Hugging
//! Face stores these weights in Burn's layout, `[in, out]`, and a head as `[vocab_size, n_embd]`.
//!
//! The buffers `attn.bias` and `attn.masked_bias`, which are the causal mask, are not loaded. For a model with a tied head, neither is
//! `lm_head.weight`, which repeats the token embedding; Hugging Face overwrites it with the embedding after loading. It must equal the
//! embedding, and replaces it if it is absent.

#[cfg(feature = "burn")]
use super::Gpt2;
use super::Gpt2Config;
#[cfg(feature = "burn")]
use crate::hf_load::hf_weights;
use crate::hf_params::Kind::{Conv1d, Head, Norm, Table};
use crate::hf_params::{Family, Layer, layer};

const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";

#[cfg(feature = "burn")]
hf_weights!(Gpt2, Gpt2Config, "GPT2LMHeadModel");

impl Family for Gpt2Config {
    const LAYERS: &'static [Layer<Self>] = &[
        layer("wte", "transformer.wte", Table, |c| [c.vocab_size, c.n_embd]),
        layer("wpe", "transformer.wpe", Table, |c| [c.n_positions, c.n_embd]),
        layer("h.*.ln_1", "transformer.h.*.ln_1", Norm, |c| [1, c.n_embd]),
        layer("h.*.attn.c_attn", "transformer.h.*.attn.c_attn", Conv1d, |c| [c.n_embd, 3 * c.n_embd]),
        layer("h.*.attn.c_proj", "transformer.h.*.attn.c_proj", Conv1d, |c| [c.n_embd, c.n_embd]),
        layer("h.*.ln_2", "transformer.h.*.ln_2", Norm, |c| [1, c.n_embd]),
        layer("h.*.mlp.c_fc", "transformer.h.*.mlp.c_fc", Conv1d, |c| [c.n_embd, c.inner_width()]),
        layer("h.*.mlp.c_proj", "transformer.h.*.mlp.c_proj", Conv1d, |c| [c.inner_width(), c.n_embd]),
        layer("ln_f", "transformer.ln_f", Norm, |c| [1, c.n_embd]),
        layer("lm_head", "lm_head", Head, |c| [c.vocab_size, c.n_embd]),
    ];
    const REPEATS: &'static [(&'static str, &'static str)] = &[(HEAD, "transformer.wte.weight")];

    fn blocks(&self, _layer: &str) -> usize {
        self.n_layer
    }

    fn is_tied(&self) -> bool {
        self.tie_word_embeddings
    }

    fn initial_std(&self, path: &str) -> f64 {
        if path.ends_with("c_proj.weight") { self.residual_std() } else { self.initializer_range }
    }

    fn in_state_dict(name: &str) -> Option<String> {
        if name == HEAD {
            return Some(name.to_string());
        }
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        let is_mask = name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
        (!is_mask).then(|| format!("{PREFIX}{name}"))
    }
}
