//! BERT with its pre-training heads or a classifier, <https://arxiv.org/abs/1810.04805>, and its variants RoBERTa, XLM-RoBERTa,
//! CamemBERT (<https://arxiv.org/abs/1907.11692>) and DistilBERT (<https://arxiv.org/abs/1910.01108>).
//!
//! The model takes token ids, segment ids and a padding mask, and returns the masked-token and next-sentence logits, the logits of
//! classes, or a loss. [`BertConfig`] is a preset or a Hugging Face `config.json`, [`Bert`] is the module that it initializes, and
//! [`weights`] loads a Hugging Face checkpoint into the module.

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
