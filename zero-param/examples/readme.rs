//! The README's program from fixed weights, with its losses: `cargo run --release --example readme -- [STEPS]`.
//!
//! `bench/fronts.py --job readme` compares it with the same program for Burn 0.21, `examples/examples/readme.rs`.

use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData};
use burn_nn::Linear;
use burn_optim::AdamWConfig;
use zero_core::{Stage, collective::threads::ThreadOptions};
use zero_param::{Error, ZeroConfig, run_threads, shard};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(10), |steps| steps.parse())?;
    // Burn 0.21 draws other weights.
    let weight = TensorData::new((0..512 * 512).map(|i| (i as f32).sin() / 16.0).collect(), [512, 512]);
    run_threads(2, &ThreadOptions::default(), |ranks| {
        let device = Device::flex().autodiff();
        let weight = Param::from_tensor(Tensor::from_data(weight.clone(), &device));
        let model = Linear { weight, bias: Some(Param::from_tensor(Tensor::zeros([512], &device))) };
        let (mut model, zero) = shard(model, ranks, &ZeroConfig::new(Stage::Parameters))?;
        let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
        for _ in 0..steps {
            let rows = Tensor::<2>::ones([8, 512], &device);
            let (loss, grads) = zero.backward(|| model.forward(rows).square().mean())?;
            model = optimizer.step(1e-3, model, grads)?;
            if ranks.comm().rank() == 0 {
                println!("{}", loss.into_scalar::<f32>());
            }
        }
        Ok::<_, Error>(())
    })?;
    Ok(())
}
