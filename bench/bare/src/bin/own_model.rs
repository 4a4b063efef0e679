//! `cargo run --release --manifest-path bench/bare/Cargo.toml --bin own_model`
//!
//! The net of `examples/examples/own_model.rs` in plain Burn, on one backend, with its own loop.
//! `bench/own_model_diff.sh` prints the differences.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_flex::Flex;

/// 1797 digits of 8 x 8 pixels from 0 to 16, each with its label (source: examples/data/README.md).
const DIGITS: &[[u8; 65]] = include_bytes!("../../../../examples/data/digits.bin").as_chunks().0;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    conv1: Conv2d<B>,
    conv2: Conv2d<B>,
    hidden: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        // Parameters may be in 16 bit.
        let images = images.cast(self.conv1.weight.val().dtype());
        let features = relu(self.conv2.forward(relu(self.conv1.forward(images))));
        self.out.forward(relu(self.hidden.forward(features.flatten(1, 3))))
    }
}

struct Digits;

impl Digits {
    fn batch<B: Backend>(rows: &[usize], device: &B::Device) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
        let pixels: Vec<f32> = rows.iter().flat_map(|&row| &DIGITS[row][..64]).map(|&p| f32::from(p) / 16.0).collect();
        let labels: Vec<i32> = rows.iter().map(|&row| DIGITS[row][64].into()).collect();
        let images = Tensor::<B, 1>::from_floats(&*pixels, device).reshape([rows.len(), 1, 8, 8]);
        (images, Tensor::from_ints(&*labels, device))
    }

    fn model<B: Backend>(&self, device: &B::Device) -> Net<B> {
        let conv = |from, to| Conv2dConfig::new([from, to], [3, 3]).with_padding(PaddingConfig2d::Same).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Net { conv1: conv(1, 8), conv2: conv(8, 16), hidden: linear(16 * 64, 64), out: linear(64, 10) }
    }

    fn loss<B: Backend>(&self, net: &Net<B>, rows: &[usize], device: &B::Device) -> Tensor<B, 1> {
        let (images, labels) = Self::batch(rows, device);
        CrossEntropyLossConfig::new().init(device).forward(net.forward(images), labels)
    }

    fn accuracy<B: Backend>(&self, net: &Net<B>, rows: &[usize], device: &B::Device) -> f32 {
        let (images, labels) = Self::batch::<B>(rows, device);
        let right = net.forward(images).argmax(1).flatten::<1>(0, 1).equal(labels).float().mean();
        right.into_scalar().elem()
    }
}

fn main() {
    let device = Default::default();
    let mut net = Digits.model::<Autodiff<Flex>>(&device);
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
    let rows: Vec<usize> = (0..1500).collect();
    for (step, batch) in rows.chunks(64).cycle().take(300).enumerate() {
        let loss = Digits.loss(&net, batch, &device);
        if step % 50 == 0 {
            println!("step {step}: loss {:.4}", loss.clone().into_scalar());
        }
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-3, net, grads);
    }
    let held_out: Vec<usize> = (1500..1797).collect();
    println!("accuracy {:.4}", Digits.accuracy(&net.valid(), &held_out, &device));
}
