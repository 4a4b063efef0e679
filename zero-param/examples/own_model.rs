//! `cargo run --release --features trainer --example own_model`
//!
//! A custom model made of Burn 0.22's modules: a convolutional net that reads handwritten digits. Two ranks train it at ZeRO stage 3.
//! `-- --help` lists the trainer's options (`--stage`, `--save`, `--resume auto`, `--config`, ...). Its checkpoints can be resumed by the
//! example `own_model` for Burn 0.21, and the other way round.

use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::conv::{Conv2d, Conv2dConfig};
use burn_nn::loss::CrossEntropyLossConfig;
use burn_nn::{Linear, LinearConfig, PaddingConfig2d};
use clap::Parser;
use zero_param::initialize;
use zero_param::trainer::Burn022;
use zero_train::trainer::{Options, Task, Trainer};

/// 1797 digits of 8 x 8 pixels from 0 to 16, each with its label (source: examples/data/README.md).
const DIGITS: &[[u8; 65]] = include_bytes!("../../examples/data/digits.bin").as_chunks().0;

#[derive(Module, Debug)]
struct Net {
    conv1: Conv2d,
    conv2: Conv2d,
    hidden: Linear,
    out: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv = |from, to| Conv2dConfig::new([from, to], [3, 3]).with_padding(PaddingConfig2d::Same).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self { conv1: conv(1, 8), conv2: conv(8, 16), hidden: linear(16 * 64, 64), out: linear(64, 10) }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        // Parameters may be in 16 bit.
        let images = images.cast(self.conv1.weight.val().dtype());
        let features = relu(self.conv2.forward(relu(self.conv1.forward(images))));
        self.out.forward(relu(self.hidden.forward(features.flatten(1, 3))))
    }
}

struct Digits;

impl Task for Digits {
    fn rows(&self) -> usize {
        DIGITS.len()
    }

    fn held_out(&self) -> usize {
        297
    }
}

fn batch(rows: &[usize], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let pixels: Vec<f32> = rows.iter().flat_map(|&row| &DIGITS[row][..64]).map(|&p| f32::from(p) / 16.0).collect();
    let labels: Vec<i32> = rows.iter().map(|&row| DIGITS[row][64].into()).collect();
    let images = Tensor::from_data(TensorData::new(pixels, [rows.len(), 1, 8, 8]), device);
    (images, Tensor::from_data(TensorData::from(&*labels), device))
}

/// Train a convolutional net with ZeRO on Burn 0.22.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let options = Line::parse().options;
    let loss = |net: &Net, (images, labels): (Tensor<4>, _), device: &Device| {
        CrossEntropyLossConfig::new().init(device).forward(net.forward(images), labels)
    };
    let integration = Burn022::new(
        |_: &Digits, seed, device| Ok(initialize(|| Net::new(device), seed, device)),
        move |_, net, rows, device| Ok(loss(net, batch(rows, device), device)),
    )
    .evaluated_by(move |_, net, rows, device| {
        let (images, labels) = batch(rows, device);
        let right = net.forward(images.clone()).argmax(1).flatten::<1>(0, 1).equal(labels.clone()).float().mean();
        let loss = loss(net, (images, labels), device);
        Ok(vec![("loss", loss.into_scalar::<f64>()), ("accuracy", right.into_scalar::<f64>())])
    });
    Trainer::on(integration, &options).main(&Digits)
}
