//! Parameters that the program changes, averages or copies.

use std::time::Instant;

use crate::common::*;
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use zero_burn::module::prepare;
use zero_burn::optim::distributed;
use zero_core::Stage;

fn prepared(device: &Device) -> (Linear<B>, impl burn::optim::Optimizer<Linear<B>, B>) {
    let model = LinearConfig::new(WIDTH, 3).init::<B>(device);
    distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), device)
}

fn loss(model: &Linear<B>, device: &Device, world: usize, step: usize) -> Tensor<B, 1> {
    model.forward(batch(device, world, step)).powf_scalar(2.0).mean()
}

/// A moving average in the style of a look-ahead optimizer: moved to the average's device, then parameter minus average.
#[test]
fn a_moving_average_that_asks_for_the_device_first() {
    like_one_rank("a moving average", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        let mut average = model.weight.val().inner();
        for step in 0..4 {
            let loss = loss(&model, &device, world, step);
            model = update(model, &mut optimizer, loss);
            let there = average.device();
            let now = model.weight.val().inner().to_device(&there);
            average = average.clone() + (now - average).mul_scalar(0.1);
        }
        average.into_data().to_vec::<f32>().unwrap()
    });
}

/// The same with a device check first, as in careful programs.
#[test]
fn a_moving_average_that_compares_devices() {
    like_one_rank("a moving average that compares devices", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        let mut average = model.weight.val().inner();
        for step in 0..4 {
            let loss = loss(&model, &device, world, step);
            model = update(model, &mut optimizer, loss);
            let now = model.weight.val().inner();
            assert_eq!(average.device(), now.device());
            average = average.clone() + (now - average).mul_scalar(0.1);
        }
        average.into_data().to_vec::<f32>().unwrap()
    });
}

/// A target network that is softly updated, used in every loss.
#[test]
fn a_target_network() {
    /// Mixes in the other module's parameters in field order.
    struct Follow(Vec<burn::tensor::TensorPrimitive<Inner>>, f64);
    impl ModuleMapper<Inner> for Follow {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Inner, D>>) -> Param<Tensor<Inner, D>> {
            let online = Tensor::<Inner, D>::from_primitive(self.0.remove(0));
            let rate = self.1;
            param.map(|target| target.mul_scalar(1.0 - rate) + online.mul_scalar(rate))
        }
    }
    struct Take(Vec<burn::tensor::TensorPrimitive<Inner>>);
    impl burn::module::ModuleVisitor<Inner> for Take {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Inner, D>>) {
            self.0.push(param.val().into_primitive());
        }
    }
    like_one_rank("a target network", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        let mut target = model.valid();
        for step in 0..4 {
            let x = batch(&device, world, step);
            let wanted = Tensor::<B, 2>::from_inner(target.forward(x.clone().inner())).mul_scalar(0.9);
            let loss = (model.forward(x) - wanted).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
            let mut take = Take(Vec::new());
            model.valid().visit(&mut take);
            target = target.map(&mut Follow(take.0, 0.25));
        }
        let of = |tensor: Tensor<Inner, 2>| tensor.into_data().to_vec::<f32>().unwrap();
        [of(target.weight.val()), whole(&model)].concat()
    });
}

/// Each rank keeps a shard of a moving average, in any of its forms, and counts it as optimizer state; plain SGD has none.
#[test]
fn a_moving_average_is_kept_in_pieces() {
    type T = Tensor<Inner, 2>;
    let ways: [fn(T, T) -> T; 4] = [
        |average, weight| average.mul_scalar(0.9) + weight.mul_scalar(0.1),
        |average, weight| average.clone() - (average - weight) * 0.1,
        |average, weight| average.clone() + (weight - average).mul_scalar(0.1),
        |average, weight| weight.mul_scalar(0.1) + average.mul_scalar(0.9),
    ];
    let weights: Vec<Vec<f32>> = run(1, config(Stage::DataParallel), |device| {
        let (mut model, mut optimizer) = prepared(&device);
        (0..=3)
            .map(|step| {
                let weight = model.weight.val().into_data().to_vec::<f32>().unwrap();
                let loss = loss(&model, &device, 1, step);
                model = update(model.clone(), &mut optimizer, loss);
                weight
            })
            .collect()
    })
    .unwrap()
    .remove(0);
    let mix =
        |average: Vec<f32>, weight: &Vec<f32>| average.iter().zip(weight).map(|(a, w)| 0.9 * a + 0.1 * w).collect();
    let expected: Vec<f32> = weights[1..].iter().fold(weights[0].clone(), mix);
    for (stage, way) in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters].into_iter().zip(0..).chain([
        (Stage::Parameters, 0),
        (Stage::Parameters, 1),
        (Stage::DataParallel, 1),
        (Stage::Parameters, 3),
    ]) {
        let ranks = run(2, config(stage), move |device| {
            let (mut model, mut optimizer) = prepared(&device);
            let mut average = model.weight.val().inner();
            for step in 0..3 {
                let loss = loss(&model, &device, 2, step);
                model = update(model, &mut optimizer, loss);
                average = ways[way](average, model.weight.val().inner());
            }
            // What was updated is a parameter from its first use on.
            drop(loss(&model, &device, 2, 3));
            let bytes = zero_burn::stats::rank_stats::<burn_flex::Flex>().model_state_bytes.optimizer;
            (bytes, average.into_data().to_vec::<f32>().unwrap())
        });
        let bytes = if stage.shards_optimizer() { 4 * WIDTH * 3 / 2 } else { 4 * WIDTH * 3 } as u64;
        for (held, values) in ranks.unwrap() {
            assert_eq!(held, bytes, "{stage:?}, way {way}");
            assert!(distance(&values, &expected) < 1e-6, "{stage:?}, way {way}: {values:?} {expected:?}");
        }
    }
}

/// A penalty on the change since the start (L2-SP): a loss with two versions of a parameter.
#[test]
fn a_penalty_on_what_has_changed() {
    like_one_rank("a penalty on what has changed", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        let begin = model.weight.val().inner();
        for step in 0..4 {
            let moved = model.weight.val() - Tensor::from_inner(begin.clone());
            let loss = loss(&model, &device, world, step) + moved.powf_scalar(2.0).sum().mul_scalar(0.3);
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

/// Weights kept at a norm after each update: max-norm, spectral norm, weight standardisation. Expected: the results of
/// one rank and of plain Burn.
#[test]
fn columns_are_kept_at_a_norm() {
    like_one_rank("columns are kept at a norm", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..3 {
            let loss = loss(&model, &device, world, step);
            model = update(model, &mut optimizer, loss);
            model.weight = model.weight.map(|weight| {
                let norm = weight.clone().powf_scalar(2.0).sum_dim(0).sqrt().clamp_min(0.5);
                (weight / norm).detach().require_grad()
            });
        }
        whole(&model)
    });
}

/// The row of a padding token is set to zero after each update.
#[test]
fn a_padding_row_stays_nought() {
    like_one_rank("a padding row stays nought", |device, world| {
        let model = EmbeddingConfig::new(5, 3).init::<B>(&device);
        let (mut model, mut optimizer) = distributed::<B, Embedding<B>, _>(model, SgdConfig::new().init(), &device);
        for step in 0..3 {
            let ids: Vec<i32> = rows(&device, world).map(|row| ((row + step) % 5) as i32).collect();
            let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [ROWS / world, 1]), &device);
            let loss = model.forward(ids).add_scalar(0.3).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
            model.weight = model.weight.map(|weight| {
                let nought = Tensor::<B, 2>::zeros([1, 3], &weight.device());
                weight.slice_assign([0..1, 0..3], nought).detach().require_grad()
            });
        }
        whole(&model)
    });
}

/// Calls `prepare` after each edit, which also broadcasts all weights from rank 0.
#[test]
fn prepared_again_after_each_edit() {
    like_one_rank("prepared again after each edit", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..3 {
            let loss = loss(&model, &device, world, step);
            model = update(model, &mut optimizer, loss);
            model.weight = model.weight.map(|weight| {
                let norm = weight.clone().powf_scalar(2.0).sum_dim(0).sqrt().clamp_min(0.5);
                (weight / norm).detach().require_grad()
            });
            model = prepare::<B, _>(model, &device);
        }
        whole(&model)
    });
}

/// Weights of a critic are clamped after each update, as in the first Wasserstein networks.
#[test]
fn weights_are_clamped() {
    struct Clamp;
    impl ModuleMapper<B> for Clamp {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|tensor| tensor.clamp(-0.2, 0.2).detach().require_grad())
        }
    }
    like_one_rank("weights are clamped", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..3 {
            let loss = loss(&model, &device, world, step);
            model = update(model, &mut optimizer, loss).map(&mut Clamp);
        }
        whole(&model)
    });
}

/// A weight, and a temperature that the program lowers itself.
#[derive(Module, Debug)]
struct Annealed<B: Backend> {
    layer: Linear<B>,
    temperature: Param<Tensor<B, 1>>,
}

/// Expected: step 400 takes as long as step 40.
#[test]
fn a_temperature_is_lowered_each_step() {
    let took = run(2, config(Stage::Parameters), |device| {
        let model = Annealed {
            layer: LinearConfig::new(WIDTH, 3).init::<B>(&device),
            temperature: Param::from_data(TensorData::from([1.0f32]), &device).set_require_grad(false),
        };
        let (mut model, mut optimizer) = distributed::<B, Annealed<B>, _>(model, SgdConfig::new().init(), &device);
        let mut took = Vec::new();
        for step in 0..400 {
            let begin = Instant::now();
            let scale = model.temperature.val().reshape([1, 1]);
            let loss = (model.layer.forward(batch(&device, 2, step)) / scale).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
            model.temperature = model.temperature.map(|temperature| temperature.mul_scalar(0.999));
            took.push(begin.elapsed().as_micros());
        }
        // Of each part the shortest: other programs make some steps longer.
        let shortest = |part: &[u128]| part.iter().copied().min().unwrap_or(0);
        (shortest(&took[20..60]), shortest(&took[360..]))
    });
    for (early, late) in took.unwrap() {
        assert!(late < 3 * early, "a step took {early} us and then {late} us");
    }
}
