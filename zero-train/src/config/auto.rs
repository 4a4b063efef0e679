//! What the program knows and the file does not: the number of ranks, and what stands for `"auto"`.

use super::node::Node;

/// The program's side of a configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Context {
    /// Number of ranks. Without it the file's `num_processes` counts, and without that what its three batch sizes come to, if
    /// it has all of them, or 1.
    pub world: Option<usize>,
    /// Values for `"auto"`.
    pub auto: Auto,
}

/// Values for `"auto"`, as Accelerate and the Hugging Face trainer fill them. One that is asked for and not here is an
/// error that names it; one that is not asked for is not used.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Auto {
    /// The model's hidden size h: `reduce_bucket_size` is h·h, `stage3_prefetch_bucket_size` 0.9·h·h (rounded down),
    /// `stage3_param_persistence_threshold` 10·h, all in elements.
    pub hidden_size: Option<usize>,
    /// Rows per rank and micro-batch. Also taken when a file gives no batch size at all.
    pub micro_batch: Option<usize>,
    /// Micro-batches per step.
    pub accumulation: Option<usize>,
    /// Learning rate of the optimizer, and the highest of a warm-up.
    pub learning_rate: Option<f64>,
    /// The optimizer's weight decay.
    pub weight_decay: Option<f64>,
    /// Decay of Adam's first moment; filled together with `beta_2`.
    pub beta_1: Option<f64>,
    /// Decay of Adam's second moment.
    pub beta_2: Option<f64>,
    /// The optimizer's epsilon.
    pub epsilon: Option<f64>,
    /// Optimizer steps of the whole training.
    pub total_steps: Option<usize>,
    /// Optimizer steps of the warm-up.
    pub warmup_steps: Option<usize>,
    /// Highest norm of the gradient; 1 when not given, as in Accelerate.
    pub gradient_clipping: Option<f64>,
    /// Whether `fp16.enabled` or `bf16.enabled` is meant.
    pub mixed_precision: Option<MixedPrecision>,
    /// Whether whole 16-bit weights are saved at stage 3; no when not given, as in Accelerate.
    pub save_16bit_model: Option<bool>,
}

/// An `"auto"` of a file, and what stands for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// The dotted path of the key.
    pub path: String,
    /// What fills it: options of `zero train`.
    pub by: &'static str,
    /// The value; `None` for one that the program has yet to supply.
    pub value: Option<Node>,
}

/// Accelerate's `mixed_precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixedPrecision {
    /// fp32 throughout.
    No,
    /// fp16 with loss scaling.
    Fp16,
    /// bf16.
    Bf16,
}

/// What stands for `"auto"` at a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// Nothing.
    None,
    /// The batch arithmetic decides.
    Batch,
    ReduceBucket,
    Prefetch,
    Persistence,
    LearningRate,
    MinLearningRate,
    WeightDecay,
    Betas,
    Epsilon,
    TotalSteps,
    WarmupSteps,
    Clipping,
    SaveModel,
    Fp16,
    Bf16,
}

impl Fill {
    /// What fills the key, as options of `zero train`.
    pub(super) fn by(self) -> &'static str {
        match self {
            Fill::None | Fill::MinLearningRate => "its default",
            // The arithmetic of the three knows.
            Fill::Batch => "the other batch sizes",
            Fill::ReduceBucket | Fill::Prefetch | Fill::Persistence => "the hidden size of --model",
            Fill::LearningRate => "--lr",
            Fill::WeightDecay => "--weight-decay",
            Fill::Betas => "--beta1, --beta2",
            Fill::Epsilon => "--eps",
            Fill::TotalSteps => "--steps",
            Fill::WarmupSteps => "--warmup",
            Fill::Clipping => "--clip",
            Fill::SaveModel => "false, as in Accelerate",
            Fill::Fp16 | Fill::Bf16 => "--dtype",
        }
    }

    /// The value, or what the program would have to supply.
    pub(super) fn value(self, auto: &Auto) -> Result<Node, &'static str> {
        const HIDDEN: &str = "supply the model's hidden size (Auto::hidden_size), or give a number of elements";
        const PRECISION: &str = "supply the precision (Auto::mixed_precision), or write true or false";
        let elements = |of: fn(i128) -> Option<i128>| {
            let hidden = auto.hidden_size.and_then(|hidden| i128::try_from(hidden).ok()).ok_or(HIDDEN)?;
            of(hidden).map(Node::Int).ok_or(HIDDEN)
        };
        let number = |value: Option<f64>, supply| value.map(Node::from).ok_or(supply);
        let count = |value: Option<usize>, supply| value.map(Node::from).ok_or(supply);
        let precision = |is| auto.mixed_precision.map(|given| Node::Bool(given == is)).ok_or(PRECISION);
        match self {
            Fill::None | Fill::Batch => Err("give a value"),
            Fill::ReduceBucket => elements(|h| h.checked_mul(h)),
            Fill::Prefetch => elements(|h| h.checked_mul(h)?.checked_mul(9).map(|nine| nine / 10)),
            Fill::Persistence => elements(|h| h.checked_mul(10)),
            Fill::LearningRate => {
                number(auto.learning_rate, "supply the learning rate (Auto::learning_rate), or give a number")
            }
            Fill::MinLearningRate => Ok(Node::Int(0)),
            Fill::WeightDecay => {
                number(auto.weight_decay, "supply the weight decay (Auto::weight_decay), or give a number")
            }
            Fill::Betas => match (auto.beta_1, auto.beta_2) {
                (Some(first), Some(second)) => Ok(Node::List(vec![Node::from(first), Node::from(second)])),
                _ => Err("supply both decays (Auto::beta_1 and Auto::beta_2), or give two numbers"),
            },
            Fill::Epsilon => number(auto.epsilon, "supply epsilon (Auto::epsilon), or give a number"),
            Fill::TotalSteps => {
                count(auto.total_steps, "supply the steps of the training (Auto::total_steps), or give a number")
            }
            Fill::WarmupSteps => {
                count(auto.warmup_steps, "supply the steps of the warm-up (Auto::warmup_steps), or give a number")
            }
            Fill::Clipping => Ok(Node::from(auto.gradient_clipping.unwrap_or(1.0))),
            Fill::SaveModel => Ok(Node::Bool(auto.save_16bit_model.unwrap_or(false))),
            Fill::Fp16 => precision(MixedPrecision::Fp16),
            Fill::Bf16 => precision(MixedPrecision::Bf16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_the_hidden_size() {
        let auto = Auto { hidden_size: Some(1023), ..Auto::default() };
        assert_eq!(Fill::ReduceBucket.value(&auto), Ok(Node::Int(1_046_529)));
        // 0.9 * 1,046,529 = 941,876.1
        assert_eq!(Fill::Prefetch.value(&auto), Ok(Node::Int(941_876)));
        assert_eq!(Fill::Persistence.value(&auto), Ok(Node::Int(10_230)));
        assert!(Fill::Prefetch.value(&Auto::default()).is_err());
        let huge = Auto { hidden_size: Some(usize::MAX), ..Auto::default() };
        assert!(Fill::ReduceBucket.value(&huge).is_err());
    }
}
