//! The validated plan, which later code reads instead of a file, and the settings of decorator, engine and optimizer
//! derived from it.

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

/// A training plan: sharding, number of ranks, precision, optimizer and schedule.
// A field for each setting that a file can have.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroPlan {
    /// Settings of the decorator. Its `seed`, `param_dtype`, `gradient_dtype`, `offload` and `gradient_predivide_factor` are
    /// ignored: [`zero_config`](Self::zero_config) derives them from the plan's other fields.
    pub zero: ZeroConfig,
    /// Number of ranks, at least 1.
    pub world: usize,
    /// The split of a step's rows.
    pub batch: Batch,
    /// If true, gradients are reduced with each micro-batch; if false, once per optimizer step. `None` is true at stages 2 and
    /// 3 and false at 0 and 1 (`gradient_accumulation_kwargs.sync_each_batch`, as in Hugging Face's Trainer).
    pub sync_each_batch: Option<bool>,
    /// If true, non-finite gradients are an error (`watchdog.error_if_nonfinite`).
    pub error_if_nonfinite: bool,
    /// Maximum global gradient norm; `None` does not clip.
    pub gradient_clipping: Option<f64>,
    /// If true, gradients are divided by the number of ranks before the sum instead of after it.
    pub prescale_gradients: bool,
    /// Without `prescale_gradients`: the divisor before the sum; the rest is applied after it. Above 0.
    pub gradient_predivide_factor: f64,
    /// If true, gradients are summed over the ranks, not averaged (`gradient_allreduce_op`).
    pub sums_gradients: bool,
    /// The type of parameters and activations.
    pub precision: Precision,
    /// The type in which gradients of micro-batches accumulate; `None` is fp32 for several micro-batches, else the gradients' type.
    pub grad_accum_dtype: Option<Float>,
    /// The optimizer; `None` leaves it to the program.
    pub optimizer: Option<OptimizerPlan>,
    /// The learning-rate schedule, with its warm-up steps as written; `None` leaves it to the program.
    pub schedule: Option<Schedule>,
    /// Offload of optimizer state; `None` keeps it on the device.
    pub offload_optimizer: Option<Offload>,
    /// Offload of parameters; `None` keeps them on the device. Stage 3.
    pub offload_param: Option<Offload>,
    /// Offload of checkpointed blocks' inputs; `None` keeps them on the device.
    pub offload_activations: Option<OffloadDevice>,
    /// Maximum number of elements per chunk of an update from a disk.
    pub sub_group_size: usize,
    /// Size and parallelism of disk requests.
    pub aio: AioOptions,
    /// Console output and log files.
    pub report: Report,
    /// Limit on waits between ranks, and the folder for reports when it expires.
    pub watchdog: Watchdog,
    /// If true, the full 16-bit weights are saved at the end of training. The GPT-2 command does it; other programs
    /// call `ZeroEngine::export` of `zero-train`. Stage 3.
    pub save_16bit_model: bool,
    /// Settings that are accepted without their documented effect.
    pub warnings: Vec<Warning>,
}

impl ZeroPlan {
    /// Returns the number of ranks that model state is sharded over.
    pub fn shards(&self) -> usize {
        self.zero.shard_size.unwrap_or(self.world)
    }

    /// Returns the decorator's settings. `seed` seeds parameters and dropout.
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

    /// Returns the type in which reduced gradients are kept and accumulated, if it differs from the parameters'. It is fp32 for
    /// several micro-batches unless `data_types.grad_accum_dtype` is given, because 16-bit sums lose small addends.
    pub fn gradient_dtype(&self) -> Option<Float> {
        let sums_in_16 = self.precision != Precision::Fp32 && self.batch.accumulation > 1;
        self.grad_accum_dtype.or_else(|| sums_in_16.then_some(Float::F32))
    }

    /// Returns the folder of the offload disk, if anything is offloaded to one.
    pub fn nvme_path(&self) -> Option<&PathBuf> {
        let state = [&self.offload_optimizer, &self.offload_param].into_iter().flatten();
        let mut devices = state.map(|offload| &offload.device).chain(&self.offload_activations);
        devices.find_map(|device| match device {
            OffloadDevice::Nvme { path } => Some(path),
            OffloadDevice::Cpu => None,
        })
    }

    /// Returns the offload settings. On the CPU backend, device memory and host memory are the same.
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

    /// Returns the engine's settings.
    ///
    /// # Errors
    ///
    /// [`LossScaleError`] for an invalid loss scale; a plan from a file or the builder has none.
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

    /// Returns the update rule of the plan's optimizer, or AdamW with PyTorch's defaults if it names none.
    pub fn rule(&self) -> Rule {
        self.optimizer.unwrap_or(OptimizerPlan::DEFAULT).rule
    }

    /// Returns the learning rate by update: the plan's schedule, or its optimizer's constant rate.
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

/// `watchdog`, a section specific to this project. Absent values are left to the program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Watchdog {
    /// Maximum seconds that a rank waits for another; above 0 (`deadline_seconds`).
    pub deadline: Option<f64>,
    /// Folder to which ranks write their last operations (`flight_dir`).
    pub flight_dir: Option<PathBuf>,
}

/// The type of parameters and activations; master weights and optimizer state are always fp32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// fp32 throughout.
    Fp32,
    /// bf16.
    Bf16 {
        /// If true, a step with non-finite gradients is skipped.
        check_grad_overflow: bool,
    },
    /// fp16; a step with non-finite gradients is skipped.
    Fp16 {
        /// The factor for the loss.
        loss_scale: LossScale,
    },
}

/// The factor for the loss before the backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// A constant above 0.
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

/// Returns DeepSpeed's name of `float`.
pub(super) fn float_name(float: Float) -> &'static str {
    FLOATS.iter().find(|(known, _)| *known == float).map_or("", |(_, names)| names[0])
}

impl From<Float> for Node {
    fn from(float: Float) -> Self {
        float_name(float).into()
    }
}

/// Returns the type with this DeepSpeed or PyTorch name.
pub(super) fn float_named(name: &str) -> Option<Float> {
    let name = name.trim_start_matches("torch.");
    FLOATS.iter().find(|(_, names)| names.contains(&name)).map(|(float, _)| *float)
}

/// Offload settings of one kind of state.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// The kind of memory.
    pub device: OffloadDevice,
    /// If true, host memory is pinned.
    pub pin_memory: bool,
    /// Number of buffers per array moved to or from a disk; an update moves four arrays.
    pub buffer_count: usize,
    /// Maximum number of elements of a parameter buffer.
    pub buffer_size: usize,
    /// The share of optimizer state and gradients that is offloaded, by bytes; see `zero_burn::config::Offload::ratio`.
    pub ratio: f64,
    /// Number of elements of each rank's parameters that stay in memory.
    pub max_in_cpu: usize,
    /// If true, an update reads ahead.
    pub pipeline_read: bool,
    /// If true, an update writes behind.
    pub pipeline_write: bool,
}

impl Offload {
    /// Offloads everything to `device`, with overlap and without pinned memory.
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

/// The kind of memory to offload to.
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

/// Settings of console output and log files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps between progress lines, at least 1; `None` leaves it to the program.
    pub steps_per_print: Option<usize>,
    /// If true, the time of each phase of a step is printed.
    pub wall_clock_breakdown: bool,
    /// If true, memory use is printed after each phase.
    pub memory_breakdown: bool,
    /// A profile of one step.
    pub flops_profiler: Option<FlopsProfiler>,
    /// A summary of collectives at the end.
    pub comms_logger: Option<CommsLogger>,
    /// TensorBoard event files.
    pub tensorboard: Option<LogFiles>,
    /// CSV files, one per quantity.
    pub csv_monitor: Option<LogFiles>,
}

/// A profile of one step: the floating-point operations and times of its passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlopsProfiler {
    /// The step, from 1.
    pub profile_step: usize,
    /// The file to write it to; `None` prints it.
    pub output_file: Option<PathBuf>,
}

/// A summary of a rank's collectives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommsLogger {
    /// The operations to log, such as `all_reduce`; `None` for all.
    pub ops: Option<Vec<String>>,
}

impl CommsLogger {
    /// Returns whether an operation is logged, such as `all-reduce`: if one of the names is its name, or a variant of it such as
    /// `all_gather_into_tensor`.
    pub fn logs(&self, op: &str) -> bool {
        let op = op.replace('-', "_");
        self.ops.as_ref().is_none_or(|ops| ops.iter().any(|name| name.starts_with(&op)))
    }
}

/// Location of a log.
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
