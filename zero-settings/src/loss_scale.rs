//! Loss scaling for fp16: static, or dynamic with DeepSpeed's rules.
//!
//! * In: whether any rank's gradients overflowed in this step (hold an infinity or a NaN).
//! * Out: the factor for the next loss, and whether this step's update is skipped.
//! * Threads: a plain value. Every rank keeps a copy and updates it from the same, already reduced, flag; equal flags
//!   keep the copies equal without communication.
//!
//! # Rules of the dynamic scale
//!
//! * An overflow skips the update. The first `hysteresis - 1` overflows only use up the hysteresis; every further one
//!   halves the scale, down to `min_scale`. Halving does not refill the hysteresis.
//! * An update without overflow that follows `k * window` earlier ones since the last overflow doubles the scale (k =
//!   1, 2, ...) and refills the hysteresis. So the first doubling comes with good update `window + 1`, not `window`.
//! * If `consecutive_hysteresis` is set, every good update refills the hysteresis, so that only overflows in a row count.
//! * An overflow that would have to halve a scale already at `min_scale` is an error: the run cannot recover.
//!
//! These are the rules of the scaler that DeepSpeed uses with ZeRO, stages 1 to 3:
//! <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py>. (Its optimizer for
//! fp16 without ZeRO has a simpler one, without hysteresis and without the error.) There are two differences. The scale
//! stops doubling at 2^127, the largest power of two in float32; a larger one would make every loss infinite. Settings
//! under which the scale could never fall, or would rise on an overflow, are rejected.
//!
//! # Which scale to divide by
//!
//! The gradients of a step carry the scale in force when its loss was multiplied: divide them by
//! [`Outcome::scale_before`]. (DeepSpeed 0.19.6 updates the scale first and then divides by the new one, which halves
//! the gradient in each step that doubles the scale.)

use std::fmt;

use serde::{Deserialize, Serialize};

/// Factor by which the dynamic scale is multiplied or divided.
const FACTOR: f64 = 2.0;

/// Exponent of the largest power of two in float32, the type in which losses are multiplied.
const MAX_POWER: u32 = 127;

/// Settings of a dynamic loss scale; the default is DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DynamicLossScale {
    /// The scale starts at 2 to this power (key `fp16.initial_scale_power`, default 16).
    pub initial_scale_power: u32,
    /// Updates without overflow between two doublings (key `fp16.loss_scale_window`, default 1000).
    #[serde(rename = "loss_scale_window")]
    pub window: u64,
    /// The overflow that first halves the scale: 1 is the first, 2 the second (key `fp16.hysteresis`, default 2).
    pub hysteresis: u32,
    /// If true, every update without overflow refills the hysteresis (key `fp16.consecutive_hysteresis`, default false).
    pub consecutive_hysteresis: bool,
    /// Lower bound of the scale (key `fp16.min_loss_scale`, default 1).
    #[serde(rename = "min_loss_scale")]
    pub min_scale: f64,
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self { initial_scale_power: 16, window: 1000, hysteresis: 2, consecutive_hysteresis: false, min_scale: 1.0 }
    }
}

/// An invalid loss scale, or one that cannot be lowered further.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossScaleError {
    /// A setting out of range.
    #[error("fp16.{key} is {got}; set it to {expected}")]
    Value {
        /// DeepSpeed's name of the setting, or the name of the field in a checkpoint.
        key: &'static str,
        /// The value given.
        got: f64,
        /// Accepted values.
        expected: &'static str,
    },
    /// The gradients overflow even at the smallest scale.
    #[error(
        "the gradients overflowed and the loss scale is already at its minimum, {min_scale}: the loss or the weights \
         are most likely infinite or NaN. Lower the learning rate, clip the gradients, check the data, train in bf16, \
         or lower fp16.min_loss_scale"
    )]
    AtMinimum {
        /// The scale and its minimum.
        min_scale: f64,
    },
}

/// The effect of an update on the scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// The scale of this step's loss and gradients; divide the gradients by it.
    pub scale_before: f64,
    /// The scale for the next step's loss.
    pub scale_after: f64,
    /// True if the optimizer must not step (nor the schedule advance), because of the overflow.
    pub skipped: bool,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (self.scale_before, self.scale_after);
        let what = if self.skipped { "overflow: update skipped" } else { "updated" };
        if before == after {
            write!(f, "{what}, loss scale {before} kept")
        } else {
            write!(f, "{what}, loss scale {before} -> {after}")
        }
    }
}

/// A loss scale and the history it depends on. It is serialized into checkpoints in full and validated when read back.
/// A resumed run takes the scale and the counters from it ([`resume`](Self::resume)).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "State")]
pub struct LossScaler(State);

/// The serialized form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum State {
    Static {
        scale: f64,
    },
    Dynamic {
        scale: f64,
        window: u64,
        hysteresis: u32,
        consecutive_hysteresis: bool,
        min_scale: f64,
        /// Overflows until the scale is halved, counting the one that halves it; at least 1.
        hysteresis_left: u32,
        /// Updates without overflow since the last overflow, or since the start.
        good_updates: u64,
    },
}

impl LossScaler {
    /// Creates a scale that never changes (`fp16.loss_scale` above 0). Every overflow skips its update, without a limit.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Value`] for a scale that is not above 0, or above 2^127.
    pub fn fixed(scale: f64) -> Result<Self, LossScaleError> {
        Self::checked(State::Static { scale })
    }

    /// Creates a scale that follows the overflows (`fp16.loss_scale` 0).
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Value`] for a window or hysteresis of 0, a minimum that is not positive, and a start below the
    /// minimum or above 2^127.
    pub fn dynamic(settings: DynamicLossScale) -> Result<Self, LossScaleError> {
        let DynamicLossScale { initial_scale_power, window, hysteresis, consecutive_hysteresis, min_scale } = settings;
        if initial_scale_power > MAX_POWER {
            let (key, got) = ("initial_scale_power", f64::from(initial_scale_power));
            return Err(LossScaleError::Value {
                key,
                got,
                expected: "127 or less (2^127 is float32's largest power of two)",
            });
        }
        Self::checked(State::Dynamic {
            scale: power_of_two(initial_scale_power),
            window,
            hysteresis,
            consecutive_hysteresis,
            min_scale,
            hysteresis_left: hysteresis,
            good_updates: 0,
        })
    }

    /// Resumes from a checkpoint. If both are dynamic, takes the scale and the counters of `saved`, clamped to these
    /// settings. Window, hysteresis, minimum and the kind stay.
    pub fn resume(&mut self, saved: &Self) {
        if let (
            State::Dynamic { scale, hysteresis, min_scale, hysteresis_left, good_updates, .. },
            State::Dynamic { scale: last, hysteresis_left: left, good_updates: good, .. },
        ) = (&mut self.0, &saved.0)
        {
            (*scale, *good_updates) = (last.max(*min_scale), *good);
            *hysteresis_left = (*left).min(*hysteresis);
        }
    }

    /// Returns the factor for the next loss.
    pub fn scale(&self) -> f64 {
        match self.0 {
            State::Static { scale } | State::Dynamic { scale, .. } => scale,
        }
    }

    /// Returns `true` if the scale is dynamic.
    pub fn is_dynamic(&self) -> bool {
        matches!(self.0, State::Dynamic { .. })
    }

    /// Records a step. Call it once per step, after the gradients are reduced and before they are applied.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::AtMinimum`] for an overflow at the minimum scale. The state does not change then, and the
    /// update must be skipped.
    pub fn update(&mut self, overflow: bool) -> Result<Outcome, LossScaleError> {
        let scale_before = self.scale();
        if let State::Dynamic {
            scale,
            window,
            hysteresis,
            consecutive_hysteresis,
            min_scale,
            hysteresis_left,
            good_updates,
        } = &mut self.0
        {
            if overflow {
                if *hysteresis_left > 1 {
                    *hysteresis_left -= 1;
                } else if *scale == *min_scale {
                    return Err(LossScaleError::AtMinimum { min_scale: *min_scale });
                } else {
                    *scale = (*scale / FACTOR).max(*min_scale);
                }
                *good_updates = 0;
            } else {
                let double = *good_updates > 0 && *good_updates % *window == 0;
                if double || *consecutive_hysteresis {
                    *hysteresis_left = *hysteresis;
                }
                if double && *scale * FACTOR <= power_of_two(MAX_POWER) {
                    *scale *= FACTOR;
                }
                *good_updates = good_updates.saturating_add(1);
            }
        }
        Ok(Outcome { scale_before, scale_after: self.scale(), skipped: overflow })
    }

    fn checked(state: State) -> Result<Self, LossScaleError> {
        let that = |ok: bool, key, got: f64, expected| {
            if ok { Ok(()) } else { Err(LossScaleError::Value { key, got, expected }) }
        };
        match state {
            State::Static { scale } => {
                let expected = "a number above 0 and at most 2^127, or to 0 for a dynamic loss scale";
                that(scale > 0.0 && scale <= power_of_two(MAX_POWER), "loss_scale", scale, expected)?;
            }
            State::Dynamic { scale, window, hysteresis, min_scale, hysteresis_left, .. } => {
                that(window > 0, "loss_scale_window", window as f64, "1 or more")?;
                that(hysteresis > 0, "hysteresis", f64::from(hysteresis), "1 or more")?;
                that(min_scale.is_finite() && min_scale > 0.0, "min_loss_scale", min_scale, "a positive number")?;
                // A start is a power of two; a scale read from a checkpoint may not be.
                let expected = "at most the initial scale, 2^fp16.initial_scale_power";
                that(min_scale <= scale, "min_loss_scale", min_scale, expected)?;
                that(scale <= power_of_two(MAX_POWER), "scale", scale, "at most 2^127")?;
                let left = f64::from(hysteresis_left);
                that((1..=hysteresis).contains(&hysteresis_left), "hysteresis_left", left, "1 to fp16.hysteresis")?;
            }
        }
        Ok(Self(state))
    }
}

impl TryFrom<State> for LossScaler {
    type Error = LossScaleError;

    fn try_from(state: State) -> Result<Self, LossScaleError> {
        Self::checked(state)
    }
}

fn power_of_two(power: u32) -> f64 {
    f64::from(power).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dynamic(initial_scale_power: u32, window: u64, hysteresis: u32) -> LossScaler {
        LossScaler::dynamic(DynamicLossScale { initial_scale_power, window, hysteresis, ..Default::default() }).unwrap()
    }

    #[test]
    fn a_fixed_scale_skips_and_stays() {
        let mut scaler = LossScaler::fixed(128.0).unwrap();
        let expected = Outcome { scale_before: 128.0, scale_after: 128.0, skipped: true };
        assert_eq!(scaler.update(true), Ok(expected));
        assert_eq!(expected.to_string(), "overflow: update skipped, loss scale 128 kept");
        assert!(!scaler.is_dynamic());
    }

    #[test]
    fn at_the_minimum_an_overflow_is_an_error_and_changes_nothing() {
        let mut scaler = dynamic(1, 10, 1);
        assert_eq!(scaler.update(true).unwrap().to_string(), "overflow: update skipped, loss scale 2 -> 1");
        let before = scaler.clone();
        let error = scaler.update(true).unwrap_err();
        assert_eq!(error, LossScaleError::AtMinimum { min_scale: 1.0 });
        assert!(error.to_string().contains("already at its minimum, 1"), "{error}");
        assert_eq!(scaler, before);
    }

    #[test]
    fn a_window_of_two_doubles_with_the_third_update() {
        let mut scaler = dynamic(0, 2, 2);
        let scales: Vec<f64> = (0..7).map(|_| scaler.update(false).unwrap().scale_after).collect();
        assert_eq!(scales, [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0]);
    }

    #[test]
    fn the_scale_stops_at_the_largest_power_of_float32() {
        let mut scaler = dynamic(127, 1, 1);
        for _ in 0..4 {
            scaler.update(false).unwrap();
        }
        assert_eq!(scaler.scale(), 2f64.powi(127));
    }

    #[test]
    fn settings_are_checked() {
        let refused = |settings: DynamicLossScale| match LossScaler::dynamic(settings) {
            Err(LossScaleError::Value { key, .. }) => key,
            other => panic!("{other:?}"),
        };
        let good = DynamicLossScale::default();
        assert_eq!(refused(DynamicLossScale { window: 0, ..good }), "loss_scale_window");
        assert_eq!(refused(DynamicLossScale { hysteresis: 0, ..good }), "hysteresis");
        assert_eq!(refused(DynamicLossScale { min_scale: f64::NAN, ..good }), "min_loss_scale");
        assert_eq!(refused(DynamicLossScale { min_scale: 1e6, ..good }), "min_loss_scale");
        assert_eq!(refused(DynamicLossScale { initial_scale_power: 128, ..good }), "initial_scale_power");
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e39] {
            assert!(LossScaler::fixed(scale).is_err(), "{scale}");
        }
    }

    #[test]
    fn a_checkpoint_goes_on_where_the_run_was() {
        let mut scaler = dynamic(8, 3, 2);
        let overflows = [false, true, false, false, true, true, false, false, false, false, false];
        for (i, overflow) in overflows.into_iter().enumerate() {
            let json = serde_json::to_string(&scaler).unwrap();
            let mut read: LossScaler = serde_json::from_str(&json).unwrap();
            assert_eq!(read, scaler, "step {i}");
            assert_eq!(read.update(overflow), scaler.update(overflow), "step {i}");
        }
    }

    #[test]
    fn a_resumed_run_has_the_scale_of_before_and_its_own_settings() {
        let mut saved = dynamic(8, 3, 4);
        (0..5).for_each(|_| drop(saved.update(false)));
        saved.update(true).unwrap();
        let mut other = dynamic(16, 7, 2);
        other.resume(&saved);
        assert_eq!(other.scale(), 512.0);
        assert_eq!(other.update(true).unwrap().scale_after, 512.0, "3 of 4 are left, of which 2 are");
        assert_eq!(other.update(true).unwrap().scale_after, 256.0);
        let mut high = LossScaler::dynamic(DynamicLossScale { min_scale: 1024.0, ..Default::default() }).unwrap();
        high.resume(&saved);
        assert_eq!(high.scale(), 1024.0);
        let mut fixed = LossScaler::fixed(8.0).unwrap();
        fixed.resume(&saved);
        assert_eq!(fixed, LossScaler::fixed(8.0).unwrap());
        saved.resume(&fixed);
        assert_eq!(saved.scale(), 512.0);
    }

    #[test]
    fn a_damaged_checkpoint_is_refused() {
        let good = serde_json::to_string(&dynamic(8, 3, 2)).unwrap();
        for (from, to) in [
            ("\"hysteresis_left\":2", "\"hysteresis_left\":0"),
            ("\"window\":3", "\"window\":0"),
            ("\"scale\":256.0", "\"scale\":0.5"),
            ("\"good_updates\":0", "\"good\":0"),
            ("\"dynamic\"", "\"other\""),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good);
            assert!(serde_json::from_str::<LossScaler>(&bad).is_err(), "{bad}");
        }
    }
}
