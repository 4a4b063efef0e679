//! The schedules against golden sequences from `tests/make_schedules.py`.

use serde::Deserialize;
use serde_json::Value;
use zero_settings::schedule::{CycleMomentum, OneCycle, Schedule, Warmup};

#[derive(Deserialize)]
struct Case {
    #[serde(rename = "type")]
    kind: String,
    params: Value,
    lr: Vec<f64>,
    momentum: Option<Vec<f64>>,
}

impl Case {
    fn number(&self, key: &str) -> f64 {
        self.params[key].as_f64().unwrap_or_else(|| panic!("{key} in {}", self.params))
    }

    fn count(&self, key: &str) -> usize {
        self.params[key].as_u64().unwrap_or_else(|| panic!("{key} in {}", self.params)) as usize
    }

    fn schedule(&self) -> Schedule {
        let warmup = || if self.params["warmup_type"] == "linear" { Warmup::Linear } else { Warmup::Log };
        match self.kind.as_str() {
            "WarmupLR" => Schedule::WarmupLr {
                min_lr: self.number("warmup_min_lr"),
                max_lr: self.number("warmup_max_lr"),
                warmup_steps: self.count("warmup_num_steps"),
                kind: warmup(),
            },
            "WarmupDecayLR" => Schedule::WarmupDecayLr {
                min_lr: self.number("warmup_min_lr"),
                max_lr: self.number("warmup_max_lr"),
                warmup_steps: self.count("warmup_num_steps"),
                kind: warmup(),
                total_steps: self.count("total_num_steps"),
            },
            "WarmupCosineLR" => Schedule::WarmupCosineLr {
                base_lr: self.number("lr"),
                total_steps: self.count("total_num_steps"),
                warmup_min_ratio: self.number("warmup_min_ratio"),
                warmup_steps: self.count("warmup_num_steps"),
                cos_min_ratio: self.number("cos_min_ratio"),
                kind: warmup(),
            },
            "OneCycle" => Schedule::OneCycle(OneCycle {
                cycle_min_lr: self.number("cycle_min_lr"),
                cycle_max_lr: self.number("cycle_max_lr"),
                decay_lr_rate: self.number("decay_lr_rate"),
                first_step_size: self.count("cycle_first_step_size"),
                second_step_size: self.count("cycle_second_step_size"),
                first_stair_count: self.count("cycle_first_stair_count"),
                second_stair_count: self.count("cycle_second_stair_count"),
                decay_step_size: self.count("decay_step_size"),
                momentum: (self.params["cycle_momentum"] == true).then(|| CycleMomentum {
                    min_mom: self.number("cycle_min_mom"),
                    max_mom: self.number("cycle_max_mom"),
                    decay_mom_rate: self.number("decay_mom_rate"),
                }),
            }),
            "LRRangeTest" => Schedule::LrRangeTest {
                min_lr: self.number("lr_range_test_min_lr"),
                step_size: self.count("lr_range_test_step_size"),
                step_rate: self.number("lr_range_test_step_rate"),
                staircase: self.params["lr_range_test_staircase"] == true,
            },
            other => panic!("unknown schedule {other}"),
        }
    }
}

#[track_caller]
fn close(got: f64, expected: f64, what: &str) {
    let tolerance = 1e-12 * expected.abs();
    assert!((got - expected).abs() <= tolerance, "{what}: got {got:e}, expected {expected:e}");
}

#[test]
fn every_schedule_equals_its_golden_sequence() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../schedules.json")).unwrap();
    assert_eq!(cases.len(), 24);
    for case in cases {
        let schedule = case.schedule();
        assert_eq!(schedule.name(), case.kind);
        if let Err(error) = schedule.validate() {
            assert!(error.is_warning_in_deepspeed(), "{error}");
        }
        assert_eq!(case.lr.len(), 60);
        for (step, &lr) in case.lr.iter().enumerate() {
            close(schedule.lr(step), lr, &format!("{schedule:?}, rate after {step} updates"));
        }
        match &case.momentum {
            Some(momenta) => {
                for (step, &momentum) in momenta.iter().enumerate() {
                    let got = schedule.momentum(step).unwrap();
                    close(got, momentum, &format!("{schedule:?}, momentum after {step} updates"));
                }
            }
            None => assert_eq!(schedule.momentum(3), None),
        }
    }
}

#[test]
fn a_constant_rate_is_constant() {
    assert!([0, 1, usize::MAX].iter().all(|&step| Schedule::Constant(3e-4).lr(step) == 3e-4));
}
