//! From options, and a configuration file if there is one, to a [`ZeroPlan`].

use std::path::Path;

use zero_core::Stage;
use zero_models::Gpt2Config;

use super::BackendChoice;
use super::options::{Dtype, OffloadChoice, OffloadTo, Options};
use super::plan::wrong;
use crate::TrainError;
use crate::config::{
    Auto, Config, Context, LossScale, MixedPrecision, Offload, OffloadDevice, OptimizerPlan, Precision, SchedulePlan,
    WarmupType, ZeroPlan,
};

const DEFAULT_RANKS: usize = 2;
const DEFAULT_LR: f64 = 1e-3;

/// The plan for `model`.
pub(super) fn zero_plan(options: &Options, model: &Gpt2Config) -> Result<ZeroPlan, TrainError> {
    check(options)?;
    match &options.config {
        Some(path) => from_config(options, path, model),
        None => from_options(options),
    }
}

fn check(options: &Options) -> Result<(), TrainError> {
    let positive = |option, value: Option<usize>| match value {
        Some(0) => Err(wrong(option, 0, "expected at least 1")),
        _ => Ok(()),
    };
    positive("ranks", options.ranks)?;
    positive("batch", options.batch)?;
    positive("accumulation", options.accumulation)?;
    let finite_from_zero = |option, value: Option<f64>| match value {
        Some(value) if !(value.is_finite() && value >= 0.0) => {
            Err(wrong(option, value, "expected a number of 0 or more"))
        }
        _ => Ok(()),
    };
    finite_from_zero("lr", options.lr)?;
    finite_from_zero("eps", options.eps)?;
    finite_from_zero("weight-decay", options.weight_decay)?;
    finite_from_zero("clip", options.clip)?;
    for (option, beta) in [("beta1", options.beta1), ("beta2", options.beta2)] {
        if let Some(beta) = beta.filter(|beta| !(0.0..1.0).contains(beta)) {
            return Err(wrong(option, beta, "expected 0 or more and less than 1"));
        }
    }
    if let Some(warmup) = options.warmup.filter(|&warmup| warmup >= options.steps && warmup > 0) {
        let expected = format!("expected fewer than the {} steps of the training", options.steps);
        return Err(wrong("warmup", warmup, expected));
    }
    Ok(())
}

/// AdamW's learning rate, betas, epsilon and weight decay.
fn adamw_values(options: &Options) -> (f64, f64, f64, f64, f64) {
    (
        options.lr.unwrap_or(DEFAULT_LR),
        options.beta1.unwrap_or(0.9),
        options.beta2.unwrap_or(0.999),
        options.eps.unwrap_or(1e-8),
        options.weight_decay.unwrap_or(0.01),
    )
}

fn adamw(options: &Options) -> OptimizerPlan {
    let (lr, beta_1, beta_2, epsilon, weight_decay) = adamw_values(options);
    OptimizerPlan::AdamW { lr, beta_1, beta_2, epsilon, weight_decay }
}

fn warmup(options: &Options) -> Option<SchedulePlan> {
    options.warmup.filter(|&warmup| warmup > 0).map(|warmup_steps| SchedulePlan::WarmupLr {
        min_lr: 0.0,
        max_lr: options.lr.unwrap_or(DEFAULT_LR),
        warmup_steps,
        warmup_type: WarmupType::Linear,
    })
}

fn precision(dtype: Dtype) -> Precision {
    match dtype {
        Dtype::Fp32 => Precision::Fp32,
        Dtype::Bf16 => Precision::Bf16 { check_grad_overflow: true },
        Dtype::Fp16 => Precision::Fp16 {
            loss_scale: LossScale::Dynamic {
                initial_scale_power: 16,
                window: 1000,
                hysteresis: 2,
                consecutive_hysteresis: false,
                min_scale: 1.0,
            },
        },
    }
}

/// Where what is offloaded goes.
///
/// # Errors
///
/// [`TrainError`] for the host's memory where the backend computes in it.
pub(super) fn offload_to(options: &Options) -> Result<OffloadTo, TrainError> {
    match (options.offload_to, options.backend) {
        (Some(OffloadTo::Host), BackendChoice::Cpu) => {
            let expected = "expected disk: the cpu backend computes in the host's memory, so nothing would move; or use \
                            --backend cuda";
            Err(wrong("offload-to", "host", expected))
        }
        (Some(given), _) => Ok(given),
        (None, BackendChoice::Cpu) => Ok(OffloadTo::Disk),
        (None, _) => Ok(OffloadTo::Host),
    }
}

fn from_options(options: &Options) -> Result<ZeroPlan, TrainError> {
    let stage = options.stage.unwrap_or(3);
    let stage = Stage::try_from(stage).map_err(|error| wrong("stage", stage, error.to_string()))?;
    let mut builder = ZeroPlan::builder(stage)
        .micro_batch(options.batch.unwrap_or(1))
        .accumulation(options.accumulation.unwrap_or(1))
        .gradient_clipping(options.clip.unwrap_or(0.0))
        .precision(precision(options.dtype.unwrap_or(Dtype::Fp32)))
        .optimizer(adamw(options));
    if let Some(schedule) = warmup(options) {
        builder = builder.schedule(schedule);
    }
    let there = Offload::to(match offload_to(options)? {
        OffloadTo::Host => OffloadDevice::Cpu,
        OffloadTo::Disk => OffloadDevice::Nvme { path: options.swap.clone() },
    });
    let choice = options.offload.unwrap_or(OffloadChoice::None);
    if choice != OffloadChoice::None {
        builder = builder.offload_optimizer(&there);
    }
    if choice == OffloadChoice::All {
        builder = builder.offload_param(&there);
    }
    Ok(builder.build(options.ranks.unwrap_or(DEFAULT_RANKS))?)
}

fn from_config(options: &Options, path: &Path, model: &Gpt2Config) -> Result<ZeroPlan, TrainError> {
    let config = Config::from_file(path)?;
    let (lr, beta_1, beta_2, epsilon, weight_decay) = adamw_values(options);
    let auto = Auto {
        hidden_size: Some(model.n_embd),
        micro_batch: Some(options.batch.unwrap_or(1)),
        accumulation: options.accumulation,
        learning_rate: Some(lr),
        weight_decay: Some(weight_decay),
        beta_1: Some(beta_1),
        beta_2: Some(beta_2),
        epsilon: Some(epsilon),
        total_steps: Some(options.steps),
        warmup_steps: Some(options.warmup.unwrap_or(0)),
        gradient_clipping: options.clip,
        mixed_precision: Some(match options.dtype {
            None | Some(Dtype::Fp32) => MixedPrecision::No,
            Some(Dtype::Fp16) => MixedPrecision::Fp16,
            Some(Dtype::Bf16) => MixedPrecision::Bf16,
        }),
        save_16bit_model: None,
    };
    let world = options.ranks.or_else(|| config.processes().is_none().then_some(DEFAULT_RANKS));
    let mut plan = config.resolve(&Context { world, auto })?;
    plan.optimizer.get_or_insert(adamw(options));
    if plan.schedule.is_none() {
        plan.schedule = warmup(options);
    }
    check_against(options, path, &plan)?;
    Ok(plan)
}

/// Options that say something else than the file.
fn check_against(options: &Options, path: &Path, plan: &ZeroPlan) -> Result<(), TrainError> {
    let optimizer = plan.optimizer.unwrap_or_else(|| adamw(options));
    let (beta_1, beta_2, epsilon, weight_decay) = match optimizer {
        OptimizerPlan::AdamW { beta_1, beta_2, epsilon, weight_decay, .. }
        | OptimizerPlan::Adam { beta_1, beta_2, epsilon, weight_decay, .. } => {
            (Some(beta_1), Some(beta_2), Some(epsilon), weight_decay)
        }
        OptimizerPlan::Lion { beta_1, beta_2, weight_decay, .. } => (Some(beta_1), Some(beta_2), None, weight_decay),
        OptimizerPlan::Adagrad { epsilon, weight_decay, .. } => (None, None, Some(epsilon), weight_decay),
        OptimizerPlan::Sgd { weight_decay, .. } => (None, None, None, weight_decay),
    };
    let dtype = match plan.precision {
        Precision::Fp32 => Dtype::Fp32,
        Precision::Bf16 { .. } => Dtype::Bf16,
        Precision::Fp16 { .. } => Dtype::Fp16,
    };
    let warmup_steps = match plan.schedule {
        Some(
            SchedulePlan::WarmupLr { warmup_steps, .. }
            | SchedulePlan::WarmupDecayLr { warmup_steps, .. }
            | SchedulePlan::WarmupCosineLr { warmup_steps, .. },
        ) => warmup_steps,
        _ => 0,
    };
    let conflicts: [(&'static str, Option<String>, String); 11] = [
        ("stage", text(options.stage), plan.stage.number().to_string()),
        ("batch", text(options.batch), plan.batch.micro.to_string()),
        ("accumulation", text(options.accumulation), plan.batch.accumulation.to_string()),
        ("lr", text(options.lr), optimizer.learning_rate().to_string()),
        ("beta1", text(options.beta1), said(beta_1)),
        ("beta2", text(options.beta2), said(beta_2)),
        ("eps", text(options.eps), said(epsilon)),
        ("weight-decay", text(options.weight_decay), weight_decay.to_string()),
        ("warmup", text(options.warmup), warmup_steps.to_string()),
        ("clip", text(options.clip), plan.gradient_clipping.unwrap_or(0.0).to_string()),
        ("dtype", options.dtype.map(|dtype| format!("{dtype:?}")), format!("{dtype:?}")),
    ];
    for (option, given, planned) in conflicts {
        if let Some(given) = given.filter(|given| *given != planned) {
            let expected = format!("{} says {planned}; leave the option out, or change the file", path.display());
            return Err(wrong(option, given, expected));
        }
    }
    Ok(())
}

fn text(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

fn said(value: Option<f64>) -> String {
    value.map_or_else(|| "nothing of the kind".into(), |value| value.to_string())
}
