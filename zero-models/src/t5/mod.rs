//! T5 and mT5, an encoder and a decoder of pre-norm transformer layers with relative positions only, <https://arxiv.org/abs/1910.10683>.
//!
//! The model takes token ids of a source text and of a target text, and returns logits or a loss; [`generate`] generates text.
//! [`T5Config`] is a preset or a Hugging Face `config.json`, [`T5`] is the module that it initializes, and [`weights`] loads a Hugging
//! Face checkpoint into the module.

mod buckets;
mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

pub use buckets::Buckets;
pub use config::{T5Config, T5Kind};
#[cfg(feature = "burn")]
pub use model::{T5, T5Attention, T5Block, T5Stack};

#[cfg(feature = "burn")]
pub use crate::seq2seq::{generate, generate_with};
