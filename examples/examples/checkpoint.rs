//! `cargo run --release --example checkpoint -- [FOLDER [RANKS [STAGE]]]`
//!
//! Trains for 20 updates and saves every 5. Stop it at any moment, with any signal, and start it again, optionally with
//! another number of ranks or another stage: it resumes from the newest intact checkpoint.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use serde_json::json;
use zero_burn::{Zero, launch::launch, optim::Fused};
use zero_core::Stage;
use zero_core::checkpoint::{Check, Checkpoint, SaveOptions, find_latest};
use zero_models::Gpt2Config;
use zero_train::TrainError;
use zero_train::config::ZeroPlan;
use zero_train::engine::{Parts, ZeroEngine};

type B = Autodiff<Zero<Flex>>;

const TEXT: &[u8] = include_bytes!("../data/tinyshakespeare.txt");
const SEQ: usize = 64;
/// Rows of a global batch.
const ROWS: usize = 12;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().unwrap_or_else(|| "checkpoints".into()));
    let ranks: usize = args.next().map_or(Ok(2), |ranks| ranks.parse())?;
    let stage = Stage::try_from(args.next().map_or(Ok(3), |stage| stage.parse::<u8>())?)?;
    let plan = ZeroPlan::builder(stage).micro_batch(ROWS / ranks).build(ranks)?;
    let model = Gpt2Config { vocab_size: 256, n_embd: 64, n_head: 4, n_layer: 2, ..Gpt2Config::preset("tiny")? };

    // Every byte of the newest checkpoint is verified; a damaged one is skipped.
    let found = find_latest(&dir, Check::Contents)?;
    for (path, reason) in &found.skipped {
        eprintln!("{} is skipped: {reason}", path.display());
    }
    let latest = found.checkpoint.map(|path| Checkpoint::open(&path)).transpose()?;

    let launched = launch::<Flex, _, TrainError>(ranks, &plan.zero_config(0), &Default::default(), |device| {
        let optimizer = Fused::new(plan.rule());
        let mut engine = ZeroEngine::initialize(model.init::<B>(&device), optimizer, plan.engine_config()?, &device)?;
        // Position in the text of the next global batch: the program's own state, saved together with the engine's.
        let mut at = 0;
        if let Some(checkpoint) = &latest {
            let state = engine.load(checkpoint, Parts::All)?;
            at = state["at"].as_u64().unwrap_or(0) as usize;
            if device.rank() == 0 {
                println!("resumes from {}", checkpoint.path().display());
            }
        }
        while engine.steps() < 20 {
            let rows = ROWS / ranks;
            let begin = at + device.rank() * rows * SEQ;
            let ids: Vec<i32> = TEXT[begin..begin + rows * SEQ].iter().map(|&byte| i32::from(byte)).collect();
            at += ROWS * SEQ;
            let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, SEQ]), &device);
            let loss = engine.forward(|model| model.loss(ids));
            let value = loss.clone().into_scalar();
            engine.backward(loss);
            engine.step()?;
            if device.rank() == 0 {
                println!("step {}: loss {value:.4} on rank 0", engine.steps());
            }
            if engine.steps().is_multiple_of(5) {
                let state = json!({ "at": at, "model": { "family": "gpt2", "config": model } });
                let state = state.as_object().expect("it is one").clone();
                let keep = SaveOptions { keep_last: NonZeroUsize::new(2), ..SaveOptions::default() };
                let saved = engine.save(&dir, engine.steps() as u64, state, &keep)?;
                if device.rank() == 0 {
                    println!("saved {} in {:.2} s", saved.path.display(), saved.seconds);
                }
            }
        }
        Ok(())
    });
    launched.map_err(|error| error.to_string())?;
    Ok(())
}
