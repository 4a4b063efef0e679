//! The engine's numbers: equal bits at all stages, non-finite gradients, edits that would be lost.

use burn::module::Param;
use burn::optim::SgdConfig;
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::rank_stats;
use zero_core::Stage;
use zero_train::engine::{EngineConfig, EngineError, Step, ZeroEngine};
use zero_train::loss_scale::LossScaler;

use super::{Engine, config, engine, tokens};
use crate::common::{B, Device, Run, launch_options, on_ranks};

/// Bits of all parameters and norms after three updates of three micro-batches, and bytes on the wire.
fn accumulated(stage: Stage, sync_each_batch: Option<bool>) -> (Vec<u64>, Vec<u32>, u64) {
    let run = Run { ranks: 3, ..Run::tiny(stage) };
    let mut ranks = on_ranks(run.ranks, &run.zero, |device| {
        let config = EngineConfig { sync_each_batch, clipping: Some(0.5), ..config(3) };
        let mut engine = engine(&run, config, &device);
        let mut norms = Vec::new();
        for micro in 0..9 {
            let first = (micro * run.ranks + device.rank()) * 2;
            let loss = engine.forward(|model| model.loss(tokens(&run, first..first + 2, &device)));
            engine.backward(loss);
            if let Step::Updated(update) = engine.step().unwrap() {
                norms.push(update.grad_norm.to_bits());
            }
        }
        let wire = rank_stats::<Flex>().wire_bytes.reduce_scatter + rank_stats::<Flex>().wire_bytes.all_reduce;
        let paths: Vec<String> = engine.parameters().into_iter().map(|meta| meta.path).collect();
        let read = |path: String| engine.full_parameter(&path).unwrap().values.into_iter().map(f32::to_bits);
        (norms, paths.into_iter().flat_map(read).collect::<Vec<u32>>(), wire)
    });
    ranks.swap_remove(0)
}

#[test]
fn with_one_way_of_accumulating_all_stages_give_the_same_bits() {
    let mut wires = Vec::new();
    for sync_each_batch in [true, false] {
        let (norms, parameters, _) = accumulated(Stage::DataParallel, Some(sync_each_batch));
        for stage in Stage::ALL {
            let (other_norms, other, wire) = accumulated(stage, Some(sync_each_batch));
            assert_eq!(norms, other_norms, "stage {stage}, sync_each_batch {sync_each_batch}");
            assert!(parameters == other, "stage {stage}, sync_each_batch {sync_each_batch}");
            if stage == Stage::Gradients {
                wires.push(wire);
            }
        }
        // What is not set is what the stage does best.
        let stage = if sync_each_batch { Stage::Parameters } else { Stage::OptimizerState };
        let (other_norms, other, _) = accumulated(stage, None);
        assert!(norms == other_norms && parameters == other, "stage {stage}");
    }
    assert!(2 * wires[1] < wires[0], "three micro-batches are reduced once: {wires:?} bytes");
}

/// A term that a rank adds to its loss.
#[derive(Debug, Clone, Copy)]
pub(super) enum Spoiled {
    /// A NaN that passes through the last layer norm's scale.
    Loss,
    /// Only a non-finite gradient, in the same place.
    Gradient,
}

pub(super) fn train(run: &Run, engine: &mut Engine, device: &Device, row: usize, spoiled: Option<Spoiled>) {
    let batch = tokens(run, row..row + 2, device);
    let loss = engine.forward(|model| {
        let gamma = model.ln_f.gamma.val();
        let loss = model.loss(batch);
        match spoiled {
            None => loss,
            Some(Spoiled::Loss) => loss + gamma.sum().mul_scalar(f32::NAN),
            // The slope of a root at zero is infinite, and that of what is in it zero.
            Some(Spoiled::Gradient) => loss + gamma.mul_scalar(0.0).sqrt().sum(),
        }
    });
    engine.backward(loss);
}

#[test]
fn gradients_that_are_not_finite_are_an_error_on_all_ranks_if_asked_for() {
    for stage in Stage::ALL {
        for (spoiled, culprit) in [(Spoiled::Loss, Some(1)), (Spoiled::Gradient, None)] {
            for accumulation in [1, 2] {
                let run = Run::tiny(stage);
                on_ranks(run.ranks, &run.zero, |device| {
                    let what = format!("stage {stage}, {spoiled:?}, {accumulation} micro-batches");
                    let config = EngineConfig { error_if_nonfinite: true, ..config(accumulation) };
                    let mut engine = engine(&run, config, &device);
                    let update = |engine: &mut Engine, spoiled: Option<Spoiled>| {
                        for micro in 1..=accumulation {
                            let here = spoiled.filter(|_| device.rank() == 1 && micro == 1);
                            train(&run, engine, &device, 4 * micro + 2 * device.rank(), here);
                            if micro < accumulation {
                                engine.step().unwrap();
                            }
                        }
                        engine.step()
                    };
                    assert!(matches!(update(&mut engine, None), Ok(Step::Updated(_))), "{what}");
                    let before = engine.full_parameter("wte").unwrap().values;
                    let error = update(&mut engine, Some(spoiled)).unwrap_err();
                    let EngineError::NotFinite { step, rank, parameter } = &error else { panic!("{what}: {error}") };
                    assert_eq!((*step, *rank, parameter.as_deref()), (2, culprit, Some("ln_f.gamma")), "{what}");
                    let text = error.to_string();
                    assert!(text.contains("update 2") && text.contains("\"ln_f.gamma\""), "{text}");
                    assert_eq!(culprit.is_some(), text.contains("not finite on rank 1"), "{text}");
                    // Nothing was updated, and the engine goes on.
                    assert_eq!(engine.full_parameter("wte").unwrap().values, before, "{what}");
                    let Ok(Step::Updated(next)) = update(&mut engine, None) else { panic!("{what}") };
                    assert!(next.step == 2 && next.grad_norm.is_finite(), "{what}: {next:?}");
                });
            }
        }
    }
}

/// Same as in PyTorch; rank 0 prints a warning.
#[test]
fn gradients_that_are_not_finite_are_skipped_unless_asked_otherwise() {
    let run = Run::tiny(Stage::Parameters);
    let spoilt = |skip_overflow| {
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, EngineConfig { skip_overflow, ..config(1) }, &device);
            train(&run, &mut engine, &device, 0, Some(Spoiled::Loss).filter(|_| device.rank() == 1));
            let step = engine.step().unwrap();
            (step, engine.full_parameter("ln_f.gamma").unwrap().values)
        })
    };
    for (step, gamma) in spoilt(true) {
        assert_eq!(step, Step::Skipped { loss_scale: 1.0, next_loss_scale: 1.0, skipped: 1 });
        assert!(gamma.iter().all(|x| x.is_finite()));
    }
    for (step, gamma) in spoilt(false) {
        let Step::Updated(update) = step else { panic!("not updated") };
        assert!(update.grad_norm.is_nan() && gamma.iter().all(|x| x.is_nan()));
    }
    let wrong = EngineConfig {
        loss_scale: Some(LossScaler::fixed(2.0).unwrap()),
        error_if_nonfinite: true,
        ..EngineConfig::default()
    };
    let launched = launch::<Flex, (), EngineError>(1, &run.zero, &launch_options(), |device| {
        let optimizer = Fused::new(Rule::sgd());
        ZeroEngine::initialize(run.model.init::<B>(&device), optimizer, wrong.clone(), &device).map(|_| ())
    });
    let error = launched.unwrap_err().to_string();
    assert!(error.contains("error_if_nonfinite is true") && error.contains("choose one"), "{error}");
}

#[test]
fn an_edit_that_would_be_lost_is_an_error() {
    for stage in Stage::ALL {
        for (root, editor) in [(None, None), (None, Some(1)), (Some(1), Some(0))] {
            let run = Run::tiny(stage);
            let launched = launch::<Flex, (), EngineError>(2, &run.zero, &launch_options(), |device| {
                let mut engine = engine(&run, config(1), &device);
                let edits = editor.is_none_or(|editor| editor == device.rank());
                engine.gathered(
                    |param| param.path.starts_with("ln_f"),
                    root,
                    |found| {
                        if edits {
                            found[1].values.fill(3.0);
                        }
                    },
                );
                engine.full_parameter("ln_f.beta").map(|_| ())
            });
            let error = launched.expect_err("an edit is lost").to_string();
            assert!(error.contains("ln_f.beta") && error.contains("modify_on_rank"), "{error}");
        }
    }
}

#[test]
fn a_frozen_parameter_has_values_and_says_why_it_has_nothing_else() {
    let run = Run::tiny(Stage::Gradients);
    on_ranks(run.ranks, &run.zero, |device| {
        let mut model = run.model.init::<B>(&device);
        model.wpe = model.wpe.set_require_grad(false);
        let mut engine = ZeroEngine::initialize(model, Fused::new(Rule::adamw()), config(1), &device).unwrap();
        train(&run, &mut engine, &device, 0, None);
        assert_eq!(engine.full_parameter("wpe").unwrap().values.len(), 16 * 32);
        let zeros = vec![0.0; 16 * 32];
        let errors = [
            engine.full_gradient("wpe").map(|_| ()).unwrap_err(),
            engine.set_full_gradient("wpe", &zeros).unwrap_err(),
            engine.full_optimizer_state("wpe", "exp_avg").map(|_| ()).unwrap_err(),
            engine.set_full_optimizer_state("wpe", "exp_avg", &zeros).unwrap_err(),
        ];
        for error in errors {
            assert!(
                matches!(&error, EngineError::NoState { .. }) && error.to_string().contains("is frozen"),
                "{error}"
            );
        }
        engine.step().unwrap();
        assert!(engine.full_optimizer_state("wpe", "exp_avg").unwrap_err().to_string().contains("is frozen"));
    });
}

/// Two parameters.
#[derive(burn::module::Module, Debug)]
struct Two<B: burn::tensor::backend::Backend> {
    a: Param<Tensor<B, 1>>,
    b: Param<Tensor<B, 1>>,
}

/// A parameter created from another's tensor, micro-batches accumulated on the rank, and one of Burn's optimizers.
#[test]
fn parameters_of_one_tensor_are_updated_each_with_its_own_gradient() {
    for stage in Stage::ALL {
        for sync_each_batch in [None, Some(true), Some(false)] {
            let zero = zero_burn::config::ZeroConfig::new(stage);
            on_ranks(2, &zero, |device| {
                let a = Param::from_data(TensorData::from([1.0f32, 2.0, 3.0]), &device);
                let b = Param::from_tensor(a.val().detach());
                let schedule = zero_train::schedule::Schedule::Constant(1.0);
                let config = EngineConfig { sync_each_batch, schedule, ..config(2) };
                let mut engine =
                    ZeroEngine::initialize(Two::<B> { a, b }, SgdConfig::new().init(), config, &device).unwrap();
                for _ in 0..2 {
                    let loss = engine.forward(|model| model.a.val().sum() + model.b.val().sum().mul_scalar(10.0));
                    engine.backward(loss);
                    engine.step().unwrap();
                }
                assert_eq!(engine.full_parameter("a").unwrap().values, [0.0, 1.0, 2.0], "stage {stage}");
                assert_eq!(engine.full_parameter("b").unwrap().values, [-9.0, -8.0, -7.0], "stage {stage}");
            });
        }
    }
}
