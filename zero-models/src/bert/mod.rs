//! BERT with the heads it is pre-trained with, or with a classifier, <https://arxiv.org/abs/1810.04805>.
//!
//! In go token ids, segment ids and a padding mask, out come the masked-token and next-sentence logits or those of classes, or
//! their loss. [`BertConfig`] is a preset or a Hugging Face `config.json`, [`Bert`] the module that it initialises, and
//! [`weights`] fills it from a Hugging Face checkpoint.

#[cfg(feature = "burn")]
mod batch;
mod config;
#[cfg(feature = "burn")]
mod model;
pub mod weights;

#[cfg(feature = "burn")]
pub use batch::{BertBatch, BertPredictions};
pub use config::{BertConfig, BertHead, BertKind};
#[cfg(feature = "burn")]
pub use model::{Bert, BertEmbeddings, BertLayer};
