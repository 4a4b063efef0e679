//! Tensors that a module holds but does not train.

use crate::common::*;
use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Distribution, Int, Tensor};
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, distributed};
use zero_core::Stage;
use zero_train::TrainError;
use zero_train::config::ZeroPlan;
use zero_train::engine::ZeroEngine;

/// Random Fourier features: fixed frequencies in a plain tensor, which Burn neither visits nor saves.
#[derive(Module, Debug)]
struct Fourier<B: Backend> {
    frequencies: Tensor<B, 2>,
    out: Linear<B>,
}

/// Expected: all ranks have the frequencies of one rank (as DDP and FSDP broadcast buffers), or `prepare` returns an error.
#[test]
fn fixed_random_features() {
    like_one_rank("fixed random features", |device, world| {
        let model = Fourier {
            frequencies: Tensor::<B, 2>::random([WIDTH, 6], Distribution::Normal(0.0, 1.0), &device),
            out: LinearConfig::new(6, 2).init(&device),
        };
        let (mut model, mut optimizer) = distributed::<B, Fourier<B>, _>(model, SgdConfig::new().init(), &device);
        for step in 0..3 {
            let x = batch(&device, world, step).matmul(model.frequencies.clone()).cos();
            let loss = model.out.forward(x).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        let frequencies = model.frequencies.clone().into_data().to_vec::<f32>().unwrap();
        [frequencies, whole(&model)].concat()
    });
}

/// A layer of a flow: a fixed random column order and a fixed random mask, both non-float parameters.
#[derive(Module, Debug)]
struct Flow<B: Backend> {
    order: Param<Tensor<B, 1, Int>>,
    pruned: Param<Tensor<B, 2, Bool>>,
    weight: Linear<B>,
}

impl<B: Backend> Flow<B> {
    fn new(device: &B::Device) -> Self {
        let order = Tensor::<B, 1>::random([WIDTH], Distribution::Uniform(0.0, 1.0), device).argsort(0);
        let pruned = Tensor::<B, 2>::random([WIDTH, WIDTH], Distribution::Uniform(0.0, 1.0), device).lower_elem(0.5);
        Self {
            order: Param::initialized(ParamId::new(), order),
            pruned: Param::initialized(ParamId::new(), pruned),
            weight: LinearConfig::new(WIDTH, WIDTH).init(device),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let kept = self.weight.weight.val().mask_fill(self.pruned.val(), 0.0);
        x.select(1, self.order.val()).matmul(kept).powf_scalar(2.0).mean()
    }
}

/// Expected: one order and one mask on all ranks, or an error of `prepare`.
#[test]
fn parameters_of_ints_and_bools() {
    like_one_rank("parameters of ints and bools", |device, world| {
        let (mut model, mut optimizer) =
            distributed::<B, Flow<B>, _>(Flow::new(&device), SgdConfig::new().init(), &device);
        for step in 0..3 {
            let loss = model.loss(batch(&device, world, step));
            model = update(model, &mut optimizer, loss);
        }
        let order = model.order.val().into_data().iter::<f32>().collect::<Vec<_>>();
        let pruned = model.pruned.val().float().into_data().iter::<f32>().collect::<Vec<_>>();
        [order, pruned, whole(&model)].concat()
    });
}

/// Checkpoints do not hold them: the engine reports this before training, not when saving.
#[test]
fn the_engine_refuses_ints_and_bools() {
    let plan = ZeroPlan::builder(Stage::Parameters).micro_batch(2).build(2).unwrap();
    let ranks = launch::<burn_flex::Flex, (), TrainError>(2, &plan.zero_config(0), &Default::default(), |device| {
        ZeroEngine::initialize(Flow::<B>::new(&device), Fused::new(plan.rule()), plan.engine_config()?, &device)?;
        Ok(())
    });
    let error = ranks.unwrap_err().to_string();
    assert!(error.contains("\"order\" is not a float tensor"), "{error}");
}

/// A parameter created from a random tensor outside of any initialiser. Expected: rank 0's values on all ranks.
#[test]
fn a_parameter_made_of_noise() {
    like_one_rank("a parameter made of noise", |device, world| {
        let noise = Tensor::<B, 2>::random([WIDTH, 3], Distribution::Normal(0.0, 0.1), &device);
        let mut model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
        model.weight = Param::from_tensor(noise);
        let (model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), &device);
        let loss = model.forward(batch(&device, world, 0)).powf_scalar(2.0).mean();
        whole(&update(model, &mut optimizer, loss))
    });
}

/// Seeds. Expected: a seed outside of the launch changes nothing inside; inside, the same seed on all ranks gives the
/// weights of a single rank.
#[test]
fn seeds_inside_and_outside() {
    like_one_rank("seeds", |device, _| {
        B::seed(&device, 42);
        let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
        let (model, _) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), &device);
        whole(&model)
    });
}
