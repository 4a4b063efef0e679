//! BERT with the heads it is pre-trained with, or with a classifier, <https://arxiv.org/abs/1810.04805>; and RoBERTa, XLM-RoBERTa, CamemBERT
//! (<https://arxiv.org/abs/1907.11692>) and DistilBERT (<https://arxiv.org/abs/1910.01108>), which differ in little.
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
