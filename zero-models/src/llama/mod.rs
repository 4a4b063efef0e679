//! Llama and its kin, decoders of pre-norm transformer blocks with rotary positions, <https://arxiv.org/abs/2302.13971>: Llama 2
//! and 3, Mistral, Qwen2, 2.5 and 3.
//!
//! In go token ids, out come logits or the next-token loss. [`LlamaConfig`] is a preset or a Hugging Face `config.json`,
//! [`Llama`] the module that it initialises, and [`weights`] fills it from a Hugging Face checkpoint.

mod config;
#[cfg(feature = "burn")]
mod model;
#[cfg(feature = "burn")]
mod rotary;
mod scaling;
pub mod weights;

pub use config::{LayerType, LlamaConfig, LlamaKind};
#[cfg(feature = "burn")]
pub use model::{Llama, LlamaAttention, LlamaLayer, LlamaMlp};
pub use scaling::RopeScaling;
