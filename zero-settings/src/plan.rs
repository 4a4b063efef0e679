//! The validated plan, which everything after reads and never a file, and from it the settings of decorator, engine and
//! optimizer.

use std::path::PathBuf;

use zero_core::config::{Disk, Float, Tier, ZeroConfig};
use zero_core::offload::AioOptions;
use zero_kernels::Rule;

use super::batch::Batch;
use super::error::Warning;
use super::node::Node;
use super::optimizer::OptimizerPlan;
use crate::EngineConfig;
use crate::loss_scale::{DynamicLossScale, LossScaleError, LossScaler};
use crate::schedule::{Schedule, at_least_two};

/// How to train: what is sharded over how many ranks, in which precision, with which optimizer and schedule.
// A field for each setting that a file can have.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroPlan {
    /// Settings of the decorator. `seed`, `param_dtype`, `gradient_dtype`, `offload` and `gradient_predivide_factor` are ignored here:
    /// [`zero_config`](Self::zero_config) derives them from the plan's other fields.
    pub zero: ZeroConfig,
    /// Number of ranks, at least 1.
    pub world: usize,
    /// How the rows of a step are split.
    pub batch: Batch,
    /// Whether gradients are reduced with each micro-batch, or once per optimizer step; `None` is each at stages 2 and 3, and
    /// once at 0 and 1 (`gradient_accumulation_kwargs.sync_each_batch`, as Hugging Face's Trainer has it).
    pub sync_each_batch: Option<bool>,
    /// Whether gradients that are not finite are an error (`watchdog.error_if_nonfinite`).
    pub error_if_nonfinite: bool,
    /// Highest norm of the whole gradient; `None` does not clip.
    pub gradient_clipping: Option<f64>,
    /// Whether gradients are divided by the number of ranks before they are summed rather than after.
    pub prescale_gradients: bool,
    /// Without `prescale_gradients`: what they are divided by before the sum, the rest after it. Above 0.
    pub gradient_predivide_factor: f64,
    /// True if gradients are added over the ranks, and not averaged (`gradient_allreduce_op`).
    pub sums_gradients: bool,
    /// The type of parameters and activations.
    pub precision: Precision,
    /// The type gradients of micro-batches are added up in; `None` is fp32 over several micro-batches and otherwise their own.
    pub grad_accum_dtype: Option<Float>,
    /// The optimizer; `None` leaves it to the program.
    pub optimizer: Option<OptimizerPlan>,
    /// The learning-rate schedule, with the steps of its warm-up as written; `None` leaves it to the program.
    pub schedule: Option<Schedule>,
    /// Where optimizer state is kept when not on the device.
    pub offload_optimizer: Option<Offload>,
    /// Where parameters are kept when not on the device. Stage 3.
    pub offload_param: Option<Offload>,
    /// Where inputs of checkpointed blocks are kept when not on the device.
    pub offload_activations: Option<OffloadDevice>,
    /// Most elements of a stretch of an update from a disk.
    pub sub_group_size: usize,
    /// Sizes and parallelism of requests to a disk.
    pub aio: AioOptions,
    /// What is printed and logged.
    pub report: Report,
    /// How long ranks wait for one another, and what they leave when one does not come.
    pub watchdog: Watchdog,
    /// Whether whole 16-bit weights are saved at the end of training: the GPT-2 command does it, a program of its own calls
    /// `ZeroEngine::export` of `zero-train`. Stage 3.
    pub save_16bit_model: bool,
    /// Everything accepted that does not do what it says.
    pub warnings: Vec<Warning>,
}

impl ZeroPlan {
    /// Ranks among which model state is sharded.
    pub fn shards(&self) -> usize {
        self.zero.shard_size.unwrap_or(self.world)
    }

    /// What the decorator is launched with. `seed` is of parameters and dropout.
    pub fn zero_config(&self, seed: u64) -> ZeroConfig {
        ZeroConfig {
            seed,
            param_dtype: match self.precision {
                Precision::Fp32 => Float::F32,
                Precision::Bf16 { .. } => Float::Bf16,
                Precision::Fp16 { .. } => Float::F16,
            },
            gradient_dtype: self.gradient_dtype(),
            offload: self.offload(),
            gradient_predivide_factor: match self.prescale_gradients {
                true => self.world as f32,
                false => self.gradient_predivide_factor as f32,
            },
            ..self.zero.clone()
        }
    }

    /// The type that reduced gradients are kept and added up in, if that is not the parameters': fp32 over several micro-batches
    /// unless `data_types.grad_accum_dtype` is given, as small addends are lost in sums of 16 bit.
    pub fn gradient_dtype(&self) -> Option<Float> {
        let sums_in_16 = self.precision != Precision::Fp32 && self.batch.accumulation > 1;
        self.grad_accum_dtype.or_else(|| sums_in_16.then_some(Float::F32))
    }

    /// The folder of the disk that something is offloaded to, if something is.
    pub fn nvme_path(&self) -> Option<&PathBuf> {
        let state = [&self.offload_optimizer, &self.offload_param].into_iter().flatten();
        let mut devices = state.map(|offload| &offload.device).chain(&self.offload_activations);
        devices.find_map(|device| match device {
            OffloadDevice::Nvme { path } => Some(path),
            OffloadDevice::Cpu => None,
        })
    }

    /// Where state is kept. On the CPU backend the device's memory and the host's are one.
    fn offload(&self) -> zero_core::config::Offload {
        let tier = |device: Option<&OffloadDevice>| match device {
            Some(OffloadDevice::Nvme { .. }) => Tier::Disk,
            Some(OffloadDevice::Cpu) => Tier::Host,
            None => Tier::Memory,
        };
        let state = |offload: &Option<Offload>| tier(offload.as_ref().map(|offload| &offload.device));
        let both = || [&self.offload_optimizer, &self.offload_param].into_iter().flatten();
        let parts = Disk::default();
        let buffer_count = both().zip([4, 1]).map(|(offload, arrays)| offload.buffer_count * arrays).max();
        let buffer_bytes = self.offload_param.as_ref().map_or(usize::MAX, |offload| offload.buffer_size * 4);
        let update = self.offload_optimizer.as_ref();
        zero_core::config::Offload {
            optimizer: state(&self.offload_optimizer),
            parameters: state(&self.offload_param),
            activations: tier(self.offload_activations.as_ref()),
            ratio: update.map_or(1.0, |offload| offload.ratio as f32),
            min_bytes: zero_core::config::Offload::default().min_bytes,
            disk: Disk {
                path: self.nvme_path().cloned().unwrap_or_default(),
                pin_memory: both().any(|offload| offload.pin_memory),
                aio: self.aio.clone(),
                buffer_count: buffer_count.map_or(parts.buffer_count, |count| count.max(Disk::FEWEST_BUFFERS)),
                buffer_bytes: parts.buffer_bytes.min(buffer_bytes).max(Disk::SMALLEST_BUFFER),
                sub_group_size: self.sub_group_size,
                max_in_memory: self.offload_param.as_ref().map_or(0, |offload| offload.max_in_cpu),
                pipeline_read: update.is_none_or(|offload| offload.pipeline_read),
                pipeline_write: update.is_none_or(|offload| offload.pipeline_write),
                ..parts
            },
        }
    }

    /// How the engine steps.
    ///
    /// # Errors
    ///
    /// [`LossScaleError`] for a loss scale that cannot be used; a plan from a file or the builder has none.
    pub fn engine_config(&self) -> Result<EngineConfig, LossScaleError> {
        let (loss_scale, skip_overflow) = match self.precision {
            Precision::Fp32 => (None, true),
            Precision::Bf16 { check_grad_overflow } => (None, check_grad_overflow),
            Precision::Fp16 { loss_scale: LossScale::Static(scale) } => (Some(LossScaler::fixed(scale)?), true),
            Precision::Fp16 { loss_scale: LossScale::Dynamic(settings) } => {
                (Some(LossScaler::dynamic(settings)?), true)
            }
        };
        Ok(EngineConfig {
            exclude_frozen_parameters: false,
            world: Some(self.world),
            sums_gradients: self.sums_gradients,
            accumulation: self.batch.accumulation,
            sync_each_batch: self.sync_each_batch,
            error_if_nonfinite: self.error_if_nonfinite,
            clipping: self.gradient_clipping,
            schedule: self.learning_rates(),
            loss_scale,
            skip_overflow,
        })
    }

    /// The rule of the plan's optimizer; AdamW with PyTorch's defaults if it names none.
    pub fn rule(&self) -> Rule {
        self.optimizer.unwrap_or(OptimizerPlan::DEFAULT).rule
    }

    /// The learning rate by update: the plan's schedule, or its optimizer's rate throughout.
    pub fn learning_rates(&self) -> Schedule {
        let rate = self.optimizer.unwrap_or(OptimizerPlan::DEFAULT).lr;
        let mut schedule = self.schedule.clone().unwrap_or(Schedule::Constant(rate));
        if let Schedule::WarmupLr { warmup_steps, .. }
        | Schedule::WarmupDecayLr { warmup_steps, .. }
        | Schedule::WarmupCosineLr { warmup_steps, .. } = &mut schedule
        {
            *warmup_steps = at_least_two(*warmup_steps);
        }
        if let Schedule::WarmupCosineLr { base_lr, .. } = &mut schedule {
            *base_lr = rate;
        }
        schedule
    }
}

/// `watchdog`, a section of this project's own. What is absent is left to the program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Watchdog {
    /// Seconds that a rank waits for another at most; above 0 (`deadline_seconds`).
    pub deadline: Option<f64>,
    /// Where ranks leave their last operations (`flight_dir`).
    pub flight_dir: Option<PathBuf>,
}

/// The type of parameters and activations; master weights and optimizer state are fp32 always.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// fp32 throughout.
    Fp32,
    /// bf16.
    Bf16 {
        /// Whether a step whose gradients are not finite is skipped.
        check_grad_overflow: bool,
    },
    /// fp16; a step whose gradients are not finite is skipped.
    Fp16 {
        /// What the loss is multiplied by.
        loss_scale: LossScale,
    },
}

/// What the loss is multiplied by before the backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// The same number throughout, above 0.
    Static(f64),
    /// Doubled after a run of good steps and halved after overflows.
    Dynamic(DynamicLossScale),
}

/// DeepSpeed's name of each type, and PyTorch's.
const FLOATS: [(Float, &[&str]); 3] = [
    (Float::F32, &["fp32", "float32", "float"]),
    (Float::F16, &["fp16", "float16", "half"]),
    (Float::Bf16, &["bf16", "bfloat16"]),
];

/// DeepSpeed's name.
pub(super) fn float_name(float: Float) -> &'static str {
    FLOATS.iter().find(|(known, _)| *known == float).map_or("", |(_, names)| names[0])
}

impl From<Float> for Node {
    fn from(float: Float) -> Self {
        float_name(float).into()
    }
}

/// By DeepSpeed's or PyTorch's name.
pub(super) fn float_named(name: &str) -> Option<Float> {
    let name = name.trim_start_matches("torch.");
    FLOATS.iter().find(|(_, names)| names.contains(&name)).map(|(float, _)| *float)
}

/// Where something is kept when not on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// The kind of memory.
    pub device: OffloadDevice,
    /// Whether host memory is pinned.
    pub pin_memory: bool,
    /// Buffers of each array that moves to and from a disk; an update moves four arrays.
    pub buffer_count: usize,
    /// Most elements of a buffer of parameters.
    pub buffer_size: usize,
    /// The share of optimizer state and gradients that is offloaded, by bytes: see `zero_burn::config::Offload::ratio`.
    pub ratio: f64,
    /// Elements of each rank's parameters that stay in memory all the same.
    pub max_in_cpu: usize,
    /// Whether an update reads ahead.
    pub pipeline_read: bool,
    /// Whether an update writes behind.
    pub pipeline_write: bool,
}

impl Offload {
    /// To `device`, all of it, with overlap and nothing pinned.
    pub fn to(device: OffloadDevice) -> Self {
        Self {
            device,
            pin_memory: false,
            buffer_count: 4,
            buffer_size: 100_000_000,
            ratio: 1.0,
            max_in_cpu: 0,
            pipeline_read: true,
            pipeline_write: true,
        }
    }
}

/// The kind of memory something is offloaded to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffloadDevice {
    /// Host memory.
    Cpu,
    /// Files under a folder.
    Nvme {
        /// The folder.
        path: PathBuf,
    },
}

/// What is printed and logged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps between progress lines, at least 1; `None` leaves it to the program.
    pub steps_per_print: Option<usize>,
    /// Whether the time of each phase of a step is printed.
    pub wall_clock_breakdown: bool,
    /// Whether memory is printed after each phase.
    pub memory_breakdown: bool,
    /// TensorBoard event files.
    pub tensorboard: Option<LogFiles>,
    /// CSV files, one per quantity.
    pub csv_monitor: Option<LogFiles>,
}

/// Where a log is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFiles {
    /// The folder; empty for the current one.
    pub output_path: PathBuf,
    /// The folder inside `output_path`.
    pub job_name: String,
}

impl From<&LogFiles> for Node {
    fn from(files: &LogFiles) -> Self {
        let (path, job) = (files.output_path.display().to_string(), files.job_name.clone());
        Node::map([("enabled", true.into()), ("output_path", path.into()), ("job_name", job.into())])
    }
}
