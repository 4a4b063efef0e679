//! Moving averages of the weights: PyTorch's formula, operation by operation, at every stage and tier, without any
//! effect on training.

use crate::common;

use std::collections::BTreeMap;

use burn::tensor::{Int, Tensor};
use burn_flex::Flex;
use common::{B, Device, Run, on_ranks};
use serde_json::Map;
use zero_burn::Zero;
use zero_burn::config::{Disk, Float, Offload, Tier};
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{all_gather, rank_stats};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::offload::AioOptions;
use zero_models::Gpt2;
use zero_train::engine::{EngineConfig, Parts, ZeroEngine};

type Engine = ZeroEngine<B, Gpt2<B>, Fused<B>>;
type Whole = BTreeMap<String, Vec<f32>>;

const STEPS: usize = 4;

fn engine(run: &Run, rule: Rule, device: &Device) -> Engine {
    let config = EngineConfig { clipping: Some(1.0), ..EngineConfig::default() };
    ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(rule), config, device).unwrap()
}

fn train(run: &Run, engine: &mut Engine, step: usize, device: &Device) -> f64 {
    let loss = engine.forward(|model| model.loss(run.tokens(step, device.rank(), device)));
    let value = loss.clone().into_data().iter::<f64>().next().unwrap();
    engine.backward(loss);
    engine.step().unwrap();
    all_gather::<Flex>(&[value]).iter().map(|rank| rank[0]).sum()
}

/// Returns the loss of rows that no step uses.
fn held_out(run: &Run, engine: &Engine, device: &Device) -> f64 {
    let rows = run.tokens(100, device.rank(), device);
    let rows: Tensor<Zero<Flex>, 2, Int> = rows.inner();
    let loss: f64 = engine.evaluate(|model| model.loss(rows)).into_data().iter::<f64>().next().unwrap();
    all_gather::<Flex>(&[loss]).iter().map(|rank| rank[0]).sum()
}

fn whole(engine: &Engine) -> Whole {
    let values = |path: &str| engine.full_parameter(path).unwrap().values;
    engine.parameters().iter().map(|meta| (meta.path.clone(), values(&meta.path))).collect()
}

/// The formula of `torch.lerp`, as PyTorch's `get_ema_multi_avg_fn` calls it.
fn lerp(average: f32, value: f32, weight: f32) -> f32 {
    let difference = value - average;
    if weight < 0.5 { average + weight * difference } else { value - difference * (1.0 - weight) }
}

fn run_of(stage: Stage, ranks: usize, dtype: Float, disk: Option<&std::path::Path>) -> Run {
    let mut run = Run { ranks, ..Run::tiny(stage) };
    run.zero.param_dtype = dtype;
    if let Some(path) = disk {
        // Every tensor is in several stretches.
        let aio = AioOptions { block_size: 16 << 10, ..AioOptions::default() };
        let disk = Disk { path: path.into(), aio, buffer_count: 7, buffer_bytes: 64 << 10, ..Disk::default() };
        let parameters = if stage.shards_parameters() { Tier::Disk } else { Tier::Memory };
        run.zero.offload = Offload { optimizer: Tier::Disk, parameters, min_bytes: 1, disk, ..Offload::default() };
    }
    run
}

#[test]
fn averages_follow_the_weights_bit_by_bit_and_change_nothing() {
    let swap = tempfile::tempdir().unwrap();
    let disk = Some(swap.path());
    for (stage, ranks, dtype, disk, rule, decay) in [
        (Stage::DataParallel, 1, Float::F32, None, Rule::adamw(), 0.9),
        (Stage::DataParallel, 2, Float::Bf16, None, Rule::adamw(), 0.9),
        (Stage::OptimizerState, 2, Float::F32, None, Rule::adamw(), 0.9),
        (Stage::Gradients, 3, Float::F32, disk, Rule::adamw(), 0.25),
        (Stage::Gradients, 3, Float::Bf16, None, Rule::lion(), 0.9),
        (Stage::Parameters, 1, Float::F32, disk, Rule::adamw(), 0.9),
        (Stage::Parameters, 2, Float::F32, None, Rule::lamb(), 0.9),
        (Stage::Parameters, 2, Float::Bf16, disk, Rule::lamb(), 0.25),
        (Stage::Parameters, 3, Float::Bf16, None, Rule::sgd(), 0.9),
        (Stage::Parameters, 4, Float::F32, None, Rule::adamw(), 0.9),
    ] {
        let name = format!("stage {stage}, {ranks} rank(s), {dtype:?}, disk {}, {}", disk.is_some(), rule.name());
        let plain = run_of(stage, ranks, dtype, disk);
        let trained = |run: &Run| {
            on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine(run, rule, &device);
                let losses: Vec<f64> = (0..=STEPS).map(|step| train(run, &mut engine, step, &device)).collect();
                (losses, whole(&engine))
            })
            .swap_remove(0)
        };
        let expected = trained(&plain);
        let mut run = plain.clone();
        run.zero.ema_decay = Some(decay);
        let ranks_averages = on_ranks(ranks, &run.zero, |device| {
            let mut engine = engine(&run, rule, &device);
            let (mut losses, mut averages) = (Vec::new(), Whole::new());
            for step in 0..STEPS {
                losses.push(train(&run, &mut engine, step, &device));
                for (path, values) in whole(&engine) {
                    let average = averages.entry(path).or_insert_with(|| values.clone());
                    let weight = (1.0 - decay) as f32;
                    average.iter_mut().zip(values).for_each(|(a, w)| *a = lerp(*a, w, weight));
                }
            }
            let before = (whole(&engine), held_out(&run, &engine, &device));
            let there = engine.with_averages(|engine| (whole(engine), held_out(&run, engine, &device))).unwrap();
            assert!(there.0 == averages, "{name}: the averages");
            assert!((whole(&engine), held_out(&run, &engine, &device)) == before, "{name}: the weights are back");
            assert!(before.0 != averages && before.1 != there.1, "{name}: averages are not the weights");
            losses.push(train(&run, &mut engine, STEPS, &device));
            let optimizer = rank_stats::<Flex>().model_state_bytes.optimizer;
            ((losses, whole(&engine)), (averages, there.1), optimizer)
        });
        let (with, (averages, loss), _) = ranks_averages.into_iter().next().unwrap();
        assert!(with == expected, "{name}: what is trained differs");
        // A model of these weights has this loss.
        let other = on_ranks(ranks, &plain.zero, |device| {
            let mut engine = engine(&plain, rule, &device);
            for (path, values) in &averages {
                engine.set_full_parameter(path, values).unwrap();
            }
            held_out(&plain, &engine, &device)
        });
        assert_eq!(other[0], loss, "{name}: the loss of the averages");
    }
}

#[test]
fn averages_take_four_bytes_a_parameter_and_are_sharded() {
    for (stage, ranks) in [(Stage::DataParallel, 2), (Stage::OptimizerState, 2), (Stage::Parameters, 2)] {
        let bytes = |decay| {
            let mut run = run_of(stage, ranks, Float::F32, None);
            run.zero.ema_decay = decay;
            let held = on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine(&run, Rule::adamw(), &device);
                train(&run, &mut engine, 0, &device);
                rank_stats::<Flex>().model_state_bytes.optimizer
            });
            (held.into_iter().sum::<u64>(), run.model.num_params() as u64)
        };
        let ((without, numel), (with, _)) = (bytes(None), bytes(Some(0.99)));
        let copies = if stage.shards_optimizer() { 1 } else { ranks as u64 };
        assert_eq!((without, with), (8 * numel * copies, 12 * numel * copies), "stage {stage}");
    }
}

#[test]
fn checkpoints_hold_averages_for_any_number_of_ranks() {
    let (saves, swap) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dtype in [Float::F32, Float::Bf16] {
        let with = |stage, ranks, disk| {
            let mut run = run_of(stage, ranks, dtype, disk);
            run.zero.ema_decay = Some(0.9);
            run
        };
        let run = with(Stage::Parameters, 2, None);
        let (path, averages) = on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), &device);
            for step in 0..STEPS {
                train(&run, &mut engine, step, &device);
            }
            let path = engine.save(saves.path(), STEPS as u64, Map::new(), &SaveOptions::default()).unwrap().path;
            (path, engine.with_averages(|engine| whole(engine)).unwrap())
        })
        .swap_remove(0);
        for (stage, ranks, disk) in [
            (Stage::DataParallel, 1, None),
            (Stage::Gradients, 3, None),
            (Stage::Parameters, 4, Some(swap.path())),
            (Stage::Parameters, 2, None),
        ] {
            let run = with(stage, ranks, disk);
            let resumed = on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine(&run, Rule::adamw(), &device);
                engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
                let resumed = engine.with_averages(|engine| whole(engine)).unwrap();
                train(&run, &mut engine, STEPS, &device);
                resumed
            });
            assert!(resumed.iter().all(|resumed| *resumed == averages), "stage {stage}, {ranks} rank(s), {dtype:?}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn what_makes_no_average_is_refused() {
    let mut run = run_of(Stage::Parameters, 1, Float::F32, None);
    for (decay, told) in [(0.0, "0"), (1.0, "1"), (f64::NAN, "NaN")] {
        run.zero.ema_decay = Some(decay);
        let error = run.zero.validate(1).unwrap_err().to_string();
        assert_eq!(error, format!("ema_decay is {told}: expected a number between 0 and 1, such as 0.999"));
    }
    run.zero.ema_decay = None;
    on_ranks(1, &run.zero, |device| {
        let error = engine(&run, Rule::adamw(), &device).with_averages(|_| ()).unwrap_err().to_string();
        assert!(error.contains("set ZeroConfig::ema_decay"), "{error}");
    });
}
