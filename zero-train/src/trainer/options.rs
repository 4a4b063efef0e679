//! The command line, as given.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use zero_core::config::Float;
use zero_kernels::quantized::Format;
use zero_models::hf_export::ExportDtype;

use super::BackendChoice;
use crate::config::MixedPrecision;
use crate::error::{Result, wrong};

// Headings of the help.
#[cfg(feature = "cli")]
const OPTIMIZER: &str = "Optimizer and batch size";
#[cfg(feature = "cli")]
const MEMORY: &str = "Sharding and memory";
#[cfg(feature = "cli")]
const EVALUATION: &str = "Evaluation";
#[cfg(feature = "cli")]
const CHECKPOINTS: &str = "Checkpoints";
#[cfg(feature = "cli")]
const OUTPUT: &str = "Output";

/// The values that replace `"auto"` in a configuration file, and fill in keys that it lacks. Without a file, a run uses them directly.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", group(id = "zero-hyperparameters"), command(next_help_heading = OPTIMIZER))]
pub struct Hyperparameters {
    /// Rows (training examples) per micro-batch on each rank [default: 1]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "per-device-train-batch-size"))]
    pub batch: Option<usize>,
    /// Micro-batches per step [default: 1]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "gradient-accumulation-steps"))]
    pub accumulation: Option<usize>,
    /// Learning rate of the optimizer. A preset that is trained from random weights uses its published hyperparameters
    /// (its recipe), if there are any, unless you set --config, --lr, --beta1, --beta2, --eps, --weight-decay, --warmup,
    /// --schedule or --clip [default: 0.001]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "learning-rate"))]
    pub lr: Option<f64>,
    /// AdamW's decay of the first moment [default: 0.9]
    #[cfg_attr(feature = "cli", arg(long))]
    pub beta1: Option<f64>,
    /// AdamW's decay of the second moment [default: 0.999]
    #[cfg_attr(feature = "cli", arg(long))]
    pub beta2: Option<f64>,
    /// AdamW's epsilon, for numerical stability [default: 1e-8]
    #[cfg_attr(feature = "cli", arg(long))]
    pub eps: Option<f64>,
    /// AdamW's weight decay [default: 0.01]
    #[cfg_attr(feature = "cli", arg(long))]
    pub weight_decay: Option<f64>,
    /// Warm-up steps, over which the learning rate rises linearly from 0 [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "STEPS"))]
    pub warmup: Option<usize>,
    /// Learning-rate schedule after the warm-up: constant, or linear or cosine decay to 0 at the last step [default:
    /// constant]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHAPE", visible_alias = "lr-scheduler-type"))]
    pub schedule: Option<ScheduleChoice>,
    /// Clip gradients to this global L2 norm; 0 for no clipping [default: 0, or 1 if the --config file
    /// sets gradient_clipping to "auto"]
    #[cfg_attr(feature = "cli", arg(long, value_name = "NORM", visible_alias = "max-grad-norm"))]
    pub clip: Option<f64>,
    /// Precision of parameters and gradients; with bf16 and fp16, the optimizer keeps fp32 master weights [default: fp32]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "mixed-precision"))]
    pub dtype: Option<Dtype>,
    /// True if they are a model's [`Recipe`](super::Recipe), whose warm-up begins slowly.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub is_recipe: bool,
    /// Number of ranks that batch and accumulation are for, if a restart has another number.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub batch_ranks: Option<usize>,
}

/// Options of a [`Trainer`](super::Trainer), which a program flattens into its own (`#[command(flatten)]`). An option that is
/// not given takes its value from `--config`, or else its default.
// A field for each option. The group has a name that a program's own options do not take.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", group(id = "zero-trainer"), command(next_help_heading = "Run"))]
pub struct Options {
    /// Compute on this backend. For cuda or vulkan, build the program with the Cargo feature of that name
    #[cfg_attr(feature = "cli", arg(long, value_name = "BACKEND", default_value = "cpu"))]
    pub backend: BackendChoice,
    /// Do not use the cache of compiled CUDA kernels in $XDG_CACHE_HOME/zero/kernels or ~/.cache/zero/kernels: compile all kernels
    /// again
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_kernel_cache: bool,
    /// Read this DeepSpeed JSON or Accelerate YAML file. Other options fill in its "auto" values and the keys that it
    /// lacks, and must not contradict its other values
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", visible_alias = "config-file"))]
    pub config: Option<PathBuf>,
    /// ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters
    /// [default: 3]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, visible_alias = "zero-stage"))]
    pub stage: Option<u8>,
    /// Number of data-parallel ranks: threads of this process, or the processes that a launcher started [default: the
    /// number that the launcher or --config sets, otherwise 2]
    #[cfg_attr(feature = "cli", arg(long))]
    pub ranks: Option<usize>,
    /// Total number of training steps, including those before a resume
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 20))]
    pub steps: usize,
    /// Hyperparameters.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub hyper: Hyperparameters,
    /// Hold out ROWS rows: the first of the data's validation split, or the last of the data if it has no such split.
    /// The model is evaluated on them after every epoch and at the end [default: the whole validation split, or none]
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, value_name = "ROWS"))]
    pub eval: Option<usize>,
    /// Write the trained model's predictions for the held-out rows to this file at the end, one JSON object per line
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, value_name = "FILE"))]
    pub predictions: Option<PathBuf>,
    /// Show the predictions for the first ROWS held-out rows at every evaluation, in the terminal, in events.jsonl and in the report
    /// [default: 0]
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, value_name = "ROWS", default_value_t = 0, hide_default_value = true))]
    pub eval_samples: usize,
    /// Keep an exponential moving average (EMA) of the weights, in fp32 and sharded like the optimizer state. Each update sets
    /// average = DECAY * average + (1 - DECAY) * weights. Checkpoints contain it; `zero export --ema` writes it [default: none]
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, value_name = "DECAY"))]
    pub ema_decay: Option<f64>,
    /// Use the averages of --ema-decay instead of the weights for evaluation, for --predictions, and for the sample output (such as
    /// generated text) that a run on the CPU prints at its end. If the --config file sets
    /// stage3_gather_16bit_weights_on_model_save, the 16-bit model that is saved at the end contains the averages instead of the weights
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, requires = "ema_decay"))]
    pub eval_ema: bool,
    /// Exclude parameters from weight decay: `vectors` excludes biases and the parameters of norms, `embeddings` excludes
    /// these and the embeddings. To match a DeepSpeed run that has no parameter groups (all parameters decay), use `nothing`
    #[cfg_attr(feature = "cli", arg(long, help_heading = OPTIMIZER, value_name = "WHAT", default_value = "vectors"))]
    pub decay_except: DecayExcept,
    /// Also evaluate every N steps
    #[cfg_attr(feature = "cli", arg(long, help_heading = EVALUATION, value_name = "N"))]
    pub eval_every: Option<usize>,
    /// Shuffle the rows in every epoch, with --seed; false keeps the order of the data [default: false for next-token
    /// prediction on text or token ids, otherwise true]
    #[cfg_attr(feature = "cli", arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true"))]
    pub shuffle: Option<bool>,
    /// Compute threads per rank [default: the machine's cores, divided evenly among its ranks]
    #[cfg_attr(feature = "cli", arg(long))]
    pub threads: Option<usize>,
    /// Seed of the initial weights, of dropout and of shuffles
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub seed: u64,
    /// Write report.html, metrics.jsonl, events.jsonl, metrics.csv and run.json to this folder
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT, value_name = "DIR"))]
    pub out: Option<PathBuf>,
    /// Shard model state within groups of this many consecutive ranks, such as those of one machine (hybrid sharding, MiCS). Each
    /// group holds a full copy of the model state, so parameters are gathered only within a group. Must divide the number of
    /// ranks [default: all ranks]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "RANKS"))]
    pub shard_size: Option<usize>,
    /// Keep a secondary partition of the parameters within groups of this many consecutive ranks, such as those of one machine
    /// (hpZ of ZeRO++). Ranks gather parameters from it, so parameters are sent between groups only once per step, to
    /// refill it. Must divide the number of ranks; needs stage 3 [default: none]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "RANKS"))]
    pub secondary_shard_size: Option<usize>,
    /// Quantize gradients for communication to int8, int4 or nf4, with one scale per 64 values (qgZ of ZeRO++). With --shard-size
    /// or --secondary-shard-size, only communication between groups is quantized. Changes training results slightly [default:
    /// not quantized]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "FORMAT"))]
    pub quantized_gradients: Option<Format>,
    /// Quantize gathered weights to int8, int4 or nf4, with one scale per 64 values (qwZ of ZeRO++). Forward and backward passes
    /// use the dequantized values; updates and checkpoints keep full precision. Needs stage 3 [default: not quantized]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "FORMAT"))]
    pub quantized_weights: Option<Format>,
    /// Keep the optimizer's moments in bf16 with stochastic rounding, in half the memory or disk space. Changes training results
    /// slightly; master weights and checkpoints stay in fp32
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY))]
    pub bf16_optimizer_states: bool,
    /// Keep the optimizer's moments in 8 bits, in blocks of 256 with one scale, like adamw_8bit of bitsandbytes. Changes training
    /// results slightly; master weights and checkpoints stay in fp32. Not with model state on a disk, and not for LAMB
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, conflicts_with = "bf16_optimizer_states"))]
    pub int8_optimizer_states: bool,
    /// Offload this part of the model state. The value `all` needs stage 3 [default: as little as makes the run fit in
    /// memory]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "WHAT"))]
    pub offload: Option<OffloadChoice>,
    /// Offload this fraction of the state, from 0 to 1; the rest stays in the backend's memory. Needs --offload optimizer or all. With
    /// --offload-to host, the fraction applies to optimizer state and to gradients equally. With --offload-to disk at stages 2 and 3, it
    /// applies to their total size: optimizer state is offloaded first, and gradients if the fraction is larger than its share. With
    /// --offload-to disk at stage 1, it applies to optimizer state, because gradients stay in memory [default: 1]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "SHARE"))]
    pub offload_ratio: Option<f64>,
    /// Offload to host memory, where the CPU runs the optimizer, or to a disk [default: host with --backend cuda and
    /// vulkan; disk with --backend cpu, which already computes in host memory]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "WHERE"))]
    pub offload_to: Option<OffloadTo>,
    /// Checkpoint the activations of all blocks (transformer layers), or of the first BLOCKS: recompute them in the backward pass
    /// instead of keeping them [default: none, or the fewest blocks that make the run fit in memory]
    #[cfg_attr(feature = "cli", arg(
        long, help_heading = MEMORY,
        value_name = "all|BLOCKS",
        visible_alias = "gradient-checkpointing",
        num_args = 0..=1,
        default_missing_value = "all"
    ))]
    pub checkpoint_activations: Option<Blocks>,
    /// Limit activations to SIZE per rank, such as 2GiB or 500MB: checkpoint as few blocks as the limit allows
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "SIZE", conflicts_with = "checkpoint_activations"))]
    pub activation_memory: Option<String>,
    /// Offload the inputs of checkpointed blocks to the place that --offload-to names, until the backward pass needs them. This checkpoints
    /// every block, unless --checkpoint-activations or --activation-memory is given [default: only if the run would not
    /// fit in memory otherwise]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY))]
    pub offload_activations: bool,
    /// Use the largest micro-batch whose estimated memory fits; no trial step is run. To fit a larger one, Zero may also turn on
    /// activation checkpointing and offload, unless you set those options yourself
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, conflicts_with = "batch"))]
    pub auto_find_batch_size: bool,
    /// Gather parameters between processes by collectives that all ranks call in the same order (collective), or let each
    /// rank read the shards of the others through host memory (one-sided) [default: collective with NCCL, otherwise
    /// one-sided]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "HOW"))]
    pub gathers: Option<GathersChoice>,
    /// Put swap files in this folder, for offload to a disk; choose a fast disk. Each run creates its own subfolder, and
    /// removes it at the end [default: the current folder]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "DIR"))]
    pub swap: Option<PathBuf>,
    /// Use at most SIZE of memory, such as 6GiB or 500MB, for all ranks of a machine together: host memory with --backend cpu,
    /// device memory otherwise [default: the available memory; with --backend cpu, minus a reserve for other programs]
    #[cfg_attr(feature = "cli", arg(long, help_heading = MEMORY, value_name = "SIZE"))]
    pub memory: Option<String>,
    /// After each phase (an epoch of training, an evaluation), print a table of the host and device memory in use before the
    /// phase, at its end and at its peak
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT))]
    pub memory_breakdown: bool,
    /// Print a progress line to standard error every N steps, and for the first and last step [default: a progress bar on a
    /// terminal; otherwise a line every 10 steps or 10 seconds]
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT, value_name = "N"))]
    pub log_every: Option<usize>,
    /// Save checkpoints to this folder: at the end, when a signal stops the run (SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2),
    /// and every --save-every steps
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, value_name = "DIR"))]
    pub save: Option<PathBuf>,
    /// Save every N steps
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, value_name = "N", requires = "save"))]
    pub save_every: Option<usize>,
    /// Keep the last N checkpoints [default: all]
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, value_name = "N", requires = "save"))]
    pub keep_last: Option<usize>,
    /// With --keep-last, also keep the best checkpoint: the one with the lowest loss on the held-out rows or, if no rows are held out, with
    /// the lowest mean training loss since the previous checkpoint
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, requires = "keep_last"))]
    pub keep_best: bool,
    /// Save asynchronously: training continues while a copy of the shards is written
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, requires = "save"))]
    pub save_async: bool,
    /// Resume from a checkpoint. `auto` takes the newest intact checkpoint in the --save folder, and starts from scratch if
    /// there is none. DIR is a checkpoint or a folder of checkpoints. The checkpoint may come from a run with another number
    /// of ranks, stage or precision
    #[cfg_attr(feature = "cli", arg(long, help_heading = CHECKPOINTS, value_name = "auto|DIR"))]
    pub resume: Option<PathBuf>,
    /// Wait at most SECONDS for another rank; after that, all ranks exit with code 75 [default: 600]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", env = "ZERO_DEADLINE"))]
    pub deadline: Option<f64>,
    /// Let ranks connect without a secret (ZERO_SECRET) even if other machines can reach them. Use this option only on a
    /// network without other users [or set ZERO_TRUSTED_NETWORK=1]
    #[cfg_attr(feature = "cli", arg(long))]
    pub trusted_network: bool,
    /// Write flight records (the last operations of each rank) to this folder when a rank fails or is late, for `zero flight`
    /// [default: the subfolder `flight` of --out]
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT, value_name = "DIR", env = "ZERO_FLIGHT_DIR"))]
    pub flight: Option<PathBuf>,
    /// Write a trace of every operation, all-gather and reduction to this file, for chrome://tracing or Perfetto
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT, value_name = "FILE"))]
    pub trace: Option<PathBuf>,
    /// Print the plan, the memory that the run needs, and the first rows if they are conversations, and exit without training
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT))]
    pub dry_run: bool,
    /// Print only a JSON summary to standard output. Progress lines go to standard error; there is no progress bar
    #[cfg_attr(feature = "cli", arg(long, help_heading = OUTPUT))]
    pub json: bool,
}

/// Number of a model's first blocks that are checkpointed; `usize::MAX` for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks(pub usize);

impl FromStr for Blocks {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self(usize::MAX)),
            number => number.parse().map(Self).map_err(|_| "expected all, or a number of blocks"),
        }
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == usize::MAX { f.write_str("all") } else { write!(f, "{}", self.0) }
    }
}

impl Default for Options {
    /// Returns the options of an empty command line, with values from the environment.
    fn default() -> Self {
        Self {
            backend: Default::default(),
            no_kernel_cache: false,
            config: None,
            stage: None,
            ranks: None,
            steps: 20,
            hyper: Default::default(),
            eval: None,
            predictions: None,
            eval_samples: 0,
            ema_decay: None,
            eval_ema: false,
            decay_except: DecayExcept::Vectors,
            eval_every: None,
            shuffle: None,
            threads: None,
            seed: 0,
            out: None,
            shard_size: None,
            secondary_shard_size: None,
            quantized_gradients: None,
            quantized_weights: None,
            bf16_optimizer_states: false,
            int8_optimizer_states: false,
            offload: None,
            offload_ratio: None,
            offload_to: None,
            checkpoint_activations: None,
            activation_memory: None,
            offload_activations: false,
            auto_find_batch_size: false,
            gathers: None,
            swap: None,
            memory: None,
            memory_breakdown: false,
            log_every: None,
            save: None,
            save_every: None,
            keep_last: None,
            keep_best: false,
            save_async: false,
            resume: None,
            deadline: std::env::var("ZERO_DEADLINE").ok().and_then(|seconds| seconds.parse().ok()),
            trusted_network: false,
            flight: std::env::var_os("ZERO_FLIGHT_DIR").map(Into::into),
            trace: None,
            dry_run: false,
            json: false,
        }
    }
}

impl Options {
    /// Returns the folder of --swap.
    pub(super) fn swap_dir(&self) -> &Path {
        self.swap.as_deref().unwrap_or(Path::new("."))
    }
}

/// Rejects options that are 0.
pub(crate) fn at_least_one(options: &[(&'static str, Option<usize>)]) -> Result<()> {
    let zero = options.iter().find(|(_, value)| *value == Some(0));
    zero.map_or(Ok(()), |&(option, _)| Err(wrong(option, 0, "expected at least 1")))
}

/// The learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum ScheduleChoice {
    /// Constant.
    #[cfg_attr(feature = "cli", value(alias = "constant_with_warmup"))]
    Constant,
    /// Linear decay.
    Linear,
    /// Cosine decay.
    Cosine,
}

/// Parameters without weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum DecayExcept {
    /// No parameters.
    Nothing,
    /// Parameters of one dimension: biases, and the scales and offsets of norms.
    Vectors,
    /// The same as `vectors`, and also embeddings: parameters with a name such as `wte`, `wpe` or `token_embedding` in their path.
    Embeddings,
}

impl DecayExcept {
    /// Returns whether weight decay applies to the parameter at `path` of the module.
    pub fn decays(self, path: &str, shape: &[usize]) -> bool {
        let is_embedding = || path.split('.').any(|name| ["wte", "wpe"].contains(&name) || name.contains("embed"));
        match self {
            Self::Nothing => true,
            Self::Vectors => shape.len() > 1,
            Self::Embeddings => shape.len() > 1 && !is_embedding(),
        }
    }
}

/// The model state that is offloaded from the backend's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum OffloadChoice {
    /// Nothing.
    None,
    /// Optimizer state and gradients. With --offload-to disk, gradients are offloaded only at stages 2 and 3.
    Optimizer,
    /// Optimizer state, gradients and parameters.
    All,
}

/// The memory that holds offloaded model state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum OffloadTo {
    /// Host memory.
    Host,
    /// A file on a disk.
    Disk,
}

impl OffloadTo {
    /// The reason to refuse host memory with the cpu backend.
    pub(crate) const NOT_HOST: &str =
        "expected disk: the cpu backend computes in host memory, so nothing would move; or use --backend cuda";
}

/// The method by which processes gather parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum GathersChoice {
    /// All ranks call the same all-gathers in the same order.
    Collective,
    /// Each rank reads the shards of the others through host memory.
    OneSided,
}

/// The type of parameters and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Dtype {
    /// Single precision.
    #[cfg_attr(feature = "cli", value(alias = "no"))]
    Fp32,
    /// IEEE half precision; training scales the loss dynamically.
    Fp16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Returns the corresponding types of exports and of ranks.
    pub fn types(self) -> (ExportDtype, Float) {
        match self {
            Self::Fp32 => (ExportDtype::Fp32, Float::F32),
            Self::Fp16 => (ExportDtype::Fp16, Float::F16),
            Self::Bf16 => (ExportDtype::Bf16, Float::Bf16),
        }
    }
}

impl From<Dtype> for MixedPrecision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Fp32 => MixedPrecision::No,
            Dtype::Fp16 => MixedPrecision::Fp16,
            Dtype::Bf16 => MixedPrecision::Bf16,
        }
    }
}

#[cfg(all(test, feature = "cli"))]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::Options;

    #[test]
    fn defaults_are_those_of_an_empty_command_line() {
        let matches = Options::augment_args(clap::Command::new("train")).get_matches_from(["train"]);
        let parsed = Options::from_arg_matches(&matches).unwrap();
        assert_eq!(format!("{parsed:?}"), format!("{:?}", Options::default()));
    }
}
