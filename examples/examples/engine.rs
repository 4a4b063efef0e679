//! `cargo run --release --example engine -- [ds_config.json]`
//!
//! A DeepSpeed-style training loop on two ranks: a configuration file, `initialize`, `forward`, `backward`, `step`.
//! Without a file it uses the settings below.

use std::process::ExitCode;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::launch::{launch_auto, launched_ranks};
use zero_burn::{Zero, optim::Fused};
use zero_core::Stage;
use zero_models::Gpt2Config;
use zero_train::config::{Config, Context, ZeroPlan};
use zero_train::engine::{Step, ZeroEngine};
use zero_train::{TrainError, exit};

type B = Autodiff<Zero<Flex>>;

const TEXT: &[u8] = include_bytes!("../data/tinyshakespeare.txt");
const SEQ: usize = 64;

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), TrainError> {
    // Two ranks, or the number that a launcher has started: batch sizes depend on it.
    let ranks = launched_ranks(2).map_err(|error| TrainError::Launch(error.to_string()))?;
    let plan = match std::env::args().nth(1) {
        Some(file) => Config::from_file(file)?.resolve(&Context { world: Some(ranks), ..Context::default() })?,
        None => {
            ZeroPlan::builder(Stage::Parameters).micro_batch(2).accumulation(2).gradient_clipping(1.0).build(ranks)?
        }
    };
    println!("{}\n", plan.explain());
    // Characters instead of tokens: a vocabulary of 256.
    let model = Gpt2Config { vocab_size: 256, n_embd: 64, n_head: 4, n_layer: 2, ..Gpt2Config::preset("tiny")? };

    launch_auto::<Flex, _, TrainError>(plan.world, &plan.zero_config(0), &Default::default(), |device| {
        let optimizer = Fused::new(plan.rule());
        let mut engine = ZeroEngine::initialize(model.init::<B>(&device), optimizer, plan.engine_config()?, &device)?;
        // Initialize positions with waves instead of noise: every rank calls this, and rank 0's change is broadcast.
        engine.gathered(
            |parameter| parameter.path == "wpe",
            Some(0),
            |found| {
                let width = found[0].meta.shape[1];
                for (at, value) in found[0].values.iter_mut().enumerate() {
                    *value = 0.02 * ((at / width) as f32 / 10f32.powf((at % width) as f32 / width as f32 * 4.0)).sin();
                }
            },
        );
        let mut at = device.rank() * TEXT.len() / plan.world;
        while engine.steps() + engine.skipped() < 30 {
            let rows = plan.batch.micro;
            let ids = TEXT.iter().cycle().skip(at).take(rows * SEQ).map(|&byte| i32::from(byte)).collect();
            at = (at + rows * SEQ) % TEXT.len();
            let ids = Tensor::<B, 2, Int>::from_data(TensorData::new::<i32, _>(ids, [rows, SEQ]), &device);

            let loss = engine.forward(|model| model.loss(ids));
            let value = loss.clone().into_scalar();
            engine.backward(loss);
            if let Step::Updated(update) = engine.step()?
                && device.rank() == 0
                && update.step % 10 == 0
            {
                println!(
                    "step {}: loss {value:.3}, gradient norm {:.3}, lr {:.1e}",
                    update.step, update.grad_norm, update.lr
                );
            }
        }
        Ok(())
    })?;
    Ok(())
}
