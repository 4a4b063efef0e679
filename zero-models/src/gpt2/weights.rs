//! GPT-2 checkpoints of Hugging Face: in go a model and a folder, out comes the model with the folder's weights.
//!
//! Names are those of `GPT2LMHeadModel`; a checkpoint of `GPT2Model` lacks the prefix `transformer.` and is read too.
//! Hugging Face stores these weights as Burn uses them, `[in, out]`, and a head as `[vocab_size, n_embd]`.
//!
//! Not loaded are the buffers `attn.bias` and `attn.masked_bias`, which are the causal mask, and, for a model with a
//! tied head, `lm_head.weight`: it is the token embedding a second time, which Hugging Face also overwrites with the
//! embedding after loading. It is checked to have that shape, and stands in if the embedding itself is absent.

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

    fn in_state_dict(name: &str) -> Option<String> {
        if name == HEAD {
            return Some(name.to_string());
        }
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        let is_mask = name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
        (!is_mask).then(|| format!("{PREFIX}{name}"))
    }
}
