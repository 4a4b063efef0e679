//! Trains a GPT-2 on Burn 0.22 by the options, files and data of `zero train`, over ranks that are threads or processes:
//!
//! `cargo run --release --features trainer --example gpt2 -- --weights ../tests/fixtures/gpt2_tiny
//! --data ../examples/data/tinyshakespeare.txt`
//!
//! `--help` lists the options; those that Burn 0.22's integration lacks are refused by name. `--resume` resumes from a checkpoint of either
//! Burn version.

mod model;
#[path = "../shared/mod.rs"]
mod shared;

use std::alloc::System;
use std::process::ExitCode;

use burn::tensor::{Tensor, TensorData};
use clap::Parser;
use zero_core::alloc::PageKeeper;
use zero_models::Gpt2Config;
use zero_param::trainer::Burn022;
use zero_train::data::{Source, TokenBatch};
use zero_train::language::{CausalTask, Options, Program};
use zero_train::trainer::Trainer;

/// Reuses the pages of the previous step.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Train a GPT-2 with ZeRO on Burn 0.22.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let options = Line::parse().options;
    let program = Program { model: "gpt2", data: Source::Text("", "no data"), allocator: Some(&ALLOCATOR) };
    let front = Burn022::new(
        |task: &CausalTask<Gpt2Config>, seed, device| {
            let config = task.config();
            let model = model::init(config, device)?;
            let fresh = config.clone();
            shared::begin(model, &config.clone().into(), task.weights(), move |each| fresh.fresh(seed, each))
        },
        |task, model: &model::Gpt2, rows, device| {
            let TokenBatch { width, input_ids, labels } = task.rows().batch(rows)?;
            let [ids_bt, labels_bt] =
                [input_ids, labels].map(|ids| Tensor::from_data(TensorData::new(ids, [rows.len(), width]), device));
            Ok(model.loss(ids_bt, labels_bt))
        },
    )
    .adapted_by(CausalTask::initial_adapter);
    let trainer = Trainer::on(front, &options.train).allocator(&ALLOCATOR);
    trainer.main_with(|setup| CausalTask::new(&options, &program, setup))
}
