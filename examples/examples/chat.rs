//! ```text
//! cargo run --release --example chat -- --steps 300 --batch 4 --lr 3e-3 --save chat-model
//! zero chat chat-model
//! ```
//!
//! Trains a small Llama from scratch to answer questions. `zero train` does this without a program; copy this one to change the
//! model, the loss or the rows. `Conversations` reads and tokenizes the data, and labels the tokens of the answers. `-- --help` lists the options.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::prelude::*;
use zero_core::checkpoint::SideFile;
use zero_models::generate::{Sampling, alone};
use zero_models::{CausalFamily, Llama, LlamaConfig, ModelConfig, TextFamily};
use zero_train::data::{ChatFormat, Conversations, LossOn, Message, TokenBatch, TokenizeOptions, Tokenizer};
use zero_train::trainer::{self, FusedBackend, Result, Rows, Task, Trainer};

struct Chat {
    config: LlamaConfig,
    data: Conversations,
}

impl Chat {
    /// Reads conversations, with the tokenizer and the chat template that are in the same folder.
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("chats.jsonl");
        let preset = LlamaConfig::preset("llama-tiny")?;
        let options = TokenizeOptions {
            vocab_size: preset.vocab_size,
            n_positions: 256,
            tokenizer: Some(folder),
            ..TokenizeOptions::default()
        };
        let tokenizer = Tokenizer::find(&path, &options)?;
        let config = LlamaConfig { vocab_size: tokenizer.tokens(), max_position_embeddings: 256, ..preset };
        let data = Conversations::load(&path, ChatFormat::Messages, LossOn::Completions, &options, tokenizer)?;
        Ok(Self { config, data })
    }
}

impl Task for Chat {
    type Model<B: FusedBackend> = Llama<B>;

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Llama<B>> {
        Ok(self.config.init(device))
    }

    /// The mean loss of the answers' tokens.
    fn loss<B: FusedBackend>(&self, model: &Llama<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let TokenBatch { width, input_ids, labels, .. } = self.data.batch(rows);
        let [ids_bt, labels_bt] =
            [input_ids, labels].map(|ids| Tensor::from_data(TensorData::new(ids, [rows.len(), width]), device));
        Ok(LlamaConfig::loss(model, ids_bt, labels_bt, None))
    }

    /// The number of tokens of which `loss` is the mean: answers differ in length.
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        Ok(vec![self.data.labels(rows) as f64])
    }

    /// Answers two questions after training.
    fn sample<B: FusedBackend>(&self, model: &Llama<B>, device: &B::Device) -> Result<Option<String>> {
        let tokenizer = self.data.tokenizer();
        let questions = ["What is a rank?", "What does stage 3 shard?"];
        let prompts =
            questions.map(|question| tokenizer.encode_chat(&[Message::new("user", question)]).unwrap_or_default());
        let how = Sampling { max_new_tokens: 64, stop: tokenizer.end().into_iter().collect(), ..Sampling::default() };
        let answers = alone(|hooks| LlamaConfig::generate(model, &prompts, &how, device, hooks))?;
        let lines =
            questions.iter().zip(&answers).map(|(question, ids)| format!("{question} {}", tokenizer.decode(ids)));
        Ok(Some(lines.collect::<Vec<_>>().join("\n")))
    }

    fn rows(&self) -> usize {
        self.data.rows()
    }

    fn tokens_per_row(&self) -> Option<usize> {
        Some(self.data.seq())
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(self.data.tokens(rows))
    }

    /// A resumed run recognizes its data by it.
    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.data.checksum(rows)))
    }

    /// Names the parameters and the kind of model in checkpoints, from which `zero chat` and `zero export` read them.
    fn model_config(&self) -> Option<ModelConfig> {
        Some(self.config.clone().into())
    }

    /// The tokenizer with its chat template, which checkpoints keep.
    fn files(&self) -> Vec<SideFile> {
        self.data.tokenizer().files()
    }
}

/// Trains a model that answers questions.
#[derive(clap::Parser)]
struct Options {
    /// Folder with chats.jsonl (a list `messages` in each row), tokenizer.json and tokenizer_config.json (with a chat template)
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/data/chat"))]
    data: PathBuf,
    #[command(flatten)]
    train: trainer::Options,
}

fn main() -> ExitCode {
    let options = <Options as clap::Parser>::parse();
    Trainer::new(&options.train).main_with(|_| Chat::read(&options.data))
}
