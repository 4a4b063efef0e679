//! The command line, as given.

use std::path::PathBuf;

use clap::Args;

/// Options of GPT-2 training.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// A preset (tiny, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b), or a folder with a Hugging Face
    /// config.json
    #[arg(long, value_name = "PRESET|DIR")]
    pub model: Option<String>,
    /// Start from the Hugging Face weights in this folder (model.safetensors or a sharded index); without --model, its
    /// config.json describes the model
    #[arg(long, value_name = "DIR")]
    pub weights: Option<PathBuf>,
    /// Text, or a .safetensors file with an int tensor `input_ids` [rows, T], to train on
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded over the ranks
    #[arg(long, default_value_t = 3)]
    pub stage: u8,
    /// Number of data-parallel ranks (threads of this process)
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// Training steps
    #[arg(long, default_value_t = 20)]
    pub steps: usize,
    /// Rows per rank and step
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Tokens per row [default: 128, or what the data file has]
    #[arg(long)]
    pub seq: Option<usize>,
    /// AdamW's learning rate
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f64,
    /// AdamW's decay of the mean of gradients
    #[arg(long, default_value_t = 0.9)]
    pub beta1: f32,
    /// AdamW's decay of the mean of squared gradients
    #[arg(long, default_value_t = 0.999)]
    pub beta2: f32,
    /// AdamW's term for numerical stability
    #[arg(long, default_value_t = 1e-8)]
    pub eps: f32,
    /// AdamW's weight decay
    #[arg(long, default_value_t = 0.01)]
    pub weight_decay: f32,
    /// Compute threads per rank [default: the machine's cores, shared evenly]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Seed of the initial weights and of dropout
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write metrics.jsonl into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print a machine-readable summary on standard output, and nothing else there
    #[arg(long)]
    pub json: bool,
}
