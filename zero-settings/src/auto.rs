//! Values that the program supplies because the file does not: the number of ranks and the values for `"auto"`.

use super::node::Node;

/// The program's input to a configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Context {
    /// Number of ranks. If `None`, the file's `num_processes` is used; without that, the number implied by its three
    /// batch sizes if all are given; otherwise 1.
    pub world: Option<usize>,
    /// Number of ranks that the file's batch sizes and `num_processes` are meant for, if a restart uses another number.
    /// The rows per step stay the same if `world` divides them ([`Batch::on`](super::Batch::on)).
    pub batch_world: Option<usize>,
    /// Values for `"auto"`.
    pub auto: Auto,
}

/// Values for `"auto"`, filled as Accelerate and the Hugging Face trainer do. If the file needs a value that is
/// missing, the error names it. Values that the file does not need are ignored.
// A field for each key that may be `"auto"`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Auto {
    /// The model's hidden size h: `reduce_bucket_size` is h·h, `stage3_prefetch_bucket_size` 0.9·h·h (rounded down),
    /// `stage3_param_persistence_threshold` 10·h, all in elements.
    pub hidden_size: Option<usize>,
    /// Rows per rank and micro-batch. Also taken when a file gives no batch size at all.
    pub micro_batch: Option<usize>,
    /// Micro-batches per step.
    pub accumulation: Option<usize>,
    /// Learning rate of the optimizer and peak of a warm-up.
    pub learning_rate: Option<f64>,
    /// The optimizer's weight decay.
    pub weight_decay: Option<f64>,
    /// Decay of Adam's first moment; filled together with `beta_2`.
    pub beta_1: Option<f64>,
    /// Decay of Adam's second moment.
    pub beta_2: Option<f64>,
    /// The optimizer's epsilon.
    pub epsilon: Option<f64>,
    /// Optimizer steps of the full training run.
    pub total_steps: Option<usize>,
    /// Optimizer steps of the warm-up.
    pub warmup_steps: Option<usize>,
    /// Maximum gradient norm; 1 if not given, as in Accelerate.
    pub gradient_clipping: Option<f64>,
    /// The precision to enable: `fp16.enabled` or `bf16.enabled`.
    pub mixed_precision: Option<MixedPrecision>,
    /// If true, the full 16-bit weights are saved at stage 3; `None` means no, as in Accelerate.
    pub save_16bit_model: Option<bool>,
}

/// An `"auto"` in a file and the value that replaces it.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// The dotted path of the key.
    pub path: String,
    /// Source of the value: options of `zero train`.
    pub by: &'static str,
    /// The value; `None` if the program has yet to supply it.
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

/// Defines the sources of `"auto"` values: the options of `zero train` that fill the key, what the program has to
/// supply if there is no value, and the value itself.
macro_rules! fills {
    ($($name:ident: $by:expr, $supply:expr, |$auto:ident| $value:expr;)+) => {
        /// The source of the value for an `"auto"` key.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Fill {
            $($name),+
        }

        impl Fill {
            /// Returns the name of the source.
            pub(super) fn by(self) -> &'static str {
                match self {
                    $(Fill::$name => $by),+
                }
            }

            /// Returns the value, or what the program has to supply.
            pub(super) fn value(self, auto: &Auto) -> Result<Node, &'static str> {
                let value: Option<Node> = match self {
                    $(Fill::$name => { let $auto = auto; $value }),+
                };
                value.ok_or(match self {
                    $(Fill::$name => $supply),+
                })
            }
        }
    };
}

const MODEL: &str = "the hidden size of --model";
const HIDDEN: &str =
    "supply the model's hidden size (Task::hidden_size, Auto::hidden_size), or give a number of elements";
const PRECISION: &str = "supply the precision (Auto::mixed_precision), or write true or false";

fills! {
    None: "its default", "give a value", |_auto| None;
    // The batch arithmetic decides.
    Batch: "the other batch sizes", "give a value", |_auto| None;
    ReduceBucket: MODEL, HIDDEN, |auto| elements(auto, |h| h.checked_mul(h));
    Prefetch: MODEL, HIDDEN, |auto| elements(auto, |h| h.checked_mul(h)?.checked_mul(9).map(|nine| nine / 10));
    Persistence: MODEL, HIDDEN, |auto| elements(auto, |h| h.checked_mul(10));
    LearningRate: "--lr", "supply the learning rate (Auto::learning_rate), or give a number",
        |auto| auto.learning_rate.map(Node::from);
    MinLearningRate: "its default", "give a value", |_auto| Some(Node::Int(0));
    WeightDecay: "--weight-decay", "supply the weight decay (Auto::weight_decay), or give a number",
        |auto| auto.weight_decay.map(Node::from);
    Betas: "--beta1, --beta2", "supply both betas (Auto::beta_1 and Auto::beta_2), or give two numbers",
        |auto| auto.beta_1.zip(auto.beta_2).map(|(first, second)| Node::List(vec![first.into(), second.into()]));
    Epsilon: "--eps", "supply epsilon (Auto::epsilon), or give a number", |auto| auto.epsilon.map(Node::from);
    TotalSteps: "--steps", "supply the number of training steps (Auto::total_steps), or give a number",
        |auto| auto.total_steps.map(Node::from);
    WarmupSteps: "--warmup", "supply the number of warm-up steps (Auto::warmup_steps), or give a number",
        |auto| auto.warmup_steps.map(Node::from);
    Clipping: "--clip", "give a number", |auto| Some(auto.gradient_clipping.unwrap_or(1.0).into());
    SaveModel: "false, as in Accelerate", "give a value", |auto| Some(auto.save_16bit_model.unwrap_or(false).into());
    Fp16: "--dtype", PRECISION, |auto| auto.mixed_precision.map(|given| (given == MixedPrecision::Fp16).into());
    Bf16: "--dtype", PRECISION, |auto| auto.mixed_precision.map(|given| (given == MixedPrecision::Bf16).into());
}

fn elements(auto: &Auto, of: fn(i128) -> Option<i128>) -> Option<Node> {
    of(i128::try_from(auto.hidden_size?).ok()?).map(Node::Int)
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
