//! Validates a schedule before use: every message names the key of the configuration file and the value to set.

use super::{CycleMomentum, Schedule, at_least_two};

/// An error in a schedule. Keys are DeepSpeed's, as in the configuration file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A value out of range.
    #[error("scheduler {schedule}: {key} is {got}; set it to {expected}")]
    Value {
        /// DeepSpeed's name of the schedule.
        schedule: &'static str,
        /// DeepSpeed's name of the parameter.
        key: &'static str,
        /// The value given.
        got: f64,
        /// Accepted values.
        expected: &'static str,
    },
    /// The schedule ends before its warm-up does. DeepSpeed only warns and continues; see
    /// [`is_warning_in_deepspeed`](Self::is_warning_in_deepspeed).
    #[error(
        "scheduler {schedule}: total_num_steps is {total_steps}, but the warm-up alone takes {warmup_steps}; raise \
         total_num_steps or lower warmup_num_steps"
    )]
    TotalBelowWarmup {
        /// DeepSpeed's name of the schedule.
        schedule: &'static str,
        /// Length of the full schedule in updates.
        total_steps: usize,
        /// Length of the warm-up in updates (at least 2).
        warmup_steps: usize,
    },
}

impl ScheduleError {
    /// Returns `true` if DeepSpeed only warns about this. [`Schedule::lr`] is still defined and equal to DeepSpeed's,
    /// so a lenient caller can print the error and continue.
    pub fn is_warning_in_deepspeed(&self) -> bool {
        matches!(self, ScheduleError::TotalBelowWarmup { .. })
    }
}

impl Schedule {
    /// Checks every parameter. A valid schedule's rate is never negative.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::Value`] for a parameter that is negative, not a number, or zero where it divides;
    /// [`ScheduleError::TotalBelowWarmup`], checked last, for a warm-up longer than the schedule.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        let schedule = self.name();
        let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
        let rate = |key, got: f64| (is_rate(got), key, got, "a finite number, 0 or more");
        let beta = |key, got: f64| ((0.0..1.0).contains(&got), key, got, "a number from 0 up to, but not including, 1");
        let count = |key, got: usize| (got > 0, key, got as f64, "a whole number, 1 or more");
        // Steps of the schedule and of its warm-up.
        let mut steps = None;
        let mut values = Vec::new();
        match *self {
            Schedule::Constant(lr) | Schedule::Warmup { lr, .. } | Schedule::Decay { lr, .. } => {
                values.push(rate("lr", lr))
            }
            Schedule::WarmupLr { min_lr, max_lr, warmup_steps, .. } => {
                values.extend([rate("warmup_min_lr", min_lr), rate("warmup_max_lr", max_lr)]);
                values.push(count("warmup_num_steps", warmup_steps));
            }
            Schedule::WarmupDecayLr { min_lr, max_lr, warmup_steps, total_steps, .. } => {
                values.extend([rate("warmup_min_lr", min_lr), rate("warmup_max_lr", max_lr)]);
                values.push(count("warmup_num_steps", warmup_steps));
                steps = Some((total_steps, warmup_steps));
            }
            Schedule::WarmupCosineLr {
                base_lr, total_steps, warmup_min_ratio, warmup_steps, cos_min_ratio, ..
            } => {
                let ratios = [("warmup_min_ratio", warmup_min_ratio), ("cos_min_ratio", cos_min_ratio)];
                values.extend([("lr", base_lr)].into_iter().chain(ratios).map(|(key, got)| rate(key, got)));
                values.push(count("warmup_num_steps", warmup_steps));
                steps = Some((total_steps, warmup_steps));
            }
            Schedule::OneCycle(ref cycle) => {
                values.extend([rate("cycle_min_lr", cycle.cycle_min_lr), rate("cycle_max_lr", cycle.cycle_max_lr)]);
                values.push(rate("decay_lr_rate", cycle.decay_lr_rate));
                values.push(count("cycle_first_step_size", cycle.first_step_size));
                values.extend(cycle.momentum.into_iter().flat_map(
                    |CycleMomentum { min_mom, max_mom, decay_mom_rate }| {
                        let decay = (decay_mom_rate.is_finite(), "decay_mom_rate", decay_mom_rate, "a finite number");
                        [beta("cycle_min_mom", min_mom), beta("cycle_max_mom", max_mom), decay]
                    },
                ));
            }
            Schedule::LrRangeTest { min_lr, step_size, step_rate, .. } => {
                values.extend([rate("lr_range_test_min_lr", min_lr), count("lr_range_test_step_size", step_size)]);
                values.push(rate("lr_range_test_step_rate", step_rate));
            }
        }
        if let Some((_, key, got, expected)) = values.into_iter().find(|(is_right, ..)| !is_right) {
            return Err(ScheduleError::Value { schedule, key, got, expected });
        }
        match steps.map(|(total, warmup)| (total, at_least_two(warmup))) {
            Some((total_steps, warmup_steps)) if total_steps < warmup_steps => {
                Err(ScheduleError::TotalBelowWarmup { schedule, total_steps, warmup_steps })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{CycleMomentum, OneCycle, Warmup};

    fn cosine() -> Schedule {
        Schedule::WarmupCosineLr {
            base_lr: 1e-3,
            total_steps: 50,
            warmup_min_ratio: 0.0,
            warmup_steps: 10,
            cos_min_ratio: 1e-4,
            kind: Warmup::Log,
        }
    }

    fn one_cycle() -> OneCycle {
        let momentum = Some(CycleMomentum { min_mom: 0.8, max_mom: 0.9, decay_mom_rate: 0.0 });
        OneCycle {
            cycle_min_lr: 1e-4,
            cycle_max_lr: 1e-3,
            decay_lr_rate: 0.0,
            first_step_size: 10,
            second_step_size: 0,
            first_stair_count: 0,
            second_stair_count: 0,
            decay_step_size: 0,
            momentum,
        }
    }

    #[track_caller]
    fn refused(schedule: Schedule, key: &str) {
        match schedule.validate() {
            Err(ScheduleError::Value { key: named, .. }) => assert_eq!(named, key),
            other => panic!("{schedule:?}: {other:?}"),
        }
    }

    #[test]
    fn good_schedules_pass() {
        let schedules = [Schedule::Constant(0.0), cosine(), Schedule::OneCycle(one_cycle())];
        for schedule in schedules {
            assert_eq!(schedule.validate(), Ok(()), "{schedule:?}");
        }
    }

    #[test]
    fn values_out_of_range_are_named() {
        let warmup =
            |min_lr, max_lr, warmup_steps| Schedule::WarmupLr { min_lr, max_lr, warmup_steps, kind: Warmup::Log };
        let range =
            |min_lr, step_size, step_rate| Schedule::LrRangeTest { min_lr, step_size, step_rate, staircase: true };
        refused(Schedule::Constant(f64::NAN), "lr");
        refused(warmup(-1.0, 1.0, 1), "warmup_min_lr");
        refused(warmup(0.0, f64::INFINITY, 1), "warmup_max_lr");
        refused(warmup(0.0, 1.0, 0), "warmup_num_steps");
        refused(range(1.0, 0, 1.0), "lr_range_test_step_size");
        refused(range(1.0, 1, -1.0), "lr_range_test_step_rate");
        refused(Schedule::OneCycle(OneCycle { first_step_size: 0, ..one_cycle() }), "cycle_first_step_size");
        let momentum = Some(CycleMomentum { min_mom: 0.8, max_mom: 1.0, decay_mom_rate: 0.0 });
        refused(Schedule::OneCycle(OneCycle { momentum, ..one_cycle() }), "cycle_max_mom");
    }

    #[test]
    fn a_total_below_the_warmup_is_told_and_marked_as_lenient() {
        let mut schedule = cosine();
        if let Schedule::WarmupCosineLr { total_steps, .. } = &mut schedule {
            *total_steps = 9;
        }
        let error = schedule.validate().unwrap_err();
        assert!(error.is_warning_in_deepspeed());
        let told = "scheduler WarmupCosineLR: total_num_steps is 9, but the warm-up alone takes 10; raise \
                    total_num_steps or lower warmup_num_steps";
        assert_eq!(error.to_string(), told);
    }

    #[test]
    fn refused_schedules_do_not_panic() {
        let cycle = OneCycle { first_step_size: 0, first_stair_count: 3, ..one_cycle() };
        let range = Schedule::LrRangeTest { min_lr: 1.0, step_size: 0, step_rate: f64::NAN, staircase: true };
        let warmup = Schedule::WarmupLr { min_lr: 0.0, max_lr: 1.0, warmup_steps: 0, kind: Warmup::Linear };
        for schedule in [Schedule::OneCycle(cycle), range, warmup, cosine()] {
            for step in [0, 1, 2, 9, 10, 11, 12, usize::MAX] {
                let _ = (schedule.lr(step), schedule.momentum(step));
            }
        }
    }
}
