//! Learning rate schedules that give DeepSpeed's exact values.
//!
//! * In: a [`Schedule`] and how many optimizer steps have been applied so far.
//! * Out: the learning rate (and, for [`OneCycle`], the momentum) of the next update. Pure functions; nothing is
//!   stored, so a resumed run only needs the step count.
//!
//! # Which update uses which value
//!
//! `lr(n)` is the rate of update `n + 1`, the one that follows `n` applied updates.
//!
//! A DeepSpeed scheduler keeps `last_batch_iteration`, initially -1. Its constructor writes a rate into the optimizer,
//! and the first update uses that rate. The engine steps the scheduler after each update, which sets
//! `last_batch_iteration` to 0 after the first, 1 after the second, and so on. So `lr(0)` is the constructor's rate,
//! and `lr(n)` for `n >= 1` is `get_lr()` at `last_batch_iteration = n - 1`. Surprising consequences:
//!
//! * The warm-up schedules repeat their first value: `lr(0)` and `lr(1)` are both the minimum, because
//!   `last_batch_iteration` 0 is still the start of the ramp. The maximum is reached at `lr(warmup_steps + 1)` with
//!   [`Warmup::Linear`] and already at `lr(warmup_steps)` with [`Warmup::Log`].
//! * `WarmupCosineLr` starts with an update of rate 0 regardless of `warmup_min_ratio`; the ratio applies from the
//!   second update.
//! * [`OneCycle`] and `LrRangeTest` do not repeat: their `get_lr()` looks one iteration ahead.
//! * The first update of [`OneCycle`] uses `min_mom`; from the second on the momentum falls from `max_mom`.
//!
//! An update skipped for an overflow (see [`crate::loss_scale`]) does not count: the engine steps the scheduler only
//! after an applied update, so neither micro-batches nor skipped steps advance `n`.
//!
//! Checked against DeepSpeed 0.19.6:
//! <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/lr_schedules.py> and, for when the scheduler
//! is stepped, `_take_model_step` of
//! <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py>.

mod one_cycle;
mod validate;

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

pub use one_cycle::{CycleMomentum, ONE_CYCLE_BETA2, OneCycle};
pub use validate::ScheduleError;

/// The shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Warmup {
    /// `ln(i + 1) / ln(warmup_steps)` of the range at iteration `i`: fast first, then slower.
    #[default]
    Log,
    /// `i / warmup_steps` of the range at iteration `i`.
    Linear,
}

/// A learning rate for every update. Fields are named after DeepSpeed's keys; it serializes to DeepSpeed's `scheduler` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "params")]
pub enum Schedule {
    /// A constant rate (DeepSpeed without a scheduler).
    Constant(f64),
    /// Warm-up from `min_lr` to `max_lr`, then constant.
    #[serde(rename = "WarmupLR")]
    WarmupLr {
        /// Rate at the start.
        #[serde(rename = "warmup_min_lr")]
        min_lr: f64,
        /// Rate from the end of the warm-up on.
        #[serde(rename = "warmup_max_lr")]
        max_lr: f64,
        /// Length of the warm-up in updates; 1 acts as 2, as in DeepSpeed.
        #[serde(rename = "warmup_num_steps")]
        warmup_steps: usize,
        /// Shape of the warm-up.
        #[serde(rename = "warmup_type")]
        kind: Warmup,
    },
    /// Warm-up from `min_lr` to `max_lr`, linear decay to `min_lr` at `total_steps`, then constant.
    #[serde(rename = "WarmupDecayLR")]
    WarmupDecayLr {
        /// Rate at the start and at the end.
        #[serde(rename = "warmup_min_lr")]
        min_lr: f64,
        /// Rate at the end of the warm-up.
        #[serde(rename = "warmup_max_lr")]
        max_lr: f64,
        /// Length of the warm-up in updates; 1 acts as 2, as in DeepSpeed.
        #[serde(rename = "warmup_num_steps")]
        warmup_steps: usize,
        /// Shape of the warm-up.
        #[serde(rename = "warmup_type")]
        kind: Warmup,
        /// Length of the full schedule in updates.
        #[serde(rename = "total_num_steps")]
        total_steps: usize,
    },
    /// Warm-up from `warmup_min_ratio * base_lr` to `base_lr`, half a cosine to `cos_min_ratio * base_lr`, then constant.
    #[serde(rename = "WarmupCosineLR")]
    WarmupCosineLr {
        /// The optimizer's learning rate.
        #[serde(skip_serializing)]
        base_lr: f64,
        /// Length of the full schedule in updates.
        #[serde(rename = "total_num_steps")]
        total_steps: usize,
        /// Share of `base_lr` at the start of the warm-up (the first update does not use it: its rate is 0).
        warmup_min_ratio: f64,
        /// Length of the warm-up in updates; 1 acts as 2, as in DeepSpeed.
        #[serde(rename = "warmup_num_steps")]
        warmup_steps: usize,
        /// Share of `base_lr` at the end.
        cos_min_ratio: f64,
        /// Shape of the warm-up.
        #[serde(rename = "warmup_type")]
        kind: Warmup,
    },
    /// Linear warm-up from 0 to `lr`, then constant: transformers' `constant_with_warmup`. Not in DeepSpeed.
    Warmup {
        /// Rate from the end of the warm-up on.
        lr: f64,
        /// Length of the warm-up in updates.
        warmup_steps: usize,
    },
    /// Linear warm-up from 0 to `lr`, then decay to `floor * lr` at `total_steps`. If `floor` is 0: transformers' `linear` and
    /// `cosine` (<https://github.com/huggingface/transformers/blob/main/src/transformers/optimization.py>). Not in DeepSpeed.
    Decay {
        /// Rate at the end of the warm-up.
        lr: f64,
        /// Length of the warm-up in updates; if 0, the first update has the full rate.
        warmup_steps: usize,
        /// Length of the full schedule in updates.
        total_steps: usize,
        /// If true, the rate falls along half a cosine; otherwise linearly.
        cosine: bool,
        /// If true, the warm-up rises geometrically from about `lr / 100`: Adam's first updates are as large as the
        /// rate, and large ones raise the loss of a deep model. Otherwise it rises linearly from 0.
        gentle: bool,
        /// Share of `lr` at the end.
        floor: f64,
    },
    /// One cycle up and down, then decay.
    OneCycle(OneCycle),
    /// A rate that grows without bound, to find the largest one that a model trains with
    /// (<https://arxiv.org/abs/1803.09820>).
    #[serde(rename = "LRRangeTest")]
    LrRangeTest {
        /// Rate of the first update.
        #[serde(rename = "lr_range_test_min_lr")]
        min_lr: f64,
        /// Interval, in updates, in which the rate grows by `step_rate * min_lr`.
        #[serde(rename = "lr_range_test_step_size")]
        step_size: usize,
        /// Growth per interval, in units of `min_lr`.
        #[serde(rename = "lr_range_test_step_rate")]
        step_rate: f64,
        /// If true, the rate grows once per interval instead of with every update.
        #[serde(rename = "lr_range_test_staircase")]
        staircase: bool,
    },
}

impl Schedule {
    /// Returns the learning rate of the next update after `step` applied updates (0 for the first update). See the
    /// module documentation for how DeepSpeed counts.
    ///
    /// The result may be non-finite for schedules that [`validate`](Self::validate) rejects.
    ///
    /// # Example
    ///
    /// ```
    /// # use zero_settings::schedule::{Schedule, Warmup};
    /// let schedule = Schedule::WarmupLr { min_lr: 0.0, max_lr: 1e-3, warmup_steps: 10, kind: Warmup::Linear };
    /// assert_eq!([0, 1, 2, 11].map(|step| schedule.lr(step)), [0.0, 0.0, 1e-4, 1e-3]);
    /// ```
    pub fn lr(&self, step: usize) -> f64 {
        match *self {
            Schedule::Constant(lr) => lr,
            Schedule::WarmupLr { min_lr, max_lr, warmup_steps, kind } => {
                let Some(iteration) = step.checked_sub(1) else { return min_lr };
                min_lr + (max_lr - min_lr) * kind.ratio(iteration, warmup_steps).unwrap_or(1.0)
            }
            Schedule::WarmupDecayLr { min_lr, max_lr, warmup_steps, kind, total_steps } => {
                let Some(iteration) = step.checked_sub(1) else { return min_lr };
                let decay = || decay_ratio(iteration, at_least_two(warmup_steps), total_steps);
                min_lr + (max_lr - min_lr) * kind.ratio(iteration, warmup_steps).unwrap_or_else(decay)
            }
            Schedule::WarmupCosineLr { base_lr, total_steps, warmup_min_ratio, warmup_steps, cos_min_ratio, kind } => {
                let Some(iteration) = step.checked_sub(1) else { return 0.0 };
                let ratio = match kind.ratio(iteration, warmup_steps) {
                    Some(ratio) => warmup_min_ratio + ratio * (1.0 - warmup_min_ratio),
                    None => cosine_ratio(iteration, at_least_two(warmup_steps), total_steps, cos_min_ratio),
                };
                base_lr * ratio
            }
            Schedule::OneCycle(ref cycle) => cycle.lr(step),
            Schedule::Warmup { lr, warmup_steps } if step < warmup_steps => lr * step as f64 / warmup_steps as f64,
            Schedule::Warmup { lr, .. } => lr,
            Schedule::Decay { lr, warmup_steps, gentle: true, .. } if step < warmup_steps => {
                lr * 100f64.powf((step + 1) as f64 / (warmup_steps + 1) as f64 - 1.0)
            }
            Schedule::Decay { lr, warmup_steps, .. } if step < warmup_steps => lr * step as f64 / warmup_steps as f64,
            Schedule::Decay { lr, warmup_steps, total_steps, cosine, floor, .. } => {
                let progress = (step - warmup_steps) as f64 / total_steps.saturating_sub(warmup_steps).max(1) as f64;
                let progress = progress.min(1.0);
                let left = if cosine { 0.5 * (1.0 + (PI * progress).cos()) } else { 1.0 - progress };
                lr * if floor == 0.0 { left } else { floor + (1.0 - floor) * left }
            }
            Schedule::LrRangeTest { min_lr, step_size, step_rate, staircase } => {
                let intervals = step as f64 / step_size as f64;
                min_lr * (1.0 + step_rate * if staircase { intervals.floor() } else { intervals })
            }
        }
    }

    /// Returns the peak rate of the schedule; for [`LrRangeTest`](Self::LrRangeTest), the first rate.
    pub fn top_lr(&self) -> f64 {
        match *self {
            Schedule::Constant(lr) | Schedule::Warmup { lr, .. } | Schedule::Decay { lr, .. } => lr,
            Schedule::WarmupLr { max_lr, .. } | Schedule::WarmupDecayLr { max_lr, .. } => max_lr,
            Schedule::WarmupCosineLr { base_lr, .. } => base_lr,
            Schedule::OneCycle(ref cycle) => cycle.cycle_max_lr,
            Schedule::LrRangeTest { min_lr, .. } => min_lr,
        }
    }

    /// Returns the momentum (Adam's first beta) of the next update after `step` applied updates, or `None` if the
    /// schedule does not set it. Along with the momentum, DeepSpeed sets the second beta to [`ONE_CYCLE_BETA2`].
    pub fn momentum(&self, step: usize) -> Option<f64> {
        match self {
            Schedule::OneCycle(cycle) => cycle.momentum(step),
            _ => None,
        }
    }

    /// Returns DeepSpeed's name of the schedule, as in the key `scheduler.type`, or a name in the same style.
    pub fn name(&self) -> &'static str {
        match self {
            Schedule::Constant(_) => "Constant",
            Schedule::WarmupLr { .. } => "WarmupLR",
            Schedule::WarmupDecayLr { .. } => "WarmupDecayLR",
            Schedule::WarmupCosineLr { .. } => "WarmupCosineLR",
            Schedule::Warmup { .. } => "Warmup",
            Schedule::Decay { .. } => "Decay",
            Schedule::OneCycle(_) => "OneCycle",
            Schedule::LrRangeTest { .. } => "LRRangeTest",
        }
    }
}

impl Warmup {
    /// Returns DeepSpeed's name.
    pub fn name(self) -> &'static str {
        match self {
            Warmup::Log => "log",
            Warmup::Linear => "linear",
        }
    }

    /// Returns the warm-up's progress at `iteration`, or `None` once it is over.
    fn ratio(self, iteration: usize, warmup_steps: usize) -> Option<f64> {
        let warmup_steps = at_least_two(warmup_steps);
        (iteration < warmup_steps).then(|| match self {
            Warmup::Log => (1.0 / (warmup_steps as f64).ln()) * (iteration as f64 + 1.0).ln(),
            Warmup::Linear => iteration as f64 / warmup_steps as f64,
        })
    }
}

/// Applies DeepSpeed's lower bound of a warm-up; ln(1) would cause a division by zero.
pub(crate) fn at_least_two(warmup_steps: usize) -> usize {
    warmup_steps.max(2)
}

/// Returns the linear decay from 1 at the end of the warm-up to 0 at `total_steps`.
fn decay_ratio(iteration: usize, warmup_steps: usize, total_steps: usize) -> f64 {
    let left = total_steps as f64 - iteration as f64;
    let length = (total_steps as f64 - warmup_steps as f64).max(1.0);
    (left / length).max(0.0)
}

/// Returns half a cosine from 1 to `floor`, reached at iteration `total_steps - 1` and kept from there.
fn cosine_ratio(iteration: usize, warmup_steps: usize, total_steps: usize, floor: f64) -> f64 {
    let done = (iteration - warmup_steps + 1) as f64;
    let length = (total_steps as f64 - warmup_steps as f64).max(1.0);
    let half_cosine = (1.0 + (PI * (done / length).min(1.0)).cos()) / 2.0;
    (floor + (1.0 - floor) * half_cosine).max(0.0)
}
