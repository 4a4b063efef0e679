//! GPT-2, a decoder of pre-norm transformer blocks ("Language Models are Unsupervised Multitask Learners", 2019).
//!
//! The model takes token ids, and returns logits or the next-token loss. [`Gpt2Config`] is a preset or a Hugging Face `config.json`,
//! [`Gpt2`] is the module that it initializes, and [`weights`] loads a Hugging Face checkpoint into the module.

mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

pub use config::Gpt2Config;
#[cfg(feature = "burn")]
pub use model::{Gpt2, Gpt2Attention, Gpt2Block, Gpt2Mlp};
