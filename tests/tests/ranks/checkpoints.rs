//! The engine's checkpoints: any number of ranks and any stage resumes where any other stopped, bit by bit.
//!
//! `cargo test -p zero-tests --test ranks checkpoints -- --nocapture` prints what is compared.

mod batch_norm;

use crate::common;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamWConfig, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use common::{B, Device, Run, launch_options, on_ranks};
use serde_json::{Map, json};
use zero_burn::config::{Float, ZeroConfig};
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::all_gather;
use zero_core::Stage;
use zero_core::checkpoint::{Check, Checkpoint, ElementType, SaveOptions, find_latest};
use zero_models::hf_export::{ExportDtype, ExportOptions};
use zero_models::quantize::Format;
use zero_models::{Gpt2, Gpt2Config, ModelConfig};
use zero_train::engine::{EngineConfig, EngineError, Parts, Step, ZeroEngine};
use zero_train::export::{Weights, export_checkpoint};
use zero_train::loss_scale::{DynamicLossScale, LossScaler};
use zero_train::schedule::{Schedule, Warmup};

type Engine = ZeroEngine<B, Gpt2<B>, Fused<B>>;

/// Rows of a global batch, divisible by every number of ranks here.
const ROWS: usize = 12;

fn engine(run: &Run, device: &Device) -> Engine {
    engine_by(Rule::adamw(), run, device)
}

fn engine_by(rule: Rule, run: &Run, device: &Device) -> Engine {
    let config = EngineConfig { clipping: Some(1.0), schedule: warmup(), ..EngineConfig::default() };
    ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(rule), config, device).unwrap()
}

/// A learning rate that differs between steps.
fn warmup() -> Schedule {
    Schedule::WarmupLr { min_lr: 1e-4, max_lr: 1e-2, warmup_steps: 20, kind: Warmup::Linear }
}

/// Rows of update `step` (from 0) for this rank.
fn tokens(run: &Run, step: usize, device: &Device) -> Tensor<B, 2, Int> {
    let rows = ROWS / run.ranks;
    let first = step * ROWS + device.rank() * rows;
    let vocab = run.model.vocab_size;
    let ids: Vec<i32> = (first..first + rows)
        .flat_map(|row| (0..run.seq).map(move |i| ((row * 7 + i * (1 + row % 2)) % vocab) as i32))
        .collect();
    Tensor::from_data(TensorData::new(ids, [rows, run.seq]), device)
}

/// Global losses of updates `steps`.
fn train(run: &Run, engine: &mut Engine, steps: std::ops::Range<usize>, device: &Device) -> Vec<f64> {
    steps
        .map(|step| {
            let loss = engine.forward(|model| model.loss(tokens(run, step, device)));
            let value = loss.clone().into_data().iter::<f64>().next().unwrap();
            engine.backward(loss);
            assert!(matches!(engine.step().unwrap(), Step::Updated(_)));
            all_gather::<Flex>(&[value]).iter().map(|rank| rank[0]).sum::<f64>() / run.ranks as f64
        })
        .collect()
}

/// Bits of all full parameters and moments.
fn state(engine: &Engine) -> BTreeMap<String, Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let mut state = BTreeMap::new();
    for meta in engine.parameters() {
        state.insert(meta.path.clone(), bits(engine.full_parameter(&meta.path).unwrap().values));
        for name in ["exp_avg", "exp_avg_sq"] {
            let values = engine.full_optimizer_state(&meta.path, name).unwrap().values;
            state.insert(format!("{} {name}", meta.path), bits(values));
        }
    }
    state
}

fn save(engine: &Engine, dir: &Path) -> PathBuf {
    let step = engine.steps() as u64;
    engine.save(dir, step, Map::new(), &SaveOptions::default()).unwrap().path
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
}

/// A run saved after two of four updates.
struct Source {
    run: Run,
    path: PathBuf,
    /// Losses of the two updates that followed.
    next: Vec<f64>,
    /// State at the save, and after those two updates.
    saved: BTreeMap<String, Vec<u32>>,
    end: BTreeMap<String, Vec<u32>>,
}

#[test]
fn every_shape_goes_on_where_every_other_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let shapes: Vec<(usize, Stage)> = (1..=4).flat_map(|ranks| Stage::ALL.map(|stage| (ranks, stage))).collect();
    let run = |ranks, stage: Stage| {
        let mut run = Run { ranks, ..Run::tiny(stage) };
        run.model.n_layer = 1;
        // Other bucket sizes with every shape, and dropout, whose random state is part of the checkpoint.
        run.zero.reduce_bucket_size += 500 * ranks + 1000 * usize::from(stage.number());
        run.model.resid_pdrop = 0.1;
        run
    };
    let sources: Vec<Source> = shapes
        .iter()
        .map(|&(ranks, stage)| {
            let run = run(ranks, stage);
            let dir = dir.path().join(format!("{ranks}-{stage}"));
            let (path, next, saved, end) = on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine(&run, &device);
                train(&run, &mut engine, 0..2, &device);
                let path = save(&engine, &dir);
                let saved = state(&engine);
                let next = train(&run, &mut engine, 2..4, &device);
                (path, next, saved, state(&engine))
            })
            .swap_remove(0);
            Source { run, path, next, saved, end }
        })
        .collect();
    let (mut pairs, mut same, mut apart) = (0, 0, 0.0f64);
    for source in &sources {
        for &(ranks, stage) in &shapes {
            let run = run(ranks, stage);
            // Sums over the ranks have another order, and dropout other numbers, unless their number is the same.
            let (loaded, steps, losses, end) = on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine(&run, &device);
                let checkpoint = Checkpoint::open(&source.path).unwrap();
                engine.load(&checkpoint, Parts::All).unwrap();
                let (loaded, steps) = (state(&engine), engine.steps());
                (loaded, steps, train(&run, &mut engine, 2..4, &device), state(&engine))
            })
            .swap_remove(0);
            let name = format!("{} ranks at stage {} -> {ranks} at {stage}", source.run.ranks, source.run.zero.stage);
            assert_eq!(steps, 2, "{name}");
            assert!(loaded == source.saved, "{name}: loaded state differs");
            if ranks == source.run.ranks {
                assert_eq!(losses, source.next, "{name}");
                assert!(end == source.end, "{name}: the state after the next updates differs");
                same += 1;
            } else {
                apart = apart.max(worst(&losses, &source.next));
            }
            pairs += 1;
        }
    }
    println!(
        "{pairs} pairs of shapes: loaded state equal in every bit; {same} with as many ranks: the next losses and the state \
         after them too; the others' next losses (other dropout) within {apart:.1e}"
    );
    assert_eq!((pairs, same), (256, 64));
    // Dropout of other numbers moves the loss of so small a model by so much.
    assert!(apart < 0.1, "{apart}");
}

#[test]
fn without_dropout_other_numbers_of_ranks_go_on_within_rounding() {
    for rule in [Rule::adamw(), Rule::lamb().with_weight_decay(0.01)] {
        let dir = tempfile::tempdir().unwrap();
        let two = Run { ranks: 2, ..Run::tiny(Stage::Parameters) };
        let (path, saved, unbroken) = on_ranks(2, &two.zero, |device| {
            let mut engine = engine_by(rule, &two, &device);
            train(&two, &mut engine, 0..3, &device);
            (save(&engine, dir.path()), state(&engine), train(&two, &mut engine, 3..9, &device))
        })
        .swap_remove(0);
        for (ranks, stage) in
            [(2, Stage::DataParallel), (1, Stage::Gradients), (3, Stage::Gradients), (4, Stage::Gradients)]
        {
            let run = Run { ranks, ..Run::tiny(stage) };
            let (loaded, losses) = on_ranks(ranks, &run.zero, |device| {
                let mut engine = engine_by(rule, &run, &device);
                engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
                (state(&engine), train(&run, &mut engine, 3..9, &device))
            })
            .swap_remove(0);
            let (name, apart) = (rule.name(), worst(&losses, &unbroken));
            println!("{name}, 2 ranks -> {ranks}: six losses within {apart:.1e} of the unbroken run's");
            assert!(loaded == saved, "{name}, {ranks} ranks: loaded state differs");
            assert!(apart < if ranks == 2 { f64::MIN_POSITIVE } else { 2e-6 }, "{name}, {ranks} ranks: {apart:e}");
        }
    }
}

#[test]
fn every_mesh_goes_on_where_every_other_stopped() {
    let dir = tempfile::tempdir().unwrap();
    // Ranks, and how many of them hold a whole between them.
    let shapes = [(4, 2), (4, 1), (4, 4), (6, 3), (6, 2), (1, 1)];
    let run = |(ranks, shards), stage| {
        let mut run = Run { ranks, ..Run::tiny(stage) };
        run.zero.shard_size = Some(shards).filter(|&shards| shards < ranks);
        // The flat world gathers from a second cut, where it gathers.
        run.zero.secondary_shard_size = (shards == 4 && stage == Stage::Parameters).then_some(2);
        run
    };
    for (at, &shape) in shapes.iter().enumerate() {
        let stage = Stage::ALL[1 + at % 3];
        let source = run(shape, stage);
        let dir = dir.path().join(at.to_string());
        let (path, saved, unbroken) = on_ranks(source.ranks, &source.zero, |device| {
            let mut engine = engine(&source, &device);
            train(&source, &mut engine, 0..2, &device);
            engine.save_async(&dir, 2, Map::new(), &SaveOptions::default()).unwrap();
            let saved = state(&engine);
            let next = train(&source, &mut engine, 2..5, &device);
            (engine.wait_for_save().unwrap().expect("it was begun").path, saved, next)
        })
        .swap_remove(0);
        for (to, &shape) in shapes.iter().enumerate() {
            let run = run(shape, Stage::ALL[(at + to) % 4]);
            let (loaded, losses) = on_ranks(run.ranks, &run.zero, |device| {
                let mut engine = engine(&run, &device);
                engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
                (state(&engine), train(&run, &mut engine, 2..5, &device))
            })
            .swap_remove(0);
            let name = format!("{:?} to {shape:?}, stage {}", shapes[at], run.zero.stage);
            let apart = worst(&losses, &unbroken);
            println!("{name}: three losses within {apart:.1e} of the unbroken run's");
            assert!(loaded == saved, "{name}: loaded state differs");
            assert!(apart < if at == to { f64::MIN_POSITIVE } else { 2e-6 }, "{name}: {apart:e}");
        }
    }
}

/// Passes compute with the quantized values; reads and checkpoints have exact values.
#[test]
fn quantized_weights_are_saved_with_all_digits() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run { ranks: 4, ..Run::tiny(Stage::Parameters) };
    let first = |run: &Run| {
        on_ranks(run.ranks, &run.zero, |device| {
            let engine = engine(run, &device);
            let weight = engine.model().wte.val();
            weight.into_data().into_vec::<f32>().unwrap()
        })
        .swap_remove(0)
    };
    let exact = first(&run);
    run.zero.quantized_weights = Some(Format::Int4);
    assert!(first(&run) == exact, "what was drawn");
    let (path, saved, unbroken) = on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..2, &device);
        let (path, saved) = (save(&engine, dir.path()), state(&engine));
        (path, saved, train(&run, &mut engine, 2..5, &device))
    })
    .swap_remove(0);
    let resumed = |run: &Run| {
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(run, &device);
            engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
            (state(&engine), train(run, &mut engine, 2..5, &device))
        })
        .swap_remove(0)
    };
    assert!(resumed(&run) == (saved.clone(), unbroken.clone()));
    run.zero.quantized_weights = None;
    let (loaded, losses) = resumed(&run);
    assert!(loaded == saved && losses != unbroken);
}

#[test]
fn a_save_beside_the_training_is_the_same_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Parameters);
    on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..2, &device);
        let options = SaveOptions { keep_last: NonZeroUsize::new(2), ..SaveOptions::default() };
        engine.save(&dir.path().join("now"), 2, Map::new(), &options).unwrap();
        let beside = dir.path().join("beside");
        let started = engine.save_async(&beside, 2, Map::new(), &options).unwrap();
        assert!(started.previous.is_none() && started.stall >= started.waited);
        // Training goes on, in place, on what has been copied.
        train(&run, &mut engine, 2..4, &device);
        let saved = engine.wait_for_save().unwrap().expect("a save was under way");
        assert_eq!(saved.step, 2);
        assert!(engine.wait_for_save().unwrap().is_none());
    });
    let [now, beside] = ["now", "beside"].map(|name| {
        let found = find_latest(&dir.path().join(name), Check::Contents).unwrap();
        Checkpoint::open(&found.checkpoint.unwrap()).unwrap()
    });
    assert_eq!(now.tensors(), beside.tensors());
    assert_eq!(now.state().unwrap(), beside.state().unwrap());
}

fn half(dtype: Float, stage: Stage) -> Run {
    let mut run = Run::tiny(stage);
    run.zero = ZeroConfig { param_dtype: dtype, ..run.zero };
    run
}

fn half_engine(run: &Run, device: &Device) -> Engine {
    let scaler = DynamicLossScale { initial_scale_power: 6, window: 2, hysteresis: 1, ..DynamicLossScale::default() };
    let loss_scale = (run.zero.param_dtype == Float::F16).then(|| LossScaler::dynamic(scaler).unwrap());
    let config = EngineConfig { schedule: warmup(), loss_scale, ..EngineConfig::default() };
    ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(Rule::adamw()), config, device).unwrap()
}

#[test]
fn masters_and_the_loss_scale_go_on_in_16_bit() {
    for (dtype, from, to) in [
        (Float::Bf16, Stage::Parameters, Stage::OptimizerState),
        (Float::F16, Stage::Gradients, Stage::DataParallel),
        (Float::F16, Stage::DataParallel, Stage::Parameters),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = half(dtype, from);
        let (path, saved, scale, next) = on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = half_engine(&run, &device);
            train(&run, &mut engine, 0..4, &device);
            let (path, saved, scale) = (save(&engine, dir.path()), state(&engine), engine.loss_scale());
            (path, saved, scale, train(&run, &mut engine, 4..8, &device))
        })
        .swap_remove(0);
        if dtype == Float::F16 {
            assert!(scale > 64.0, "the scale must have grown to tell something: {scale}");
        }
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert!(checkpoint.tensors().values().all(|tensor| tensor.dtype == ElementType::F32), "masters are saved");
        let run = half(dtype, to);
        let (loaded, loaded_scale, losses) = on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = half_engine(&run, &device);
            engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
            let (loaded, scale) = (state(&engine), engine.loss_scale());
            (loaded, scale, train(&run, &mut engine, 4..8, &device))
        })
        .swap_remove(0);
        assert!(loaded == saved, "{dtype:?}: masters and moments differ");
        assert_eq!((loaded_scale, &losses), (scale, &next), "{dtype:?}");
        // The same checkpoint goes on in fp32: its parameters are the masters.
        let run = Run::tiny(Stage::Parameters);
        let loaded = on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, &device);
            engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
            let loaded = state(&engine);
            train(&run, &mut engine, 4..6, &device);
            loaded
        })
        .swap_remove(0);
        assert!(loaded == saved, "{dtype:?} -> fp32");
    }
}

#[test]
fn parameters_alone_begin_a_new_training_with_another_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Parameters);
    on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..2, &device);
        let extra = json!({ "mood": "good" });
        engine.save(dir.path(), 2, extra.as_object().unwrap().clone(), &SaveOptions::default()).unwrap();
        let checkpoint = Checkpoint::open(&dir.path().join("step-00000002")).unwrap();
        let config = EngineConfig::default();
        let other = Fused::new(Rule::lion());
        let mut other = ZeroEngine::initialize(run.model.init::<B>(&device), other, config, &device).unwrap();
        let error = other.load(&checkpoint, Parts::All).unwrap_err().to_string();
        assert!(error.contains("optimizer adamw, but this run uses lion"), "{error}");
        let extra = other.load(&checkpoint, Parts::Parameters).unwrap();
        assert_eq!(extra["mood"], "good");
        assert_eq!(other.steps(), 0);
        let path = "h.0.mlp.c_fc.weight";
        let [old, new] = [engine.full_parameter(path).unwrap(), other.full_parameter(path).unwrap()];
        assert_eq!(old.values, new.values);
        let loss = other.forward(|model| model.loss(tokens(&run, 0, &device)));
        other.backward(loss);
        assert!(matches!(other.step().unwrap(), Step::Updated(_)));
    });
}

#[test]
fn what_does_not_fit_is_told_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Gradients);
    let path = on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..1, &device);
        save(&engine, dir.path())
    })
    .swap_remove(0);
    for (model, expected) in [
        (Gpt2Config { n_embd: 16, ..run.model.clone() }, "has shape"),
        (Gpt2Config { n_layer: 3, ..run.model.clone() }, "only in this model: h.2."),
        (Gpt2Config { n_layer: 1, ..run.model.clone() }, "only in the checkpoint: h.1."),
    ] {
        let other = Run { model, ..run.clone() };
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&other, &device);
            let before = engine.full_parameter("wte").unwrap();
            let error = engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("configure the same model"), "{error}");
            assert_eq!(engine.full_parameter("wte").unwrap(), before);
        });
    }
}

#[test]
fn between_micro_batches_neither_saving_nor_loading_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Parameters);
    on_ranks(run.ranks, &run.zero, |device| {
        let config = EngineConfig { accumulation: 2, ..EngineConfig::default() };
        let fused = Fused::new(Rule::adamw());
        let mut engine = ZeroEngine::initialize(run.model.init::<B>(&device), fused, config, &device).unwrap();
        let whole = save(&engine, dir.path());
        let loss = engine.forward(|model| model.loss(tokens(&run, 0, &device)));
        engine.backward(loss);
        let error = engine.save(dir.path(), 1, Map::new(), &SaveOptions::default()).unwrap_err().to_string();
        assert!(error.contains("between the micro-batches"), "{error}");
        let error = engine.load(&Checkpoint::open(&whole).unwrap(), Parts::All).unwrap_err().to_string();
        assert!(error.contains("between the micro-batches"), "{error}");
    });
}

#[test]
fn one_ranks_damaged_file_is_every_ranks_error() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Parameters);
    let path = on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..1, &device);
        save(&engine, dir.path())
    })
    .swap_remove(0);
    let file = path.join("rank-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let errors = on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(&run, &device);
        match engine.load(&Checkpoint::open(&path).unwrap(), Parts::All) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("rank {} loaded a damaged checkpoint", device.rank()),
        }
    });
    assert!(errors[0].contains("rank 1 could not load"), "{errors:?}");
    assert!(errors[1].contains("is corrupt in") && errors[1].contains("rank-00001-of-00002"), "{errors:?}");
}

#[test]
fn burns_optimizers_are_told_to_use_records() {
    let run = Run::tiny(Stage::Parameters);
    let dir = tempfile::tempdir().unwrap();
    on_ranks(run.ranks, &run.zero, |device| {
        let config = EngineConfig::default();
        let optimizer = AdamWConfig::new().init::<B, Gpt2<B>>();
        let engine = ZeroEngine::initialize(run.model.init::<B>(&device), optimizer, config, &device).unwrap();
        match engine.save(dir.path(), 0, Map::new(), &SaveOptions::default()) {
            Err(EngineError::CannotSave(reason)) => assert!(reason.contains("recorder"), "{reason}"),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// `model.into_record()` and `optimizer.to_record()` through one of Burn's recorders, with any optimizer.
#[test]
fn records_go_on_at_any_shape() {
    let recorder = BinBytesRecorder::<FullPrecisionSettings, Vec<u8>>::default();
    let two = Run::tiny(Stage::Parameters);
    let saved = launch::<Flex, _, String>(2, &two.zero, &launch_options(), |device| {
        let mut engine = engine(&two, &device);
        train(&two, &mut engine, 0..2, &device);
        let model: Vec<u8> = recorder.record(engine.model().clone().into_record(), ()).map_err(|e| e.to_string())?;
        let optimizer = Optimizer::<Gpt2<B>, B>::to_record(engine.optimizer());
        let optimizer: Vec<u8> = recorder.record(optimizer, ()).map_err(|e| e.to_string())?;
        Ok((model, optimizer, state(&engine)))
    })
    .unwrap()
    .swap_remove(0);
    for (ranks, stage) in [(1, Stage::DataParallel), (3, Stage::Gradients), (2, Stage::Parameters)] {
        let run = Run { ranks, ..Run::tiny(stage) };
        let loaded = on_ranks(ranks, &run.zero, |device| {
            let record = recorder.load(saved.0.clone(), &device).unwrap();
            let model = run.model.init::<B>(&device).load_record(record);
            let optimizer = zero_burn::load_state(|| {
                let record = recorder.load(saved.1.clone(), &device).unwrap();
                Optimizer::<Gpt2<B>, B>::load_record(Fused::new(Rule::adamw()), record)
            });
            let config = EngineConfig { clipping: Some(1.0), schedule: warmup(), ..EngineConfig::default() };
            let mut engine = ZeroEngine::initialize(model, optimizer, config, &device).unwrap();
            let loaded = state(&engine);
            train(&run, &mut engine, 2..3, &device);
            let _ = engine.model().valid();
            loaded
        })
        .swap_remove(0);
        assert!(loaded == saved.2, "records -> {ranks} ranks at stage {stage}");
    }
}

#[test]
fn a_live_model_is_exported_as_its_checkpoint_is() {
    for (dtype, stage, ranks) in
        [(Float::F32, Stage::Parameters, 3), (Float::Bf16, Stage::Parameters, 2), (Float::F32, Stage::DataParallel, 2)]
    {
        let dir = tempfile::tempdir().unwrap();
        let run = Run { ranks, ..half(dtype, stage) };
        let model = ModelConfig::Gpt2(run.model.clone());
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
        let (live, offline) = (dir.path().join("live"), dir.path().join("offline"));
        let path = on_ranks(ranks, &run.zero, |device| {
            let mut engine = half_engine(&run, &device);
            train(&run, &mut engine, 0..2, &device);
            let exported = engine.export(&model, &live, &options).unwrap();
            assert_eq!(exported.is_some(), device.rank() == 0);
            // Again into the same folder: refused on rank 0, and told to the others.
            let error = engine.export(&model, &live, &options).unwrap_err().to_string();
            let expected = if device.rank() == 0 { "live" } else { "rank 0 could not write" };
            assert!(error.contains(expected), "{error}");
            let mut state = Map::new();
            state.insert("model".into(), serde_json::to_value(&model).unwrap());
            engine.save(&dir.path().join("checkpoints"), 2, state, &SaveOptions::default()).unwrap().path
        })
        .swap_remove(0);
        export_checkpoint(&path, &offline, &options, None, Weights::Trained).unwrap();
        for file in ["model.safetensors", "config.json"] {
            let [live, offline] = [&live, &offline].map(|folder| std::fs::read(folder.join(file)).unwrap());
            assert!(live == offline, "{file} of {dtype:?} at stage {stage} on {ranks} ranks");
        }
    }
}

/// Ranks with different seeds continue their own random streams.
#[test]
fn seeds_of_ranks_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::tiny(Stage::Parameters);
    on_ranks(run.ranks, &run.zero, |device| {
        let seed = (7 << 40) + device.rank() as u64;
        <B as burn::tensor::backend::Backend>::seed(&device, seed);
        let draw = || {
            let drawn = Tensor::<B, 1>::random([8], burn::tensor::Distribution::Default, &device);
            drawn.into_data().to_vec::<f32>().unwrap()
        };
        let mut engine = engine(&run, &device);
        train(&run, &mut engine, 0..1, &device);
        let path = save(&engine, dir.path());
        let next = draw();
        <B as burn::tensor::backend::Backend>::seed(&device, 1);
        engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
        assert_eq!(draw(), next);
    });
}
