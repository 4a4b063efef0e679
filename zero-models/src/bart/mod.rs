//! BART, an encoder and a decoder of post-norm transformer layers, <https://arxiv.org/abs/1910.13461>.
//!
//! The model takes token ids of a source text and of a target text, and returns logits or a loss; [`generate`] generates text. With a
//! classification head, it returns logits of a text's labels. [`BartConfig`] is a preset or a Hugging Face `config.json`, [`Bart`] is
//! the module that it initializes, and [`weights`] loads a Hugging Face checkpoint into the module.

mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

#[cfg(feature = "burn")]
pub use crate::seq2seq::{generate, generate_with};
pub use config::{BartConfig, BartHead, OFFSET};
#[cfg(feature = "burn")]
pub use model::{Bart, BartAttention, BartClassificationHead, BartLayer, BartStack};
