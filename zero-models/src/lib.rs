//! GPT-2, BERT, Llama, BART and T5 as plain Burn modules.
//!
//! A model takes a configuration (a preset, or a Hugging Face `config.json`), a device and token ids, and returns logits and losses.
//! The modules are generic over [`Backend`](burn::tensor::backend::Backend). They know nothing of ranks or of where their parameters
//! live, and run the same on a plain backend. They own their parameters; a parameter is created on first use, or by [`gpt2::weights`]
//! and its siblings, which read Hugging Face checkpoints. [`generate`] generates text. [`hf_export`] writes a Hugging Face checkpoint,
//! from a configuration and a function that reads parameters. Everything runs on the caller's thread.
//!
//! Without the feature `burn` there are no modules, only configurations, parameter names and files. Modules of any version of Burn can
//! be filled from these ([`ModelConfig::read`]).
//!
//! ```
//! use burn::tensor::{Int, Tensor};
//! use burn_flex::Flex;
//! use zero_models::Gpt2Config;
//!
//! let device = Default::default();
//! let config = Gpt2Config { vocab_size: 32, n_embd: 16, n_layer: 1, n_head: 2, ..Gpt2Config::preset("tiny")? };
//! let model = config.init::<Flex>(&device);
//! let ids = Tensor::<Flex, 2, Int>::from_data([[1, 2, 3, 4]], &device);
//! assert_eq!(model.loss(ids).dims(), [1]);
//! # Ok::<(), zero_models::ModelError>(())
//! ```

mod activation;
#[cfg(feature = "burn")]
mod attention;
pub mod bart;
pub mod bert;
mod causal;
mod error;
pub mod generate;
pub mod gpt2;
mod hf_config;
pub mod hf_export;
#[cfg(feature = "burn")]
mod hf_load;
mod hf_params;
#[cfg(feature = "burn")]
mod init;
mod key_map;
mod labels;
#[cfg(feature = "burn")]
mod layers;
#[cfg(feature = "burn")]
mod linear;
pub mod llama;
pub mod lora;
pub mod loss;
mod model_config;
mod module_config;
mod packing;
mod peft;
#[cfg(feature = "burn")]
pub mod quantize;
pub mod safetensors_file;
#[cfg(feature = "burn")]
pub mod seq2seq;
mod suggest;
pub mod t5;
#[cfg(feature = "burn")]
mod tiled;

pub use activation::Activation;
#[cfg(feature = "burn")]
pub use bart::Bart;
pub use bart::{BartConfig, BartHead};
#[cfg(feature = "burn")]
pub use bert::{Bert, BertBatch, BertPredictions};
pub use bert::{BertConfig, BertHead, BertKind};
pub use causal::{CausalFamily, CausalSizes, Seq2SeqFamily, Seq2SeqSizes, TextFamily};
pub use error::{ModelError, Result, ShapeMismatch, describe_name_differences, listed};
#[cfg(feature = "burn")]
pub use gpt2::Gpt2;
pub use gpt2::Gpt2Config;
#[cfg(feature = "burn")]
pub use hf_load::{HfParam, load_module};
pub use hf_params::ModelParam;
pub use key_map::KeyMap;
pub use labels::{ProblemType, unnamed_labels};
#[cfg(feature = "burn")]
pub use layers::Ids;
#[cfg(feature = "burn")]
pub use llama::Llama;
pub use llama::LlamaConfig;
pub use model_config::{AdaptedModel, ModelConfig, Seq2SeqSettings};
pub use module_config::ModuleConfig;
pub use packing::Documents;
#[cfg(feature = "burn")]
pub use seq2seq::Seq2SeqLm;
#[cfg(feature = "burn")]
pub use t5::T5;
pub use t5::T5Config;
#[cfg(feature = "burn")]
pub use tiled::TiledLinear;
