//! Offload, meshes, quantized traffic, and moments in 8 and 16 bits: `cargo test --test settings`.

mod common;

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_nn::{RmsNorm, RmsNormConfig};
use burn_optim::{AdamConfig, AdamWConfig, LambConfig, SgdConfig};
use common::{
    Gpt, Half, LR, Mlp, Net, Told, apart, config, device, filled, options, rows, seed, table, train_threads, value,
    weights,
};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::config::{Disk, Gathers, Offload, Tier};
use zero_kernels::quantized::Format;
use zero_param::{Error, Float, OptimizerConfig, Ranks, ZeroConfig, run_threads, shard};

type Model = Gpt<2, 10>;

/// Keeps every tensor, however small, in this folder.
fn on_disk(config: ZeroConfig, dir: &Path, parameters: Tier) -> ZeroConfig {
    let disk = Disk { path: dir.into(), buffer_bytes: Disk::SMALLEST_BUFFER, ..Disk::default() };
    let offload = Offload { optimizer: Tier::Disk, parameters, min_bytes: 0, disk, ..Offload::default() };
    ZeroConfig { offload, ..config }
}

fn trains_as_in_memory(config: &ZeroConfig, optimizer: &(impl OptimizerConfig + Sync)) {
    let dir = tempfile::tempdir().unwrap();
    for world in [1, 2, 3] {
        let expected = train_threads::<Model>(world, config, optimizer);
        let tiers = if config.stage.shards_parameters() { &[Tier::Memory, Tier::Disk][..] } else { &[Tier::Memory] };
        for &parameters in tiers {
            let mut offloaded = on_disk(config.clone(), dir.path(), parameters);
            assert!(train_threads::<Model>(world, &offloaded, optimizer) == expected, "{world} ranks, {offloaded:?}");
            offloaded.offload.ratio = 0.5;
            assert!(train_threads::<Model>(world, &offloaded, optimizer) == expected, "{world} ranks, {offloaded:?}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the files of a run are deleted at its end");
}

#[test]
fn state_on_a_disk_changes_no_bit() {
    for stage in &Stage::ALL[1..] {
        trains_as_in_memory(&config(*stage), &AdamWConfig::new());
    }
    trains_as_in_memory(&config(Stage::Parameters), &AdamConfig::new());
    trains_as_in_memory(&config(Stage::Parameters), &LambConfig::new());
    trains_as_in_memory(&ZeroConfig { bf16_optimizer_states: true, ..config(Stage::Gradients) }, &AdamWConfig::new());
}

#[test]
fn host_memory_is_the_backends_own() {
    let offload = Offload { optimizer: Tier::Host, min_bytes: 0, ..Offload::default() };
    let config = config(Stage::Gradients);
    let expected = train_threads::<Model>(2, &config, &AdamWConfig::new());
    assert!(train_threads::<Model>(2, &ZeroConfig { offload, ..config }, &AdamWConfig::new()) == expected);
}

#[test]
fn an_optimizer_of_burns_is_refused_with_state_on_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let config = on_disk(config(Stage::Parameters), dir.path(), Tier::Memory);
    let error = run_threads(2, &options(), |ranks| {
        let (_, zero) = shard(Model::build(&device()), ranks, &config)?;
        zero.optimizer(&SgdConfig::new()).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("on a disk") && error.contains("AdamW"), "{error}");
}

#[test]
fn settings_that_are_missing_or_contradict_are_named() {
    let refused = |config: &ZeroConfig| {
        run_threads(2, &options(), |ranks| shard(Model::build(&device()), ranks, config).map(drop))
            .unwrap_err()
            .to_string()
    };
    let error = refused(&ZeroConfig { gathers: Gathers::Collective, ..config(Stage::Parameters) });
    assert!(error.contains("gathering by collectives") && error.contains("not supported with Burn 0.22"), "{error}");
    let both = ZeroConfig { int8_optimizer_states: true, bf16_optimizer_states: true, ..config(Stage::Parameters) };
    assert!(refused(&both).contains("choose one"), "{}", refused(&both));
    let dir = tempfile::tempdir().unwrap();
    let disk =
        ZeroConfig { int8_optimizer_states: true, ..on_disk(config(Stage::Parameters), dir.path(), Tier::Memory) };
    assert!(refused(&disk).contains("keeps optimizer state in memory"), "{}", refused(&disk));
    let error = refused(&ZeroConfig { shard_size: Some(3), ..config(Stage::Parameters) });
    assert!(error.contains('3') && error.contains('2'), "{error}");
}

#[test]
fn moments_in_8_and_16_bits_have_the_same_bits_at_all_stages() {
    moments_have_the_same_bits::<Model>(|stage| ZeroConfig { bf16_optimizer_states: true, ..config(stage) });
    // Matrices of 4,096 elements, the least whose moments are in 8 bits.
    moments_have_the_same_bits::<Mlp<64, 3>>(|stage| ZeroConfig { int8_optimizer_states: true, ..config(stage) });
}

fn moments_have_the_same_bits<N: Net>(of: fn(Stage) -> ZeroConfig) {
    let exact = train_threads::<N>(2, &config(Stage::DataParallel), &AdamWConfig::new());
    let first = train_threads::<N>(2, &of(Stage::DataParallel), &AdamWConfig::new());
    for stage in &Stage::ALL[1..] {
        assert!(train_threads::<N>(2, &of(*stage), &AdamWConfig::new()) == first, "stage {stage}");
    }
    let apart = apart(&first[0], &exact[0]);
    assert!(apart > 0.0 && apart < 0.01, "{apart:e}");
}

#[test]
fn groups_of_ranks_train_as_all_do() {
    let optimizer = AdamWConfig::new();
    for stage in &Stage::ALL[1..] {
        let expected = train_threads::<Model>(4, &config(*stage), &optimizer);
        let grouped = train_threads::<Model>(4, &ZeroConfig { shard_size: Some(2), ..config(*stage) }, &optimizer);
        for (grouped, expected) in grouped.iter().zip(&expected) {
            let apart = apart(grouped, expected);
            assert!(apart < 1e-5, "stage {stage}: {apart:e}");
        }
    }
    let secondary = ZeroConfig { secondary_shard_size: Some(2), ..config(Stage::Parameters) };
    let expected = train_threads::<Model>(4, &config(Stage::Parameters), &optimizer);
    assert!(train_threads::<Model>(4, &secondary, &optimizer) == expected, "a secondary partition changes no bit");
    let format = Some(Format::Int8);
    let quantized = ZeroConfig { quantized_weights: format, quantized_gradients: format, ..secondary };
    for (quantized, expected) in train_threads::<Model>(4, &quantized, &optimizer).iter().zip(&expected) {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 0.05 * b;
        assert!(quantized.losses.iter().zip(&expected.losses).all(near), "{quantized:?}");
    }
}

#[test]
fn one_rank_may_read_a_model_after_a_step() {
    let config = ZeroConfig { secondary_shard_size: Some(2), ..config(Stage::Parameters) };
    run_threads(4, &options(), |ranks| {
        let (device, rank) = (device(), ranks.comm().rank());
        let (mut net, zero) = shard(Half::build(&device), ranks, &config)?;
        let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
        let (_, grads) = zero.backward(|| net.loss(seed(0, rank), &device))?;
        net = optimizer.step(LR, net, grads)?;
        if rank == 0 {
            assert_eq!(weights(&net).len(), 2);
        }
        Ok::<_, Error>(ranks.comm().barrier()?)
    })
    .unwrap();
}

/// A table, and a norm that reads the shape of its vector.
#[derive(Module, Debug)]
struct Normed {
    table: Param<Tensor<2>>,
    norm: RmsNorm,
}

impl Net for Normed {
    fn build(device: &Device) -> Self {
        filled(Self { table: table(16, 16, device), norm: RmsNormConfig::new(16).init(device) })
    }

    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let (x, y) = rows(seed, 16, device);
        (self.norm.forward(x.matmul(self.table.val())) - y).square().mean()
    }
}

#[test]
fn norms_of_burn_work_with_state_on_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(Stage::Parameters);
    let expected = train_threads::<Normed>(2, &config, &AdamWConfig::new());
    let offloaded = on_disk(config, dir.path(), Tier::Disk);
    assert!(train_threads::<Normed>(2, &offloaded, &AdamWConfig::new()) == expected);
}

#[test]
fn misuse_is_an_error_that_says_what_to_do() {
    let error = |change: bool| {
        let result = run_threads(2, &options(), |ranks| {
            let device = device();
            let (net, zero) = shard(Half::build(&device), ranks, &config(Stage::Parameters))?;
            let (other, another) = shard(Half::build(&device), ranks, &config(Stage::Parameters))?;
            let (_, grads) = zero.backward(|| net.loss(0, &device))?;
            let (second, zero) = (net.second.id, if change { zero } else { another });
            let net = if change { net.map(&mut Doubled(second)) } else { other };
            zero.optimizer(&AdamWConfig::new())?.step(LR, net, grads).map(drop)
        });
        result.unwrap_err().to_string()
    };
    let told = error(true);
    assert!(told.contains("'second'") && told.contains("publish_changes"), "{told}");
    let told = error(false);
    assert!(told.contains("another module"), "{told}");
}

#[test]
fn ranks_that_run_other_passes_are_told_at_once() {
    let begin = std::time::Instant::now();
    let result = run_threads(2, &options(), |ranks| {
        let (device, rank) = (device(), ranks.comm().rank());
        let (net, zero) = shard(Half::build(&device), ranks, &config(Stage::Parameters))?;
        let (_, mut grads) = zero.backward(|| net.loss(0, &device))?;
        if rank == 0 {
            grads.add(zero.backward(|| net.loss(1, &device))?.1);
        }
        zero.optimizer(&AdamWConfig::new())?.step(LR, net, grads).map(drop)
    });
    assert!(result.is_err() && begin.elapsed().as_secs() < 30, "{result:?} after {:?}", begin.elapsed());
}

#[test]
fn averages_that_were_swapped_in_and_out_change_no_update() {
    let dir = tempfile::tempdir().unwrap();
    let memory = |dtype| ZeroConfig { ema_decay: Some(0.9), param_dtype: dtype, ..config(Stage::Parameters) };
    let run = |config: &ZeroConfig, swaps: bool| {
        run_threads(2, &options(), |ranks| {
            let (device, rank) = (device(), ranks.comm().rank());
            let (mut net, zero) = shard(Half::build(&device), ranks, config)?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            for step in 0..4 {
                if step == 2 && swaps {
                    net = optimizer.swap_averages(net)?;
                    net = optimizer.swap_averages(net)?;
                }
                let (_, grads) = zero.backward(|| net.loss(seed(step, rank), &device))?;
                net = optimizer.step(1e-4, net, grads)?;
            }
            net = optimizer.swap_averages(net)?;
            let averages = weights(&net);
            net = optimizer.swap_averages(net)?;
            Ok::<_, Error>((weights(&net), averages))
        })
        .unwrap()
    };
    for dtype in [Float::F32, Float::Bf16] {
        let expected = run(&memory(dtype), false);
        assert!(run(&memory(dtype), true) == expected, "{dtype:?}");
        assert!(run(&on_disk(memory(dtype), dir.path(), Tier::Disk), true) == expected, "{dtype:?} on a disk");
    }
}

/// Returns the losses of a few steps on 2 ranks, and the bytes that a rank has received.
fn received(config: &ZeroConfig) -> (Vec<f32>, u64, u64) {
    let all = run_threads(2, &options(), |ranks| {
        let (told, _) = common::train::<Model>(ranks, config, &AdamWConfig::new())?;
        let wire = ranks.comm().wire().read();
        Ok::<_, Error>((told.losses, wire.all_gather, wire.reduce_scatter + wire.all_to_all))
    });
    all.unwrap().swap_remove(0)
}

#[test]
fn quantized_traffic_is_smaller_and_trains() {
    let exact = config(Stage::Parameters);
    let (losses, gathered, reduced) = received(&exact);
    let near = |other: &[f32]| losses.iter().zip(other).all(|(a, b)| (a - b).abs() < 0.05 * a);
    let weights = ZeroConfig { quantized_weights: Some(Format::Int8), ..exact.clone() };
    let (of_weights, fewer, _) = received(&weights);
    assert!(near(&of_weights) && of_weights != losses, "{of_weights:?} of {losses:?}");
    assert!(fewer < gathered / 2, "{fewer} of {gathered} bytes");
    let gradients = ZeroConfig { quantized_gradients: Some(Format::Int8), ..exact };
    let (of_gradients, _, fewer) = received(&gradients);
    assert!(near(&of_gradients) && of_gradients != losses, "{of_gradients:?} of {losses:?}");
    assert!(fewer < reduced / 2, "{fewer} of {reduced} bytes");
}

#[test]
fn a_checkpoint_moves_between_memory_and_a_disk() {
    let (saved, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dtype in [Float::F32, Float::Bf16] {
        let memory = ZeroConfig { param_dtype: dtype, ..config(Stage::Parameters) };
        let offloaded = on_disk(memory.clone(), disk.path(), Tier::Disk);
        for (first, then) in [(&memory, &offloaded), (&offloaded, &memory)] {
            let dir = saved.path().join(format!("{dtype:?}-{:?}", first.offload.optimizer));
            let whole = run_threads(2, &options(), |ranks| resumed(ranks, first, &dir, false)).unwrap();
            let resumed = run_threads(2, &options(), |ranks| resumed(ranks, then, &dir, true)).unwrap();
            assert!(resumed[0].losses[..] == whole[0].losses[2..], "{dtype:?}: {resumed:?} after {whole:?}");
            assert!(resumed[0].weights == whole[0].weights, "{dtype:?}");
        }
    }
}

/// Trains four steps and saves after the second, or trains the last two from there.
fn resumed(ranks: &Ranks, config: &ZeroConfig, dir: &Path, resume: bool) -> Result<Told, Error> {
    let device = device();
    let (mut net, zero) = shard(Half::build(&device), ranks, config)?;
    let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
    let (mut told, mut from) = (Told::default(), 0);
    if resume {
        let resumed = zero.load(net, optimizer, &Checkpoint::open(&dir.join("step-00000002"))?)?;
        (net, optimizer, from) = (resumed.model, resumed.optimizer, resumed.steps);
    }
    for step in from..4 {
        if step == 2 && !resume {
            zero.save(&net, &optimizer, dir, step, Default::default(), &SaveOptions::default())?;
        }
        let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
        told.losses.push(value(loss));
        net = optimizer.step(LR, net, grads)?;
    }
    told.weights = weights(&net);
    Ok(told)
}

#[test]
fn averages_are_swapped_in_and_out() {
    let dir = tempfile::tempdir().unwrap();
    let averaged = |stage| ZeroConfig { ema_decay: Some(0.9), ..config(stage) };
    let run = |config: &ZeroConfig| {
        run_threads(2, &options(), |ranks| {
            let device = device();
            let (mut net, zero) = shard(Half::build(&device), ranks, config)?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            let mut expected = weights(&net);
            for step in 0..4 {
                let (_, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
                net = optimizer.step(LR, net, grads)?;
                for (average, weights) in expected.values_mut().zip(weights(&net).values()) {
                    let follow = |(a, w): (&mut f32, &f32)| *a = if step == 0 { *w } else { *a + 0.1 * (w - *a) };
                    average.iter_mut().zip(weights).for_each(follow);
                }
            }
            let trained = weights(&net);
            net = optimizer.swap_averages(net)?;
            let averages = weights(&net);
            net = optimizer.swap_averages(net)?;
            assert!(weights(&net) == trained, "they come back bit by bit");
            for (a, b) in averages.values().flatten().zip(expected.values().flatten()) {
                assert!((a - b).abs() < 1e-5, "{a}, not {b}");
            }
            Ok::<_, Error>((trained, averages))
        })
        .unwrap()
    };
    let first = run(&averaged(Stage::DataParallel));
    for stage in &Stage::ALL[1..] {
        assert!(run(&averaged(*stage)) == first, "stage {stage}");
    }
    assert!(run(&on_disk(averaged(Stage::Parameters), dir.path(), Tier::Disk)) == first, "on a disk");
}

/// Doubles what a module holds of one parameter.
struct Doubled(ParamId);

impl ModuleMapper for Doubled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.id != self.0 {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, (tensor * 2.0).detach().require_grad(), mapper)
    }
}

#[test]
fn replicas_that_differ_are_named() {
    let error = run_threads(3, &options(), |ranks| {
        let (device, rank) = (device(), ranks.comm().rank());
        let config = ZeroConfig { check_replicas: 2, ..config(Stage::DataParallel) };
        let (mut net, zero) = shard(Half::build(&device), ranks, &config)?;
        let second = net.second.id;
        let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
        for step in 0..4 {
            let (_, grads) = zero.backward(|| net.loss(seed(step, rank), &device))?;
            net = optimizer.step(LR, net, grads)?;
            if step == 1 && rank == 1 {
                net = net.map(&mut Doubled(second));
            }
            net = zero.publish_changes(net)?;
        }
        Ok::<_, Error>(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("before update 4") && error.contains("'second'") && error.contains("rank(s) 1"), "{error}");
}

#[test]
fn one_rank_may_change_its_shard() {
    for stage in Stage::ALL {
        let trained = run_threads(2, &options(), |ranks| {
            let (device, rank) = (device(), ranks.comm().rank());
            let (mut net, zero) = shard(Half::build(&device), ranks, &config(stage))?;
            let second = net.second.id;
            if rank == 1 {
                net = net.map(&mut Doubled(second));
            }
            net = zero.publish_changes(net)?;
            let (_, grads) = zero.backward(|| net.loss(seed(0, rank), &device))?;
            net = zero.optimizer(&AdamWConfig::new())?.step(LR, net, grads)?;
            Ok::<_, Error>(weights(&net))
        });
        let trained = trained.unwrap();
        // At stage 0 the ranks have replicas, which this makes different.
        assert_eq!(trained[0]["second"] == trained[1]["second"], stage != Stage::DataParallel, "stage {stage}");
    }
}
