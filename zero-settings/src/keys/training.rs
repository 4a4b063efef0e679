//! `optimizer` and `scheduler`: parameters of each type, named as in DeepSpeed's and PyTorch's constructors.

use crate::auto::Fill;
use crate::rule::{Fate as T, Key, Kind as K, Tagged, keys};

const KERNEL: T = T::no_effect("it selects a PyTorch kernel");
const STATE: T = T::refused("moments are stored in fp32, or in bf16 with `bf16.bf16_optimizer_states`; remove the key");
const NO_SUCH_RULE: T = T::refused("this variant of the optimizer is not implemented; remove the key");
const FREED: T = T::no_effect("gradients are always freed");
const CLIPS: T = T::refused("clipping is set by the top-level key `gradient_clipping`; move the value there");
const RESUMES: T = T::refused("a schedule resumes at the step in the checkpoint; remove the key");
const SHAPES: K = K::OneOf("log linear");

/// Parameters of Adam and AdamW.
const ADAM: &[Key] = keys! {
    lr = 1e-3 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    betas = [0.9, 0.999] => K::Betas, T::ACTED.auto(Fill::Betas);
    eps = 1e-8 => K::POSITIVE, T::ACTED.auto(Fill::Epsilon);
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    adam_w_mode = true, torch_adam = false, bias_correction = true => K::Bool, T::ACTED;
    amsgrad = false => K::Bool, NO_SUCH_RULE;
    capturable = false => K::Bool, KERNEL;
    fp32_optimizer_states = true => K::Bool, STATE;
    set_grad_none = true => K::Bool, FREED;
    fused = false, foreach = false => K::Bool, KERNEL;
    maximize = false, differentiable = false => K::Bool, NO_SUCH_RULE;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

/// Parameters of LAMB, as DeepSpeed's `FusedLamb` names them.
const LAMB: &[Key] = keys! {
    lr = 1e-3 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    betas = [0.9, 0.999] => K::Betas, T::ACTED.auto(Fill::Betas);
    eps = 1e-8 => K::POSITIVE, T::ACTED.auto(Fill::Epsilon);
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    bias_correction = true => K::Bool, T::ACTED;
    max_coeff = 10.0, min_coeff = 0.01 => K::POSITIVE, T::ACTED;
    eps_inside_sqrt = false, amsgrad = false => K::Bool, NO_SUCH_RULE;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

const SGD: &[Key] = keys! {
    lr = 1e-3 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    momentum = 0 => K::POSITIVE, T::ACTED;
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    nesterov = false => K::Bool, T::ACTED;
    dampening = 0 => K::NUM, NO_SUCH_RULE;
    fused = false, foreach = false => K::Bool, KERNEL;
    maximize = false, differentiable = false => K::Bool, NO_SUCH_RULE;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

const LION: &[Key] = keys! {
    lr = 1e-3 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    betas = [0.9, 0.999] => K::Betas, T::ACTED.auto(Fill::Betas);
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    fp32_optimizer_states = true => K::Bool, STATE;
    set_grad_none = true => K::Bool, FREED;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

const ADAGRAD: &[Key] = keys! {
    lr = 1e-2 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    eps = 1e-10 => K::POSITIVE, T::ACTED.auto(Fill::Epsilon);
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    lr_decay = 0, initial_accumulator_value = 0 => K::POSITIVE, NO_SUCH_RULE;
    amsgrad = false => K::Bool, NO_SUCH_RULE;
    fp32_optimizer_states = true => K::Bool, STATE;
    fused = false, foreach = false => K::Bool, KERNEL;
    maximize = false, differentiable = false => K::Bool, NO_SUCH_RULE;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

/// Parameters of Muon and of its AdamW, as in DeepSpeed; `adjust_lr_fn` and `nesterov` as in PyTorch.
const MUON: &[Key] = keys! {
    lr = 0.02 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    muon_lr = null, adam_lr = null => K::POSITIVE, T::ACTED;
    momentum = 0.95 => K::POSITIVE, T::ACTED;
    nesterov = true => K::Bool, T::ACTED;
    weight_decay = 0 => K::POSITIVE, T::ACTED.auto(Fill::WeightDecay);
    adjust_lr_fn = "original" => K::OneOf("original match_rms_adamw"), T::ACTED;
    betas = [0.9, 0.95] => K::Betas, T::ACTED.auto(Fill::Betas);
    eps = 1e-10 => K::POSITIVE, T::ACTED.auto(Fill::Epsilon);
    ns_method = "gram" => K::OneOf("gram standard"), T::ACTED;
    adam_w_mode = true => K::Bool, NO_SUCH_RULE;
    max_grad_norm = 0 => K::POSITIVE, CLIPS;
};

/// `optimizer`.
pub(crate) static OPTIMIZERS: Tagged = Tagged {
    what: "optimizer",
    variants: &[
        ("AdamW", ADAM),
        ("Adam", ADAM),
        ("Lamb", LAMB),
        ("SGD", SGD),
        ("Lion", LION),
        ("Adagrad", ADAGRAD),
        ("Muon", MUON),
    ],
    refused: &["OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD"],
    beside: keys! { legacy_fusion = false => K::Bool, KERNEL; },
};

const WARMUP_LR: &[Key] = keys! {
    warmup_min_lr = 0 => K::POSITIVE, T::ACTED.auto(Fill::MinLearningRate);
    warmup_max_lr = null => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    warmup_num_steps = 1000 => K::COUNT, T::ACTED.auto(Fill::WarmupSteps);
    warmup_type = "log" => SHAPES, T::ACTED;
    last_batch_iteration = -1 => K::INT, RESUMES;
};

const WARMUP_DECAY_LR: &[Key] = keys! {
    total_num_steps = null => K::ONE_UP, T::ACTED.auto(Fill::TotalSteps);
    warmup_min_lr = 0 => K::POSITIVE, T::ACTED.auto(Fill::MinLearningRate);
    warmup_max_lr = 1e-3 => K::POSITIVE, T::ACTED.auto(Fill::LearningRate);
    warmup_num_steps = 1000 => K::COUNT, T::ACTED.auto(Fill::WarmupSteps);
    warmup_type = "log" => SHAPES, T::ACTED;
    last_batch_iteration = -1 => K::INT, RESUMES;
};

const WARMUP_COSINE_LR: &[Key] = keys! {
    total_num_steps = null => K::ONE_UP, T::ACTED.auto(Fill::TotalSteps);
    warmup_min_ratio = 0 => K::FRACTION, T::ACTED;
    warmup_num_steps = 1000 => K::COUNT, T::ACTED.auto(Fill::WarmupSteps);
    cos_min_ratio = 1e-4 => K::FRACTION, T::ACTED;
    warmup_type = "log" => SHAPES, T::ACTED;
    last_batch_iteration = -1 => K::INT, RESUMES;
};

const ONE_CYCLE: &[Key] = keys! {
    cycle_min_lr = null, cycle_max_lr = null => K::Rates, T::ACTED;
    decay_lr_rate = 0 => K::POSITIVE, T::ACTED;
    cycle_first_step_size = 2000, cycle_second_step_size = null => K::ONE_UP, T::ACTED;
    cycle_first_stair_count = 0, cycle_second_stair_count = null, decay_step_size = 0 => K::COUNT, T::ACTED;
    cycle_momentum = true => K::Bool, T::ACTED;
    cycle_min_mom = 0.8, cycle_max_mom = 0.9 => K::Decays, T::ACTED;
    decay_mom_rate = 0 => K::POSITIVE, T::ACTED;
    last_batch_iteration = -1 => K::INT, RESUMES;
};

const LR_RANGE_TEST: &[Key] = keys! {
    lr_range_test_min_lr = 1e-3 => K::POSITIVE, T::ACTED;
    lr_range_test_step_size = 2000 => K::ONE_UP, T::ACTED;
    lr_range_test_step_rate = 1 => K::POSITIVE, T::ACTED;
    lr_range_test_staircase = false => K::Bool, T::ACTED;
    last_batch_iteration = -1 => K::INT, RESUMES;
};

/// `scheduler`.
pub(crate) static SCHEDULERS: Tagged = Tagged {
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
