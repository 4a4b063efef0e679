//! A model on a device, with shards there or in host memory: `../tests/software_device.sh param`, on Mesa's software device. With the feature `cuda`
//! alone the device is an NVIDIA GPU.
#![cfg(any(feature = "wgpu", feature = "cuda"))]

mod common;

use std::collections::BTreeMap;

use burn::module::{Lora, Module, ParamGroup};
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamWConfig, LambConfig, SgdConfig};
use common::processes::{be_a_rank, bits, train_processes};
use common::{
    Filled, Gpt, LR, Mlp, Net as _, Told, apart, config, filled, numbers, options, seed, train_on, value, weights,
};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::config::Tier;
use zero_param::{
    AttentionDropout, AttentionOptions, CrossEntropyOptions, Error, Float, Format, Gelu, OptimizerConfig, Uses,
    ZeroConfig, attention, embedding, gelu, layer_norm, linear, linear_cross_entropy, packed_attention, run_threads,
    shard, shard_lora, shard_qlora,
};

const RANKS: usize = 2;

/// A net with dropout, whose masks are drawn on the host.
type Net = Gpt<2, 10>;

/// Largest difference between the device's and the host's numbers, relative for values above 1.
const TOLERANCE: f64 = 1e-4;

fn device() -> Device {
    #[cfg(feature = "wgpu")]
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    #[cfg(not(feature = "wgpu"))]
    let device = Device::cuda(0);
    device.autodiff()
}

/// Where model state is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kept {
    /// On the model's device.
    Device,
    /// Shards on the device; optimizer state in host memory.
    HostOptimizer,
    /// Shards on the device; optimizer state on a disk, from stage 1 on.
    DiskOptimizer,
    /// In host memory, at stage 3.
    Host,
}

fn config_of(stage: Stage, kept: Kept) -> ZeroConfig {
    let mut config = config(stage);
    config.offload.min_bytes = 0;
    config.offload.optimizer = match kept {
        Kept::Device => Tier::Memory,
        Kept::HostOptimizer | Kept::Host => Tier::Host,
        Kept::DiskOptimizer => Tier::Disk,
    };
    config.offload.disk.path = std::env::temp_dir();
    if kept == Kept::Host {
        config.offload.parameters = Tier::Host;
    }
    config
}

/// Trains a GPT-2 on `device` on ranks that are threads. Returns their results and the uses of each parameter.
fn trained(
    device: &Device,
    config: &ZeroConfig,
    optimizer: &(impl OptimizerConfig + Sync),
) -> Vec<(Told, BTreeMap<String, Uses>)> {
    let trained = run_threads(RANKS, &options(), |ranks| {
        let (told, zero) = train_on::<Net>(device.clone(), ranks, config, optimizer)?;
        let uses = zero.paths().map(|path| (path.to_string(), zero.uses(path).unwrap())).collect();
        Ok::<_, Error>((told, uses))
    });
    trained.unwrap()
}

#[test]
fn a_gpt2_on_a_device_trains_alike_at_all_stages() {
    trains_alike(&AdamWConfig::new());
}

#[test]
fn lamb_trains_a_gpt2_on_a_device_alike_at_all_stages() {
    trains_alike(&LambConfig::new());
}

/// It copies shards to the module, where Burn updates them.
#[test]
fn an_optimizer_of_burns_updates_shards_on_a_device() {
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)));
    trains_alike(&sgd);
}

fn trains_alike(optimizer: &(impl OptimizerConfig + Sync)) {
    for kept in [Kept::Device, Kept::HostOptimizer, Kept::DiskOptimizer, Kept::Host] {
        let mut first: Option<Vec<Told>> = None;
        let is_allowed = |stage: &Stage| match kept {
            Kept::Device | Kept::HostOptimizer => true,
            Kept::DiskOptimizer => stage.shards_optimizer() && optimizer.rule().is_some(),
            Kept::Host => stage.shards_parameters(),
        };
        for stage in Stage::ALL.into_iter().filter(is_allowed) {
            let config_there = config_of(stage, kept);
            let here = trained(&Device::flex().autodiff(), &config(stage), optimizer);
            let there = trained(&device(), &config_there, optimizer);
            for (rank, ((on_device, used), (on_host, expected))) in there.iter().zip(&here).enumerate() {
                let apart = apart(on_device, on_host);
                println!("{kept:?}, stage {stage}, rank {rank}: {apart:e} from the host's");
                assert!(apart < TOLERANCE, "{kept:?}, stage {stage}, rank {rank}: {apart:e}");
                if stage != Stage::Parameters {
                    continue;
                }
                for (path, uses) in used {
                    // Burn's `Linear` on sequences keeps a view of its weight.
                    let is_kept = uses.gathered_backward == 0 && !path.starts_with("wte");
                    let again = if is_kept { 0 } else { expected[path].gathered_backward };
                    let ahead = uses.gathered_ahead;
                    let expected = Uses { gathered_backward: again, gathered_ahead: ahead, ..expected[path] };
                    assert_eq!(*uses, expected, "{kept:?}, {path}");
                }
            }
            let mut there: Vec<Told> = there.into_iter().map(|(told, _)| told).collect();
            if matches!(kept, Kept::HostOptimizer | Kept::DiskOptimizer) {
                // At stage 0 gradients stay on the device, with a disk at stage 1 too: it adds their squares in another order.
                there.iter_mut().for_each(|told| told.norms.clear());
            }
            assert!(*first.get_or_insert_with(|| there.clone()) == there, "{kept:?}: stage {stage} has other bits");
        }
    }
}

#[test]
fn clipped_gradients_on_a_device_have_the_same_bits_at_all_stages() {
    let run = |device: Device, stage| {
        let told = run_threads(RANKS, &options(), |ranks| {
            let (mut net, zero) = shard(Net::build(&device), ranks, &config(stage))?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new().with_weight_decay(0.1))?;
            let mut told = Told::default();
            for step in 0..6 {
                let (loss, mut grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
                told.losses.push(value(loss));
                told.norms.push(grads.clip_norm(0.05)?);
                net = optimizer.step(LR, net, grads)?;
            }
            told.weights = weights(&net);
            Ok::<_, Error>(told)
        });
        told.unwrap()
    };
    let first = run(device(), Stage::DataParallel);
    assert!(first[0].norms.iter().all(|norm| *norm > 0.05), "all steps are clipped: {:?}", first[0].norms);
    for stage in Stage::ALL {
        let there = run(device(), stage);
        assert!(there == first, "stage {stage} has other bits");
        let apart = apart(&there[0], &run(Device::flex().autodiff(), stage)[0]);
        assert!(apart < TOLERANCE, "stage {stage}: {apart:e}");
    }
}

#[test]
fn moments_in_8_bits_of_a_model_on_a_device_are_updated_by_the_host() {
    let run = |device: Device, stage| {
        let config = ZeroConfig { int8_optimizer_states: true, ..config(stage) };
        let told = run_threads(RANKS, &options(), |ranks| {
            train_on::<Mlp<64, 3>>(device.clone(), ranks, &config, &AdamWConfig::new()).map(|(told, _)| told)
        });
        told.unwrap().swap_remove(0)
    };
    for stage in Stage::ALL {
        let apart = apart(&run(device(), stage), &run(Device::flex().autodiff(), stage));
        println!("stage {stage}: {apart:e}");
        assert!(apart < TOLERANCE, "stage {stage}: {apart:e}");
    }
}

#[test]
fn checkpointed_blocks_on_a_device_have_the_same_bits() {
    let plain = trained(&device(), &config(Stage::Parameters), &AdamWConfig::new());
    for activations in [Tier::Memory, Tier::Host, Tier::Disk] {
        let mut config = ZeroConfig { checkpointed_blocks: usize::MAX, ..config_of(Stage::Parameters, Kept::Device) };
        config.offload.activations = activations;
        for (again, plain) in trained(&device(), &config, &AdamWConfig::new()).iter().zip(&plain) {
            assert!(again.0 == plain.0, "inputs of blocks in {activations:?}");
        }
    }
}

#[test]
fn adapters_train_on_a_device_as_on_the_host() {
    let run = |device: Device, stage, format: Option<Format>| {
        let told = run_threads(RANKS, &options(), |ranks| {
            let adapted = ParamGroup::from_paths(vec!["layers.0.weight", "layers.2.weight"]);
            let lora = Filled(Lora::new(2, 4.0).set_param_group(adapted));
            let (net, config) = (Mlp::<12, 3>::build(&device), config(stage));
            let (mut net, zero) = match format {
                None => shard_lora(net, ranks, &config, lora)?,
                Some(format) => shard_qlora(net, ranks, &config, lora, format)?,
            };
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            let mut told = Told::default();
            for step in 0..4 {
                let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
                told.losses.push(value(loss));
                net = optimizer.step(LR, net, grads)?;
            }
            Ok::<_, Error>(told)
        });
        told.unwrap()
    };
    for format in [None, Some(Format::Nf4)] {
        let first = run(device(), Stage::DataParallel, format);
        for stage in Stage::ALL {
            let (there, here) = (run(device(), stage, format), run(Device::flex().autodiff(), stage, format));
            for (there, here) in there.iter().zip(&here) {
                let apart = apart(there, here);
                println!("{format:?}, stage {stage}: {apart:e} from the host's");
                assert!(apart < TOLERANCE, "{format:?}, stage {stage}: {apart:e}");
            }
            assert!(there == first, "{format:?}: stage {stage} has other bits");
        }
    }
}

#[test]
fn checkpoints_move_between_a_device_and_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let run = |device: Device, stage, from: usize, to: usize| {
        let told = run_threads(RANKS, &options(), |ranks| {
            let (mut net, zero) = shard(Net::build(&device), ranks, &config(stage))?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            if from > 0 {
                let saved = Checkpoint::open(&dir.path().join(format!("step-{from:08}")))?;
                let resumed = zero.load(net, optimizer, &saved)?;
                (net, optimizer) = (resumed.model, resumed.optimizer);
            }
            let mut told = Told::default();
            for step in from..to {
                let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
                told.losses.push(value(loss));
                net = optimizer.step(LR, net, grads)?;
            }
            zero.save(&net, &optimizer, dir.path(), to, Default::default(), &SaveOptions::default())?;
            told.weights = weights(&net);
            Ok::<_, Error>(told)
        });
        told.unwrap().swap_remove(0)
    };
    let host = || Device::flex().autodiff();
    let expected = run(host(), Stage::Parameters, 0, 6);
    run(device(), Stage::Parameters, 0, 2);
    run(host(), Stage::OptimizerState, 2, 4);
    let last = run(device(), Stage::Gradients, 4, 6);
    assert_eq!(last.losses.len(), 2);
    let expected = Told { losses: expected.losses[4..].to_vec(), ..expected };
    let apart = apart(&last, &expected);
    println!("{apart:e} from a run on the host");
    assert!(apart < TOLERANCE, "{apart:e}");
}

/// The body of a rank, not a test by itself.
#[test]
fn rank() {
    be_a_rank(|ranks, stage| {
        train_on::<Net>(device(), ranks, &config(stage), &AdamWConfig::new()).map(|(told, _)| told)
    });
}

#[test]
fn processes_train_on_a_device_as_threads_do() {
    for stage in Stage::ALL {
        let threads: Vec<Told> =
            trained(&device(), &config(stage), &AdamWConfig::new()).into_iter().map(|(told, _)| told).collect();
        assert!(train_processes(RANKS, stage) == bits(&threads), "stage {stage}");
    }
}

/// Returns the results of all fused operations, and the gradients of their operands.
fn operations(device: &Device) -> Vec<Vec<f32>> {
    const IGNORED: i64 = -100;
    let (batch, heads, t, d, words) = (2, 2, 5, 8, 11);
    let n = batch * t;
    let mut seed = 0;
    let mut leaf = |shape: [usize; 2]| {
        seed += 1;
        let mut next = numbers(seed);
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| next()).collect();
        Tensor::<2>::from_data(TensorData::new(values, shape), device).require_grad()
    };
    let leaves = [[words, d], [1, d], [1, d], [d, 3 * d], [1, 3 * d], [d, d], [1, d]].map(&mut leaf);
    let [table, gamma, beta, packing, packed, out, bias] = leaves.clone();
    let vector = |x: Tensor<2>| x.flatten::<1>(0, 1);
    let numbers = |step: usize| (0..n).map(|at| ((at * step) % words) as i64).collect::<Vec<_>>();
    let ids = Tensor::<1, Int>::from_data(TensorData::new(numbers(3), [n]), device);
    let mut targets = numbers(7);
    targets[4] = IGNORED;
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [n]), device);
    let mask: Vec<f32> = (0..n).map(|at| if at == t + 1 { -3e4 } else { 0.0 }).collect();
    let mask = Tensor::<2>::from_data(TensorData::new(mask, [batch, t]), device);

    let words = burn::module::Param::from_mapped_value(Default::default(), table.clone(), Default::default());
    let x = embedding(&words, ids.reshape([batch, t])).reshape([n, d]);
    let x = layer_norm(x, vector(gamma), Some(vector(beta)), 1e-5);
    let qkv = linear(x.clone(), packing, Some(vector(packed)), None);
    let options =
        AttentionOptions { batch, heads, causal: true, window: Some(2), scale: 0.5, dropout: None, cap: Some(1.5) };
    let seen = packed_attention(qkv.clone(), None, options);
    let dropout = Some(AttentionDropout { probability: 0.3, key: 5 });
    let [q, k, v] = [0, 1, 2].map(|at| qkv.clone().slice([0..n, at * d..(at + 1) * d]));
    let all = attention(q, k, v, Some(mask), AttentionOptions { causal: false, window: None, dropout, ..options });
    let x = linear(gelu(Gelu::Tanh, seen, Some(vector(bias))), out, None, Some(x)) + gelu(Gelu::Erf, all, None);
    let loss = linear_cross_entropy(x, table, targets, CrossEntropyOptions { ignored: Some(IGNORED), cap: Some(2.0) });
    let grads = loss.backward();
    let of_leaves = leaves.iter().map(|leaf| leaf.grad(&grads).unwrap().into_data().try_into_vec().unwrap());
    std::iter::once(loss.into_data().try_into_vec().unwrap()).chain(of_leaves).collect()
}

#[test]
fn fused_operations_on_a_device_are_those_of_the_host() {
    let (there, here) = (operations(&device()), operations(&Device::flex().autodiff()));
    for (part, (there, here)) in there.iter().zip(&here).enumerate() {
        assert_eq!(there.len(), here.len());
        for (a, b) in there.iter().zip(here) {
            let apart = f64::from((a - b).abs() / b.abs().max(1.0));
            assert!(apart < 1e-5, "part {part}: {a} there, {b} here");
        }
    }
}

#[test]
fn what_a_device_cannot_do_is_said() {
    let failure = |on: Device, config: &ZeroConfig, moves: bool| {
        let run = run_threads(RANKS, &options(), |ranks| {
            let (net, zero) = shard(filled(Gpt::<1>::build(&on)), ranks, config)?;
            let net = if moves { net.to_device(&device()) } else { net };
            zero.backward(|| net.loss(0, &device())).map(drop)
        });
        run.map_err(|error| error.to_string()).err()
    };
    let moved = failure(Device::flex().autodiff(), &config(Stage::Parameters), true).unwrap();
    assert!(moved.contains("was moved to a device") && moved.contains("then shard it"), "{moved}");
    let half = ZeroConfig { param_dtype: Float::Bf16, ..config(Stage::Parameters) };
    if !device().supports_dtype(DType::BF16) {
        let refused = failure(device(), &half, false).unwrap();
        assert!(refused.contains("does not support bf16") && refused.contains("Float::F32"), "{refused}");
    }
}
