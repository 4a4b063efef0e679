//! A model on a device, with shards in host memory: `../tests/software_device.sh param`, on Mesa's software device. With the feature `cuda`
//! alone the device is an NVIDIA GPU.
#![cfg(any(feature = "wgpu", feature = "cuda"))]

mod common;

use burn::module::Module;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_optim::{AdamWConfig, LambConfig};
use common::processes::{be_a_rank, bits, train_processes};
use common::{Gpt, Net as _, Told, apart, config, filled, numbers, options, train_on};
use zero_core::Stage;
use zero_param::{
    AttentionDropout, AttentionOptions, Error, Float, Gelu, OptimizerConfig, Uses, ZeroConfig, attention, embedding,
    gelu, layer_norm, linear, linear_cross_entropy, packed_attention, run_threads, shard,
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

/// Trains a GPT-2 on `device` on ranks that are threads. Returns their results and the uses of each parameter.
fn trained(device: &Device, stage: Stage, optimizer: &(impl OptimizerConfig + Sync)) -> Vec<(Told, Vec<Uses>)> {
    let trained = run_threads(RANKS, &options(), |ranks| {
        let (told, zero) = train_on::<Net>(device.clone(), ranks, &config(stage), optimizer)?;
        let uses = zero.paths().map(|path| zero.uses(path).unwrap()).collect();
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

fn trains_alike(optimizer: &(impl OptimizerConfig + Sync)) {
    let first = trained(&device(), Stage::DataParallel, optimizer);
    for stage in Stage::ALL {
        let (here, there) =
            (trained(&Device::flex().autodiff(), stage, optimizer), trained(&device(), stage, optimizer));
        for (rank, (on_device, on_host)) in there.iter().zip(&here).enumerate() {
            let apart = apart(&on_device.0, &on_host.0);
            println!("stage {stage}, rank {rank}: {apart:e} from the host's");
            assert!(apart < TOLERANCE, "stage {stage}, rank {rank}: {apart:e}");
            assert!(on_device.0 == first[rank].0, "stage {stage} has other bits than stage 0");
        }
        if stage == Stage::Parameters {
            assert_eq!(there[0].1, here[0].1, "no whole stays on the device from a forward pass to its backward pass");
        }
    }
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
            trained(&device(), stage, &AdamWConfig::new()).into_iter().map(|(told, _)| told).collect();
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
    let options = AttentionOptions { batch, heads, causal: true, window: Some(2), scale: 0.5, dropout: None };
    let seen = packed_attention(qkv.clone(), None, options);
    let dropout = Some(AttentionDropout { probability: 0.3, key: 5 });
    let [q, k, v] = [0, 1, 2].map(|at| qkv.clone().slice([0..n, at * d..(at + 1) * d]));
    let all = attention(q, k, v, Some(mask), AttentionOptions { causal: false, window: None, dropout, ..options });
    let x = linear(gelu(Gelu::Tanh, seen, Some(vector(bias))), out, None, Some(x)) + gelu(Gelu::Erf, all, None);
    let loss = linear_cross_entropy(x, table, targets, Some(IGNORED));
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
