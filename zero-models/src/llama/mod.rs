//! Llama and its variants, decoders of pre-norm transformer blocks with rotary positions, <https://arxiv.org/abs/2302.13971>: Llama 2
//! and 3, Mistral, Qwen2, 2.5 and 3, Gemma and Phi-3.
//!
//! The model takes token ids, and returns logits or the next-token loss. [`LlamaConfig`] is a preset or a Hugging Face `config.json`,
//! [`Llama`] is the module that it initializes, and [`weights`] loads a Hugging Face checkpoint into the module.

mod config;
#[cfg(feature = "burn")]
mod model;
mod rotary;
mod scaling;
pub mod weights;

pub use config::{LayerType, LlamaConfig, LlamaKind};
#[cfg(feature = "burn")]
pub use model::{Llama, LlamaAttention, LlamaLayer, LlamaMlp};
pub use rotary::rotary_angles;
pub use scaling::RopeScaling;
