//! Describes the plan in plain words.

use super::auto::Filled;
use super::optimizer::{OptimizerPlan, short};
use super::plan::{LossScale, Offload, OffloadDevice, Precision, ZeroPlan, float_name};
use crate::loss_scale::DynamicLossScale;
use crate::schedule::{OneCycle, Schedule, Warmup, at_least_two};

impl ZeroPlan {
    /// Describes the plan in a few lines, for a reader who has not seen the file.
    pub fn explain(&self) -> String {
        self.explain_filled(&[])
    }

    /// Like [`explain`](Self::explain), but writes `"auto"` for sizes that have no value in `filled` yet.
    pub fn explain_filled(&self, filled: &[Filled]) -> String {
        let open = |key: &str| filled.iter().any(|filled| filled.value.is_none() && filled.path.ends_with(key));
        let size = |key, value| if open(key) { "\"auto\"".to_owned() } else { number(value) };
        let bucket = size("reduce_bucket_size", self.zero.reduce_bucket_size);
        let mut lines = vec![
            format!(
                "ZeRO stage {} over {}: {}.",
                self.zero.stage,
                count(self.world, "rank"),
                self.sharding() + &self.groups()
            ),
            format!(
                "Batch: {} per rank × {} × {} = {} per optimizer step.",
                count(self.batch.micro, "row"),
                count(self.batch.accumulation, "micro-batch"),
                count(self.world, "rank"),
                count(self.batch.global, "row"),
            ),
            format!(
                "Precision: {}{}.",
                precision(self.precision),
                match self.gradient_dtype() {
                    Some(dtype) if self.batch.accumulation > 1 => {
                        format!("; gradients of micro-batches are added in {}", float_name(dtype))
                    }
                    _ => String::new(),
                }
            ),
            format!(
                "Optimizer: {}{}{}.",
                self.optimizer.as_ref().map_or_else(|| "the program's own".to_owned(), OptimizerPlan::describe),
                match (self.zero.int8_optimizer_states, self.zero.bf16_optimizer_states) {
                    (true, _) => ", moments in 8 bits",
                    (false, true) => ", moments in bf16",
                    (false, false) => "",
                },
                self.zero
                    .ema_decay
                    .map_or_else(String::new, |decay| format!(", and a moving average of the weights (decay {decay})"))
            ),
            format!(
                "Learning rate: {}.",
                self.schedule.as_ref().map_or_else(|| "no schedule".to_owned(), describe_schedule)
            ),
            match self.gradient_clipping {
                Some(norm) => format!("Gradients: clipped to a global norm of {norm}, {}.", self.reduction(&bucket)),
                None => format!("Gradients: not clipped, {}.", self.reduction(&bucket)),
            },
        ];
        if self.zero.stage.shards_parameters() {
            let again = match self.zero.max_reuse_distance {
                0 => String::new(),
                distance => format!(
                    ", or if it is used again within {} elements, as long as no more than {} elements are gathered",
                    number(distance),
                    number(self.zero.max_live_parameters)
                ),
            };
            lines.push(format!(
                "Parameters: {} elements are prefetched (all-gather ahead of use); a parameter stays gathered if it \
                has at most {} elements{}.",
                size("prefetch_bucket_size", self.zero.prefetch_bucket_size),
                size("param_persistence_threshold", self.zero.param_persistence_threshold),
                again
            ));
        }
        if self.zero.check_replicas > 0 {
            lines.push(format!("Replicas: compared every {} updates.", number(self.zero.check_replicas as usize)));
        }
        match self.zero.checkpointed_blocks {
            0 => {}
            usize::MAX => {
                lines.push("Activations: dropped in every block, and recomputed in the backward pass.".into())
            }
            some => lines.push(format!(
                "Activations: dropped in the first {} blocks, and recomputed in the backward pass.",
                number(some)
            )),
        }
        let device = |offload: &Option<Offload>| offload.as_ref().map(|offload| offload.device.clone());
        let of_state = match self.offload_optimizer.as_ref().map_or(1.0, |offload| offload.ratio) {
            1.0 => "optimizer state".to_owned(),
            ratio => format!("{ratio} of optimizer state and gradients"),
        };
        for (what, updated, device) in [
            (&of_state[..], ", where the CPU updates it", device(&self.offload_optimizer)),
            ("parameters", ", where the CPU updates them", device(&self.offload_param)),
            ("inputs of checkpointed blocks", "", self.offload_activations.clone()),
        ] {
            lines.extend(device.map(|device| match device {
                OffloadDevice::Cpu => format!(
                    "Offload: {what} in host memory{updated}; the cpu backend computes there anyway, so nothing moves."
                ),
                OffloadDevice::Nvme { path } => format!("Offload: {what} on disk, under {}.", path.display()),
            }));
        }
        lines.extend(self.warnings.iter().map(|warning| format!("Warning: {warning}.")));
        lines.join("\n")
    }

    fn groups(&self) -> String {
        let groups = |size| format!("within {} of {}", count(self.world / size, "group"), count(size, "rank"));
        let cut = match (self.zero.shard_size, self.zero.secondary_shard_size) {
            (Some(size), _) => format!(", {}", groups(size)),
            (_, Some(size)) => format!("; parameters are gathered from a secondary partition {}", groups(size)),
            _ => String::new(),
        };
        let weights = match (self.zero.quantized_weights, self.zero.quantized_nontrainable_weights) {
            (Some(how), _) => format!("; large weights are gathered in {how}"),
            (_, Some(how)) => format!("; large frozen weights are gathered in {how}"),
            _ => String::new(),
        };
        cut + &weights
    }

    fn sharding(&self) -> String {
        let what = match self.zero.stage.number() {
            0 => "nothing is sharded, every rank holds all model state (data parallel)",
            1 => "optimizer state is sharded, every rank holds all gradients and parameters",
            2 => "optimizer state and gradients are sharded, every rank holds all parameters",
            _ => "optimizer state, gradients and parameters are sharded",
        };
        what.into()
    }

    fn reduction(&self, bucket: &str) -> String {
        let dtype = self.zero.communication_dtype.map_or(String::new(), |dtype| format!(" as {}", float_name(dtype)));
        let quantized = self.zero.quantized_gradients.map_or(String::new(), |how| {
            let across = if self.zero.shard_size.is_some() { " across groups" } else { "" };
            format!(", in {how}{across}")
        });
        let each = self.sync_each_batch.unwrap_or(self.zero.stage.shards_gradients());
        let often = match each {
            _ if self.batch.accumulation == 1 => "",
            true => ", with each micro-batch",
            false => ", once per optimizer step",
        };
        // Gradients of several micro-batches are accumulated first.
        let overlap = match self.zero.overlap_comm && (each || self.batch.accumulation == 1) {
            true => ", overlapped with the backward pass",
            false => " after the backward pass",
        };
        let how = if self.sums_gradients { "added" } else { "averaged" };
        format!("{how} over the ranks{dtype}{quantized} in buckets of {bucket} elements{overlap}{often}")
    }
}

fn precision(precision: Precision) -> String {
    match precision {
        Precision::Fp32 => "fp32".to_owned(),
        Precision::Bf16 { check_grad_overflow: true } => "bf16; a step with non-finite gradients is skipped".to_owned(),
        Precision::Bf16 { check_grad_overflow: false } => "bf16".to_owned(),
        Precision::Fp16 { loss_scale: LossScale::Static(scale) } => format!("fp16 with the loss scaled by {scale}"),
        Precision::Fp16 { loss_scale: LossScale::Dynamic(DynamicLossScale { initial_scale_power, window, .. }) } => {
            format!(
                "fp16 with the loss scaled by 2^{initial_scale_power} initially, doubled after every {window} steps \
                 without overflow"
            )
        }
    }
}

fn describe_schedule(schedule: &Schedule) -> String {
    let warmup = |steps: usize, kind: Warmup| format!("in {} steps ({})", at_least_two(steps), kind.name());
    match schedule {
        Schedule::Constant(lr) => format!("constant {lr}"),
        Schedule::WarmupLr { min_lr, max_lr, warmup_steps, kind } => {
            format!("{min_lr} to {max_lr} {}, then constant", warmup(*warmup_steps, *kind))
        }
        Schedule::WarmupDecayLr { min_lr, max_lr, warmup_steps, kind, total_steps } => {
            let warmup = warmup(*warmup_steps, *kind);
            format!("{min_lr} to {max_lr} {warmup}, then linearly to {min_lr} at step {total_steps}")
        }
        Schedule::WarmupCosineLr { total_steps, warmup_min_ratio, warmup_steps, cos_min_ratio, kind, .. } => format!(
            "{warmup_min_ratio} to 1 times the optimizer's {}, then along a cosine to {cos_min_ratio} times at step \
            {total_steps}",
            warmup(*warmup_steps, *kind)
        ),
        Schedule::Warmup { lr, warmup_steps } => {
            format!("0 to {lr} in {}, then constant", count(*warmup_steps, "step"))
        }
        Schedule::Decay { lr, warmup_steps, total_steps, cosine, gentle, floor } => {
            let along = if *cosine { "along a cosine" } else { "linearly" };
            let (from, rise) = match gentle {
                true => (format!("a hundredth of {lr}"), " (geometrically)"),
                false => ("0".into(), ""),
            };
            let (steps, end) = (count(*warmup_steps, "step"), short(lr * floor));
            format!("{from} to {lr} in {steps}{rise}, then {along} to {end} at step {total_steps}")
        }
        Schedule::OneCycle(OneCycle {
            cycle_min_lr,
            cycle_max_lr,
            first_step_size,
            second_step_size,
            momentum,
            ..
        }) => {
            let momentum = if momentum.is_some() { ", with the momentum moving the opposite way" } else { "" };
            format!(
                "one cycle from {cycle_min_lr} to {cycle_max_lr} in {first_step_size} steps and back in \
                {second_step_size}{momentum}"
            )
        }
        Schedule::LrRangeTest { min_lr, step_size, step_rate, staircase } => {
            let stairs = if *staircase { " in a staircase" } else { "" };
            format!(
                "a range test from {min_lr}, growing by {step_rate} times that value every {step_size} steps{stairs}"
            )
        }
    }
}

fn count(number: usize, what: &str) -> String {
    let ending = match (number, what.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        _ => "s",
    };
    format!("{number} {what}{ending}")
}

/// Formats `value` with commas between thousands.
fn number(value: usize) -> String {
    let digits = value.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).expect("digits are ASCII")).collect();
    groups.join(",")
}
