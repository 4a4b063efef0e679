//! `cargo run --release --example own_model`
//!
//! A custom model made of Burn's modules: a convolutional net that reads handwritten digits. Two ranks train it at ZeRO
//! stage 3. `-- --help` lists the trainer's options (`--stage`, `--save`, `--resume auto`, `--config`, ...).

use std::process::ExitCode;

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use zero_train::trainer::{self, FusedBackend, Measured, Result, Rows, Task, scalar};

/// 1797 digits of 8 x 8 pixels from 0 to 16, each with its label (source: examples/data/README.md).
const DIGITS: &[[u8; 65]] = include_bytes!("../data/digits.bin").as_chunks().0;

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
}

impl Task for Digits {
    type Model<B: FusedBackend> = Net<B>;

    fn rows(&self) -> usize {
        DIGITS.len()
    }

    fn held_out(&self) -> usize {
        297
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Net<B>> {
        let conv = |from, to| Conv2dConfig::new([from, to], [3, 3]).with_padding(PaddingConfig2d::Same).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Ok(Net { conv1: conv(1, 8), conv2: conv(8, 16), hidden: linear(16 * 64, 64), out: linear(64, 10) })
    }

    fn loss<B: FusedBackend>(&self, net: &Net<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let (images, labels) = Self::batch(rows, device);
        Ok(CrossEntropyLossConfig::new().init(device).forward(net.forward(images), labels))
    }

    fn evaluate<B: FusedBackend>(&self, net: &Net<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let (images, labels) = Self::batch::<B>(rows, device);
        let right = net.forward(images).argmax(1).flatten::<1>(0, 1).equal(labels).float().mean();
        Ok(vec![("loss", scalar(self.loss(net, rows, device)?)), ("accuracy", scalar(right))])
    }
}

fn main() -> ExitCode {
    trainer::main(&Digits)
}
