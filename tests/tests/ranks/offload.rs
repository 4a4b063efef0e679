//! State on a disk: the same bits as in memory, with every combination of tiers.
//!
//! `cargo test -p zero-tests --test ranks offload -- --nocapture` prints what is compared.

use crate::common;

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use common::{B, Device, Run, launch_options, on_ranks};
use serde_json::Map;
use zero_burn::config::{Disk, Float, Offload, Tier, ZeroConfig};
use zero_burn::launch::launch;
use zero_burn::module::{collect_grads, mark, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::shards::disk_bytes;
use zero_burn::stats::{all_gather, rank_stats, reset_peaks};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::offload::AioOptions;
use zero_models::Gpt2;
use zero_train::engine::{EngineConfig, Parts, Step, ZeroEngine};
use zero_train::loss_scale::{DynamicLossScale, LossScaler};

type Engine = ZeroEngine<B, Gpt2<B>, Fused<B>>;

const STEPS: usize = 4;

fn engine(run: &Run, rule: Rule, accumulation: usize, device: &Device) -> Engine {
    let config = EngineConfig { clipping: Some(1.0), accumulation, ..EngineConfig::default() };
    ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(rule), config, device).unwrap()
}

fn tokens(run: &Run, micro: usize, device: &Device) -> Tensor<B, 2, Int> {
    let first = (micro * run.ranks + device.rank()) * run.batch;
    let vocab = run.model.vocab_size;
    let ids: Vec<i32> = (first..first + run.batch)
        .flat_map(|row| (0..run.seq).map(move |i| ((row * 7 + i * (1 + row % 2)) % vocab) as i32))
        .collect();
    Tensor::from_data(TensorData::new(ids, [run.batch, run.seq]), device)
}

/// Global losses, and the bits of one parameter and its moments at the end.
fn train(
    run: &Run,
    engine: &mut Engine,
    steps: std::ops::Range<usize>,
    accumulation: usize,
    device: &Device,
) -> Vec<f64> {
    steps
        .map(|step| {
            let mut sum = 0.0;
            for micro in 0..accumulation {
                let loss = engine.forward(|model| model.loss(tokens(run, step * accumulation + micro, device)));
                sum += loss.clone().into_data().iter::<f64>().next().unwrap();
                engine.backward(loss);
                engine.step().unwrap();
            }
            all_gather::<Flex>(&[sum]).iter().map(|rank| rank[0]).sum()
        })
        .collect()
}

fn bits(engine: &Engine) -> Vec<Vec<u32>> {
    let path = "h.1.mlp.c_fc.weight";
    let names = engine.optimizer().rule().state_names();
    let states = names.iter().map(|name| engine.full_optimizer_state(path, name).unwrap().values);
    std::iter::once(engine.full_parameter(path).unwrap().values)
        .chain(states)
        .map(|values| values.into_iter().map(f32::to_bits).collect())
        .collect()
}

fn disk(path: &Path) -> Disk {
    // So small that every tensor is in several stretches, and everything is on the disk.
    let aio = AioOptions { block_size: 16 << 10, ..AioOptions::default() };
    Disk { path: path.into(), aio, buffer_count: 7, buffer_bytes: 64 << 10, ..Disk::default() }
}

/// Tiers of optimizer state with gradients and of parameters, and the offloaded share of the former.
fn tiers(stage: Stage) -> Vec<(Tier, Tier, f32)> {
    let mut tiers = vec![(Tier::Disk, Tier::Memory, 1.0), (Tier::Disk, Tier::Memory, 0.4)];
    if stage.shards_parameters() {
        tiers.extend([(Tier::Memory, Tier::Disk, 1.0), (Tier::Disk, Tier::Disk, 1.0), (Tier::Disk, Tier::Disk, 0.6)]);
        tiers.push((Tier::Disk, Tier::Disk, 0.8));
    }
    tiers
}

fn run_of(stage: Stage, ranks: usize) -> Run {
    let mut run = Run { ranks, ..Run::tiny(stage) };
    // Wider, so that a piece is longer than a buffer.
    run.model.n_embd = 96;
    run.zero.max_live_parameters = 100_000;
    run
}

fn compare(name: &str, run: &Run, rule: Rule, accumulation: usize) -> usize {
    let run_with = |offload: Offload| {
        let mut run = run.clone();
        run.zero.offload = offload;
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, rule, accumulation, &device);
            let losses = train(&run, &mut engine, 0..STEPS, accumulation, &device);
            (losses, bits(&engine), rank_stats::<Flex>().model_state_bytes)
        })
        .swap_remove(0)
    };
    let (losses, state, bytes) = run_with(Offload::default());
    let mut combinations = 0;
    for (optimizer, parameters, ratio) in tiers(run.zero.stage) {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(dir.path());
        let offload = Offload { optimizer, parameters, ratio, min_bytes: 1, disk, ..Offload::default() };
        let leaves = ZeroConfig { offload: offload.clone(), ..run.zero.clone() }.offloaded_shares();
        let (got, got_state, got_bytes) = run_with(offload);
        let (ranks, stage) = (run.ranks, run.zero.stage);
        let name = format!("{name}, {ranks} rank(s), stage {stage}, {optimizer:?} ({ratio}), {parameters:?}");
        assert_eq!(got, losses, "{name}");
        assert!(got_state == state, "{name}: the state at the end differs");
        if optimizer == Tier::Disk {
            let kinds =
                [("gradients", got_bytes.gradients, bytes.gradients), ("state", got_bytes.optimizer, bytes.optimizer)];
            // Where parameters are in memory, the embedding's gradient, which comes last, stays until its update; with several micro-batches,
            // beside their sum.
            let first = (run.model.vocab_size * run.model.n_embd).div_ceil(run.ranks) * accumulation.min(2);
            let first = first * run.zero.gradient_dtype.unwrap_or(run.zero.param_dtype).size();
            for ((kind, here, all), leaves) in kinds.into_iter().zip(leaves) {
                let stays = (1.0 - leaves) * all as f64;
                let most = stays + if kind == "gradients" && parameters == Tier::Memory { first as f64 } else { 0.0 };
                println!("{name}: {here} bytes of the {kind} are in memory, of {stays} that may stay");
                // Whole parameters stay, of which the largest is a sixth of the model: of much less than that perhaps none.
                let enough = 1.0 - leaves < 0.09 || all == 0 || here as f64 > 0.8 * stays;
                assert!(here as f64 <= most && enough, "{name}: {kind} in memory");
            }
        }
        if parameters == Tier::Disk {
            assert_eq!(got_bytes.parameters, 0, "{name}: parameters in memory");
        }
        assert!(bytes.optimizer > 0 || rule.state_names().is_empty(), "{name}: the comparison is with memory");
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 0, "{name}: files are left");
        combinations += 1;
    }
    combinations
}

#[test]
fn every_combination_of_tiers_gives_the_same_bits() {
    let mut combinations = 0;
    for ranks in [1, 2, 3] {
        for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
            combinations += compare("AdamW", &run_of(stage, ranks), Rule::adamw(), 1);
        }
        combinations += compare("two micro-batches", &run_of(Stage::Parameters, ranks), Rule::adamw(), 2);
    }
    for rule in [Rule::lamb().with_weight_decay(0.01), Rule::sgd(), Rule::lion(), Rule::adagrad()] {
        combinations += compare(rule.name(), &run_of(Stage::Parameters, 2), rule, 1);
    }
    println!("{combinations} combinations of tiers: every loss and the state at the end equal those in memory");
}

/// 200 steps in fp16, of which every seventh overflows on one rank, with clipping: the bits of the losses and of the state at the end, the
/// norms of the gradients, and the number of skipped steps.
fn with_overflows(run: &Run, clipping: f64) -> (Vec<u64>, Vec<Vec<u32>>, Vec<f64>, usize) {
    on_ranks(run.ranks, &run.zero, |device| {
        let scaler = DynamicLossScale { initial_scale_power: 10, window: 3, ..DynamicLossScale::default() };
        let loss_scale = Some(LossScaler::dynamic(scaler).unwrap());
        let clipping = Some(clipping);
        let config = EngineConfig { clipping, loss_scale, skip_overflow: true, ..EngineConfig::default() };
        let mut engine =
            ZeroEngine::initialize(run.model.init::<B>(&device), Fused::new(Rule::adamw()), config, &device).unwrap();
        let (mut losses, mut norms, mut skipped) = (Vec::new(), Vec::new(), 0);
        for step in 0..200 {
            let mut loss = engine.forward(|model| model.loss(tokens(run, step % 4, &device)));
            losses.push(loss.clone().into_data().iter::<f64>().next().unwrap().to_bits());
            if device.rank() == 1 && step % 7 == 3 {
                loss = loss * f32::INFINITY;
            }
            engine.backward(loss);
            match engine.step().unwrap() {
                Step::Updated(update) => norms.push(update.grad_norm),
                _ => skipped += 1,
            }
        }
        (losses, bits(&engine), norms, skipped)
    })
    .swap_remove(0)
}

#[test]
fn two_hundred_steps_with_overflows_and_clipping_give_the_same_bits() {
    const CLIPPING: f64 = 0.5;
    let mut run = run_of(Stage::Parameters, 2);
    run.zero.param_dtype = Float::F16;
    let expected = with_overflows(&run, CLIPPING);
    let (_, _, norms, skipped) = &expected;
    let clipped = norms.iter().filter(|norm| **norm > CLIPPING).count();
    println!("{skipped} steps overflow, {clipped} of the other {} are clipped", norms.len());
    assert!(*skipped >= 28 && clipped > 20 && norms.len() - clipped > 20, "{skipped} and {clipped} of {}", norms.len());
    for parameters in [Tier::Memory, Tier::Disk] {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(dir.path());
        run.zero.offload = Offload { optimizer: Tier::Disk, parameters, min_bytes: 1, disk, ..Offload::default() };
        assert!(with_overflows(&run, CLIPPING) == expected, "parameters in {parameters:?}: the bits differ");
    }
}

#[test]
fn masters_on_the_disk_give_the_same_bits_in_16_bit() {
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let mut run = run_of(stage, 2);
        run.zero.param_dtype = Float::Bf16;
        compare("bf16", &run, Rule::adamw(), 1);
        compare("LAMB, bf16", &run, Rule::lamb().with_weight_decay(0.01), 1);
    }
}

#[test]
fn moments_in_bf16_give_the_same_bits_wherever_they_are() {
    for (stage, dtype, rule) in [
        (Stage::OptimizerState, Float::F32, Rule::adamw()),
        (Stage::Gradients, Float::Bf16, Rule::adamw()),
        (Stage::Parameters, Float::F32, Rule::lamb().with_weight_decay(0.01)),
        (Stage::Parameters, Float::Bf16, Rule::lion()),
    ] {
        let mut run = run_of(stage, 2);
        (run.zero.param_dtype, run.zero.bf16_optimizer_states) = (dtype, true);
        run.zero.gradient_dtype = Some(Float::F32);
        compare("moments in bf16", &run, rule, 1);
    }
}

#[test]
fn moments_in_bf16_do_not_depend_on_the_stage_and_take_half_the_bytes() {
    let run_with = |stage, ranks, dtype, bf16_optimizer_states| {
        let mut run = run_of(stage, ranks);
        (run.zero.param_dtype, run.zero.bf16_optimizer_states) = (dtype, bf16_optimizer_states);
        let numel = run.model.num_params() as u64;
        let trained = on_ranks(ranks, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            let losses = train(&run, &mut engine, 0..STEPS, 1, &device);
            (losses, bits(&engine), rank_stats::<Flex>().model_state_bytes.optimizer)
        });
        let bytes: u64 = trained.iter().map(|(.., bytes)| bytes).sum();
        let (losses, bits, _) = trained.into_iter().next().unwrap();
        (losses, bits, bytes / if stage.shards_optimizer() { 1 } else { ranks as u64 } / numel)
    };
    for (ranks, dtype, master) in [(1, Float::F32, 0), (2, Float::F32, 0), (3, Float::Bf16, 4)] {
        let [(losses, bits, bytes), others @ ..] = Stage::ALL.map(|stage| run_with(stage, ranks, dtype, true));
        assert_eq!(bytes, 4 + master);
        assert!(others.iter().all(|other| *other == (losses.clone(), bits.clone(), bytes)), "{ranks} ranks, {dtype:?}");
        let (exact, exact_bits, exact_bytes) = run_with(Stage::Parameters, ranks, dtype, false);
        assert_eq!(exact_bytes, 8 + master);
        assert!(exact_bits != bits, "rounding shows");
        let apart = losses.iter().zip(&exact).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        println!("{ranks} rank(s), {dtype:?}: losses are up to {apart:.1e} from those with moments in fp32");
        assert!(apart < 1e-3, "{losses:?}, with moments in fp32 {exact:?}");
    }
}

#[test]
fn moments_in_8_bits_do_not_depend_on_the_stage_and_take_a_quarter_of_the_bytes() {
    let run_with = |stage, ranks, dtype, rule, int8_optimizer_states| {
        let mut run = run_of(stage, ranks);
        (run.zero.param_dtype, run.zero.int8_optimizer_states) = (dtype, int8_optimizer_states);
        let trained = on_ranks(ranks, &run.zero, |device| {
            let mut engine = engine(&run, rule, 1, &device);
            let losses = train(&run, &mut engine, 0..STEPS, 1, &device);
            (losses, bits(&engine), rank_stats::<Flex>().model_state_bytes.optimizer)
        });
        let bytes: u64 = trained.iter().map(|(.., bytes)| bytes).sum();
        let (losses, bits, _) = trained.into_iter().next().unwrap();
        (losses, bits, bytes / if stage.shards_optimizer() { 1 } else { ranks as u64 })
    };
    for (ranks, dtype, rule) in [
        (1, Float::F32, Rule::adamw()),
        (2, Float::F32, Rule::adamw()),
        (3, Float::F32, Rule::adagrad()),
        (3, Float::Bf16, Rule::lion()),
        (2, Float::Bf16, Rule::muon()),
    ] {
        let of = |stage| run_with(stage, ranks, dtype, rule, true);
        let [(losses, bits, bytes), others @ ..] = Stage::ALL.map(of);
        for (stage, (others_losses, others_bits, others_bytes)) in Stage::ALL[1..].iter().zip(others) {
            assert!(others_losses == losses && others_bits == bits, "{rule:?}, {ranks} ranks, stage {stage}");
            // A block that is not full has a scale of its own on each rank.
            assert!(others_bytes.abs_diff(bytes) <= bytes / 100, "{rule:?}: {others_bytes}, at stage 0 {bytes}");
        }
        let (exact, exact_bits, exact_bytes) = run_with(Stage::Parameters, ranks, dtype, rule, false);
        assert!(exact_bits != bits, "rounding shows");
        let masters =
            if dtype == Float::F32 { 0 } else { 4 * run_of(Stage::Parameters, ranks).model.num_params() as u64 };
        let share = (bytes - masters) as f64 / (exact_bytes - masters) as f64;
        let apart = losses.iter().zip(&exact).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        println!("{rule:?}, {ranks} rank(s), {dtype:?}: {share:.3} of the bytes, losses up to {apart:.1e} apart");
        assert!((0.25..0.3).contains(&share), "{share}");
        assert!(apart < 1e-2, "{losses:?}, with moments in fp32 {exact:?}");
    }
}

#[test]
fn a_run_with_moments_in_8_bits_resumes_with_the_same_bits() {
    let saves = tempfile::tempdir().unwrap();
    let of = |stage| {
        let mut run = run_of(stage, 2);
        run.zero.int8_optimizer_states = true;
        run
    };
    let run = of(Stage::Gradients);
    let (path, expected) = on_ranks(2, &run.zero, |device| {
        let mut engine = engine(&run, Rule::adamw(), 1, &device);
        train(&run, &mut engine, 0..2, 1, &device);
        let path = engine.save(saves.path(), 2, Map::new(), &SaveOptions::default()).unwrap().path;
        (path, (train(&run, &mut engine, 2..STEPS, 1, &device), bits(&engine)))
    })
    .swap_remove(0);
    for stage in Stage::ALL {
        let run = of(stage);
        let resumed = on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
            (train(&run, &mut engine, 2..STEPS, 1, &device), bits(&engine))
        })
        .swap_remove(0);
        assert!(resumed == expected, "stage {stage}");
    }
}

#[test]
fn checkpoints_go_from_tier_to_tier() {
    for bf16_optimizer_states in [false, true] {
        go_from_tier_to_tier(bf16_optimizer_states);
    }
}

fn go_from_tier_to_tier(bf16_optimizer_states: bool) {
    let [memory, both] = [Tier::Memory, Tier::Disk].map(|tier| {
        let mut run = run_of(Stage::Parameters, 2);
        run.zero.bf16_optimizer_states = bf16_optimizer_states;
        (run, tier)
    });
    let swap = tempfile::tempdir().unwrap();
    let saves = tempfile::tempdir().unwrap();
    let offload = |tier| Offload {
        optimizer: tier,
        parameters: tier,
        min_bytes: 1,
        disk: disk(swap.path()),
        ..Offload::default()
    };
    for (from, to) in [(&memory, &both), (&both, &memory), (&both, &both)] {
        let mut run = from.0.clone();
        run.zero.offload = offload(from.1);
        let (path, next) = on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            train(&run, &mut engine, 0..2, 1, &device);
            let path = engine.save(saves.path(), 2, Map::new(), &SaveOptions::default()).unwrap().path;
            (path, (train(&run, &mut engine, 2..STEPS, 1, &device), bits(&engine)))
        })
        .swap_remove(0);
        let mut run = to.0.clone();
        run.zero.offload = offload(to.1);
        let resumed = on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            engine.load(&Checkpoint::open(&path).unwrap(), Parts::All).unwrap();
            (train(&run, &mut engine, 2..STEPS, 1, &device), bits(&engine))
        })
        .swap_remove(0);
        assert!(resumed == next, "{:?} -> {:?}", from.1, to.1);
    }
}

#[test]
fn all_the_room_is_taken_before_the_first_step() {
    for (optimizer, parameters, dtype, bf16_optimizer_states) in [
        (Tier::Disk, Tier::Disk, Float::F32, false),
        (Tier::Disk, Tier::Memory, Float::F32, true),
        (Tier::Disk, Tier::Disk, Float::Bf16, false),
        (Tier::Disk, Tier::Disk, Float::Bf16, true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut run = run_of(Stage::Parameters, 2);
        (run.zero.param_dtype, run.zero.bf16_optimizer_states) = (dtype, bf16_optimizer_states);
        // Wider than what a file grows by at a time, so that a need for more would be seen.
        run.model.n_embd = 768;
        run.model.n_layer = 1;
        run.zero.offload = Offload {
            optimizer,
            parameters,
            min_bytes: 1,
            disk: Disk { buffer_bytes: 1 << 20, ..disk(dir.path()) },
            ..Offload::default()
        };
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            let begun = disk_bytes::<Flex>();
            train(&run, &mut engine, 0..2, 1, &device);
            assert_eq!(disk_bytes::<Flex>(), begun, "{optimizer:?}, {parameters:?}, {dtype:?}");
        });
    }
}

#[test]
fn states_leave_memory_for_a_while_and_come_back() {
    for (stage, ranks, dtype) in [
        (Stage::DataParallel, 2, Float::F32),
        (Stage::OptimizerState, 3, Float::F32),
        (Stage::Gradients, 2, Float::Bf16),
        (Stage::Parameters, 2, Float::F32),
        (Stage::Parameters, 3, Float::Bf16),
    ] {
        let mut run = run_of(stage, ranks);
        run.zero.param_dtype = dtype;
        let train_with = |pause: bool| {
            on_ranks(ranks, &run.zero, |device| {
                let dir = tempfile::tempdir().unwrap();
                let mut engine = engine(&run, Rule::adamw(), 1, &device);
                let mut losses = train(&run, &mut engine, 0..2, 1, &device);
                if pause {
                    let before = rank_stats::<Flex>();
                    let moved = engine.offload_states(&disk(dir.path())).unwrap();
                    reset_peaks::<Flex>();
                    let state = rank_stats::<Flex>().model_state_bytes;
                    assert_eq!((state.parameters, state.optimizer), (0, 0), "stage {stage}");
                    assert!(moved >= before.model_state_bytes.optimizer, "{moved} bytes moved");
                    assert!(engine.offload_states(&disk(dir.path())).is_err(), "twice");
                    // An evaluation reads from the disk.
                    let ids = tokens(&run, 9, &device).inner();
                    let loss = engine.evaluate(|model| model.loss(ids));
                    assert!(loss.into_data().iter::<f32>().next().unwrap().is_finite());
                    engine.reload_states();
                    assert_eq!(rank_stats::<Flex>().model_state_bytes.optimizer, before.model_state_bytes.optimizer);
                }
                losses.extend(train(&run, &mut engine, 2..STEPS, 1, &device));
                (losses, bits(&engine))
            })
            .swap_remove(0)
        };
        assert!(train_with(true) == train_with(false), "stage {stage}, {ranks} ranks, {dtype:?}");
    }
}

/// State that is moved to a disk can be used and updated there; the new state is placed as configured.
#[test]
fn states_that_are_on_a_disk_for_a_while_are_updated_all_the_same() {
    for (stage, dtype, configured) in [
        (Stage::DataParallel, Float::F32, (Tier::Memory, Tier::Memory)),
        (Stage::OptimizerState, Float::Bf16, (Tier::Memory, Tier::Memory)),
        (Stage::Parameters, Float::F32, (Tier::Memory, Tier::Memory)),
        (Stage::Parameters, Float::Bf16, (Tier::Memory, Tier::Memory)),
        (Stage::Parameters, Float::Bf16, (Tier::Memory, Tier::Disk)),
        (Stage::Gradients, Float::F32, (Tier::Disk, Tier::Memory)),
    ] {
        states_are_on_a_disk_for_a_while(stage, dtype, configured, false);
    }
    for (stage, dtype) in [(Stage::DataParallel, Float::F32), (Stage::Parameters, Float::Bf16)] {
        states_are_on_a_disk_for_a_while(stage, dtype, (Tier::Memory, Tier::Memory), true);
    }
}

fn states_are_on_a_disk_for_a_while(stage: Stage, dtype: Float, configured: (Tier, Tier), is_in_8_bits: bool) {
    let mut run = run_of(stage, 2);
    (run.zero.param_dtype, run.zero.int8_optimizer_states) = (dtype, is_in_8_bits);
    let own = tempfile::tempdir().unwrap();
    let (optimizer, parameters) = configured;
    run.zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk: disk(own.path()), ..Offload::default() };
    if configured == (Tier::Memory, Tier::Memory) {
        run.zero.offload = Offload::default();
    }
    let train_with = |pause: bool| {
        on_ranks(2, &run.zero, |device| {
            let dir = tempfile::tempdir().unwrap();
            let mut engine = engine(&run, Rule::adamw(), 1, &device);
            let mut losses = train(&run, &mut engine, 0..1, 1, &device);
            engine.optimizer().wait();
            let before = rank_stats::<Flex>().model_state_bytes.optimizer;
            if pause {
                engine.offload_states(&disk(dir.path())).unwrap();
            }
            losses.extend(train(&run, &mut engine, 1..3, 1, &device));
            engine.optimizer().wait();
            if pause {
                engine.reload_states();
            }
            assert_eq!(rank_stats::<Flex>().model_state_bytes.optimizer, before, "stage {stage}");
            losses.extend(train(&run, &mut engine, 3..STEPS, 1, &device));
            (losses, bits(&engine))
        })
        .swap_remove(0)
    };
    assert!(train_with(true) == train_with(false), "stage {stage}, {dtype:?}, {configured:?}");
}

#[test]
fn what_cannot_work_is_refused() {
    let refused = |stage, offload: Offload, expected: &str| {
        let mut run = run_of(stage, 2);
        run.zero.offload = offload;
        let error = launch::<Flex, (), String>(2, &run.zero, &launch_options(), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected} in {error}");
    };
    let dir = tempfile::tempdir().unwrap();
    let on = |optimizer, parameters, disk| Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
    refused(
        Stage::Gradients,
        on(Tier::Memory, Tier::Disk, disk(dir.path())),
        "can be offloaded to host memory or a disk only at stage 3",
    );
    refused(Stage::DataParallel, on(Tier::Disk, Tier::Memory, disk(dir.path())), "from stage 1 on");
    refused(Stage::Parameters, on(Tier::Disk, Tier::Disk, Disk::default()), "name a folder on a fast disk");
    let few = Disk { buffer_count: 5, ..disk(dir.path()) };
    refused(Stage::Parameters, on(Tier::Disk, Tier::Disk, few), "at least 6 buffers");
    let absent = disk(&dir.path().join("absent/deeper"));
    refused(Stage::Parameters, on(Tier::Disk, Tier::Disk, absent), "absent");
}

/// Clamps every weight in place, as some training recipes do after each step.
struct Clamp;

impl ModuleMapper<B> for Clamp {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = Tensor::from_inner(tensor.inner().clamp(-0.03, 0.03)).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Such a parameter is written to the disk after its update, by the thread whose pipeline holds the buffers.
#[test]
fn weights_that_are_changed_between_steps_are_updated_from_the_disk_too() {
    let run = run_of(Stage::Parameters, 2);
    let run_with = |offload: Offload| {
        let mut zero = run.zero.clone();
        zero.offload = offload;
        on_ranks(run.ranks, &zero, |device| {
            let mut model = prepare::<B, _>(run.model.init::<B>(&device), &device);
            let mut optimizer = Fused::<B>::new(Rule::adamw());
            (0..STEPS)
                .map(|step| {
                    mark::<B, _>(&model);
                    let loss = model.loss(tokens(&run, step, &device));
                    let value = loss.clone().into_data().iter::<f64>().next().unwrap();
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    let grads = collect_grads::<B, _>(grads, &model);
                    let current = std::mem::replace(&mut model, run.model.init::<B>(&device));
                    model = optimizer.step(1e-2, current, grads).map(&mut Clamp);
                    value.to_bits()
                })
                .collect::<Vec<_>>()
        })
        .swap_remove(0)
    };
    let memory = run_with(Offload::default());
    let dir = tempfile::tempdir().unwrap();
    // As many buffers as two items have arrays on the disk, and little patience.
    let disk = Disk { buffer_count: 6, limit: std::time::Duration::from_secs(10), ..disk(dir.path()) };
    assert_eq!(
        run_with(Offload { optimizer: Tier::Disk, parameters: Tier::Disk, min_bytes: 1, disk, ..Offload::default() }),
        memory
    );
}

/// Brings every weight so close to zero that the clamp has an effect in each step.
struct Tight;

impl ModuleMapper<B> for Tight {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        // By a number that is a tensor, as a rescaling by a norm is.
        let tensor = tensor.inner();
        let factor = tensor.clone().abs().max().mul_scalar(0.0).add_scalar(0.75).reshape([1; D]);
        let tensor = Tensor::from_inner((tensor * factor).clamp(-0.02, 0.02)).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Changes between steps also change the fp32 master, in any tier.
#[test]
fn weights_in_16_bit_that_are_changed_between_steps_stay_changed() {
    for (stage, ranks, dtype) in [
        (Stage::DataParallel, 2, Float::Bf16),
        (Stage::OptimizerState, 3, Float::F16),
        (Stage::Parameters, 2, Float::Bf16),
    ] {
        let mut run = run_of(stage, ranks);
        run.zero.param_dtype = dtype;
        let run_with = |optimizer: Tier, lr: f64| {
            let dir = tempfile::tempdir().unwrap();
            let mut zero = run.zero.clone();
            if optimizer == Tier::Disk {
                zero.offload = Offload { optimizer, min_bytes: 1, disk: disk(dir.path()), ..Offload::default() };
            }
            on_ranks(ranks, &zero, |device| {
                let mut model = prepare::<B, _>(run.model.init::<B>(&device), &device);
                let mut optimizer = Fused::<B>::new(Rule::sgd());
                for step in 0..3 {
                    mark::<B, _>(&model);
                    let loss = model.loss(tokens(&run, step, &device));
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    let grads = collect_grads::<B, _>(grads, &model);
                    let current = std::mem::replace(&mut model, run.model.init::<B>(&device));
                    model = optimizer.step(lr, current, grads);
                    if step < 2 {
                        model = model.map(&mut Tight);
                    }
                }
                let values = model.h[1].mlp.c_fc.weight.val().into_data();
                let master = optimizer.state(model.h[1].mlp.c_fc.weight.id, "fp32_param").unwrap().into_data();
                (values.iter::<f32>().collect::<Vec<_>>(), master.iter::<f32>().collect::<Vec<_>>())
            })
            .swap_remove(0)
        };
        // With a rate of nearly nothing the last step keeps what the edit has made.
        let (values, master) = run_with(Tier::Memory, 1e-12);
        let most = |values: &[f32]| values.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(most(&values) < 0.0201, "{dtype:?} at stage {stage}: the clamp is undone: {}", most(&values));
        assert!(most(&master) < 0.0201, "{dtype:?} at stage {stage}: the master is not clamped: {}", most(&master));
        if stage != Stage::DataParallel {
            assert_eq!(run_with(Tier::Disk, 1e-2), run_with(Tier::Memory, 1e-2), "{dtype:?} at stage {stage}");
        }
    }
}

/// `max_in_memory` counts each parameter once, also in 16 bit.
#[test]
fn as_many_parameters_stay_in_memory_in_16_bit_as_in_32() {
    let on_disk = |dtype: Float| {
        let dir = tempfile::tempdir().unwrap();
        let mut run = run_of(Stage::Parameters, 2);
        run.zero.param_dtype = dtype;
        let everything = 1 << 30;
        let fit = |max_in_memory| Offload {
            parameters: Tier::Disk,
            optimizer: Tier::Memory,
            min_bytes: 1,
            disk: Disk { max_in_memory, ..disk(dir.path()) },
            ..Offload::default()
        };
        let resident = |max_in_memory| {
            run.zero.offload = fit(max_in_memory);
            on_ranks(2, &run.zero, |device| {
                let _model = prepare::<B, _>(run.model.init::<B>(&device), &device);
                // Without what was there before it was converted.
                reset_peaks::<Flex>();
                rank_stats::<Flex>().model_state_bytes.parameters / dtype.size() as u64
            })
            .swap_remove(0)
        };
        let mut resident = resident;
        let all = resident(everything);
        (all, resident(all as usize * 3 / 4))
    };
    let (all, part) = on_disk(Float::F32);
    assert!(part > all / 2 && part < all, "{part} of {all}");
    assert_eq!(on_disk(Float::Bf16), (all, part));
}
