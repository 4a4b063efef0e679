//! Recipes of presets that are trained from scratch.

use crate::trainer::{Recipe, ScheduleChoice};

/// Learning rates of GPT-3's models, by their millions of parameters.
const GPT3: [(f64, f64); 7] = [
    (125.0, 6e-4),
    (350.0, 3e-4),
    (760.0, 2.5e-4),
    (1_300.0, 2e-4),
    (2_700.0, 1.6e-4),
    (6_700.0, 1.2e-4),
    (13_000.0, 1e-4),
];

/// Returns the recipe of a GPT-2, whose own paper has none: that of the GPT-3 model of the nearest size.
pub(super) fn gpt2(parameters: usize) -> Recipe {
    let distance = |millions: f64| (parameters as f64 / 1e6 / millions).ln().abs();
    let nearest = GPT3.into_iter().min_by(|a, b| distance(a.0).total_cmp(&distance(b.0)));
    let (_, lr) = nearest.expect("there are some");
    let source = "GPT-3, Brown et al. 2020, table 2.1, https://arxiv.org/abs/2005.14165";
    Recipe { lr, beta2: 0.95, weight_decay: 0.1, clip: 1.0, schedule: ScheduleChoice::Cosine, source }
}

/// Returns the recipe of a Llama and of families with the same architecture.
pub(super) fn llama(parameters: usize) -> Recipe {
    let lr = if parameters < 20_000_000_000 { 3e-4 } else { 1.5e-4 };
    let source = "LLaMA, Touvron et al. 2023, table 2, https://arxiv.org/abs/2302.13971";
    Recipe { lr, beta2: 0.95, weight_decay: 0.1, clip: 1.0, schedule: ScheduleChoice::Cosine, source }
}

/// Returns the recipe of a BERT.
pub(super) fn bert() -> Recipe {
    let source = "BERT, Devlin et al. 2018, appendix A.2, https://arxiv.org/abs/1810.04805";
    Recipe { lr: 1e-4, beta2: 0.999, weight_decay: 0.01, clip: 1.0, schedule: ScheduleChoice::Linear, source }
}

/// Returns the recipe of direct preference optimization, of the full model or of an adapter.
pub(super) fn dpo(of_adapter: bool) -> Recipe {
    let source = "TRL's DPOConfig, https://huggingface.co/docs/trl/dpo_trainer";
    let lr = if of_adapter { 1e-5 } else { 1e-6 };
    Recipe { lr, beta2: 0.999, weight_decay: 0.0, clip: 1.0, schedule: ScheduleChoice::Linear, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_nearest_size() {
        let rates = [1_000_000, 124_439_808, 354_823_168, 774_030_080, 1_557_611_200, 10_279_047_168].map(gpt2);
        assert_eq!(rates.map(|recipe| recipe.lr), [6e-4, 6e-4, 3e-4, 2.5e-4, 2e-4, 1e-4]);
        assert_eq!([8_000_000_000, 70_000_000_000].map(llama).map(|recipe| recipe.lr), [3e-4, 1.5e-4]);
    }
}
