//! A tiled linear layer equals the plain layer, at every stage, with state in memory and on a disk.

use burn::module::AutodiffModule;
use burn::nn::LinearConfig;
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::Zero;
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::module::prepare;
use zero_core::Stage;
use zero_models::TiledLinear;

use crate::common::{B, adamw, on_ranks, step};

const SIZES: [usize; 2] = [24, 50];

fn values(shape: [usize; 2], seed: usize, device: &burn::tensor::Device<B>) -> Tensor<B, 2> {
    let numbers = (0..shape[0] * shape[1]).map(|i| ((i * 7919 + seed * 31) % 199) as f32 / 199.0 - 0.5);
    Tensor::from_data(TensorData::new(numbers.collect(), shape), device)
}

fn by_steps<M: AutodiffModule<B>>(
    model: M,
    device: &burn::tensor::Device<B>,
    loss: impl Fn(&M) -> Tensor<B, 1>,
) -> Vec<[f64; 2]> {
    let (mut model, mut optimizer, mut seen) = (prepare::<B, _>(model, device), adamw(), Vec::new());
    for _ in 0..6 {
        let (next, value, norm) = step(model, &mut optimizer, &loss);
        seen.push([value, norm]);
        model = next;
    }
    seen
}

/// Returns losses and gradient norms of two layers, untiled or with `tiles` tiles each. The gradient of the second's
/// input reaches the first.
fn trained(zero: &ZeroConfig, ranks: usize, tiles: Option<usize>) -> Vec<[f64; 2]> {
    let of_ranks = on_ranks(ranks, zero, |device| {
        let [wide, narrow] = [SIZES, [SIZES[1], SIZES[0]]];
        let layer = |[d_in, d_out]: [usize; 2]| LinearConfig::new(d_in, d_out).init::<B>(&device);
        let (first, second) = (layer(wide), layer(narrow));
        let x = values([6, wide[0]], device.rank(), &device);
        let y = values([6, narrow[1]], 9 + device.rank(), &device);
        let loss = |out: Tensor<B, 2>| (out - y.clone()).powi_scalar(2).mean();
        match tiles {
            None => {
                by_steps(vec![first, second], &device, |layers| loss(layers[1].forward(layers[0].forward(x.clone()))))
            }
            Some(tiles) => {
                let layers = [first, second].map(|layer| TiledLinear::from_linear(layer, tiles)).to_vec();
                by_steps(layers, &device, |layers| loss(layers[1].forward(layers[0].forward(x.clone()))))
            }
        }
    });
    of_ranks.into_iter().next().expect("there is a rank")
}

#[test]
fn tiles_train_as_the_layer_does() {
    let swap = tempfile::tempdir().unwrap();
    for ranks in [1, 2] {
        for stage in Stage::ALL {
            let mut zero = ZeroConfig::new(stage);
            let whole = trained(&zero, ranks, None);
            assert!(whole.last().unwrap()[0] < 0.9 * whole[0][0], "{whole:?}");
            let tiled = trained(&zero, ranks, Some(7));
            for (whole, tiled) in whole.iter().zip(&tiled) {
                let close = (0..2).all(|i| (whole[i] - tiled[i]).abs() <= 1e-5 * whole[i].abs());
                assert!(close, "{ranks} ranks, stage {stage}: {tiled:?}, expected {whole:?}");
            }
            if stage == Stage::Parameters && ranks > 1 {
                let disk = Disk { path: swap.path().to_path_buf(), ..Disk::default() };
                let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
                zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
                let bits = |seen: &[[f64; 2]]| seen.iter().map(|seen| seen.map(f64::to_bits)).collect::<Vec<_>>();
                assert_eq!(bits(&trained(&zero, ranks, Some(7))), bits(&tiled), "on a disk");
            }
        }
    }
}

#[test]
fn results_and_gradients_of_weights_are_those_of_one_layer() {
    let device = Default::default();
    let close = |what: &str, got: Tensor<Zero<Flex>, 2>, expected: Tensor<Zero<Flex>, 2>| {
        let largest = expected.clone().abs().max().into_scalar();
        let error = (got - expected).abs().max().into_scalar();
        assert!(error <= 1e-5 * largest, "{what}: {error} of {largest}");
    };
    for (d_in, d_out, tiles, bias) in [(8, 12, 3, true), (16, 13, 5, true), (5, 3, 9, false), (33, 70, 1, true)] {
        let layer = LinearConfig::new(d_in, d_out).with_bias(bias).init::<B>(&device);
        // Drawn now: clones of what is not would be drawn each for itself.
        let x = values([8, d_in], 3, &device).require_grad();
        let whole = layer.forward(x.clone());
        let tiled = TiledLinear::from_linear(layer.clone(), tiles);
        assert_eq!(tiled.tiles.len(), tiles.min(d_out));
        let widths: Vec<_> = tiled.tiles.iter().map(|tile| tile.weight.dims()[1]).collect();
        let (least, most) = (widths.iter().min().unwrap(), widths.iter().max().unwrap());
        assert!(*least > 0 && most - least <= 1 && widths.iter().sum::<usize>() == d_out, "{widths:?}");

        let again = values([8, d_in], 3, &device).require_grad();
        let parts = tiled.forward(again.clone().reshape([2, 4, d_in])).reshape([8, d_out]);
        close("result", parts.clone().inner(), whole.clone().inner());
        let by = values([8, d_out], 5, &device);
        let (whole, parts) = ((whole * by.clone()).sum().backward(), (parts * by).sum().backward());
        let weights = tiled.tiles.iter().map(|tile| tile.weight.grad(&parts).unwrap());
        close("weight", Tensor::cat(weights.collect(), 1), layer.weight.grad(&whole).unwrap());
        if let Some(bias) = &layer.bias {
            let biases = tiled.tiles.iter().map(|tile| tile.bias.as_ref().unwrap().grad(&parts).unwrap());
            close("bias", Tensor::cat(biases.collect(), 0).unsqueeze(), bias.grad(&whole).unwrap().unsqueeze());
        }
        close("x", again.grad(&parts).unwrap(), x.grad(&whole).unwrap());
    }
}
