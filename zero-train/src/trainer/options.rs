//! The command line, as given.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

#[cfg(feature = "burn")]
use burn::tensor::FloatDType;
#[cfg(feature = "burn")]
use zero_core::config::Float;
use zero_kernels::quantized::Format;
#[cfg(feature = "burn")]
use zero_models::hf_export::ExportDtype;

use super::BackendChoice;
use crate::config::MixedPrecision;
use crate::error::{Result, wrong};

/// What stands for `"auto"` in a configuration file, and without a file is used as it is.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", group(id = "zero-hyperparameters"))]
pub struct Hyperparameters {
    /// Rows per rank and micro-batch [default: 1]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "per-device-train-batch-size"))]
    pub batch: Option<usize>,
    /// Micro-batches per step [default: 1]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "gradient-accumulation-steps"))]
    pub accumulation: Option<usize>,
    /// Learning rate of the optimizer [default: 0.001; for a preset that is trained from nothing, where nothing is said of rate,
    /// betas, decay, warm-up, schedule and clipping, all of them by its published recipe]
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
    /// What the learning rate does after the warm-up: it stays, or falls to 0 at the last step [default: constant]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHAPE", visible_alias = "lr-scheduler-type"))]
    pub schedule: Option<ScheduleChoice>,
    /// Clip gradients to this global L2 norm; 0 for no clipping [default: 0, or 1 for "auto"]
    #[cfg_attr(feature = "cli", arg(long, value_name = "NORM", visible_alias = "max-grad-norm"))]
    pub clip: Option<f64>,
    /// Precision of the model, with fp32 master weights in the optimizer [default: fp32]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "mixed-precision"))]
    pub dtype: Option<Dtype>,
    /// True if they are a model's [`Recipe`](super::Recipe), whose warm-up begins slowly.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub is_recipe: bool,
    /// Number of ranks that batch and accumulation are for, if a restart has another number.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub batch_ranks: Option<usize>,
}

/// Options of a [`Trainer`](super::Trainer), for a program to flatten into its own (`#[command(flatten)]`). What is not given
/// is taken from `--config`, and without that has the default named.
// A field for each option. The group has a name that a program's own options do not take.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", group(id = "zero-trainer"))]
pub struct Options {
    /// Where ranks compute: cpu, cuda (ranks share the GPUs) or vulkan; the program needs the feature of that name
    #[cfg_attr(feature = "cli", arg(long, value_name = "BACKEND", default_value = "cpu"))]
    pub backend: BackendChoice,
    /// Compile CUDA kernels anew, and do not keep them in the user's cache folder (XDG_CACHE_HOME or ~/.cache, in zero/kernels)
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_kernel_cache: bool,
    /// A DeepSpeed JSON or an Accelerate YAML; other options fill its "auto" values and must not contradict it
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", visible_alias = "config-file"))]
    pub config: Option<PathBuf>,
    /// ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded over the ranks
    /// [default: 3]
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "zero-stage"))]
    pub stage: Option<u8>,
    /// Number of data-parallel ranks: threads of this process, or the processes that a launcher started [default: 2, or what
    /// the launcher or the file says]
    #[cfg_attr(feature = "cli", arg(long))]
    pub ranks: Option<usize>,
    /// Training steps
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 20))]
    pub steps: usize,
    /// Hyperparameters.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub hyper: Hyperparameters,
    /// Hold out the last ROWS rows of the data, or the first of its validation split, and evaluate on them at the end of every
    /// epoch and of training [default: the validation split, or none]
    #[cfg_attr(feature = "cli", arg(long, value_name = "ROWS"))]
    pub eval: Option<usize>,
    /// Write what the trained model says of each row that is held out into this file, a JSON object a line, at the end
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
    pub predictions: Option<PathBuf>,
    /// Keep an exponential moving average (EMA) of the weights, in fp32 and sharded as the optimizer's state is: each step moves it by 1 - DECAY
    /// of its distance to the weights. Checkpoints hold it; `zero export --ema` writes it [default: none]
    #[cfg_attr(feature = "cli", arg(long, value_name = "DECAY"))]
    pub ema_decay: Option<f64>,
    /// Use the averages of --ema-decay instead of the weights to evaluate, predict and sample, and for the 16-bit model at the end
    #[cfg_attr(feature = "cli", arg(long, requires = "ema_decay"))]
    pub eval_ema: bool,
    /// What weight decay leaves alone: nothing, as DeepSpeed without parameter groups; vectors, which are biases and norms; or
    /// embeddings too
    #[cfg_attr(feature = "cli", arg(long, value_name = "WHAT", default_value = "vectors"))]
    pub decay_except: DecayExcept,
    /// Evaluate every N steps too
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub eval_every: Option<usize>,
    /// Take rows in a new random order in every epoch, by the seed; or in the order of the data [default: true, but false for
    /// text]
    #[cfg_attr(feature = "cli", arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true"))]
    pub shuffle: Option<bool>,
    /// Compute threads per rank [default: the machine's cores, shared evenly]
    #[cfg_attr(feature = "cli", arg(long))]
    pub threads: Option<usize>,
    /// Seed of the initial weights, of dropout and of shuffles
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub seed: u64,
    /// Write report.html, metrics.jsonl, events.jsonl and metrics.csv into this folder
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub out: Option<PathBuf>,
    /// Shard model state among so many neighbouring ranks, those of one machine perhaps, of which each group holds all of it
    /// (hybrid sharding, MiCS): gathers stay within a group. Divides the number of ranks [default: all ranks]
    #[cfg_attr(feature = "cli", arg(long, value_name = "RANKS"))]
    pub shard_size: Option<usize>,
    /// Keep a second cut of the parameters among so many neighbouring ranks, those of one machine perhaps, which serves their
    /// gathers (ZeRO++'s hpZ): parameters cross groups once a step. Divides the number of ranks; stage 3 [default: none]
    #[cfg_attr(feature = "cli", arg(long, value_name = "RANKS"))]
    pub secondary_shard_size: Option<usize>,
    /// Send gradients in 8 or 4 bit, with a scale for every 64 of them, int8, int4 or nf4: across the groups of --shard-size, or within
    /// the one there is (ZeRO++'s quantised gradients). It changes what is trained a little [default: as they are]
    #[cfg_attr(feature = "cli", arg(long, value_name = "FORMAT"))]
    pub quantized_gradients: Option<Format>,
    /// Gather weights in 8 or 4 bit, with a scale for every 64 of them, int8, int4 or nf4 (ZeRO++'s quantised weights): passes compute
    /// with what they stand for, updates and checkpoints keep all digits. Stage 3 [default: as they are]
    #[cfg_attr(feature = "cli", arg(long, value_name = "FORMAT"))]
    pub quantized_weights: Option<Format>,
    /// Keep the optimizer's moments in bf16, rounded up or down by chance, in half the bytes of memory or disk: it changes what is trained
    /// a little; masters and checkpoints stay in fp32
    #[cfg_attr(feature = "cli", arg(long))]
    pub bf16_optimizer_states: bool,
    /// Offload model state: the optimizer's (and gradients, from stage 2 on), or all of it (at stage 3) [default: the least
    /// that makes the run fit into memory]
    #[cfg_attr(feature = "cli", arg(long, value_name = "WHAT"))]
    pub offload: Option<OffloadChoice>,
    /// The share of the optimizer's state and gradients that is offloaded, from 0 to 1; the rest stays where the model computes, gradients
    /// first if the others go to a disk [default: all of it with --offload, as little as memory allows without]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHARE"))]
    pub offload_ratio: Option<f64>,
    /// Where to: the host's memory, where the processor updates it, or a disk [default: host for --backend cuda and vulkan,
    /// disk for cpu, which computes in the host's memory]
    #[cfg_attr(feature = "cli", arg(long, value_name = "WHERE"))]
    pub offload_to: Option<OffloadTo>,
    /// Activation checkpointing: drop what blocks (transformer layers) compute in the forward pass, and compute it again in the
    /// backward pass; of all blocks, or of so many of the first [default: none, or the fewest that make the run fit into memory]
    #[cfg_attr(feature = "cli", arg(
        long,
        value_name = "all|BLOCKS",
        visible_alias = "gradient-checkpointing",
        num_args = 0..=1,
        default_missing_value = "all"
    ))]
    pub checkpoint_activations: Option<Blocks>,
    /// The same of the fewest blocks with which activations take no more than this on a rank, such as 2GiB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", conflicts_with = "checkpoint_activations"))]
    pub activation_memory: Option<String>,
    /// Offload what checkpointed blocks keep, their inputs, until the backward pass comes to them, to where --offload-to says;
    /// every block is checkpointed if nothing else is said [default: where that makes the run fit into memory]
    #[cfg_attr(feature = "cli", arg(long))]
    pub offload_activations: bool,
    /// Take the most rows per rank and micro-batch with which the run fits into memory, by the plan's estimate; with what it may
    /// checkpoint and offload
    #[cfg_attr(feature = "cli", arg(long, conflicts_with = "batch"))]
    pub auto_find_batch_size: bool,
    /// How ranks that are processes all-gather parameters: all together, in the order of the program, or each by reading the
    /// others' shards through the hosts' memory [default: collective with NCCL, one-sided without]
    #[cfg_attr(feature = "cli", arg(long, value_name = "HOW"))]
    pub gathers: Option<GathersChoice>,
    /// The folder for --offload to a disk, on a fast one; a run makes one of its own in it and removes it at its end
    /// [default: the current folder]
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub swap: Option<PathBuf>,
    /// Use no more memory than this, such as 6GiB [default: what is available]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE"))]
    pub memory: Option<String>,
    /// Print what memory each phase takes, training to the end of an epoch and evaluation: before it, at its end and at its peak, of
    /// the host and of the device
    #[cfg_attr(feature = "cli", arg(long))]
    pub memory_breakdown: bool,
    /// Write a line about the training to standard error every N steps, and for the first and the last [default: where that is
    /// no terminal, every 10 steps or 10 seconds; on a terminal a bar is shown]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub log_every: Option<usize>,
    /// Save checkpoints into this folder: at the end, when a signal ends the run (SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2),
    /// and every --save-every steps
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub save: Option<PathBuf>,
    /// Save every N steps
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", requires = "save"))]
    pub save_every: Option<usize>,
    /// Keep the last N checkpoints [default: all]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", requires = "save"))]
    pub keep_last: Option<usize>,
    /// Keep the best checkpoint too: by the loss over the --eval rows, or without them by the mean training loss since
    /// the checkpoint before
    #[cfg_attr(feature = "cli", arg(long, requires = "keep_last"))]
    pub keep_best: bool,
    /// Save asynchronously: training continues while a copy of the shards is written
    #[cfg_attr(feature = "cli", arg(long, requires = "save"))]
    pub save_async: bool,
    /// Resume from a checkpoint: `auto` for the newest sound one in --save, from the start if there is none; or the folder of
    /// one. It may have been saved with any number of ranks, stage and precision
    #[cfg_attr(feature = "cli", arg(long, value_name = "auto|DIR"))]
    pub resume: Option<PathBuf>,
    /// Timeout in seconds of a wait for another rank, after which all end with exit code 75 [default: 600]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", env = "ZERO_DEADLINE"))]
    pub deadline: Option<f64>,
    /// Ranks that are processes may meet without a secret (ZERO_SECRET) where other machines reach them: nobody else is on
    /// their network [or ZERO_TRUSTED_NETWORK=1]
    #[cfg_attr(feature = "cli", arg(long))]
    pub trusted_network: bool,
    /// Where ranks write flight records, their last operations, when one fails or is late, for `zero flight` [default: flight
    /// in --out]
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR", env = "ZERO_FLIGHT_DIR"))]
    pub flight: Option<PathBuf>,
    /// Write a trace of every operation, all-gather and reduction into this file, for chrome://tracing or Perfetto
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
    pub trace: Option<PathBuf>,
    /// Print the plan, with the memory it takes, and end without training
    #[cfg_attr(feature = "cli", arg(long))]
    pub dry_run: bool,
    /// Print a machine-readable summary on standard output, and nothing else there; no bar, but lines as of --log-every
    #[cfg_attr(feature = "cli", arg(long))]
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
pub(super) fn at_least_one(options: &[(&'static str, Option<usize>)]) -> Result<()> {
    let zero = options.iter().find(|(_, value)| *value == Some(0));
    zero.map_or(Ok(()), |&(option, _)| Err(wrong(option, 0, "expected at least 1")))
}

/// The learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum ScheduleChoice {
    /// Stays.
    #[cfg_attr(feature = "cli", value(alias = "constant_with_warmup"))]
    Constant,
    /// Falls along a line.
    Linear,
    /// Falls along half a cosine.
    Cosine,
}

/// Parameters without weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum DecayExcept {
    /// None.
    Nothing,
    /// Those of one dimension: biases, and the scales and offsets of norms.
    Vectors,
    /// These, and embeddings: parameters with a name such as `wte`, `wpe` or `token_embedding` in their path.
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

/// What is offloaded from where the backend computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum OffloadChoice {
    /// Nothing.
    None,
    /// Optimizer state, and gradients from their reduction to the update.
    Optimizer,
    /// Parameters too.
    All,
}

/// Where offloaded model state is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum OffloadTo {
    /// The host's memory.
    Host,
    /// A file on a disk.
    Disk,
}

/// How processes gather parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum GathersChoice {
    /// All ranks together.
    Collective,
    /// Each rank by itself.
    OneSided,
}

/// A type to compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Dtype {
    /// 32 bit.
    #[cfg_attr(feature = "cli", value(alias = "no"))]
    Fp32,
    /// IEEE half precision with a dynamic loss scale.
    Fp16,
    /// bfloat16.
    Bf16,
}

#[cfg(feature = "burn")]
impl Dtype {
    /// Returns the corresponding types of exports, of ranks and of the backend.
    pub fn types(self) -> (ExportDtype, Float, FloatDType) {
        match self {
            Self::Fp32 => (ExportDtype::Fp32, Float::F32, FloatDType::F32),
            Self::Fp16 => (ExportDtype::Fp16, Float::F16, FloatDType::F16),
            Self::Bf16 => (ExportDtype::Bf16, Float::Bf16, FloatDType::BF16),
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
