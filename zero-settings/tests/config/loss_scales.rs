//! The dynamic loss scale against golden traces from `tests/make_schedules.py`.

use serde::Deserialize;
use zero_settings::loss_scale::{DynamicLossScale, LossScaleError, LossScaler};

#[derive(Deserialize)]
struct Case {
    params: Params,
    overflows: String,
    /// The scale after each update, as (value, number of repeats).
    runs: Vec<(f64, usize)>,
    failed_at: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Params {
    initial_scale_power: u32,
    loss_scale_window: u64,
    hysteresis: u32,
    consecutive_hysteresis: bool,
    min_loss_scale: f64,
}

#[test]
fn every_trace_equals_its_golden() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../loss_scales.json")).unwrap();
    assert_eq!(cases.len(), 264);
    for case in cases {
        let params = &case.params;
        let mut scaler = LossScaler::dynamic(DynamicLossScale {
            initial_scale_power: params.initial_scale_power,
            window: params.loss_scale_window,
            hysteresis: params.hysteresis,
            consecutive_hysteresis: params.consecutive_hysteresis,
            min_scale: params.min_loss_scale,
        })
        .unwrap();
        let mut expected = case.runs.iter().flat_map(|&(scale, times)| std::iter::repeat_n(scale, times));
        for (step, overflow) in case.overflows.chars().map(|flag| flag == '1').enumerate() {
            let at = format!("{params:?}, {}, step {step}", case.overflows);
            let before = scaler.scale();
            let outcome = scaler.update(overflow);
            if case.failed_at == Some(step) {
                assert_eq!(outcome, Err(LossScaleError::AtMinimum { min_scale: params.min_loss_scale }), "{at}");
                break;
            }
            let outcome = outcome.unwrap();
            assert_eq!((outcome.scale_before, outcome.skipped), (before, overflow), "{at}");
            assert_eq!(Some(outcome.scale_after), expected.next(), "{at}");
        }
        assert_eq!(expected.next(), None, "{params:?}, {}", case.overflows);
    }
}
