//! LoRA adapters on a sharded model: `cargo test --test lora`.

mod common;

use std::collections::BTreeMap;

use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams};
use common::{Filled, LR, Mlp, Net, ROWS, STEPS, config, device, filled, numbers, options, rows, seed, value, weights};
use serde_json::Map;
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_kernels::quantized::Format;
use zero_param::{Error, Float, OptimizerConfig, Ranks, ZeroConfig, dense, run_threads, shard_lora, shard_qlora};

const WIDTH: usize = 12;
const DEPTH: usize = 3;

type Net3 = Mlp<WIDTH, DEPTH>;

fn lora() -> Filled {
    let adapted = ParamGroup::from_paths(vec!["layers.0.weight", "layers.2.weight"]);
    Filled(Lora::new(2, 4.0).set_param_group(adapted))
}

/// The net's loss, by `zero_param::dense`.
fn loss_by_dense(net: &Net3, seed: u64, device: &Device) -> Tensor<1> {
    let (mut x, y) = rows(seed, WIDTH, device);
    for (index, layer) in net.layers.iter().enumerate() {
        x = dense(x, &layer.weight, layer.bias.as_ref(), None);
        if index + 1 < DEPTH {
            x = burn::tensor::activation::relu(x);
        }
    }
    (x - y).square().mean()
}

#[derive(Debug, Clone, PartialEq, Default)]
struct Seen {
    losses: Vec<f32>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

type Loss = fn(&Net3, u64, &Device) -> Tensor<1>;

fn train(ranks: &Ranks, config: &ZeroConfig, loss_of: Loss) -> Result<Seen, Error> {
    let device = device();
    let (mut net, zero) = shard_lora(Net3::build(&device), ranks, config, lora())?;
    let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
    let mut seen = Seen::default();
    for step in 0..STEPS {
        let (loss, grads) = zero.backward(|| loss_of(&net, seed(step, ranks.comm().rank()), &device))?;
        for frozen in ["layers.0.weight", "layers.1.weight", "layers.1.bias"] {
            assert!(grads.get(frozen).is_none(), "{frozen} has no gradient");
        }
        assert!(grads.get("layers.0.adapter.a").is_some() && grads.get("layers.2.adapter.b").is_some());
        seen.losses.push(value(loss));
        seen.norms.push(grads.norm()?);
        net = optimizer.step(LR, net, grads)?;
    }
    for (path, is_trained) in [("layers.0.weight", false), ("layers.0.adapter.a", true)] {
        assert_eq!(zero.uses(path).unwrap().reduced, if is_trained { STEPS } else { 0 }, "{path}");
    }
    seen.weights = weights(&net);
    Ok(seen)
}

/// Plain Burn on the mean of the ranks' losses.
fn train_plain(world: usize) -> Seen {
    train_plain_from(world, |net| net)
}

fn train_plain_from(world: usize, begin: impl FnOnce(Net3) -> Net3) -> Seen {
    let device = device();
    let mut net = begin(Net3::build(&device)).apply_reparameterization(lora());
    let mut optimizer = AdamWConfig::new().elementwise().unwrap();
    let mut seen = Seen::default();
    for step in 0..STEPS {
        let losses: Vec<Tensor<1>> = (0..world).map(|rank| net.loss(seed(step, rank), &device)).collect();
        seen.losses.push(value(losses[0].clone()));
        let mean = losses.into_iter().reduce(|a, b| a + b).unwrap() / world as f32;
        let grads = GradientsParams::from_grads(mean.backward(), &net);
        net = optimizer.step(LR, net, grads);
    }
    seen.weights = weights(&net);
    seen
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn adapters_train_alike_at_all_stages() {
    for world in 1..=3 {
        let plain = train_plain(world);
        for loss_of in [Net3::loss as Loss, loss_by_dense] {
            let run = |stage| run_threads(world, &options(), |ranks| train(ranks, &config(stage), loss_of)).unwrap();
            let first = run(Stage::DataParallel);
            assert!(apart(&first[0].losses, &plain.losses) < 1e-6, "{:?} {:?}", first[0].losses, plain.losses);
            assert!(plain.losses.windows(2).all(|pair| pair[0] != pair[1]), "it trains");
            for (path, weight) in &plain.weights {
                assert!(apart(&first[0].weights[path], weight) < 1e-5, "{path}");
            }
            for stage in &Stage::ALL[1..] {
                assert!(run(*stage) == first, "{world} ranks at stage {stage}: other bits than at stage 0");
            }
        }
    }
}

#[test]
fn bf16_weights_take_adapters() {
    let loss = |net: &Net3, seed, device: &Device| {
        let (x, y) = rows(seed, WIDTH, device);
        let layer = &net.layers[0];
        let x = x.cast(layer.weight.val().dtype());
        (dense(x, &layer.weight, layer.bias.as_ref(), None).cast(burn::tensor::DType::F32) - y).square().mean()
    };
    let run = |stage| {
        let config = ZeroConfig { param_dtype: Float::Bf16, ..config(stage) };
        run_threads(2, &options(), |ranks| {
            let device = device();
            let (mut net, zero) = shard_lora(Net3::build(&device), ranks, &config, lora())?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                let (value_of, grads) = zero.backward(|| loss(&net, seed(step, ranks.comm().rank()), &device))?;
                losses.push(value(value_of));
                net = optimizer.step(LR, net, grads)?;
            }
            Ok::<_, Error>(losses)
        })
        .unwrap()
    };
    let first = run(Stage::DataParallel);
    assert!(first[0].windows(2).all(|pair| pair[0] != pair[1]), "it trains: {first:?}");
    assert!(run(Stage::Parameters) == first);
}

#[test]
fn adapters_resume_from_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = |stage, resumes: bool| {
        run_threads(2, &options(), |ranks| {
            let device = device();
            let (mut net, zero) = shard_lora(Net3::build(&device), ranks, &config(stage), lora())?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            let mut from = 0;
            if resumes {
                let found = Checkpoint::open(&dir.path().join("step-00000002"))?;
                let resumed = zero.load(net, optimizer, &found)?;
                (net, optimizer, from) = (resumed.model, resumed.optimizer, resumed.steps);
            }
            let mut losses = Vec::new();
            for step in from..STEPS {
                if step == 2 && !resumes {
                    zero.save(&net, &optimizer, dir.path(), step, Map::new(), &SaveOptions::default())?;
                }
                let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
                losses.push(value(loss));
                net = optimizer.step(LR, net, grads)?;
            }
            Ok::<_, Error>((losses, weights(&net)))
        })
        .unwrap()
    };
    let whole = run(Stage::Parameters, false);
    for stage in Stage::ALL {
        let resumed = run(stage, true);
        assert!(resumed[0].0 == whole[0].0[2..] && resumed[0].1 == whole[0].1, "stage {stage}");
    }
}

/// Rounds the weights of linear layers to what `format` decodes to.
struct Rounded(Format);

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 2 {
            return param;
        }
        let format = self.0;
        param.map(|weight| {
            let (shape, device) = (weight.dims(), weight.device());
            let mut values = numbers_in(weight);
            for row in values.chunks_mut(shape[1]) {
                let mut codes = Vec::new();
                format.encode_row(row, &mut codes);
                format.decode_row(&codes, row);
            }
            Tensor::from_data(TensorData::new(values, shape), &device)
        })
    }
}

fn numbers_in<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

#[test]
fn adapters_train_on_quantized_weights() {
    for (format, world) in [(Format::Nf4, 1), (Format::Int8, 2), (Format::Int4, 3)] {
        let run = |stage, few: bool| {
            run_threads(world, &options(), |ranks| {
                let device = device();
                let (mut net, zero) = shard_qlora(Net3::build(&device), ranks, &config(stage), lora(), format)?;
                let rounded = Net3::build(&device).map(&mut Rounded(format));
                for (layer, expected) in net.layers.iter().zip(&rounded.layers).skip(1).take(1) {
                    assert!(numbers_in(layer.weight.val()) == numbers_in(expected.weight.val()), "{format}");
                }
                let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
                let loss_of = if few { loss_by_dense } else { Net3::loss };
                let mut losses = Vec::new();
                for step in 0..STEPS {
                    let (loss, grads) = zero.backward(|| loss_of(&net, seed(step, ranks.comm().rank()), &device))?;
                    losses.push(value(loss));
                    net = optimizer.step(LR, net, grads)?;
                }
                Ok::<_, Error>(losses)
            })
            .unwrap()
        };
        let plain = train_plain_from(world, |net| net.map(&mut Rounded(format)));
        for few in [true, false] {
            let first = run(Stage::DataParallel, few);
            assert!(apart(&first[0], &plain.losses) < 1e-6, "{format}: {:?} {:?}", first[0], plain.losses);
            for stage in &Stage::ALL[1..] {
                assert!(
                    run(*stage, few) == first,
                    "{format}, {world} ranks at stage {stage}: other bits than at stage 0"
                );
            }
        }
        assert!(apart(&plain.losses, &train_plain(world).losses) > 1e-4, "{format} changes the weights");
    }
}

#[test]
fn a_weight_that_is_not_finite_is_not_quantized() {
    let sharded = run_threads(1, &options(), |ranks| {
        let mut net = Net3::build(&device());
        net.layers[1].weight = net.layers[1].weight.clone().map(|weight| weight * f32::NAN);
        shard_qlora(net, ranks, &config(Stage::Parameters), lora(), Format::Nf4).map(drop)
    });
    let error = sharded.unwrap_err().to_string();
    assert!(error.contains("layers.1.weight") && error.contains("cannot be quantized"), "{error}");
}

/// One layer whose weight is larger than everything else.
#[derive(Module, Debug)]
struct Wide {
    layer: Linear,
}

#[test]
fn a_frozen_weight_is_gathered_for_each_pass_and_has_no_gradient() {
    const FROM: usize = 64;
    run_threads(2, &options(), |ranks| {
        let device = device();
        let net = Wide { layer: LinearConfig::new(FROM, FROM).init(&device) };
        let (net, zero) =
            shard_lora(filled(net), ranks, &common::unkept(Stage::Parameters), Filled(Lora::new(2, 4.0)))?;
        let mut next = numbers(7);
        let values: Vec<f32> = (0..ROWS * FROM).map(|_| next()).collect();
        // Rows that need a gradient, as those of a deeper layer do.
        let x = Tensor::<2>::from_data(TensorData::new(values, [ROWS, FROM]), &device).require_grad();
        let layer = &net.layer;
        let (_, grads) = zero.backward(|| dense(x, &layer.weight, layer.bias.as_ref(), None).square().mean())?;
        let uses = zero.uses("layer.weight").unwrap();
        assert_eq!((uses.gathered_forward, uses.gathered_backward, uses.reduced), (1, 1, 0));
        assert!(grads.get("layer.weight").is_none());
        Ok::<_, Error>(())
    })
    .unwrap();
}
