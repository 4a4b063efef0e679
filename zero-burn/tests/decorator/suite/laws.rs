//! Laws that must hold over any inner backend.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{AutodiffModule, Module};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_backend::Backend;
use zero_burn::Zero;
use zero_burn::config::{Float, Offload, Tier, ZeroConfig};
use zero_burn::module::{collect_grads, grad_norm, mark, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{host_bytes, rank_stats};
use zero_core::Stage;

use super::model::{Awkward, tokens};
use super::{config, ranks};

type Ad<B> = Autodiff<Zero<B>>;

/// Asserts that two runs gave the same bits. On devices, Burn's fusion compiles different kernels for a shard and for the full tensor, and
/// the compiler may fuse a product and a sum in only one of them: there, values must agree to the last digits of fp32.
fn assert_same<B: Backend>(a: &[Vec<f32>], b: &[Vec<f32>], what: &dyn std::fmt::Debug) {
    if std::any::type_name::<B>().contains("CubeBackend") {
        assert_eq!(a.len(), b.len(), "{what:?}");
        for (a, b) in a.iter().zip(b) {
            assert_eq!(a.len(), b.len(), "{what:?}");
            // Steps carry a difference on.
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
            assert!(a.iter().zip(b).all(close), "{what:?}: {a:?} against {b:?}");
        }
        return;
    }
    let bits = |runs: &[Vec<f32>]| -> Vec<Vec<u32>> {
        runs.iter().map(|run| run.iter().map(|x| x.to_bits()).collect()).collect()
    };
    assert!(bits(a) == bits(b), "{what:?}: {a:?} against {b:?}");
}

/// The composition of a step from micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Steps {
    /// Forward, backward, step; only `prepare` is called.
    Plain,
    /// Two micro-batches through Burn's accumulator.
    Accumulate,
    /// Two forward passes, then two backward passes.
    TwoForwards,
    /// An evaluation after every step.
    Evaluate,
    /// A layer that only odd ranks use.
    RankDependent,
    /// Two micro-batches without a second mark; one rank uses a layer in the first, all ranks in the second.
    RankDependentAccumulate,
    /// A copy of the module from before the step is evaluated after the step and dropped.
    KeepBefore,
}

/// Returns the losses of each rank over some steps with any Burn optimizer.
fn train<B: Backend, O: Optimizer<Awkward<Ad<B>>, Ad<B>>>(
    world: usize,
    config: &ZeroConfig,
    steps: Steps,
    optimizer: impl Fn() -> O + Sync,
) -> Vec<Vec<f32>> {
    ranks::<B, _>(world, config, |device| {
        let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
        let mut optimizer = optimizer();
        let mut losses = Vec::new();
        let (rank, per_rank) = (device.rank(), 12 / world);
        for step in 0..6 {
            let batch = |micro: usize| {
                let first = (step * 2 + micro) * 12 + rank * per_rank;
                tokens::<Ad<B>>(first..first + per_rank, &device)
            };
            let optional = steps != Steps::RankDependent || (rank % 2 == 1 && step % 2 == 0);
            let backward = |model: &Awkward<Ad<B>>, loss: Tensor<Ad<B>, 1>, losses: &mut Vec<f32>| {
                losses.push(loss.clone().into_data().iter::<f32>().next().unwrap());
                GradientsParams::from_grads(loss.backward(), model)
            };
            let grads = match steps {
                Steps::Plain => {
                    let loss = model.loss(batch(0), optional);
                    backward(&model, loss, &mut losses)
                }
                Steps::Evaluate | Steps::RankDependent | Steps::KeepBefore => {
                    let loss = model.loss(batch(0), optional);
                    let grads = backward(&model, loss, &mut losses);
                    collect_grads::<Ad<B>, _>(grads, &model)
                }
                Steps::Accumulate | Steps::RankDependentAccumulate => {
                    let mut accumulator = GradientsAccumulator::new();
                    for micro in 0..2 {
                        let optional = steps == Steps::Accumulate || rank == 0 || micro == 1;
                        if steps == Steps::Accumulate {
                            mark::<Ad<B>, _>(&model);
                        }
                        let loss = model.loss(batch(micro), optional);
                        let grads = backward(&model, loss, &mut losses);
                        accumulator.accumulate(&model, collect_grads::<Ad<B>, _>(grads, &model));
                    }
                    accumulator.grads()
                }
                Steps::TwoForwards => {
                    let (first, second) = (model.loss(batch(0), optional), model.loss(batch(1), optional));
                    let mut accumulator = GradientsAccumulator::new();
                    for loss in [first, second] {
                        let grads = backward(&model, loss, &mut losses);
                        accumulator.accumulate(&model, collect_grads::<Ad<B>, _>(grads, &model));
                    }
                    accumulator.grads()
                }
            };
            let before = (steps == Steps::KeepBefore).then(|| model.clone());
            model = optimizer.step(0.05, model, grads);
            if let Some(before) = before {
                if rank == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(3));
                }
                let distance = (before.valid().twice.weight.val() - model.valid().twice.weight.val()).abs().sum();
                losses.push(distance.into_data().iter::<f32>().next().unwrap());
            }
            if steps == Steps::Evaluate {
                let loss = model.valid().loss(tokens::<Zero<B>>(0..3, &device), optional);
                losses.push(loss.into_data().iter::<f32>().next().unwrap());
            }
        }
        losses
    })
}

fn adamw<B: Backend>() -> impl Optimizer<Awkward<Ad<B>>, Ad<B>> {
    AdamWConfig::new().init()
}

/// Every stage gives the same bits at the same number of ranks, whatever a step consists of.
pub fn stages_agree<B: Backend>(steps: Steps) {
    for world in 1..=4 {
        let reference = train::<B, _>(world, &config(Stage::DataParallel), steps, adamw::<B>);
        let first = reference.iter().map(|rank| rank[0]).sum::<f32>();
        let last = reference.iter().map(|rank| *rank.last().unwrap()).sum::<f32>();
        assert!(
            steps == Steps::KeepBefore || last < first,
            "{steps:?}, {world} ranks: the loss does not fall: {first} to {last}"
        );
        for stage in &Stage::ALL[1..] {
            let losses = train::<B, _>(world, &config(*stage), steps, adamw::<B>);
            assert_same::<B>(&reference, &losses, &format!("{steps:?}, {world} ranks, stage {stage}"));
        }
        for changed in [
            ZeroConfig { prefetch_bucket_size: 0, ..config(Stage::Parameters) },
            ZeroConfig { param_persistence_threshold: 40, max_live_parameters: 50, ..config(Stage::Parameters) },
            ZeroConfig { max_reuse_distance: 1 << 20, reduce_bucket_size: 1 << 20, ..config(Stage::Parameters) },
        ] {
            let losses = train::<B, _>(world, &changed, steps, adamw::<B>);
            assert_same::<B>(&reference, &losses, &format!("{steps:?}, {world} ranks, {changed:?}"));
        }
    }
}

/// The same global batch over 1, 2, 3 and 4 ranks gives the same training.
pub fn worlds_agree<B: Backend>() {
    let mean = |losses: Vec<Vec<f32>>| -> Vec<f64> {
        let world = losses.len() as f64;
        (0..losses[0].len()).map(|i| losses.iter().map(|rank| f64::from(rank[i])).sum::<f64>() / world).collect()
    };
    let one = mean(train::<B, _>(1, &config(Stage::Parameters), Steps::Plain, adamw::<B>));
    for world in 2..=4 {
        let many = mean(train::<B, _>(world, &config(Stage::Parameters), Steps::Plain, adamw::<B>));
        for (a, b) in one.iter().zip(&many) {
            assert!((a - b).abs() / a < 1e-5, "{world} ranks: {one:?} against {many:?}");
        }
    }
}

/// Reductions along rows, written by hand, after an operation on another tensor of the same shape. Burn's fusion makes one kernel of them,
/// and burn-cubecl-fusion 0.21 panics on the device's thread in some (<https://github.com/tracel-ai/burn/issues/5292>).
pub fn reductions_are_right<B: Backend>() {
    type T<B> = Tensor<Zero<B>, 2>;
    let (rows, columns) = (6, 8);
    let value = |i: usize| ((i * 7 + 3) % 11) as f32 / 8.0 - 0.5;
    let values: Vec<f32> = (0..rows * columns).map(value).collect();
    let check = |what: &str, reduce: fn(T<B>) -> T<B>, right: fn(&[f64], f64) -> f64| {
        let made = ranks::<B, _>(1, &config(Stage::DataParallel), |device| {
            let of = |values: &[f32]| Tensor::<Zero<B>, 1>::from_floats(values, &device).reshape([rows, columns]);
            let read = |x: T<B>| x.into_data().to_vec::<f32>().expect("floats in fp32");
            // The device's tuner measures the reduction alone, and keeps its choice for the one behind another operation.
            [false, true].map(|is_behind_another| {
                // What is read is in memory, and fusion begins anew.
                let (x, other) = (of(&values), of(&values));
                drop((read(x.clone()), read(other.clone())));
                let before = is_behind_another.then(|| other.clone() * other.clone());
                let made = reduce(x.clone()) + x;
                let after = (!is_behind_another).then(|| made.clone() * other.clone() * other.clone());
                let made = read(made);
                let (other, before) = (read(other), before.map(read).unwrap_or_default());
                assert!(before.iter().zip(&other).all(|(squared, x)| *squared == x * x), "{what}: {before:?}");
                drop(after.map(read));
                made
            })
        });
        let row = |row: &[f32]| -> Vec<f64> {
            let row: Vec<f64> = row.iter().copied().map(f64::from).collect();
            row.iter().map(|&x| right(&row, x) + x).collect()
        };
        let right: Vec<f64> = values.chunks(columns).flat_map(row).collect();
        let close = |(made, right): (&f32, &f64)| (f64::from(*made) - right).abs() < 1e-5;
        for made in made.as_flattened() {
            assert!(
                made.len() == right.len() && made.iter().zip(&right).all(close),
                "{what}: {made:?} against {right:?}"
            );
        }
    };
    let normalized = |x: T<B>| {
        let centered = x.clone() - x.mean_dim(1);
        centered.clone() / (centered.clone() * centered).mean_dim(1).add_scalar(1e-5).sqrt()
    };
    check("normalized", normalized, |row, x| {
        let mean = |of: &dyn Fn(f64) -> f64| row.iter().map(|&x| of(x)).sum::<f64>() / row.len() as f64;
        let center = mean(&|x| x);
        (x - center) / (mean(&|x| (x - center).powi(2)) + 1e-5).sqrt()
    });
    check("mean", |x| x.clone() - x.mean_dim(1), |row, x| x - row.iter().sum::<f64>() / row.len() as f64);
    check("sum", |x| x.clone() / x.sum_dim(1), |row, x| x / row.iter().sum::<f64>());
    check("prod", |x| x.clone() * x.prod_dim(1), |row, x| x * row.iter().product::<f64>());
    check("max", |x| x.clone() - x.max_dim(1), |row, x| x - row.iter().copied().fold(f64::MIN, f64::max));
    check("min", |x| x.clone() - x.min_dim(1), |row, x| x - row.iter().copied().fold(f64::MAX, f64::min));
    check(
        "largest",
        |x| x.clone() / x.max_abs_dim(1),
        |row, x| x / row.iter().fold(0.0, |most: f64, x| most.max(x.abs())),
    );
    let softmax = |x| burn::tensor::activation::softmax(x, 1);
    check("softmax", softmax, |row, x| x.exp() / row.iter().map(|x| x.exp()).sum::<f64>());
    let log_softmax = |x| burn::tensor::activation::log_softmax(x, 1);
    check("log softmax", log_softmax, |row, x| x - row.iter().map(|x| x.exp()).sum::<f64>().ln());
}

/// Burn's optimizers, unmodified, give the same bits at every stage.
pub fn optimizers_work<B: Backend>() {
    macro_rules! agree {
        ($name:literal, $config:expr) => {{
            let run = |stage| train::<B, _>(3, &config(stage), Steps::Plain, || $config.init());
            let reference = run(Stage::DataParallel);
            assert_ne!(reference[0][0], reference[0][5], $name);
            for stage in &Stage::ALL[1..] {
                assert_same::<B>(&reference, &run(*stage), &format!("{} at stage {stage}", $name));
            }
        }};
    }
    agree!(
        "AdamW, amsgrad, cautious",
        AdamWConfig::new().with_amsgrad(true).with_cautious_weight_decay(true).with_weight_decay(0.1)
    );
    agree!("Adam", AdamConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.01))));
    agree!(
        "Sgd with momentum",
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .with_weight_decay(Some(WeightDecayConfig::new(0.01)))
    );
    agree!("Sgd", SgdConfig::new());
    agree!("AdaGrad", AdaGradConfig::new());
    agree!("RmsProp", RmsPropConfig::new());
    agree!(
        "RmsProp centered",
        RmsPropConfig::new().with_centered(true).with_weight_decay(Some(WeightDecayConfig::new(0.01)))
    );
    agree!("clipped by norm", AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.01))));
    agree!("clipped by value", AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(0.001))));
}

/// The fused AdamW gives the numbers of Burn's, at every stage.
pub fn fused_adamw_is_burns<B: Backend>() {
    let burns = || AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init::<Ad<B>, Awkward<Ad<B>>>();
    for world in [1, 3] {
        let reference = train::<B, _>(world, &config(Stage::DataParallel), Steps::Plain, burns);
        for stage in Stage::ALL {
            let losses = train::<B, _>(world, &config(stage), Steps::Plain, || Fused::new(Rule::adamw()));
            assert_same::<B>(&reference, &losses, &format!("{world} ranks, stage {stage}"));
        }
    }
}

/// Every fused rule, in groups, gives the same bits at every stage, and continues from its record.
pub fn fused_rules_work<B: Backend>() {
    let momentum = Rule::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };
    let (adam, lamb) = (Rule::adam().with_weight_decay(0.01), Rule::lamb().with_weight_decay(0.01));
    for rule in [adam, lamb, Rule::sgd(), momentum, Rule::lion(), Rule::adagrad()] {
        let optimizer = || {
            Fused::<Ad<B>>::new(rule)
                .with_group(rule.with_weight_decay(0.0), 1.0, |param| param.shape.len() < 2)
                .with_group(Rule::sgd(), 0.1, |param| param.path == "twice.weight")
        };
        let run = |stage| train::<B, _>(3, &config(stage), Steps::Plain, optimizer);
        let reference = run(Stage::DataParallel);
        assert!(reference[0][5] < reference[0][0], "{rule:?}: {reference:?}");
        for stage in &Stage::ALL[1..] {
            assert_same::<B>(&reference, &run(*stage), &format!("{rule:?} at stage {stage}"));
        }
    }
    for stage in Stage::ALL {
        ranks::<B, _>(2, &config(stage), |device| {
            let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
            let gradients = |model: &Awkward<Ad<B>>| {
                let loss = model.loss(tokens(device.rank()..device.rank() + 2, &device), true);
                collect_grads::<Ad<B>, _>(GradientsParams::from_grads(loss.backward(), model), model)
            };
            let weights =
                |model: &Awkward<Ad<B>>| model.twice.weight.val().into_data().iter::<f32>().collect::<Vec<_>>();
            type Opt<B> = Fused<Ad<B>>;
            let mut optimizer = Opt::<B>::new(Rule::adamw());
            let grads = gradients(&model);
            model = optimizer.step(0.05, model, grads);

            use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
            let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
            let record = Optimizer::<Awkward<Ad<B>>, Ad<B>>::to_record(&optimizer);
            let bytes = recorder.record(record, ()).unwrap();
            let mut restored = zero_burn::load_state(|| {
                Optimizer::<Awkward<Ad<B>>, Ad<B>>::load_record(
                    Opt::<B>::new(Rule::adamw()),
                    recorder.load(bytes.clone(), &device).unwrap(),
                )
            });
            // Recording it again before it is used gives the same: ranks read loaded state in one order.
            let record = Optimizer::<Awkward<Ad<B>>, Ad<B>>::to_record(&restored);
            assert_eq!(recorder.record(record, ()).unwrap(), bytes);
            let id = model.twice.weight.id;
            let moment = restored.state(id, "exp_avg").unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            assert_eq!(moment.len(), 100);
            assert!(restored.state(id, "momentum_buffer").is_none());

            let continued = optimizer.step(0.05, model.clone(), gradients(&model));
            let resumed = restored.step(0.05, model.clone(), gradients(&model));
            assert_same::<B>(&[weights(&continued)], &[weights(&resumed)], &stage);

            assert!(restored.set_state(id, "exp_avg", &moment));
            assert!(!restored.set_state(id, "exp_avg", &moment[1..]));
            let read = restored.state(id, "exp_avg").unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            assert_eq!(read, moment);
        });
    }
}

/// A moving average follows the weights by PyTorch's formula, and can be exchanged with them and back.
pub fn averages_follow_the_weights<B: Backend>() {
    for stage in [Stage::DataParallel, Stage::Gradients, Stage::Parameters] {
        let config = ZeroConfig { ema_decay: Some(0.9), ..config(stage) };
        ranks::<B, _>(2, &config, |device| {
            let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
            let mut optimizer = Fused::<Ad<B>>::new(Rule::adamw());
            let weights =
                |model: &Awkward<Ad<B>>| model.twice.weight.val().into_data().iter::<f32>().collect::<Vec<_>>();
            let mut expected = Vec::new();
            for step in 0..3 {
                let first = 2 * step + device.rank();
                let loss = model.loss(tokens(first..first + 2, &device), true);
                let grads = collect_grads::<Ad<B>, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
                model = optimizer.step(0.05, model, grads);
                let now = weights(&model);
                match step {
                    0 => expected = now,
                    _ => expected.iter_mut().zip(now).for_each(|(average, now)| *average += 0.1 * (now - *average)),
                }
            }
            let before = weights(&model);
            model = optimizer.swap_averages(model);
            let there = weights(&model);
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6;
            assert!(there.len() == expected.len() && there.iter().zip(&expected).all(close), "{there:?}, {expected:?}");
            assert!(there != before);
            model = optimizer.swap_averages(model);
            assert_eq!(weights(&model), before, "{stage}");
        });
    }
    // What was done to a parameter since its last update stays, with a master too.
    let has_bf16 = std::any::type_name::<B>().contains("Flex");
    for param_dtype in [Float::F32, Float::Bf16].into_iter().take(if has_bf16 { 2 } else { 1 }) {
        let config = ZeroConfig { ema_decay: Some(0.9), param_dtype, ..config(Stage::Parameters) };
        ranks::<B, _>(2, &config, |device| {
            let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
            let mut optimizer = Fused::<Ad<B>>::new(Rule::adamw());
            let loss = model.loss(tokens(device.rank()..device.rank() + 2, &device), true);
            let grads = collect_grads::<Ad<B>, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
            model = optimizer.step(0.05, model, grads);
            model.twice.weight = model.twice.weight.map(|weight| weight.clamp(-0.125, 0.125).detach().require_grad());
            let weights =
                |model: &Awkward<Ad<B>>| model.twice.weight.val().into_data().iter::<f32>().collect::<Vec<_>>();
            let before = weights(&model);
            assert!(before.iter().all(|weight| weight.abs() <= 0.125));
            model = optimizer.swap_averages(model);
            assert!(weights(&model).iter().any(|weight| weight.abs() > 0.125), "the average is of before");
            model = optimizer.swap_averages(model);
            assert_eq!(weights(&model), before, "{param_dtype:?}");
        });
    }
}

/// State that is kept and updated in host memory gives the same losses as state kept with the backend, also with accumulated gradients.
/// Records and the gradient norm read it there.
pub fn host_memory_changes_nothing<B: Backend>() {
    let offload = |optimizer, parameters| Offload { optimizer, parameters, min_bytes: 1, ..Offload::default() };
    let rules = [Rule::adamw(), Rule::lamb().with_weight_decay(0.01)];
    for (world, rule) in [1, 2].into_iter().flat_map(|world| rules.map(|rule| (world, rule))) {
        for stage in Stage::ALL {
            let fused = || Fused::new(rule);
            let plain = |steps| train::<B, _>(world, &config(stage), steps, fused);
            let mut tiers = vec![(Tier::Host, Tier::Memory)];
            if stage == Stage::Parameters {
                tiers.extend([(Tier::Host, Tier::Host), (Tier::Memory, Tier::Host)]);
            }
            for (optimizer, parameters) in tiers {
                let config = ZeroConfig { offload: offload(optimizer, parameters), ..config(stage) };
                for steps in [Steps::Plain, Steps::Accumulate] {
                    let got = train::<B, _>(world, &config, steps, fused);
                    let name = rule.name();
                    let what =
                        format!("{name}, {world} ranks, stage {stage}, {optimizer:?}, {parameters:?}, {steps:?}");
                    assert_same::<B>(&plain(steps), &got, &what);
                }
                let seen = ranks::<B, _>(world, &config, |device| {
                    let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
                    let batch = tokens::<Ad<B>>(0..2, &device);
                    let grads = GradientsParams::from_grads(model.loss(batch, true).backward(), &model);
                    let grads = collect_grads::<Ad<B>, _>(grads, &model);
                    let norm = grad_norm::<Ad<B>, _>(&grads, &model) as f32;
                    let mut optimizer = Fused::<Ad<B>>::new(rule);
                    model = optimizer.step(0.05, model, grads);
                    let id = model.twice.weight.id;
                    let moment = optimizer.state(id, "exp_avg").unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
                    let held = rank_stats::<B>().model_state_bytes;
                    let elsewhere = !zero_ops::is_host::<B>();
                    assert_eq!(held.optimizer == 0, elsewhere && optimizer_is_on_host(&config), "{held:?}");
                    assert_eq!(host_bytes::<B>() > 0, elsewhere, "state is counted where it is");
                    (norm, moment, model.twice.weight.val().into_data().iter::<f32>().collect::<Vec<_>>())
                });
                assert!(seen[0].0.is_finite() && seen[0].0 > 0.0);
                for rank in &seen[1..] {
                    assert_eq!(rank, &seen[0], "ranks read the same state");
                }
            }
        }
    }
}

fn optimizer_is_on_host(config: &ZeroConfig) -> bool {
    config.offload.optimizer == Tier::Host
}

/// The gradient norm is the same on every rank and at every stage, and equals that of one rank with the full batch.
pub fn gradient_norms_agree<B: Backend>() {
    let norm = |world: usize, stage: Stage| {
        ranks::<B, _>(world, &config(stage), |device| {
            let model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
            let (rank, per_rank) = (device.rank(), 12 / world);
            let batch = tokens::<Ad<B>>(rank * per_rank..(rank + 1) * per_rank, &device);
            let grads = GradientsParams::from_grads(model.loss(batch, true).backward(), &model);
            grad_norm::<Ad<B>, _>(&collect_grads::<Ad<B>, _>(grads, &model), &model)
        })
    };
    let one = norm(1, Stage::DataParallel)[0];
    for stage in Stage::ALL {
        let three = norm(3, stage);
        let as_losses = |norms: &[f64]| norms.iter().map(|&norm| vec![norm as f32]).collect::<Vec<_>>();
        assert_same::<B>(&as_losses(&three), &as_losses(&[three[0]; 3]), &"ranks");
        assert_same::<B>(&as_losses(&three), &as_losses(&norm(3, Stage::DataParallel)), &stage);
        assert!((three[0] - one).abs() / one < 1e-5, "{one} against {three:?}");
    }
}

/// Records and data of a sharded module equal those of the unsharded one; a record loads into any stage.
pub fn records_round_trip<B: Backend>() {
    use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let run = |stage: Stage| {
        ranks::<B, _>(3, &config(stage), |device| {
            let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init::<Ad<B>, Awkward<Ad<B>>>();
            assert_eq!(model.num_params(), 17 * 10 + 110 * 2 + 20 + 33 + 100 + 1);
            let step = |model: Awkward<Ad<B>>, optimizer: &mut _| {
                let loss = model.loss(tokens(device.rank()..device.rank() + 2, &device), true);
                let value = loss.clone().into_data().iter::<f32>().next().unwrap();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let grads = collect_grads::<Ad<B>, _>(grads, &model);
                (Optimizer::<Awkward<Ad<B>>, Ad<B>>::step(optimizer, 0.05, model, grads), value)
            };
            (model, _) = step(model, &mut optimizer);
            let bytes = recorder.record(model.clone().into_record(), ()).unwrap();
            let state = recorder.record(optimizer.to_record(), ()).unwrap();

            let fresh = Awkward::<Ad<B>>::new(&device).load_record(recorder.load(bytes.clone(), &device).unwrap());
            let fresh = prepare::<Ad<B>, _>(fresh, &device);
            let mut restored = zero_burn::load_state(|| {
                AdamWConfig::new()
                    .init::<Ad<B>, Awkward<Ad<B>>>()
                    .load_record(recorder.load(state.clone(), &device).unwrap())
            });
            let parameters = rank_stats::<B>().model_state_bytes;
            let (mut a, mut b, mut values) = (model, fresh, Vec::new());
            for _ in 0..3 {
                let (next, x) = step(a, &mut optimizer);
                let (other, y) = step(b, &mut restored);
                assert_same::<B>(&[vec![x]], &[vec![y]], &"a restored optimizer");
                values.push(x);
                (a, b) = (next, other);
            }
            (bytes, values, parameters)
        })
    };
    let reference = run(Stage::DataParallel);
    for stage in &Stage::ALL[1..] {
        let got = run(*stage);
        for ((_, a, _), (_, b, _)) in reference.iter().zip(&got) {
            assert_same::<B>(std::slice::from_ref(a), std::slice::from_ref(b), &stage);
        }
        // Both models' optimizer state was loaded as shards: two models, 8 bytes a trained parameter, a third of it.
        let trained = 17 * 10 + 110 + 20 + 100 + 1;
        let optimizer = got[0].2.optimizer as f64;
        assert!(optimizer < 1.1 * 2.0 * 8.0 * trained as f64 / 3.0, "{optimizer} bytes at stage {stage}");
    }
}

/// After a forward pass no gathered copy is alive, neither in the graph nor in the cache.
pub fn forward_keeps_no_gathered_copies<B: Backend>() {
    let config = ZeroConfig { prefetch_bucket_size: 0, ..config(Stage::Parameters) };
    ranks::<B, _>(2, &config, |device| {
        let mut model = prepare::<Ad<B>, _>(Awkward::new(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..3 {
            let before = rank_stats::<B>();
            let loss = model.loss(tokens(0..2, &device), true);
            let after = rank_stats::<B>();
            assert!(after.wire_bytes.all_gather > before.wire_bytes.all_gather, "parameters were gathered");
            // From the second step on the trace says that the tied head is needed again at once: it alone is kept.
            let kept = if step == 0 { 0 } else { 17 * 10 * 4 };
            assert!(after.gathered_bytes <= kept, "{} bytes are still gathered", after.gathered_bytes);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert_eq!(rank_stats::<B>().gathered_bytes, 0);
            model = optimizer.step(0.05, model, grads);
        }
    });
}

/// Layers that differ only in their values.
#[derive(Module, Debug)]
struct Alike<B: burn::tensor::backend::Backend> {
    layers: Vec<burn::nn::Linear<B>>,
}

/// State that one of Burn's optimizers has loaded can be recorded again before its first step, and after only some parameters have been
/// updated. The state is the same, whatever order each rank's hash map has, and training continues as if nothing had happened.
pub fn loaded_records_are_recorded_again<B: Backend>() {
    use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let run = |world: usize, stage: Stage, again: bool| {
        ranks::<B, _>(world, &config(stage), |device| {
            let layers = (0..6).map(|_| burn::nn::LinearConfig::new(5, 5).init(&device)).collect();
            let mut model = prepare::<Ad<B>, _>(Alike::<Ad<B>> { layers }, &device);
            let mut optimizer = AdamWConfig::new().init::<Ad<B>, Alike<Ad<B>>>();
            let (mut values, rank) = (Vec::new(), device.rank());
            for step in 0..4 {
                let x: Vec<f32> = (0..10).map(|i| ((i * 3 + step * 5 + rank * 7) % 11) as f32 / 7.0 - 0.6).collect();
                let x = Tensor::<Ad<B>, 2>::from_data(burn::tensor::TensorData::new(x, [2, 5]), &device);
                // In the second step half of the layers are not used, so that their loaded state stays as it is.
                let used = if step == 1 { 3 } else { 6 };
                let y = model.layers[..used].iter().fold(x, |x, layer| layer.forward(x));
                let loss = y.powf_scalar(2.0).mean();
                values.push(loss.clone().into_data().iter::<f32>().next().unwrap());
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(0.05, model.clone(), collect_grads::<Ad<B>, _>(grads, &model));
                for _ in 0..if again { 2 } else { 0 } {
                    let state = recorder.record(optimizer.to_record(), ()).unwrap();
                    optimizer = zero_burn::load_state(|| {
                        AdamWConfig::new()
                            .init::<Ad<B>, Alike<Ad<B>>>()
                            .load_record(recorder.load(state, &device).unwrap())
                    });
                }
            }
            for layer in &model.layers {
                values.extend(layer.weight.val().into_data().iter::<f32>());
            }
            values
        })
    };
    for (world, stage) in [(2, 0), (2, 1), (3, 2), (2, 3), (3, 3)] {
        let stage = Stage::ALL[stage];
        assert_same::<B>(&run(world, stage, false), &run(world, stage, true), &format!("{world} ranks, stage {stage}"));
    }
}
