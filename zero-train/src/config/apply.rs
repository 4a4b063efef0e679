//! From the plan to the settings of decorator, engine and optimizer.

use zero_burn::config::{Disk, Float, Gathers, Tier, ZeroConfig};
use zero_burn::optim::Rule;

use super::optimizer::OptimizerPlan;
use super::plan::{DataType, LossScale, Offload, OffloadDevice, Precision, ZeroPlan};
use super::schedule::{SchedulePlan, WarmupType};
use crate::engine::{EngineConfig, EngineError};
use crate::loss_scale::{DynamicLossScale, LossScaler};
use crate::schedule::{CycleMomentum, OneCycle, Schedule, Warmup, at_least_two};

/// The optimizer of a plan that names none: AdamW with PyTorch's defaults.
const DEFAULT_OPTIMIZER: OptimizerPlan =
    OptimizerPlan::AdamW { lr: 1e-3, beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };

impl ZeroPlan {
    /// What the decorator is launched with. `seed` is of parameters and dropout.
    pub fn zero_config(&self, seed: u64) -> ZeroConfig {
        ZeroConfig {
            gathers: Gathers::default(),
            check_replicas: self.check_replicas as u64,
            stage: self.stage,
            reduce_bucket_size: self.reduce_bucket_size,
            prefetch_bucket_size: self.prefetch_bucket_size,
            max_live_parameters: self.max_live_parameters,
            max_reuse_distance: self.max_reuse_distance,
            param_persistence_threshold: self.param_persistence_threshold,
            seed,
            param_dtype: match self.precision {
                Precision::Fp32 => Float::F32,
                Precision::Bf16 { .. } => Float::Bf16,
                Precision::Fp16 { .. } => Float::F16,
            },
            gradient_dtype: self.grad_accum_dtype.map(float),
            communication_dtype: self.communication_data_type.map(float),
            overlap_comm: self.overlap_comm.unwrap_or(true),
            offload: self.offload(),
            gradient_predivide_factor: match self.prescale_gradients {
                true => self.world as f32,
                false => self.gradient_predivide_factor as f32,
            },
        }
    }

    /// Where state is kept. On the CPU backend the device's memory and the host's are one.
    fn offload(&self) -> zero_burn::config::Offload {
        let path = |offload: &Option<Offload>| match offload.as_ref().map(|offload| &offload.device) {
            Some(OffloadDevice::Nvme { path }) => Some(path.clone()),
            _ => None,
        };
        let (optimizer, parameters) = (path(&self.offload_optimizer), path(&self.offload_param));
        let tier = |offload: &Option<Offload>| match offload.as_ref().map(|offload| &offload.device) {
            Some(OffloadDevice::Nvme { .. }) => Tier::Disk,
            Some(OffloadDevice::Cpu) => Tier::Host,
            None => Tier::Memory,
        };
        let both = || [&self.offload_optimizer, &self.offload_param].into_iter().flatten();
        let parts = Disk::default();
        let buffer_count = both().zip([4, 1]).map(|(offload, arrays)| offload.buffer_count * arrays).max();
        let buffer_bytes = self.offload_param.as_ref().map_or(usize::MAX, |offload| offload.buffer_size * 4);
        let update = self.offload_optimizer.as_ref();
        zero_burn::config::Offload {
            optimizer: tier(&self.offload_optimizer),
            parameters: tier(&self.offload_param),
            min_bytes: zero_burn::config::Offload::default().min_bytes,
            disk: Disk {
                path: optimizer.or(parameters).unwrap_or_default(),
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
    /// [`EngineError::LossScale`] for a loss scale that cannot be used; a plan from a file or the builder has none.
    pub fn engine_config(&self) -> Result<EngineConfig, EngineError> {
        let (loss_scale, skip_overflow) = match self.precision {
            Precision::Fp32 => (None, false),
            Precision::Bf16 { check_grad_overflow } => (None, check_grad_overflow),
            Precision::Fp16 { loss_scale: LossScale::Static(scale) } => (Some(LossScaler::fixed(scale)?), true),
            Precision::Fp16 {
                loss_scale:
                    LossScale::Dynamic { initial_scale_power, window, hysteresis, consecutive_hysteresis, min_scale },
            } => {
                let settings = DynamicLossScale {
                    initial_scale_power,
                    window: window as u64,
                    hysteresis: u32::try_from(hysteresis).unwrap_or(u32::MAX),
                    consecutive_hysteresis,
                    min_scale,
                };
                (Some(LossScaler::dynamic(settings)?), true)
            }
        };
        Ok(EngineConfig {
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
        match *self.optimizer.as_ref().unwrap_or(&DEFAULT_OPTIMIZER) {
            OptimizerPlan::AdamW { beta_1, beta_2, epsilon, weight_decay, .. } => Rule::AdamW {
                beta_1: beta_1 as f32,
                beta_2: beta_2 as f32,
                epsilon: epsilon as f32,
                weight_decay: weight_decay as f32,
            },
            OptimizerPlan::Adam { beta_1, beta_2, epsilon, weight_decay, .. } => Rule::Adam {
                beta_1: beta_1 as f32,
                beta_2: beta_2 as f32,
                epsilon: epsilon as f32,
                weight_decay: weight_decay as f32,
            },
            OptimizerPlan::Sgd { momentum, weight_decay, nesterov, .. } => {
                Rule::Sgd { momentum: momentum as f32, nesterov, weight_decay: weight_decay as f32 }
            }
            OptimizerPlan::Lion { beta_1, beta_2, weight_decay, .. } => {
                Rule::Lion { beta_1: beta_1 as f32, beta_2: beta_2 as f32, weight_decay: weight_decay as f32 }
            }
            OptimizerPlan::Adagrad { epsilon, weight_decay, .. } => {
                Rule::Adagrad { epsilon: epsilon as f32, weight_decay: weight_decay as f32 }
            }
        }
    }

    /// The learning rate by update: the plan's schedule, or its optimizer's rate throughout.
    pub fn learning_rates(&self) -> Schedule {
        let base_lr = self.optimizer.as_ref().unwrap_or(&DEFAULT_OPTIMIZER).learning_rate();
        let warmup = |kind: WarmupType| match kind {
            WarmupType::Log => Warmup::Log,
            WarmupType::Linear => Warmup::Linear,
        };
        match self.schedule {
            None => Schedule::Constant(base_lr),
            Some(SchedulePlan::WarmupLr { min_lr, max_lr, warmup_steps, warmup_type }) => {
                let warmup_steps = at_least_two(warmup_steps);
                Schedule::WarmupLr { min_lr, max_lr, warmup_steps, kind: warmup(warmup_type) }
            }
            Some(SchedulePlan::WarmupDecayLr { min_lr, max_lr, warmup_steps, warmup_type, total_steps }) => {
                let warmup_steps = at_least_two(warmup_steps);
                Schedule::WarmupDecayLr { min_lr, max_lr, warmup_steps, kind: warmup(warmup_type), total_steps }
            }
            Some(SchedulePlan::WarmupCosineLr {
                total_steps,
                warmup_min_ratio,
                warmup_steps,
                cos_min_ratio,
                warmup_type,
            }) => Schedule::WarmupCosineLr {
                base_lr,
                total_steps,
                warmup_min_ratio,
                warmup_steps: at_least_two(warmup_steps),
                cos_min_ratio,
                kind: warmup(warmup_type),
            },
            Some(SchedulePlan::OneCycle {
                min_lr,
                max_lr,
                decay_lr_rate,
                first_step_size,
                second_step_size,
                first_stair_count,
                second_stair_count,
                decay_step_size,
                cycle_momentum,
                min_momentum,
                max_momentum,
                decay_momentum_rate,
            }) => Schedule::OneCycle(OneCycle {
                cycle_min_lr: min_lr,
                cycle_max_lr: max_lr,
                decay_lr_rate,
                first_step_size,
                second_step_size: second_step_size.unwrap_or(first_step_size),
                first_stair_count,
                second_stair_count: second_stair_count.unwrap_or(first_stair_count),
                decay_step_size,
                momentum: cycle_momentum.then_some(CycleMomentum {
                    min_mom: min_momentum,
                    max_mom: max_momentum,
                    decay_mom_rate: decay_momentum_rate,
                }),
            }),
            Some(SchedulePlan::LrRangeTest { min_lr, step_size, step_rate, staircase }) => {
                Schedule::LrRangeTest { min_lr, step_size, step_rate, staircase }
            }
        }
    }
}

fn float(dtype: DataType) -> Float {
    match dtype {
        DataType::Fp32 => Float::F32,
        DataType::Fp16 => Float::F16,
        DataType::Bf16 => Float::Bf16,
    }
}
