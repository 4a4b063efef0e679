//! The GPT-2 training command: a [`Task`] of the [`Trainer`].

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::{Int, Tensor, TensorData};
use clap::Args;
use serde_json::{Value, json};
use zero_core::alloc::PageKeeper;
use zero_models::gpt2::weights;
use zero_models::{Gpt2, Gpt2Config, ModelConfig, ModelError};

use crate::TrainError;
use crate::data::{Cutting, DEFAULT_SEQ, Source, TokenRows};
use crate::error::wrong;
use crate::trainer::{self, FusedBackend, Profile, Setup, Task, Trainer};

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
    /// What to train on: text; .jsonl or .parquet with a document in each row; a folder of such files; or a .safetensors file
    /// with an int tensor `input_ids` of shape rows x T, or of one long row
    #[arg(long, value_name = "FILE|DIR")]
    pub data: Option<PathBuf>,
    /// The key of a JSON line, or the column of a Parquet file, that has the text [default: text]
    #[arg(long, value_name = "NAME")]
    pub text_field: Option<String>,
    /// A tokenizer.json that cuts text, or the folder that it is in [default: one in --weights or --model, else GPT-2's own]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Where the tokens of a large text are kept, for all runs and ranks of a machine [default: $XDG_CACHE_HOME/zero, or
    /// ~/.cache/zero]
    #[arg(long, value_name = "DIR")]
    pub token_cache: Option<PathBuf>,
    /// Tokens per row [default: 128, or what the data file has]
    #[arg(long)]
    pub seq: Option<usize>,
    /// The trainer's.
    #[command(flatten)]
    pub train: trainer::Options,
}

/// What a program brings along.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    /// Trained when the options name no model; if it does not fit into memory, the largest preset that does is.
    pub model: &'a str,
    /// Read when the options name no file.
    pub data: Source<'a>,
    /// The program's allocator, if it is one that counts.
    pub allocator: Option<&'a PageKeeper>,
}

/// Runs the whole command, as [`Trainer::main`].
pub fn main(options: &Options, program: &Program<'_>) -> ExitCode {
    let trainer = Trainer::new(&options.train);
    let trainer = program.allocator.map_or(trainer, |allocator| trainer.allocator(allocator));
    trainer.main_with(|setup| Gpt2Task::new(options, program, setup))
}

/// A GPT-2 and the rows that it is trained on.
pub struct Gpt2Task {
    /// The preset's or folder's name.
    name: String,
    config: Gpt2Config,
    /// Weights to start from.
    weights: Option<PathBuf>,
    rows: TokenRows,
    /// Why it is not the program's model.
    notice: Option<String>,
}

impl Gpt2Task {
    /// The model by name, folder or weights; if none is named, the program's, or the largest preset that fits into memory.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for what the options name and cannot be used.
    pub fn new(options: &Options, program: &Program<'_>, setup: &Setup<'_>) -> Result<Self, TrainError> {
        let source = options.data.as_deref().map_or_else(|| program.data.clone(), Source::File);
        let seq = options.seq.or(source.row_length()?).unwrap_or(DEFAULT_SEQ);
        let (name, config, notice) = match (&options.model, &options.weights) {
            (Some(name), _) => (name.clone(), model(name)?, None),
            (None, Some(dir)) => (dir.display().to_string(), Gpt2Config::from_file(&dir.join("config.json"))?, None),
            (None, None) => fitting(program.model, seq, options.seq, setup)?,
        };
        config.validate()?;
        if let Some(seq) = options.seq.filter(|&seq| seq < 2 || seq > config.n_positions) {
            let expected = format!("expected 2 to {}, the positions of model {name}", config.n_positions);
            return Err(wrong("seq", seq, expected));
        }
        // What is no folder has no tokenizer.
        let folders = [options.weights.as_deref(), options.model.as_deref().map(Path::new)];
        let folders: Vec<&Path> = folders.into_iter().flatten().collect();
        let cutting = Cutting {
            seq: options.seq,
            vocab_size: config.vocab_size,
            n_positions: config.n_positions,
            tokenizer: options.tokenizer.as_deref(),
            folders: &folders,
            field: options.text_field.as_deref(),
            cache: options.token_cache.as_deref(),
        };
        let rows = TokenRows::load(&source, &cutting)?;
        Ok(Self { name, config, weights: options.weights.clone(), rows, notice })
    }
}

/// The program's model, or the largest preset that fits, and why it is that.
fn fitting(
    default: &str,
    seq: usize,
    asked: Option<usize>,
    setup: &Setup<'_>,
) -> Result<(String, Gpt2Config, Option<String>), TrainError> {
    let misfit = |model: &Gpt2Config| {
        let profile = |micro_batch: usize| profile(model, micro_batch, seq.min(model.n_positions));
        setup.misfit(Some(model.n_embd), &profile)
    };
    let wanted = Gpt2Config::preset(default)?;
    let Some(why) = misfit(&wanted)? else { return Ok((default.to_string(), wanted, None)) };
    let why = format!("{default} does not fit: {why}");
    for &name in Gpt2Config::PRESETS.iter().rev() {
        let model = Gpt2Config::preset(name)?;
        let short = asked.is_some_and(|seq| seq > model.n_positions);
        if model.num_params() < wanted.num_params() && !short && misfit(&model)?.is_none() {
            let notice = format!("{why}.\nTraining {name}, the largest preset that fits.");
            return Ok((name.to_string(), model, Some(notice)));
        }
    }
    Err(TrainError::Memory(format!(
        "{why}, and no smaller preset fits either; use fewer --ranks or a smaller --seq or --batch"
    )))
}

/// A model by the name of a preset, or by a folder with its `config.json`.
///
/// # Errors
///
/// [`ModelError`] when there is no such preset, or the file is wrong.
pub fn model(name: &str) -> Result<Gpt2Config, ModelError> {
    let folder = Path::new(name);
    if folder.is_dir() { Gpt2Config::from_file(&folder.join("config.json")) } else { Gpt2Config::preset(name) }
}

/// What `model` takes on `micro_batch` rows of `seq` tokens.
fn profile(model: &Gpt2Config, micro_batch: usize, seq: usize) -> Profile {
    let (tokens, width) = ((micro_batch * seq) as u64, model.n_embd as u64);
    // Floats that the fused operations keep per token and layer, in widths: the input, the two norms' results, query,
    // key and value, attention's result, the sum after it, and the feed-forward layer before and after its activation.
    let per_layer = tokens * (8 * width + 2 * model.inner_width() as u64);
    // Logits are made for a few rows at a time.
    let logits = 2 * tokens.min(256) * model.vocab_size as u64;
    Profile {
        parameters: model.parameter_shapes().iter().map(|(_, shape)| shape.iter().product()).collect(),
        activation_bytes: 4 * (model.n_layer as u64 * per_layer + logits),
        flops_per_row: model.flops_per_token(seq) as f64 * seq as f64,
    }
}

impl Task for Gpt2Task {
    type Model<B: FusedBackend> = Gpt2<B>;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn rows(&self) -> usize {
        self.rows.rows()
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Gpt2<B>, TrainError> {
        let model = self.config.init(device);
        match &self.weights {
            Some(dir) => Ok(weights::load(model, dir, device)?),
            None => Ok(model),
        }
    }

    fn loss<B: FusedBackend>(
        &self,
        model: &Gpt2<B>,
        rows: &[usize],
        device: &B::Device,
    ) -> Result<Tensor<B, 1>, TrainError> {
        let data = TensorData::new(self.rows.tokens(rows)?, [rows.len(), self.rows.seq()]);
        Ok(model.loss(Tensor::<B, 2, Int>::from_data(data, device)))
    }

    /// Text is read in its own order.
    fn shuffle(&self) -> bool {
        false
    }

    fn tokens_per_row(&self) -> Option<usize> {
        Some(self.rows.seq())
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>, TrainError> {
        Ok(Some(self.rows.checksum(rows)?))
    }

    fn hidden_size(&self) -> Option<usize> {
        Some(self.config.n_embd)
    }

    fn profile(&self, micro_batch: usize) -> Option<Profile> {
        Some(profile(&self.config, micro_batch, self.rows.seq()))
    }

    fn model_config(&self) -> Option<ModelConfig> {
        Some(self.config.clone().into())
    }

    fn settings(&self) -> Value {
        json!({ "pretrained": self.weights.is_some() })
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }
}
