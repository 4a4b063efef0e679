//! BART, an encoder and a decoder of post-norm transformer layers, <https://arxiv.org/abs/1910.13461>.
//!
//! In go token ids of a text and of what is to be made of it, out come logits or a loss; [`generate`] makes text. With a
//! classification head, out come logits of a text's labels. [`BartConfig`]
//! is a preset or a Hugging Face `config.json`, [`Bart`] the module that it initialises, and [`weights`] fills it from a Hugging
//! Face checkpoint.

mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

#[cfg(feature = "burn")]
pub use crate::seq2seq::{generate, generate_with};
pub use config::{BartConfig, BartHead};
#[cfg(feature = "burn")]
pub use model::{Bart, BartAttention, BartClassificationHead, BartLayer, BartStack};
