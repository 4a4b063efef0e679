//! The 1cycle policy: learning rate and momentum of one cycle and the decay after it.
//!
//! In: the policy's parameters and the number of applied updates. Out: numbers; see the parent module for the counting.

use serde::{Deserialize, Serialize};

/// The second beta that DeepSpeed's `OneCycle` writes into an Adam optimizer whenever it cycles the momentum.
pub const ONE_CYCLE_BETA2: f64 = 0.99;

/// The 1cycle policy (<https://arxiv.org/abs/1803.09820>): rises from `cycle_min_lr` to `cycle_max_lr` and falls back,
/// then divides `cycle_min_lr` by a growing factor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OneCycle {
    /// Rate at both ends of the cycle.
    pub cycle_min_lr: f64,
    /// Rate at the top of the cycle.
    pub cycle_max_lr: f64,
    /// Decay after the cycle: the rate is `cycle_min_lr / (1 + decay_lr_rate * intervals)`; 0 disables it.
    pub decay_lr_rate: f64,
    /// Updates in the rising half.
    #[serde(rename = "cycle_first_step_size")]
    pub first_step_size: usize,
    /// Updates in the falling half; DeepSpeed's default is `first_step_size`. 0 omits the falling half.
    #[serde(rename = "cycle_second_step_size")]
    pub second_step_size: usize,
    /// Stairs in the rising half; 0 changes the rate with every update.
    #[serde(rename = "cycle_first_stair_count")]
    pub first_stair_count: usize,
    /// Stairs in the falling half; DeepSpeed's default is `first_stair_count`.
    #[serde(rename = "cycle_second_stair_count")]
    pub second_stair_count: usize,
    /// Updates per interval of the decay after the cycle; 0 disables the decay of rate and momentum.
    pub decay_step_size: usize,
    /// The momentum's cycle, opposite to the rate's; `None` leaves the momentum unchanged.
    #[serde(flatten)]
    pub momentum: Option<CycleMomentum>,
}

/// The momentum (Adam's first beta) in [`OneCycle`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CycleMomentum {
    /// Momentum at the peak of the rate's cycle (DeepSpeed's default 0.8).
    #[serde(rename = "cycle_min_mom")]
    pub min_mom: f64,
    /// Momentum at the ends of the rate's cycle (DeepSpeed's default 0.9).
    #[serde(rename = "cycle_max_mom")]
    pub max_mom: f64,
    /// Decay after the cycle: the momentum is `max_mom * (1 + decay_mom_rate * intervals)`, so a positive rate raises
    /// it. It is not clamped, as in DeepSpeed; 0 keeps it at `max_mom`.
    pub decay_mom_rate: f64,
}

impl OneCycle {
    /// Implements [`Schedule::lr`](super::Schedule::lr).
    pub(super) fn lr(&self, step: usize) -> f64 {
        match self.decay_updates(step) {
            None => self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self.height(step),
            Some(_) if self.decay_step_size == 0 || self.decay_lr_rate == 0.0 => self.cycle_min_lr,
            Some(updates) => self.cycle_min_lr / (1.0 + self.decay_lr_rate * (updates / self.decay_step_size as f64)),
        }
    }

    /// Implements [`Schedule::momentum`](super::Schedule::momentum).
    pub(super) fn momentum(&self, step: usize) -> Option<f64> {
        let CycleMomentum { min_mom, max_mom, decay_mom_rate } = self.momentum?;
        Some(match self.decay_updates(step) {
            None if step == 0 => min_mom,
            None => max_mom - (max_mom - min_mom) * self.height(step),
            Some(_) if self.decay_step_size == 0 || decay_mom_rate == 0.0 => max_mom,
            Some(updates) => max_mom * (1.0 + decay_mom_rate * (updates / self.decay_step_size as f64)),
        })
    }

    /// Returns the length of the cycle in updates.
    fn cycle_updates(&self) -> f64 {
        self.first_step_size as f64 + self.second_step_size as f64
    }

    /// Returns the updates since the end of the cycle, or `None` within it. The cycle's last value, back at the
    /// minimum, is at `step` equal to its length.
    fn decay_updates(&self, step: usize) -> Option<f64> {
        let after = step as f64 - self.cycle_updates();
        (after > 0.0).then_some(after)
    }

    /// Returns the height of the cycle at `step`: 0 at its ends, 1 at its peak. The operations and their order are
    /// DeepSpeed's, for equal rounding.
    fn height(&self, step: usize) -> f64 {
        let (first, second, total) = (self.first_step_size as f64, self.second_step_size as f64, self.cycle_updates());
        let step = step as f64;
        let top = first / total;
        let x = 1.0 + step / total - (1.0 + step / total).floor();
        let rising = x <= top;
        let stairs = if rising { self.first_stair_count } else { self.second_stair_count } as f64;
        if stairs > 0.0 {
            // Computed from whole updates: a quotient just under a stair would fall to the stair below.
            let update = step % total;
            let climbed = if update <= first { update * stairs / first } else { (total - update) * stairs / second };
            climbed.floor() / stairs
        } else if rising {
            x / top
        } else {
            (x - 1.0) / (top - 1.0)
        }
    }
}
