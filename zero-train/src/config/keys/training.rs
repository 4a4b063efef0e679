//! `optimizer` and `scheduler`: the parameters of each type, as DeepSpeed's and PyTorch's constructors name them.

use crate::config::auto::Fill;
use crate::config::rule::{Default as D, Key, Kind as K, Tagged, Treatment as T, key};

const KERNEL: T = T::NoEffect("it chooses among PyTorch's kernels");
const STATE: T = T::Refused("the optimizer's state is always fp32; remove the key");
const NO_SUCH_RULE: T = T::Refused("the optimizer has no such variant; remove the key");

const LR: Key = key("lr", K::POSITIVE, D::Num(1e-3), T::Acted).auto(Fill::LearningRate);
const BETAS: Key = key("betas", K::Betas, D::Pair(0.9, 0.999), T::Acted).auto(Fill::Betas);
const EPS: Key = key("eps", K::POSITIVE, D::Num(1e-8), T::Acted).auto(Fill::Epsilon);
const WEIGHT_DECAY: Key = key("weight_decay", K::POSITIVE, D::Num(0.0), T::Acted).auto(Fill::WeightDecay);
const FP32_STATES: Key = key("fp32_optimizer_states", K::Bool, D::Bool(true), STATE);
const SET_GRAD_NONE: Key = key("set_grad_none", K::Bool, D::Bool(true), T::NoEffect("gradients are always freed"));
const FUSED: Key = key("fused", K::Bool, D::Bool(false), KERNEL);
const FOREACH: Key = key("foreach", K::Bool, D::Bool(false), KERNEL);
const MAXIMIZE: Key = key("maximize", K::Bool, D::Bool(false), NO_SUCH_RULE);
const DIFFERENTIABLE: Key = key("differentiable", K::Bool, D::Bool(false), NO_SUCH_RULE);
const MAX_GRAD_NORM: Key = key(
    "max_grad_norm",
    K::POSITIVE,
    D::Num(0.0),
    T::Refused("clipping is the top-level key `gradient_clipping`; move the value there"),
);

/// Parameters of Adam and AdamW.
pub(in crate::config) const ADAM: &[Key] = &[
    LR,
    BETAS,
    EPS,
    WEIGHT_DECAY,
    key("adam_w_mode", K::Bool, D::Bool(true), T::Acted),
    key("torch_adam", K::Bool, D::Bool(false), T::Acted),
    key("bias_correction", K::Bool, D::Bool(true), NO_SUCH_RULE),
    key("amsgrad", K::Bool, D::Bool(false), NO_SUCH_RULE),
    key("capturable", K::Bool, D::Bool(false), KERNEL),
    FP32_STATES,
    SET_GRAD_NONE,
    FUSED,
    FOREACH,
    MAXIMIZE,
    DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

const SGD: &[Key] = &[
    LR,
    key("momentum", K::POSITIVE, D::Num(0.0), T::Acted),
    WEIGHT_DECAY,
    key("nesterov", K::Bool, D::Bool(false), T::Acted),
    key("dampening", K::NUM, D::Num(0.0), NO_SUCH_RULE),
    FUSED,
    FOREACH,
    MAXIMIZE,
    DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

const LION: &[Key] = &[LR, BETAS, WEIGHT_DECAY, FP32_STATES, SET_GRAD_NONE, MAX_GRAD_NORM];

const ADAGRAD: &[Key] = &[
    key("lr", K::POSITIVE, D::Num(1e-2), T::Acted).auto(Fill::LearningRate),
    key("eps", K::POSITIVE, D::Num(1e-10), T::Acted).auto(Fill::Epsilon),
    WEIGHT_DECAY,
    key("lr_decay", K::POSITIVE, D::Num(0.0), NO_SUCH_RULE),
    key("initial_accumulator_value", K::POSITIVE, D::Num(0.0), NO_SUCH_RULE),
    key("amsgrad", K::Bool, D::Bool(false), NO_SUCH_RULE),
    FP32_STATES,
    FUSED,
    FOREACH,
    MAXIMIZE,
    DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

/// `optimizer`.
pub(in crate::config) static OPTIMIZERS: Tagged = Tagged {
    what: "optimizer",
    variants: &[("AdamW", ADAM), ("Adam", ADAM), ("SGD", SGD), ("Lion", LION), ("Adagrad", ADAGRAD)],
    refused: &["Lamb", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD"],
    beside: &[key("legacy_fusion", K::Bool, D::Bool(false), KERNEL)],
};

const WARMUP_MIN_LR: Key = key("warmup_min_lr", K::POSITIVE, D::Num(0.0), T::Acted).auto(Fill::MinLearningRate);
const WARMUP_STEPS: Key = key("warmup_num_steps", K::COUNT, D::Int(1000), T::Acted).auto(Fill::WarmupSteps);
const WARMUP_TYPE: Key = key("warmup_type", K::OneOf(&["log", "linear"]), D::Text("log"), T::Acted);
const TOTAL_STEPS: Key = key("total_num_steps", K::ONE_UP, D::Null, T::Acted).auto(Fill::TotalSteps);
const LAST_BATCH: Key = key(
    "last_batch_iteration",
    K::INT,
    D::Int(-1),
    T::Refused("where a schedule resumes is read from the checkpoint; remove the key"),
);

const WARMUP_LR: &[Key] = &[
    WARMUP_MIN_LR,
    key("warmup_max_lr", K::POSITIVE, D::Null, T::Acted).auto(Fill::LearningRate),
    WARMUP_STEPS,
    WARMUP_TYPE,
    LAST_BATCH,
];

const WARMUP_DECAY_LR: &[Key] = &[
    TOTAL_STEPS,
    WARMUP_MIN_LR,
    key("warmup_max_lr", K::POSITIVE, D::Num(1e-3), T::Acted).auto(Fill::LearningRate),
    WARMUP_STEPS,
    WARMUP_TYPE,
    LAST_BATCH,
];

const WARMUP_COSINE_LR: &[Key] = &[
    TOTAL_STEPS,
    key("warmup_min_ratio", K::FRACTION, D::Num(0.0), T::Acted),
    WARMUP_STEPS,
    key("cos_min_ratio", K::FRACTION, D::Num(1e-4), T::Acted),
    WARMUP_TYPE,
    LAST_BATCH,
];

const ONE_CYCLE: &[Key] = &[
    key("cycle_min_lr", K::POSITIVE, D::Null, T::Acted),
    key("cycle_max_lr", K::POSITIVE, D::Null, T::Acted),
    key("decay_lr_rate", K::POSITIVE, D::Num(0.0), T::Acted),
    key("cycle_first_step_size", K::ONE_UP, D::Int(2000), T::Acted),
    key("cycle_second_step_size", K::ONE_UP, D::Null, T::Acted),
    key("cycle_first_stair_count", K::COUNT, D::Int(0), T::Acted),
    key("cycle_second_stair_count", K::COUNT, D::Null, T::Acted),
    key("decay_step_size", K::COUNT, D::Int(0), T::Acted),
    key("cycle_momentum", K::Bool, D::Bool(true), T::Acted),
    key("cycle_min_mom", K::Decay, D::Num(0.8), T::Acted),
    key("cycle_max_mom", K::Decay, D::Num(0.9), T::Acted),
    key("decay_mom_rate", K::POSITIVE, D::Num(0.0), T::Acted),
    LAST_BATCH,
];

const LR_RANGE_TEST: &[Key] = &[
    key("lr_range_test_min_lr", K::POSITIVE, D::Num(1e-3), T::Acted),
    key("lr_range_test_step_size", K::ONE_UP, D::Int(2000), T::Acted),
    key("lr_range_test_step_rate", K::POSITIVE, D::Num(1.0), T::Acted),
    key("lr_range_test_staircase", K::Bool, D::Bool(false), T::Acted),
    LAST_BATCH,
];

/// `scheduler`.
pub(in crate::config) static SCHEDULERS: Tagged = Tagged {
    what: "scheduler",
    variants: &[
        ("WarmupLR", WARMUP_LR),
        ("WarmupDecayLR", WARMUP_DECAY_LR),
        ("WarmupCosineLR", WARMUP_COSINE_LR),
        ("OneCycle", ONE_CYCLE),
        ("LRRangeTest", LR_RANGE_TEST),
    ],
    refused: &[],
    beside: &[],
};
