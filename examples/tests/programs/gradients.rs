//! Gradients that the program changes between the backward pass and the update.

use crate::common::*;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Distribution, Tensor};
use zero_burn::module::collect_grads;
use zero_burn::optim::distributed;

/// A change of a gradient.
#[derive(Debug, Clone, Copy)]
enum How {
    TimesMask,
    FilledMask,
    Noise,
    Norm(f64),
}

struct Change<'a>(&'a mut GradientsParams, How);

impl ModuleVisitor<B> for Change<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = self.0.remove::<Inner, D>(param.id) else { return };
        let (shape, device) = (gradient.shape(), gradient.device());
        // Every other element, alike on all ranks.
        let numbers = Tensor::<Inner, 1, burn::tensor::Int>::arange(0..shape.num_elements() as i64, &device);
        let odd = numbers.remainder_scalar(2).reshape(shape.clone());
        let gradient = match self.1 {
            How::TimesMask => gradient * odd.float(),
            How::FilledMask => gradient.mask_fill(odd.equal_elem(0), 0.0),
            How::Noise => gradient + Tensor::<Inner, D>::random(shape, Distribution::Normal(0.0, 1e-6), &device),
            How::Norm(factor) => gradient.mul_scalar(factor),
        };
        self.0.register::<Inner, D>(param.id, gradient);
    }
}

struct Squares<'a>(&'a GradientsParams, f64);

impl ModuleVisitor<B> for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.0.get::<Inner, D>(param.id) {
            self.1 += f64::from(gradient.powf_scalar(2.0).sum().into_scalar());
        }
    }
}

fn changed(what: &'static str, how: How) {
    like_one_rank(what, move |device, world| changed_model(&device, world, how));
}

fn changed_model(device: &Device, world: usize, how: How) -> Vec<f32> {
    let device = device.clone();
    let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
    let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), &device);
    for step in 0..3 {
        let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        // As the book says: complete them before they are looked at.
        let mut grads = collect_grads::<B, _>(grads, &model);
        let how = match how {
            How::Norm(most) => {
                let mut squares = Squares(&grads, 0.0);
                model.visit(&mut squares);
                How::Norm((most / squares.1.sqrt()).min(1.0))
            }
            how => how,
        };
        model.visit(&mut Change(&mut grads, how));
        model = optimizer.step(0.05, model, grads);
    }
    whole(&model)
}

/// Some rows of an embedding stay untrained.
#[test]
fn masked_by_a_product() {
    changed("masked by a product", How::TimesMask);
}

/// The same with `mask_fill`.
#[test]
fn masked_by_filling() {
    changed("masked by filling", How::FilledMask);
}

/// Noise as for differential privacy, too small to be visible in the values. It differs between ranks, which only an
/// error can report.
#[test]
fn noise_is_added() {
    refused("noise is added", &["float_add", "a product, mask_fill"], |device| changed_model(&device, 2, How::Noise));
}

/// One norm over all gradients: sums over shards must give the norm of the full gradients.
#[test]
fn clipped_by_one_norm() {
    changed("clipped by one norm", How::Norm(0.1));
}

/// A loss that is a parameter, a learnt log-variance, alone in a step. (Burn 0.21 panics if it is the loss itself.)
#[test]
fn a_parameter_is_the_loss() {
    like_one_rank("a parameter is the loss", |device, _| {
        let model = Param::<Tensor<B, 1>>::from_data(burn::tensor::TensorData::from([0.5f32]), &device);
        let (model, mut optimizer) = distributed::<B, Param<Tensor<B, 1>>, _>(model, SgdConfig::new().init(), &device);
        let loss = model.val() + 0.0;
        whole(&update(model, &mut optimizer, loss))
    });
}
