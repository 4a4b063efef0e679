//! Checkpointed blocks: `cargo test --test checkpointing`.

mod common;

use burn::module::{Lora, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_nn::EmbeddingConfig;
use burn_optim::{AdamWConfig, SgdConfig};
use common::{
    Filled, Gpt, Half, Mlp, Net, config, device, filled, options, rows, seed, train_on, train_threads, value,
};
use zero_core::Stage;
use zero_core::config::{Disk, Offload, Tier};
use zero_param::{Error, Float, Grads, ZeroConfig, checkpoint, dense, run_threads, shard, shard_lora};

type Model = Gpt<3, 10>;

const WIDTH: usize = 12;
type Layers = Mlp<WIDTH, 3>;

#[test]
fn checkpointed_blocks_change_no_bit() {
    for world in 1..=3 {
        for stage in Stage::ALL {
            let expected = train_threads::<Model>(world, &config(stage), &AdamWConfig::new());
            for checkpointed_blocks in [1, 2, usize::MAX] {
                let config = ZeroConfig { checkpointed_blocks, ..config(stage) };
                let got = train_threads::<Model>(world, &config, &AdamWConfig::new());
                assert!(got == expected, "{world} ranks, stage {stage}, {checkpointed_blocks} blocks");
            }
        }
    }
}

#[test]
fn checkpointing_of_burns_own_within_a_block_changes_no_bit() {
    let train = |checkpointed_blocks| {
        run_threads(2, &options(), |ranks| {
            let config = ZeroConfig { checkpointed_blocks, ..config(Stage::Parameters) };
            let device = device().gradient_checkpointing();
            train_on::<Model>(device, ranks, &config, &SgdConfig::new()).map(|(told, _)| told)
        })
        .unwrap()
    };
    assert!(train(usize::MAX) == train(0));
}

#[test]
fn inputs_on_a_disk_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for stage in [Stage::DataParallel, Stage::Parameters] {
        let expected = train_threads::<Model>(2, &config(stage), &AdamWConfig::new());
        for (optimizer, activations) in
            [(Tier::Memory, Tier::Disk), (Tier::Memory, Tier::Host), (Tier::Disk, Tier::Disk)]
        {
            let optimizer = if stage.shards_optimizer() { optimizer } else { Tier::Memory };
            let disk = Disk { path: dir.path().into(), buffer_bytes: Disk::SMALLEST_BUFFER, ..Disk::default() };
            let offload = Offload { optimizer, activations, min_bytes: 0, disk, ..Offload::default() };
            let config = ZeroConfig { checkpointed_blocks: 2, offload, ..config(stage) };
            assert!(train_threads::<Model>(2, &config, &AdamWConfig::new()) == expected, "{config:?}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the files of a run are deleted at its end");
}

/// Returns the loss and the gradients of all of a net's layers after one pass.
fn pass(
    config: &ZeroConfig,
    is_adapted: bool,
    forward: fn(&Layers, Tensor<2>) -> Tensor<2>,
) -> Result<Vec<Vec<f32>>, String> {
    let seen = run_threads(2, &options(), |ranks| {
        let device = device();
        let net = Layers::build(&device);
        let (net, zero) = match is_adapted {
            true => {
                let lora = Lora::new(2, 4.0).set_param_group(ParamGroup::from_path("layers.0.weight"));
                shard_lora(net, ranks, config, Filled(lora))?
            }
            false => shard(net, ranks, config)?,
        };
        let (x, y) = rows(seed(0, ranks.comm().rank()), WIDTH, &device);
        let (loss, grads) = zero.backward(|| (forward(&net, x) - y).square().mean())?;
        let of = |grads: &Grads, path: &str| grads.get(path);
        Ok::<_, Error>(
            [vec![value(loss)]].into_iter().chain(zero.paths().filter_map(|path| of(&grads, path))).collect(),
        )
    });
    seen.map(|mut seen: Vec<Vec<Vec<f32>>>| seen.swap_remove(0)).map_err(|error| error.to_string())
}

#[test]
fn a_block_of_frozen_layers_gives_its_adapters_gradients() {
    // The input of the first block needs no gradient, and its weight has none.
    fn forward(net: &Layers, x: Tensor<2>, block: fn(Layers, usize, Tensor<2>) -> Tensor<2>) -> Tensor<2> {
        (0..net.layers.len()).fold(x, |x, index| block(net.clone(), index, x))
    }
    fn plain(net: Layers, index: usize, x: Tensor<2>) -> Tensor<2> {
        let layer = &net.layers[index];
        dense(x, &layer.weight, layer.bias.as_ref(), None).tanh()
    }
    fn checkpointed(net: Layers, index: usize, x: Tensor<2>) -> Tensor<2> {
        checkpoint(move |x| plain(net.clone(), index, x), x)
    }
    for stage in Stage::ALL {
        let expected = pass(&config(stage), true, |net, x| forward(net, x, plain)).unwrap();
        assert_eq!(expected.len(), 3, "the loss, and two factors");
        assert!(pass(&config(stage), true, |net, x| forward(net, x, checkpointed)).unwrap() == expected, "{stage}");
    }
}

#[test]
fn a_block_has_up_to_three_inputs() {
    fn mixed(net: &Layers, x: Tensor<2>, y: Tensor<2>, z: Tensor<2>) -> Tensor<2> {
        net.layers[1].forward(x) * y + z
    }
    let plain = |net: &Layers, x: Tensor<2>| {
        let [a, b] = [0, 2].map(|index| net.layers[index].forward(x.clone()));
        mixed(net, a, b, x)
    };
    let two = |net: &Layers, x: Tensor<2>| {
        let ([a, b], net) = ([0, 2].map(|index| net.layers[index].forward(x.clone())), net.clone());
        checkpoint(move |(a, b): (Tensor<2>, Tensor<2>)| mixed(&net, a, b, x.clone()), (a, b))
    };
    let three = |net: &Layers, x: Tensor<2>| {
        let ([a, b], net) = ([0, 2].map(|index| net.layers[index].forward(x.clone())), net.clone());
        checkpoint(move |(a, b, x): (Tensor<2>, Tensor<2>, Tensor<2>)| mixed(&net, a, b, x), (a, b, x))
    };
    let config = config(Stage::Parameters);
    let expected = pass(&config, false, plain).unwrap();
    assert!(expected.len() == 7);
    assert!(pass(&config, false, two).unwrap() == expected);
    assert!(pass(&config, false, three).unwrap() == expected);
}

#[test]
fn a_block_without_inputs_looks_up_an_embedding() {
    let train = |is_checkpointed: bool| {
        run_threads(2, &options(), |ranks| {
            let device = device();
            let table = filled(EmbeddingConfig::new(20, 6).init(&device));
            let (table, zero) = shard(table, ranks, &common::unkept(Stage::Parameters))?;
            let ids = Tensor::<2, Int>::from_data([[3, 1, 3], [7, 19, 0]], &device);
            let mut between = 0;
            let (loss, grads) = zero.backward(|| {
                let (own, ids) = (table.clone(), ids.clone());
                let rows = match is_checkpointed {
                    true => checkpoint(move |()| own.forward(ids.clone()), ()),
                    false => own.forward(ids),
                };
                between = zero.uses("weight").unwrap().gathered_backward;
                rows.square().mean()
            })?;
            let again = zero.uses("weight").unwrap().gathered_backward - between;
            Ok::<_, Error>((value(loss), grads.get("weight").unwrap(), again))
        })
        .unwrap()
    };
    let (plain, block) = (train(false), train(true));
    for (plain, block) in plain.iter().zip(&block) {
        assert!(plain.0 == block.0 && plain.1 == block.1);
        // Burn's layer keeps the table, and the block gathers it again.
        assert_eq!((plain.2, block.2), (0, 1));
    }
}

#[test]
fn blocks_within_blocks_and_outside_of_passes_just_run() {
    let config = config(Stage::Parameters);
    let plain = |net: &Layers, x: Tensor<2>| net.layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
    let nested = |net: &Layers, x: Tensor<2>| {
        let net = net.clone();
        let inner = move |x: Tensor<2>| {
            net.layers.iter().cloned().fold(x, |x, layer| checkpoint(move |x: Tensor<2>| layer.forward(x).tanh(), x))
        };
        checkpoint(inner, x)
    };
    assert!(pass(&config, false, nested).unwrap() == pass(&config, false, plain).unwrap());
    let x = Tensor::<1>::ones([3], &Device::flex().autodiff()).require_grad();
    let gradient = x.grad(&checkpoint(|x: Tensor<1>| x * 2.0, x.clone()).sum().backward()).unwrap();
    assert_eq!(gradient.into_data().try_into_vec::<f32>().unwrap(), [2.0; 3]);
}

#[test]
fn a_parameter_in_several_blocks_has_one_gradient() {
    let config = config(Stage::Parameters);
    let plain = |net: &Layers, x: Tensor<2>| (0..3).fold(x, |x, _| net.layers[0].forward(x).tanh());
    let blocks = |net: &Layers, x: Tensor<2>| {
        (0..3).fold(x, |x, _| {
            let net = net.clone();
            checkpoint(move |x: Tensor<2>| net.layers[0].forward(x).tanh(), x)
        })
    };
    assert!(pass(&config, false, blocks).unwrap() == pass(&config, false, plain).unwrap());
}

#[test]
fn sixteen_bit_blocks_change_no_bit() {
    #[derive(burn::module::Module, Debug)]
    struct Blocks {
        half: Half,
    }
    impl Net for Blocks {
        fn build(device: &Device) -> Self {
            Self { half: Half::build(device) }
        }
        fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
            let half = self.half.clone();
            let (x, _) = rows(seed, 1, device);
            // The input is not used: its gradient is zero.
            let device = device.clone();
            let block = move |x: Tensor<2>| half.loss(seed, &device).unsqueeze::<2>() + x.mean().unsqueeze::<2>() * 0.0;
            zero_param::checkpoint_block(block, x.require_grad()).mean()
        }
    }
    let of = |checkpointed_blocks| {
        let config = ZeroConfig { checkpointed_blocks, param_dtype: Float::Bf16, ..config(Stage::Parameters) };
        train_threads::<Blocks>(2, &config, &AdamWConfig::new())
    };
    assert!(of(1) == of(0));
}

#[test]
fn a_block_that_is_not_the_same_again_is_an_error() {
    let config = config(Stage::Parameters);
    let random = |net: &Layers, x: Tensor<2>| {
        let net = net.clone();
        let block = move |x: Tensor<2>| {
            let noise = Tensor::random(x.shape(), Distribution::Default, &x.device());
            net.layers[0].forward(x * noise)
        };
        checkpoint(block, x)
    };
    let error = pass(&config, false, random).unwrap_err();
    assert!(error.contains("not the same when it runs again") && error.contains("dropout"), "{error}");
    let captured = |net: &Layers, x: Tensor<2>| {
        let (net, other) = (net.clone(), net.layers[0].forward(x.clone()));
        checkpoint(move |x: Tensor<2>| net.layers[1].forward(x) + other.clone(), x)
    };
    let error = pass(&config, false, captured).unwrap_err();
    assert!(error.contains("pass it as an input"), "{error}");
}
