//! The validated plan: everything after it sees no raw option.

use std::path::{Path, PathBuf};
use std::time::Duration;

use zero_burn::config::ZeroConfig;
use zero_burn::launch::LaunchOptions;
use zero_core::accounting::StateBytes;
use zero_core::estimate::{Precision, model_state};
use zero_core::{Partition, Stage};
use zero_models::Gpt2Config;

use super::Options;
use crate::TrainError;
use crate::data::{Source, TokenRows};
use crate::memory::{available_bytes, format_bytes};

/// The longest that a rank waits for another.
const DEADLINE: Duration = Duration::from_secs(600);

/// What will be trained, on what, how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The preset's or folder's name.
    pub name: String,
    /// The model.
    pub model: Gpt2Config,
    /// Weights to start from.
    pub weights: Option<PathBuf>,
    /// Training rows.
    pub rows: TokenRows,
    /// Sharding and buckets.
    pub zero: ZeroConfig,
    /// Number of ranks.
    pub ranks: usize,
    /// Steps.
    pub steps: usize,
    /// Rows per rank and step.
    pub batch: usize,
    /// AdamW: learning rate, first and second decay, stability term, weight decay.
    pub adamw: (f64, f32, f32, f32, f32),
    /// Threads and deadline of ranks.
    pub launch: LaunchOptions,
    /// Folder for metrics.
    pub out: Option<PathBuf>,
    /// Whether a progress bar is shown.
    pub progress: bool,
    /// What the run needs.
    pub need: MemoryNeed,
    /// What was said about the choice of the model.
    pub notice: Option<String>,
}

/// Bytes that a run will take at its peak, by kind; an estimate except for model state, which is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Model state of one rank.
    pub state: StateBytes,
    /// Gathered parameters, gradients on their way and optimizer temporaries of one rank.
    pub working: u64,
    /// Activations kept for the backward pass, and logits, of one rank.
    pub activations: u64,
    /// Number of ranks in this process.
    pub ranks: u64,
}

impl MemoryNeed {
    /// For `batch` rows of `seq` tokens per rank.
    pub fn new(model: &Gpt2Config, stage: Stage, ranks: usize, batch: usize, seq: usize, zero: &ZeroConfig) -> Self {
        let psi = model.num_params() as u64;
        let state = model_state(psi, stage, ranks as u64, Precision::FP32_ADAMW);
        let largest =
            model.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let piece = if stage.shards_optimizer() { Partition::new(largest, ranks).stride() } else { largest };
        let (tokens, width) = ((batch * seq) as u64, model.n_embd as u64);
        // One gathered copy, one dense gradient, two buckets in flight with their results; four pieces of temporaries
        // in the optimizer.
        let gathered = if stage.shards_parameters() { largest } else { 0 };
        let working = 4 * (gathered + largest + 3 * zero.reduce_bucket_size.min(2 * model.num_params()) + 4 * piece);
        // Floats kept per token and layer: about 34 widths (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198,
        // section 4, counts 34 bytes for half of it in 16 bit), and two or three T x T score matrices per head.
        let per_layer = tokens * 34 * width + (batch * model.n_head) as u64 * 3 * (seq * seq) as u64;
        let logits = 3 * tokens * model.vocab_size as u64;
        let activations = 4 * (model.n_layer as u64 * per_layer + logits);
        Self { state, working: working as u64, activations, ranks: ranks as u64 }
    }

    /// Sum over all ranks.
    pub fn total(&self) -> u64 {
        (self.state.total() + self.working + self.activations) * self.ranks
    }

    fn arithmetic(&self) -> String {
        format!(
            "{} ranks x ({} model state + {} working memory + {} activations) = {}",
            self.ranks,
            format_bytes(self.state.total()),
            format_bytes(self.working),
            format_bytes(self.activations),
            format_bytes(self.total())
        )
    }
}

impl Plan {
    /// Checks the options and everything they name, before anything is written.
    ///
    /// # Errors
    ///
    /// [`TrainError`], the first thing that is wrong.
    pub fn new(options: &Options, default_model: &str, default_data: &Source<'_>) -> Result<Self, TrainError> {
        let stage = Stage::try_from(options.stage).map_err(|error| wrong("stage", options.stage, error.to_string()))?;
        positive("ranks", options.ranks)?;
        positive("steps", options.steps)?;
        positive("batch", options.batch)?;
        if let Some(threads) = options.threads {
            positive("threads", threads)?;
        }
        check_adamw(options)?;

        let zero = ZeroConfig { seed: options.seed, ..ZeroConfig::new(stage) };
        zero.validate(options.ranks).map_err(|error| wrong("ranks", options.ranks, error.to_string()))?;

        let seq_guess = options.seq.unwrap_or(128);
        let (name, model, notice) = choose_model(options, default_model, stage, seq_guess, &zero)?;
        model.validate()?;
        if let Some(seq) = options.seq.filter(|&seq| seq < 2 || seq > model.n_positions) {
            let expected = format!("expected 2 to {}, the positions of model {name}", model.n_positions);
            return Err(wrong("seq", seq, expected));
        }
        let source = options.data.as_deref().map_or_else(|| default_data.clone(), Source::File);
        let rows = TokenRows::load(&source, options.seq, model.vocab_size, model.n_positions)?;
        let need = MemoryNeed::new(&model, stage, options.ranks, options.batch, rows.seq(), &zero);
        if let Some(available) = available_bytes().filter(|&available| need.total() > available) {
            return Err(TrainError::Memory(format!(
                "model {name} does not fit: {}, but {} of memory is available; use a smaller --model, --batch or --seq, \
                 or fewer --ranks{}",
                need.arithmetic(),
                format_bytes(available),
                if stage == Stage::Parameters { "" } else { ", or --stage 3" }
            )));
        }
        Ok(Self {
            name,
            model,
            weights: options.weights.clone(),
            rows,
            zero,
            ranks: options.ranks,
            steps: options.steps,
            batch: options.batch,
            adamw: (options.lr, options.beta1, options.beta2, options.eps, options.weight_decay),
            launch: LaunchOptions { threads_per_rank: options.threads.unwrap_or(0), deadline: DEADLINE },
            out: options.out.clone(),
            progress: !options.json,
            need,
            notice,
        })
    }

    /// Elements that one rank receives in one step by the ZeRO formula.
    pub fn wire_elements(&self) -> u64 {
        let persistent: usize = self
            .model
            .parameter_shapes()
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .filter(|&numel| numel <= self.zero.param_persistence_threshold)
            .sum();
        zero_core::estimate::wire_elements(
            self.model.num_params() as u64,
            persistent as u64,
            self.zero.stage,
            self.ranks as u64,
        )
    }
}

fn wrong(option: &'static str, got: impl ToString, expected: impl Into<String>) -> TrainError {
    TrainError::Option { option, got: got.to_string(), expected: expected.into() }
}

fn positive(option: &'static str, value: usize) -> Result<(), TrainError> {
    if value == 0 { Err(wrong(option, 0, "expected at least 1")) } else { Ok(()) }
}

fn check_adamw(options: &Options) -> Result<(), TrainError> {
    let finite_from_zero = |option, value: f64| {
        if value.is_finite() && value >= 0.0 {
            Ok(())
        } else {
            Err(wrong(option, value, "expected a number of 0 or more"))
        }
    };
    finite_from_zero("lr", options.lr)?;
    finite_from_zero("eps", options.eps.into())?;
    finite_from_zero("weight-decay", options.weight_decay.into())?;
    for (option, beta) in [("beta1", options.beta1), ("beta2", options.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(wrong(option, beta, "expected 0 or more and less than 1"));
        }
    }
    Ok(())
}

/// The model by name, folder or weights; if none is named, the default, or the largest preset that fits.
fn choose_model(
    options: &Options,
    default_model: &str,
    stage: Stage,
    seq: usize,
    zero: &ZeroConfig,
) -> Result<(String, Gpt2Config, Option<String>), TrainError> {
    match (&options.model, &options.weights) {
        (Some(name), _) if Path::new(name).is_dir() => {
            Ok((name.clone(), Gpt2Config::from_file(&Path::new(name).join("config.json"))?, None))
        }
        (Some(name), _) => Ok((name.clone(), Gpt2Config::preset(name)?, None)),
        (None, Some(dir)) => Ok((dir.display().to_string(), Gpt2Config::from_file(&dir.join("config.json"))?, None)),
        (None, None) => {
            let wanted = Gpt2Config::preset(default_model)?;
            let need = |model: &Gpt2Config| {
                MemoryNeed::new(model, stage, options.ranks, options.batch, seq.min(model.n_positions), zero)
            };
            let Some(available) = available_bytes() else {
                return Ok((default_model.to_string(), wanted, None));
            };
            let too_much = need(&wanted);
            if too_much.total() <= available {
                return Ok((default_model.to_string(), wanted, None));
            }
            let fits = Gpt2Config::PRESETS.iter().rev().find_map(|&name| {
                let model = Gpt2Config::preset(name).ok()?;
                let smaller =
                    model.num_params() < wanted.num_params() && options.seq.is_none_or(|s| s <= model.n_positions);
                (smaller && need(&model).total() <= available).then_some((name, model))
            });
            let why = format!(
                "{default_model} does not fit: {}, but {} of memory is available",
                too_much.arithmetic(),
                format_bytes(available)
            );
            match fits {
                Some((name, model)) => {
                    let notice = format!("{why}.\nTraining {name}, the largest preset that fits.");
                    Ok((name.to_string(), model, Some(notice)))
                }
                None => Err(TrainError::Memory(format!(
                    "{why}, and no smaller preset fits either; use fewer --ranks or a smaller --seq or --batch"
                ))),
            }
        }
    }
}

impl core::fmt::Display for Plan {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if let Some(notice) = &self.notice {
            writeln!(f, "{notice}\n")?;
        }
        let state = self.need.state;
        writeln!(f, "plan")?;
        writeln!(f, "  model          {}, {} parameters", self.name, self.model.num_params())?;
        writeln!(
            f,
            "  ranks          {} at stage {}, {} compute thread(s) each",
            self.ranks,
            self.zero.stage,
            self.launch.threads(self.ranks)
        )?;
        writeln!(
            f,
            "  batch          {} row(s) of {} tokens per rank, {} tokens a step, {} rows of data",
            self.batch,
            self.rows.seq(),
            self.ranks * self.batch * self.rows.seq(),
            self.rows.rows()
        )?;
        writeln!(f, "  bytes per rank (estimated)")?;
        for (kind, bytes) in [
            ("parameters", state.parameters),
            ("gradients", state.gradients),
            ("optimizer", state.optimizer),
            ("working", self.need.working),
            ("activations", self.need.activations),
        ] {
            writeln!(f, "    {kind:<12} {:>12}", format_bytes(bytes))?;
        }
        write!(f, "  all ranks      {}", format_bytes(self.need.total()))
    }
}
