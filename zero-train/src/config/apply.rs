//! From the plan to the settings of decorator, engine and optimizer.

use zero_burn::config::{Disk, Float, Gathers, Tier, ZeroConfig};
use zero_burn::optim::Rule;

use super::optimizer::OptimizerPlan;
use super::plan::{LossScale, Offload, OffloadDevice, Precision, ZeroPlan};
use crate::engine::{EngineConfig, EngineError};
use crate::loss_scale::LossScaler;
use crate::schedule::{Schedule, at_least_two};

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
            gradient_dtype: self.grad_accum_dtype,
            communication_dtype: self.communication_data_type,
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
        let place = |offload: &Option<Offload>| match offload.as_ref().map(|offload| &offload.device) {
            Some(OffloadDevice::Nvme { path }) => (Tier::Disk, Some(path.clone())),
            Some(OffloadDevice::Cpu) => (Tier::Host, None),
            None => (Tier::Memory, None),
        };
        let (optimizer, path) = place(&self.offload_optimizer);
        let (parameters, second_path) = place(&self.offload_param);
        let both = || [&self.offload_optimizer, &self.offload_param].into_iter().flatten();
        let parts = Disk::default();
        let buffer_count = both().zip([4, 1]).map(|(offload, arrays)| offload.buffer_count * arrays).max();
        let buffer_bytes = self.offload_param.as_ref().map_or(usize::MAX, |offload| offload.buffer_size * 4);
        let update = self.offload_optimizer.as_ref();
        zero_burn::config::Offload {
            optimizer,
            parameters,
            min_bytes: zero_burn::config::Offload::default().min_bytes,
            disk: Disk {
                path: path.or(second_path).unwrap_or_default(),
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
            Precision::Fp16 { loss_scale: LossScale::Dynamic(settings) } => {
                (Some(LossScaler::dynamic(settings)?), true)
            }
        };
        Ok(EngineConfig {
            exclude_frozen_parameters: false,
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
