//! The learning-rate schedules, with DeepSpeed's names and defaults. Steps are optimizer steps.

use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::reader::Reader;

/// A learning-rate schedule and its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SchedulePlan {
    /// From `min_lr` to `max_lr`, then constant.
    WarmupLr {
        /// Learning rate at step 0.
        min_lr: f64,
        /// Learning rate after the warm-up.
        max_lr: f64,
        /// Steps of the warm-up as written; DeepSpeed takes at least 2.
        warmup_steps: usize,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
    },
    /// From `min_lr` to `max_lr`, then in a line to 0.
    WarmupDecayLr {
        /// Learning rate at step 0.
        min_lr: f64,
        /// Learning rate after the warm-up.
        max_lr: f64,
        /// Steps of the warm-up as written; DeepSpeed takes at least 2.
        warmup_steps: usize,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
        /// Step at which it is 0.
        total_steps: usize,
    },
    /// Ratios of the optimizer's learning rate: up to 1, then along a cosine to `cos_min_ratio`.
    WarmupCosineLr {
        /// Step at which the cosine ends.
        total_steps: usize,
        /// Ratio at step 0.
        warmup_min_ratio: f64,
        /// Steps of the warm-up as written; DeepSpeed takes at least 2.
        warmup_steps: usize,
        /// Ratio at the end.
        cos_min_ratio: f64,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
    },
    /// Up, down, then decay, <https://arxiv.org/abs/1803.09820>; the momentum runs the other way.
    OneCycle {
        /// Lowest learning rate of the cycle.
        min_lr: f64,
        /// Highest learning rate of the cycle.
        max_lr: f64,
        /// Decay of the learning rate after the cycle.
        decay_lr_rate: f64,
        /// Steps up.
        first_step_size: usize,
        /// Steps down; `None` for as many as up.
        second_step_size: Option<usize>,
        /// Stairs on the way up; 0 is smooth.
        first_stair_count: usize,
        /// Stairs on the way down; `None` for as many as up.
        second_stair_count: Option<usize>,
        /// Steps between two decays after the cycle; 0 does not decay.
        decay_step_size: usize,
        /// Whether the optimizer's momentum (Adam's beta_1) is cycled too, which it is by default.
        cycle_momentum: bool,
        /// Lowest momentum, at the highest learning rate.
        min_momentum: f64,
        /// Highest momentum, at the lowest learning rate.
        max_momentum: f64,
        /// Growth of the momentum after the cycle.
        decay_momentum_rate: f64,
    },
    /// Grows without end, to find a learning rate, <https://arxiv.org/abs/1506.01186>.
    LrRangeTest {
        /// Learning rate at step 0.
        min_lr: f64,
        /// Steps of one growth by `step_rate`.
        step_size: usize,
        /// Growth in multiples of `min_lr`.
        step_rate: f64,
        /// Whether it grows in stairs.
        staircase: bool,
    },
}

/// Shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmupType {
    /// With the logarithm of the step.
    Log,
    /// With the step.
    Linear,
}

impl WarmupType {
    /// DeepSpeed's name.
    pub fn name(self) -> &'static str {
        match self {
            WarmupType::Log => "log",
            WarmupType::Linear => "linear",
        }
    }
}

impl SchedulePlan {
    /// Reads `scheduler`; the optimizer's learning rate stands for a highest one that is not given.
    pub(super) fn read(
        top: &Reader<'_>,
        optimizer: Option<&OptimizerPlan>,
        learning_rate: Option<f64>,
    ) -> Option<Self> {
        let (name, params) = top.tagged("scheduler")?;
        let lr = optimizer.map(OptimizerPlan::learning_rate).or(learning_rate);
        let warmup_type = || match params.text("warmup_type").as_str() {
            "linear" => WarmupType::Linear,
            _ => WarmupType::Log,
        };
        let total_steps = || {
            if !params.given("total_num_steps") && !params.is_auto("total_num_steps") {
                params
                    .missing("total_num_steps", "the schedule needs the optimizer steps of the training, or \"auto\"");
            }
            let total = params.usize("total_num_steps");
            if (1..params.usize("warmup_num_steps")).contains(&total) {
                params.warn("total_num_steps", "the training ends before the warm-up does");
            }
            total
        };
        if let Some(lr) = lr.filter(|_| params.is_auto("warmup_max_lr")) {
            params.filled("warmup_max_lr", "the optimizer's lr", Some(lr.into()));
        }
        let max_lr = || match lr {
            Some(lr) if params.is_auto("warmup_max_lr") || name == "WarmupLR" && !params.given("warmup_max_lr") => lr,
            None if name == "WarmupLR" && !params.given("warmup_max_lr") && !params.is_auto("warmup_max_lr") => {
                params.missing("warmup_max_lr", "without an optimizer in the file there is no learning rate to take");
                0.0
            }
            _ => params.f64("warmup_max_lr"),
        };
        let required = |key: &str| {
            params.maybe_f64(key).unwrap_or_else(|| {
                params.missing(key, "OneCycle needs it");
                0.0
            })
        };
        Some(match name {
            "WarmupLR" => SchedulePlan::WarmupLr {
                min_lr: params.f64("warmup_min_lr"),
                max_lr: max_lr(),
                warmup_steps: params.usize("warmup_num_steps"),
                warmup_type: warmup_type(),
            },
            "WarmupDecayLR" => SchedulePlan::WarmupDecayLr {
                min_lr: params.f64("warmup_min_lr"),
                max_lr: max_lr(),
                warmup_steps: params.usize("warmup_num_steps"),
                warmup_type: warmup_type(),
                total_steps: total_steps(),
            },
            "WarmupCosineLR" => SchedulePlan::WarmupCosineLr {
                total_steps: total_steps(),
                warmup_min_ratio: params.f64("warmup_min_ratio"),
                warmup_steps: params.usize("warmup_num_steps"),
                cos_min_ratio: params.f64("cos_min_ratio"),
                warmup_type: warmup_type(),
            },
            "OneCycle" => SchedulePlan::OneCycle {
                min_lr: required("cycle_min_lr"),
                max_lr: required("cycle_max_lr"),
                decay_lr_rate: params.f64("decay_lr_rate"),
                first_step_size: params.usize("cycle_first_step_size"),
                second_step_size: params.maybe_usize("cycle_second_step_size"),
                first_stair_count: params.usize("cycle_first_stair_count"),
                second_stair_count: params.maybe_usize("cycle_second_stair_count"),
                decay_step_size: params.usize("decay_step_size"),
                cycle_momentum: params.bool("cycle_momentum"),
                min_momentum: params.f64("cycle_min_mom"),
                max_momentum: params.f64("cycle_max_mom"),
                decay_momentum_rate: params.f64("decay_mom_rate"),
            },
            _ => SchedulePlan::LrRangeTest {
                min_lr: params.f64("lr_range_test_min_lr"),
                step_size: params.usize("lr_range_test_step_size"),
                step_rate: params.f64("lr_range_test_step_rate"),
                staircase: params.bool("lr_range_test_staircase"),
            },
        })
    }

    /// The section DeepSpeed would have.
    pub(super) fn to_node(self) -> Node {
        let maybe = |count: Option<usize>| count.map_or(Node::Null, Node::from);
        let (name, params) = match self {
            SchedulePlan::WarmupLr { min_lr, max_lr, warmup_steps, warmup_type } => (
                "WarmupLR",
                vec![
                    ("warmup_min_lr", min_lr.into()),
                    ("warmup_max_lr", max_lr.into()),
                    ("warmup_num_steps", warmup_steps.into()),
                    ("warmup_type", warmup_type.name().into()),
                ],
            ),
            SchedulePlan::WarmupDecayLr { min_lr, max_lr, warmup_steps, warmup_type, total_steps } => (
                "WarmupDecayLR",
                vec![
                    ("warmup_min_lr", min_lr.into()),
                    ("warmup_max_lr", max_lr.into()),
                    ("warmup_num_steps", warmup_steps.into()),
                    ("warmup_type", warmup_type.name().into()),
                    ("total_num_steps", total_steps.into()),
                ],
            ),
            SchedulePlan::WarmupCosineLr {
                total_steps,
                warmup_min_ratio,
                warmup_steps,
                cos_min_ratio,
                warmup_type,
            } => (
                "WarmupCosineLR",
                vec![
                    ("total_num_steps", total_steps.into()),
                    ("warmup_min_ratio", warmup_min_ratio.into()),
                    ("warmup_num_steps", warmup_steps.into()),
                    ("cos_min_ratio", cos_min_ratio.into()),
                    ("warmup_type", warmup_type.name().into()),
                ],
            ),
            SchedulePlan::OneCycle {
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
            } => (
                "OneCycle",
                vec![
                    ("cycle_min_lr", min_lr.into()),
                    ("cycle_max_lr", max_lr.into()),
                    ("decay_lr_rate", decay_lr_rate.into()),
                    ("cycle_first_step_size", first_step_size.into()),
                    ("cycle_second_step_size", maybe(second_step_size)),
                    ("cycle_first_stair_count", first_stair_count.into()),
                    ("cycle_second_stair_count", maybe(second_stair_count)),
                    ("decay_step_size", decay_step_size.into()),
                    ("cycle_momentum", cycle_momentum.into()),
                    ("cycle_min_mom", min_momentum.into()),
                    ("cycle_max_mom", max_momentum.into()),
                    ("decay_mom_rate", decay_momentum_rate.into()),
                ],
            ),
            SchedulePlan::LrRangeTest { min_lr, step_size, step_rate, staircase } => (
                "LRRangeTest",
                vec![
                    ("lr_range_test_min_lr", min_lr.into()),
                    ("lr_range_test_step_size", step_size.into()),
                    ("lr_range_test_step_rate", step_rate.into()),
                    ("lr_range_test_staircase", staircase.into()),
                ],
            ),
        };
        Node::tagged(name, params)
    }
}
