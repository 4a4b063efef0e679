//! `cargo run --release --example engine -- [ds_config.json]`
//!
//! The loop that DeepSpeed's users know, on two ranks: a configuration file, `initialize`, `forward`, `backward`, `step`.
//! Without a file it takes the settings below.

use std::process::ExitCode;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::{Zero, launch::launch_auto, optim::Fused};
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
    let plan = match std::env::args().nth(1) {
        Some(file) => Config::from_file(file)?.resolve(&Context { world: Some(2), ..Context::default() })?,
        None => ZeroPlan::builder(Stage::Parameters).micro_batch(2).accumulation(2).gradient_clipping(1.0).build(2)?,
    };
    println!("{}\n", plan.explain());
    // Characters instead of tokens: a model of 256 symbols.
    let model = Gpt2Config { vocab_size: 256, n_embd: 64, n_head: 4, n_layer: 2, ..Gpt2Config::preset("tiny")? };

    launch_auto::<Flex, _, TrainError>(plan.world, &plan.zero_config(0), &Default::default(), |device| {
        let optimizer = Fused::new(plan.rule());
        let mut engine = ZeroEngine::initialize(model.init::<B>(&device), optimizer, plan.engine_config()?, &device)?;
        let mut at = device.rank() * TEXT.len() / plan.world;
        while engine.steps() + engine.skipped() < 30 {
            let rows = plan.batch.micro;
            let ids: Vec<i32> = TEXT[at..at + rows * SEQ].iter().map(|&byte| i32::from(byte)).collect();
            at += rows * SEQ;
            let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, SEQ]), &device);

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
