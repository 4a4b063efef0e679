//! T5 and mT5, an encoder and a decoder of pre-norm transformer layers that know distances and no positions,
//! <https://arxiv.org/abs/1910.10683>.
//!
//! In go token ids of a text and of what is to be made of it, out come logits or a loss; [`generate`] makes text. [`T5Config`]
//! is a preset or a Hugging Face `config.json`, [`T5`] the module that it initialises, and [`weights`] fills it from a Hugging
//! Face checkpoint.

#[cfg(feature = "burn")]
mod buckets;
mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

pub use config::{T5Config, T5Kind};
#[cfg(feature = "burn")]
pub use model::{T5, T5Attention, T5Block, T5Stack};

#[cfg(feature = "burn")]
pub use crate::seq2seq::{generate, generate_with};
