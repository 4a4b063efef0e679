//! The README's program from fixed weights, with its losses: `cargo run --release --example readme -- [STEPS]`.
//!
//! `bench/fronts.py --job readme` compares it with the same program for Burn 0.22, `zero-param/examples/readme.rs`.

use burn::backend::Autodiff;
use burn::module::Param;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::{Zero, config::ZeroConfig, launch::launch_auto, optim::distributed};
use zero_core::Stage;

type B = Autodiff<Zero<Flex>>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(10), |steps| steps.parse())?;
    // Burn 0.22 draws other weights.
    let weight = TensorData::new((0..512 * 512).map(|i| (i as f32).sin() / 16.0).collect(), [512, 512]);
    launch_auto::<Flex, _, String>(2, &ZeroConfig::new(Stage::Parameters), &Default::default(), |device| {
        let weight = Param::from_tensor(Tensor::from_data(weight.clone(), &device));
        let model = Linear { weight, bias: Some(Param::from_tensor(Tensor::zeros([512], &device))) };
        let (mut model, mut optimizer) = distributed::<B, _, _>(model, AdamWConfig::new().init(), &device);
        for _ in 0..steps {
            let loss = model.forward(Tensor::<B, 2>::ones([8, 512], &device)).powf_scalar(2.0).mean();
            let value: f32 = loss.clone().into_scalar();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, grads);
            if device.rank() == 0 {
                println!("{value}");
            }
        }
        Ok(())
    })?;
    Ok(())
}
