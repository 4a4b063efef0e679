//! Resolution of options, and of a configuration file if there is one, into a [`ZeroPlan`].

use std::path::{Path, PathBuf};

use zero_core::config::Tier;
use zero_core::{Mesh, Stage};
use zero_kernels::Rule;

use super::backend::{BackendChoice, name};
use super::options::{Blocks, Dtype, Hyperparameters, OffloadChoice, OffloadTo, Options, ScheduleChoice, at_least_one};
use crate::config::{
    Auto, Batch, Context, Filled, LossScale, MixedPrecision, Offload, OffloadDevice, OptimizerPlan, Precision,
    ZeroPlan, ZeroPlanBuilder,
};
use crate::error::{Result, wrong};
use crate::loss_scale::DynamicLossScale;
use crate::schedule::Schedule;

const DEFAULT_RANKS: usize = 2;
const DEFAULT_LR: f64 = 1e-3;

/// Returns the plan for a model of this width.
pub(super) fn zero_plan(options: &Options, hidden_size: Option<usize>) -> Result<ZeroPlan> {
    check(&options.hyper, options.steps, options.ranks)?;
    if let Some(decay) = options.ema_decay.filter(|decay| !(*decay > 0.0 && *decay < 1.0)) {
        return Err(wrong("ema-decay", decay, "expected a number between 0 and 1, such as 0.999"));
    }
    let mut plan = match &options.config {
        Some(path) => from_config(options, path, hidden_size)?,
        None => from_options(options)?,
    };
    plan.zero.ema_decay = options.ema_decay;
    plan.zero.int8_optimizer_states = options.int8_optimizer_states;
    if options.int8_optimizer_states {
        let wrong = |expected| Err(wrong("int8-optimizer-states", true, expected));
        if plan.zero_config(0).offload.keeps_state(Tier::Disk) {
            return wrong(
                "keeps the moments in memory: offload no model state to a disk, or use --bf16-optimizer-states",
            );
        }
        if matches!(plan.rule(), Rule::Lamb { .. }) {
            return wrong("is not for LAMB, which reads its moments twice: use AdamW, or --bf16-optimizer-states");
        }
    }
    Ok(plan)
}

/// Returns the plan of a configuration file for a run of `steps` steps and a model of this width, and its `"auto"` values.
/// Without a width, an `"auto"` that depends on it has no value.
///
/// # Errors
///
/// [`TrainError`](crate::TrainError), as for a run.
pub fn outline(
    file: &Path,
    hyper: &Hyperparameters,
    steps: usize,
    ranks: Option<usize>,
    hidden_size: Option<usize>,
) -> Result<(ZeroPlan, Vec<Filled>)> {
    check(hyper, steps, ranks)?;
    let auto = auto(hyper, steps, hidden_size);
    let (mut plan, filled) =
        given_hyper(hyper).fill_file(file)?.outline(&Context { world: ranks, auto, ..Context::default() })?;
    complete(&mut plan, hyper, steps);
    check_against(hyper, file, &plan)?;
    Ok((plan, filled))
}

fn check(options: &Hyperparameters, steps: usize, ranks: Option<usize>) -> Result<()> {
    at_least_one(&[("ranks", ranks), ("batch", options.batch), ("accumulation", options.accumulation)])?;
    let Hyperparameters { lr, eps, weight_decay, clip, .. } = *options;
    for (option, value) in [("lr", lr), ("eps", eps), ("weight-decay", weight_decay), ("clip", clip)] {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
            return Err(wrong(option, value, "expected a number of 0 or more"));
        }
    }
    for (option, beta) in [("beta1", options.beta1), ("beta2", options.beta2)] {
        if let Some(beta) = beta.filter(|beta| !(0.0..1.0).contains(beta)) {
            return Err(wrong(option, beta, "expected 0 or more and less than 1"));
        }
    }
    if let Some(warmup) = options.warmup.filter(|&warmup| warmup >= steps && warmup > 0) {
        let expected = format!("expected fewer than the {steps} steps of the training");
        return Err(wrong("warmup", warmup, expected));
    }
    Ok(())
}

/// Returns AdamW's learning rate, betas, epsilon and weight decay.
fn adamw_values(options: &Hyperparameters) -> [f64; 5] {
    let Hyperparameters { lr, beta1, beta2, eps, weight_decay, .. } = *options;
    let given = [(lr, DEFAULT_LR), (beta1, 0.9), (beta2, 0.999), (eps, 1e-8), (weight_decay, 0.01)];
    given.map(|(given, default)| given.unwrap_or(default))
}

fn adamw(options: &Hyperparameters) -> OptimizerPlan {
    let [lr, beta_1, beta_2, epsilon, weight_decay] = adamw_values(options);
    let [beta_1, beta_2, epsilon, weight_decay] = [beta_1, beta_2, epsilon, weight_decay].map(|value| value as f32);
    OptimizerPlan { lr, rule: Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction: true } }
}

/// Returns the schedule that the options ask for: a warm-up from 0 to the optimizer's learning rate, and what follows.
fn schedule(options: &Hyperparameters, lr: f64, steps: usize) -> Option<Schedule> {
    let warmup_steps = options.warmup.unwrap_or(0);
    match options.schedule.unwrap_or(ScheduleChoice::Constant) {
        ScheduleChoice::Constant if warmup_steps == 0 => None,
        ScheduleChoice::Constant => Some(Schedule::Warmup { lr, warmup_steps }),
        shape => {
            let cosine = shape == ScheduleChoice::Cosine;
            // Of both papers that fall along a cosine.
            let floor = if options.is_recipe && cosine { 0.1 } else { 0.0 };
            let (total_steps, gentle) = (steps, options.is_recipe);
            Some(Schedule::Decay { lr, warmup_steps, total_steps, cosine, gentle, floor })
        }
    }
}

fn precision(dtype: Dtype) -> Precision {
    match dtype {
        Dtype::Fp32 => Precision::Fp32,
        Dtype::Bf16 => Precision::Bf16 { check_grad_overflow: true },
        Dtype::Fp16 => Precision::Fp16 { loss_scale: LossScale::Dynamic(DynamicLossScale::default()) },
    }
}

/// Returns the destination of offloaded state.
///
/// # Errors
///
/// [`TrainError`](crate::TrainError) for host memory if the backend computes in it.
pub(super) fn offload_to(options: &Options) -> Result<OffloadTo> {
    match (options.offload_to, options.backend) {
        (Some(OffloadTo::Host), BackendChoice::Cpu) => Err(wrong("offload-to", "host", OffloadTo::NOT_HOST)),
        (Some(given), _) => Ok(given),
        (None, BackendChoice::Cpu) => Ok(OffloadTo::Disk),
        (None, _) => Ok(OffloadTo::Host),
    }
}

fn offload_device(options: &Options) -> Result<OffloadDevice> {
    Ok(match offload_to(options)? {
        OffloadTo::Host => OffloadDevice::Cpu,
        OffloadTo::Disk => OffloadDevice::Nvme { path: options.swap_dir().to_path_buf() },
    })
}

/// Returns the settings that the options give.
fn given(options: &Options) -> Result<ZeroPlanBuilder> {
    let mut builder = given_hyper(&options.hyper);
    if let Some(stage) = options.stage {
        let stage = Stage::try_from(stage).map_err(|error| wrong("stage", stage, error.to_string()))?;
        builder = builder.stage(stage);
    }
    if options.bf16_optimizer_states {
        builder = builder.bf16_optimizer_states(true);
    }
    if let Some(ratio) = options.offload_ratio.filter(|ratio| !(0.0..=1.0).contains(ratio)) {
        return Err(wrong("offload-ratio", ratio, "expected a fraction from 0 to 1"));
    }
    let choice = options.offload.unwrap_or(OffloadChoice::None);
    if choice != OffloadChoice::None {
        let there = Offload::to(offload_device(options)?);
        let ratio = options.offload_ratio.unwrap_or(there.ratio);
        builder = builder.offload_optimizer(&Offload { ratio, ..there.clone() });
        if choice == OffloadChoice::All {
            builder = builder.offload_param(&there);
        }
    }
    if let Some(format) = options.quantized_gradients {
        builder = builder.quantized_gradients(true).quantized_gradients_format(&format.to_string());
    }
    if let Some(format) = options.quantized_weights {
        builder = builder.quantized_weights(true).quantized_weights_format(&format.to_string());
    }
    if let Some(size) = options.shard_size {
        builder = builder.shard_size(size);
    }
    if let Some(size) = options.secondary_shard_size {
        builder = builder.secondary_shard_size(size);
    }
    Ok(builder)
}

/// Returns the settings that hyperparameters give.
fn given_hyper(options: &Hyperparameters) -> ZeroPlanBuilder {
    let [_, beta_1, beta_2, ..] = adamw_values(options);
    let has_beta = options.beta1.is_some() || options.beta2.is_some();
    let mut builder = ZeroPlanBuilder::default();
    macro_rules! set {
        ($($value:expr => $setter:ident;)+) => {
            $(if let Some(value) = $value {
                builder = builder.$setter(value);
            })+
        };
    }
    set! {
        options.batch => micro_batch;
        options.accumulation => accumulation;
        options.lr => learning_rate;
        has_beta.then_some([beta_1, beta_2]) => betas;
        options.eps => epsilon;
        options.weight_decay => weight_decay;
        options.clip => gradient_clipping;
        options.dtype.map(MixedPrecision::from) => mixed_precision;
    }
    builder
}

fn from_options(options: &Options) -> Result<ZeroPlan> {
    let stage = options.stage.unwrap_or(3);
    let stage = Stage::try_from(stage).map_err(|error| wrong("stage", stage, error.to_string()))?;
    let hyper = &options.hyper;
    let there = offload_device(options)?;
    if let Some(ratio) = options.offload_ratio.filter(|_| matches!(options.offload, None | Some(OffloadChoice::None))) {
        let expected = "expected --offload optimizer or all too: it is the fraction of optimizer state to offload";
        return Err(wrong("offload-ratio", ratio, expected));
    }
    if let Some(format) = options.quantized_weights.filter(|_| !stage.shards_parameters()) {
        let expected = "expected --stage 3, where parameters are gathered for each use";
        return Err(wrong("quantized-weights", format, expected));
    }
    let ranks = options.ranks.unwrap_or(DEFAULT_RANKS);
    let groups_of = |option, size: Option<usize>| match size {
        Some(size) if Mesh::new(ranks, size).is_none() => {
            Err(wrong(option, size, format!("expected a number that divides the {ranks} ranks")))
        }
        size => Ok(size),
    };
    groups_of("shard-size", options.shard_size)?;
    if let Some(size) = groups_of("secondary-shard-size", options.secondary_shard_size)?
        && (options.shard_size.is_some() || !stage.shards_parameters() || size == 1)
    {
        let expected = "expected 2 or more, at stage 3, and without --shard-size, which already keeps gathers \
                        within its groups";
        return Err(wrong("secondary-shard-size", size, expected));
    }
    let builder = given(options)?.stage(stage).gradient_clipping(hyper.clip.unwrap_or(0.0));
    let builder = builder.precision(precision(hyper.dtype.unwrap_or(Dtype::Fp32)));
    let mut plan = builder.optimizer(adamw(hyper)).build(ranks)?;
    if let Some(first) = hyper.batch_ranks {
        plan.batch = Batch { global: plan.batch.global / ranks * first, ..plan.batch }.on(ranks);
    }
    if options.offload_activations {
        plan.offload_activations = Some(there);
    }
    let unless_said = if options.offload_activations { usize::MAX } else { 0 };
    plan.zero.checkpointed_blocks = options.checkpoint_activations.map_or(unless_said, |blocks| blocks.0);
    complete(&mut plan, hyper, options.steps);
    Ok(plan)
}

/// Returns the values for "auto".
fn auto(options: &Hyperparameters, steps: usize, hidden_size: Option<usize>) -> Auto {
    let [lr, beta_1, beta_2, epsilon, weight_decay] = adamw_values(options);
    Auto {
        hidden_size,
        micro_batch: Some(options.batch.unwrap_or(1)),
        accumulation: options.accumulation,
        learning_rate: Some(lr),
        weight_decay: Some(weight_decay),
        beta_1: Some(beta_1),
        beta_2: Some(beta_2),
        epsilon: Some(epsilon),
        total_steps: Some(steps),
        warmup_steps: Some(options.warmup.unwrap_or(0)),
        gradient_clipping: options.clip,
        mixed_precision: Some(options.dtype.unwrap_or(Dtype::Fp32).into()),
        save_16bit_model: None,
    }
}

/// Fills in what a file leaves to the program, and the program's own schedules.
fn complete(plan: &mut ZeroPlan, options: &Hyperparameters, steps: usize) {
    let lr = plan.optimizer.get_or_insert(adamw(options)).lr;
    if plan.schedule.is_none() {
        plan.schedule = schedule(options, lr, steps);
    }
}

fn from_config(options: &Options, path: &Path, hidden_size: Option<usize>) -> Result<ZeroPlan> {
    let config = given(options)?.fill_file(path)?;
    let world = options.ranks.or_else(|| config.processes().is_none().then_some(DEFAULT_RANKS));
    let (auto, batch_world) = (auto(&options.hyper, options.steps, hidden_size), options.hyper.batch_ranks);
    let mut plan = config.resolve(&Context { world, batch_world, auto })?;
    complete(&mut plan, &options.hyper, options.steps);
    check_against(&options.hyper, path, &plan)?;
    let (kept, device) = match (&plan.offload_optimizer, &plan.offload_param) {
        (None, None) => ("none", None),
        (Some(offload), None) => ("optimizer", Some(&offload.device)),
        (None, Some(offload)) => ("parameters", Some(&offload.device)),
        (Some(offload), Some(_)) => ("all", Some(&offload.device)),
    };
    if options.offload_activations && plan.offload_activations.is_none() {
        // With what the file offloads, if it offloads something.
        plan.offload_activations = Some(match device {
            Some(device) => device.clone(),
            None => offload_device(options)?,
        });
    }
    let (to, swap) = match device.or(plan.offload_activations.as_ref()) {
        None => ("none", None),
        Some(OffloadDevice::Cpu) => ("host", None),
        Some(OffloadDevice::Nvme { path }) => ("disk", Some(path)),
    };
    // As paths: `/nvme/` is `/nvme`.
    let given_swap = options.swap.as_ref().filter(|given| Some(*given) != swap);
    let shown = |path: &PathBuf| path.display().to_string();
    let or_nothing = |said: Option<String>| said.unwrap_or("none".into());
    let ratio = plan.offload_optimizer.as_ref().map_or(1.0, |offload| offload.ratio);
    let blocks = options.checkpoint_activations;
    if plan.zero.checkpointed_blocks == 0 {
        let unless_said = if options.offload_activations { usize::MAX } else { 0 };
        plan.zero.checkpointed_blocks = blocks.map_or(unless_said, |blocks| blocks.0);
    }
    let options = [
        ("checkpoint-activations", text(blocks), Blocks(plan.zero.checkpointed_blocks).to_string()),
        ("stage", text(options.stage), plan.zero.stage.number().to_string()),
        ("quantized-gradients", text(options.quantized_gradients), or_nothing(text(plan.zero.quantized_gradients))),
        ("quantized-weights", text(options.quantized_weights), or_nothing(text(plan.zero.quantized_weights))),
        (
            "bf16-optimizer-states",
            options.bf16_optimizer_states.then(|| true.to_string()),
            plan.zero.bf16_optimizer_states.to_string(),
        ),
        ("shard-size", text(options.shard_size), plan.shards().to_string()),
        ("secondary-shard-size", text(options.secondary_shard_size), or_nothing(text(plan.zero.secondary_shard_size))),
        ("offload", options.offload.map(name), kept.to_string()),
        ("offload-ratio", text(options.offload_ratio), ratio.to_string()),
        ("offload-to", options.offload_to.map(name), to.to_string()),
        ("swap", given_swap.map(shown), or_nothing(swap.map(shown))),
    ];
    agree(path, options)?;
    Ok(plan)
}

/// Rejects hyperparameters that contradict the file.
fn check_against(options: &Hyperparameters, path: &Path, plan: &ZeroPlan) -> Result<()> {
    let optimizer = plan.optimizer.unwrap_or_else(|| adamw(options));
    let (betas, epsilon) = optimizer.hyperparameters();
    // A rule has them in 32 bit.
    let rounded = |value: Option<f64>| text(value.map(|value| value as f32));
    let dtype = match plan.precision {
        Precision::Fp32 => "fp32",
        Precision::Bf16 { .. } => "bf16",
        Precision::Fp16 { .. } => "fp16",
    };
    let warmup_steps = match plan.schedule {
        Some(
            Schedule::Warmup { warmup_steps, .. }
            | Schedule::WarmupLr { warmup_steps, .. }
            | Schedule::WarmupDecayLr { warmup_steps, .. }
            | Schedule::WarmupCosineLr { warmup_steps, .. }
            | Schedule::Decay { warmup_steps, .. },
        ) => warmup_steps,
        _ => 0,
    };
    let lr = plan.schedule.as_ref().map_or(optimizer.lr, Schedule::top_lr);
    let shape = match plan.schedule {
        None | Some(Schedule::Constant(_) | Schedule::Warmup { .. } | Schedule::WarmupLr { .. }) => "constant",
        Some(Schedule::WarmupDecayLr { .. } | Schedule::Decay { cosine: false, .. }) => "linear",
        Some(Schedule::WarmupCosineLr { .. } | Schedule::Decay { .. }) => "cosine",
        Some(Schedule::OneCycle(_)) => "one cycle",
        Some(Schedule::LrRangeTest { .. }) => "a range test",
    };
    let is_first = options.batch_ranks.is_none();
    let options = [
        ("schedule", options.schedule.map(name), shape.to_string()),
        // A restart on other ranks has cut the same rows otherwise.
        ("batch", text(options.batch).filter(|_| is_first), plan.batch.micro.to_string()),
        ("accumulation", text(options.accumulation).filter(|_| is_first), plan.batch.accumulation.to_string()),
        ("lr", text(options.lr), lr.to_string()),
        ("beta1", rounded(options.beta1), said(betas.map(|betas| betas.0))),
        ("beta2", rounded(options.beta2), said(betas.map(|betas| betas.1))),
        ("eps", rounded(options.eps), said(epsilon)),
        ("weight-decay", rounded(options.weight_decay), optimizer.rule.weight_decay().to_string()),
        ("warmup", text(options.warmup), warmup_steps.to_string()),
        ("clip", text(options.clip), plan.gradient_clipping.unwrap_or(0.0).to_string()),
        ("dtype", options.dtype.map(name), dtype.to_string()),
    ];
    agree(path, options)
}

/// Rejects the first option whose given value differs from the file's.
fn agree(path: &Path, options: impl IntoIterator<Item = (&'static str, Option<String>, String)>) -> Result<()> {
    for (option, given, planned) in options {
        if let Some(given) = given.filter(|given| *given != planned) {
            let expected = format!("{} has {planned}; omit the option, or change the file", path.display());
            return Err(wrong(option, given, expected));
        }
    }
    Ok(())
}

fn text(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

fn said(value: Option<f32>) -> String {
    value.map_or_else(|| "none".into(), |value| value.to_string())
}
