//! GPT-2, a decoder of pre-norm transformer blocks ("Language Models are Unsupervised Multitask Learners", 2019).
//!
//! In go token ids, out come logits or the next-token loss. [`Gpt2Config`] is a preset or a Hugging Face
//! `config.json`, [`Gpt2`] the module that it initialises, and [`weights`] fills it from a Hugging Face checkpoint.

mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

pub use config::Gpt2Config;
#[cfg(feature = "burn")]
pub use model::{Gpt2, Gpt2Attention, Gpt2Block, Gpt2Mlp};
