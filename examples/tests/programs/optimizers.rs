//! Custom optimizers, several optimizers, and optimizers that need full parameters.

use crate::common::*;
use burn::module::{AutodiffModule, Module, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{
    AdamWConfig, GradientsAccumulator, GradientsParams, LBFGSConfig, LearningRate, Optimizer, SgdConfig,
    SimpleOptimizer,
};
use burn::record::Record;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, activation};
use zero_burn::module::{collect_grads, collect_grads_of, prepare};
use zero_burn::optim::distributed;
use zero_burn::stats::all_gather;

/// Adds the sign of a mean of gradients.
#[derive(Clone)]
struct AddsSigns;

#[derive(Record, Clone)]
struct Mean<B: Backend, const D: usize> {
    mean: Tensor<B, D>,
}

impl<B: Backend> SimpleOptimizer<B> for AddsSigns {
    type State<const D: usize> = Mean<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<Mean<B, D>>,
    ) -> (Tensor<B, D>, Option<Mean<B, D>>) {
        let mean = match state {
            Some(Mean { mean }) => mean.mul_scalar(0.9) + grad.mul_scalar(0.1),
            None => grad,
        };
        // In place of `tensor - ...`.
        (tensor + mean.clone().sign().mul_scalar(-lr), Some(Mean { mean }))
    }

    fn to_device<const D: usize>(state: Mean<B, D>, device: &B::Device) -> Mean<B, D> {
        Mean { mean: state.mean.to_device(device) }
    }
}

/// Expected: the result of one rank, or an error at the first step that explains how an update has to end.
#[test]
fn an_optimizer_that_adds() {
    like_one_rank("an optimizer that adds", |device, world| {
        let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
        let optimizer = OptimizerAdaptor::<AddsSigns, Linear<B>, B>::from(AddsSigns);
        let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, optimizer, &device);
        for step in 0..3 {
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

/// The same, and then one rank alone reads its output, as a program that logs does. Expected: no wait, because the book
/// states that any one rank can read a parameter.
#[test]
fn an_optimizer_that_adds_and_one_rank_that_evaluates() {
    like_one_rank("one rank evaluates after an update that adds", |device, world| {
        let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
        let optimizer = OptimizerAdaptor::<AddsSigns, Linear<B>, B>::from(AddsSigns);
        let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, optimizer, &device);
        for step in 0..3 {
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
            if device.rank() == 0 {
                let output = model.valid().forward(batch(&device, 1, step).inner());
                assert!(output.sum().into_scalar().is_finite());
            }
        }
        whole(&model)
    });
}

#[derive(Module, Debug)]
struct Two<B: Backend> {
    trunk: Linear<B>,
    head: Linear<B>,
    /// Used only by rank 1's rows.
    extra: Linear<B>,
}

impl<B: Backend> Two<B> {
    fn new(device: &B::Device) -> Self {
        let layer = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self { trunk: layer(), head: layer(), extra: layer() }
    }

    fn loss(&self, x: Tensor<B, 2>, extra: bool) -> Tensor<B, 1> {
        let y = self.head.forward(activation::relu(self.trunk.forward(x)));
        let y = if extra { self.extra.forward(y) } else { y };
        y.powf_scalar(2.0).mean()
    }

    fn groups(&self) -> (Vec<ParamId>, Vec<ParamId>) {
        let of = |layer: &Linear<B>| vec![layer.weight.id, layer.bias.as_ref().unwrap().id];
        (of(&self.trunk), [of(&self.head), of(&self.extra)].concat())
    }
}

/// Two optimizers with their own rates on one module, Burn's `from_params`; one layer has gradients only on rank 1.
/// Expected: the second optimizer steps it on all ranks, like `collect_grads_of` (below).
#[test]
fn two_groups_and_a_layer_of_one_rank() {
    fn body(device: Device, by_hand: bool) -> Vec<f32> {
        let model = prepare::<B, _>(Two::<B>::new(&device), &device);
        let (trunk, head) = model.groups();
        let (mut model, mut slow) = distributed::<B, Two<B>, _>(model, SgdConfig::new().init(), &device);
        let mut fast = slow.clone();
        let (mut plain_slow, mut plain_fast) =
            (SgdConfig::new().init::<B, Two<B>>(), SgdConfig::new().init::<B, Two<B>>());
        for step in 0..3 {
            let mut grads = model.loss(batch(&device, 2, step), device.rank() == 1).backward();
            let one = GradientsParams::from_params(&mut grads, &model, &trunk);
            let two = GradientsParams::from_params(&mut grads, &model, &head);
            if by_hand {
                let one = collect_grads_of::<B, _>(one, &model, &trunk);
                let two = collect_grads_of::<B, _>(two, &model, &head);
                model = plain_slow.step(0.001, model, one);
                model = plain_fast.step(0.1, model, two);
            } else {
                model = slow.step(0.001, model, one);
                model = fast.step(0.1, model, two);
            }
        }
        whole(&model)
    }
    for stage in zero_core::Stage::ALL {
        let right = run(2, config(stage), |device| body(device, true)).unwrap();
        match run(2, config(stage), |device| body(device, false)) {
            Ok(ranks) => {
                assert!(distance(&ranks[0], &right[0]) < 1e-6, "{stage:?}: in silence, {ranks:?} for {right:?}")
            }
            Err(error) => println!("{stage:?}: {error}"),
        }
    }
}

/// L-BFGS replaces parameters by ordinary tensors. If its closure collects gradients and returns the mean loss of all
/// ranks, these are equal on all ranks, and it trains as on one rank.
#[test]
fn lbfgs_of_collected_gradients() {
    like_one_rank("L-BFGS", |device, world| {
        let mut model = prepare::<B, _>(LinearConfig::new(WIDTH, 3).init::<B>(&device), &device);
        let mut optimizer = LBFGSConfig::new().with_max_iter(3).init::<B>();
        for step in 0..2 {
            (model, _) = optimizer.step(0.1, model, |model: Linear<B>| {
                let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
                let all = all_gather::<burn_flex::Flex>(&[f64::from(loss.clone().into_scalar())]);
                let mean = all.iter().map(|rank| rank[0]).sum::<f64>() / world as f64;
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                (mean, collect_grads::<B, _>(grads, &model))
            });
        }
        model.weight.val().into_data().to_vec::<f32>().unwrap()
    });
}

/// A generator and a discriminator with an optimizer each; the generator's pass goes through the discriminator.
#[test]
fn a_generator_and_a_discriminator() {
    like_one_rank("a generator and a discriminator", |device, world| {
        let layer = || LinearConfig::new(WIDTH, WIDTH).init::<B>(&device);
        let (mut generator, mut of_generator) =
            distributed::<B, Linear<B>, _>(layer(), AdamWConfig::new().init(), &device);
        let (mut critic, mut of_critic) = distributed::<B, Linear<B>, _>(layer(), AdamWConfig::new().init(), &device);
        for step in 0..3 {
            let real = critic.forward(batch(&device, world, step)).mean();
            let fake = generator.forward(batch(&device, world, step + 9)).detach();
            let loss = critic.forward(fake).mean() - real;
            let grads = GradientsParams::from_grads(loss.backward(), &critic);
            critic = of_critic.step(0.01, critic, grads);
            let fake = generator.forward(batch(&device, world, step + 9));
            let loss = critic.forward(fake).mean().neg();
            // The critic's gradients of this pass are not wanted.
            let grads = GradientsParams::from_grads(loss.backward(), &generator);
            generator = of_generator.step(0.01, generator, grads);
        }
        [whole(&generator), whole(&critic)].concat()
    });
}

/// Burn's accumulator over micro-batches, collected one by one as the book describes.
#[test]
fn accumulated() {
    like_one_rank("accumulated", |device, world| {
        let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
        let mut model = prepare::<B, _>(model, &device);
        let mut optimizer = AdamWConfig::new().init::<B, Linear<B>>();
        let mut sum = GradientsAccumulator::new();
        for step in 0..4 {
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean() / 2.0;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            sum.accumulate(&model, collect_grads::<B, _>(grads, &model));
            if step % 2 == 1 {
                model = optimizer.step(0.01, model, sum.grads());
            }
        }
        whole(&model)
    });
}
