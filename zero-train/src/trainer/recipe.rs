//! Hyperparameters of models for users who give none.

use super::options::{Hyperparameters, ScheduleChoice};

/// Published hyperparameters of AdamW and its schedule for a model that is trained from scratch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// The highest learning rate.
    pub lr: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// The global norm that gradients are clipped to.
    pub clip: f64,
    /// The shape of the rate after the warm-up.
    pub schedule: ScheduleChoice,
    /// The source: a paper and its URL.
    pub source: &'static str,
}

/// Returns the warm-up steps of a run of `steps` steps: a fiftieth, at most 2,000 as in *LLaMA* (Touvron et al. 2023,
/// <https://arxiv.org/abs/2302.13971>), and in a short run 8 or half of it: the first steps of a deep model are the ones
/// that fail.
fn warmup(steps: usize) -> usize {
    (steps / 50).clamp(8, 2000).min(steps / 2)
}

impl Recipe {
    /// Returns `hyper` with these hyperparameters for a run of `steps` steps, if the user has given none of them.
    pub(super) fn complete(&self, hyper: &Hyperparameters, steps: usize) -> Option<Hyperparameters> {
        let Hyperparameters { lr, beta1, beta2, eps, weight_decay, warmup: warm, schedule, clip, .. } = hyper;
        let given = [lr, beta1, beta2, eps, weight_decay, clip].iter().any(|given| given.is_some());
        if given || warm.is_some() || schedule.is_some() {
            return None;
        }
        Some(Hyperparameters {
            lr: Some(self.lr),
            beta2: Some(self.beta2),
            weight_decay: Some(self.weight_decay),
            clip: Some(self.clip),
            warmup: Some(warmup(steps)),
            schedule: Some(self.schedule),
            is_recipe: true,
            ..hyper.clone()
        })
    }

    /// Formats the recipe for a person, before training.
    pub(super) fn told(&self, name: &str) -> String {
        format!(
            "Using the recipe of {name}, because no --lr, --warmup, --schedule, --clip, --weight-decay or beta is \
             given: learning rate {}, betas 0.9 and {}, weight decay {}, clipping to {} ({}).",
            self.lr, self.beta2, self.weight_decay, self.clip, self.source
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_taken_whole_or_not() {
        let (lr, beta2, weight_decay, clip) = (2e-4, 0.95, 0.1, 1.0);
        let recipe = Recipe { lr, beta2, weight_decay, clip, schedule: ScheduleChoice::Cosine, source: "a paper" };
        let batch = Hyperparameters { batch: Some(4), ..Hyperparameters::default() };
        let taken = recipe.complete(&batch, 20).unwrap();
        assert_eq!((taken.batch, taken.lr, taken.warmup, taken.is_recipe), (Some(4), Some(2e-4), Some(8), true));
        assert!(recipe.complete(&Hyperparameters { clip: Some(0.0), ..batch.clone() }, 20).is_none());
        assert!(recipe.complete(&Hyperparameters { warmup: Some(0), ..batch }, 20).is_none());
        assert_eq!([1, 4, 20, 1000, 1_000_000].map(warmup), [0, 2, 8, 20, 2000]);
    }
}
