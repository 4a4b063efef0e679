//! GPT-2, BERT, Llama and BART as plain Burn modules.
//!
//! What goes in: a configuration (a preset, or a Hugging Face `config.json`), a device, and token ids.
//! What comes out: logits and losses. The modules are generic over [`Backend`](burn::tensor::backend::Backend),
//! know nothing of ranks or of where their parameters live, and run the same on a bare backend. They own their
//! parameters; a parameter is created on first use, or by [`gpt2::weights`] and its like, which read the
//! checkpoints that Hugging Face publishes; [`generate`] makes text. [`hf_export`] writes such a checkpoint, from a configuration and whoever can
//! read parameters by name. Everything runs on the caller's thread.
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
mod attention;
pub mod bart;
pub mod bert;
mod causal;
mod error;
pub mod generate;
pub mod gpt2;
mod hf_config;
pub mod hf_export;
mod hf_params;
mod init;
mod key_map;
mod layers;
pub mod llama;
pub mod lora;
pub mod loss;
mod model_config;
mod module_config;
pub mod quantize;
pub mod safetensors_file;
mod suggest;
mod tiled;

pub use activation::Activation;
pub use bart::{Bart, BartConfig};
pub use bert::{Bert, BertBatch, BertConfig, BertHead, BertPredictions};
pub use causal::{CausalFamily, CausalSizes, TextFamily};
pub use error::{ModelError, Result, ShapeMismatch, listed, names_differ};
pub use gpt2::{Gpt2, Gpt2Config};
pub use hf_params::{HfParam, ModelParam, load_module};
pub use key_map::KeyMap;
pub use layers::Ids;
pub use llama::{Llama, LlamaConfig};
pub use model_config::ModelConfig;
pub use module_config::ModuleConfig;
pub use tiled::TiledLinear;
