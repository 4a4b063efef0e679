//! Pre-trains a BERT on Burn 0.22 by the options, files and data of `zero train`, over ranks that are threads or processes:
//!
//! `cargo run --release --features trainer --example bert -- --model bert-tiny --data ../examples/data/tinyshakespeare.txt --tokenizer DIR`
//!
//! `--help` lists the options; those that Burn 0.22's integration lacks are refused by name. `--resume` resumes from a checkpoint of either
//! Burn version.

mod model;
#[path = "../shared/mod.rs"]
mod shared;

use std::alloc::System;
use std::process::ExitCode;

use burn::tensor::{Device, Tensor, TensorData};
use clap::Parser;
use model::{Batch, Bert};
use zero_core::alloc::PageKeeper;
use zero_param::trainer::Burn022;
use zero_train::data::Source;
use zero_train::language::{BertTask, Options, Program};
use zero_train::trainer::{Rows, Trainer};

/// Reuses the pages of the previous step.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Pre-train a BERT with ZeRO on Burn 0.22.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let options = Line::parse().options;
    let program = Program { model: "bert-tiny", data: Source::Text("", "no data"), allocator: Some(&ALLOCATOR) };
    let front = Burn022::new(
        |task: &BertTask, seed, device| {
            let config = task.config();
            let model = Bert::new(config, device)?;
            let fresh = config.clone();
            shared::begin(model, &config.clone().into(), task.weights(), move |each| fresh.fresh(seed, each))
        },
        |task, model: &Bert, rows, device| Ok(model.losses(batch(task, rows, device)?)),
    )
    .evaluated_by(|task, model, rows, device| {
        let [predicted, related, tokens, pairs] = model.measure(batch(task, rows, device)?);
        let losses = [("loss", predicted), ("loss", related)];
        Ok([&losses[..], &[("masked_accuracy", tokens), ("next_sentence_accuracy", pairs)]].concat())
    })
    .adapted_by(BertTask::initial_adapter);
    let trainer = Trainer::on(front, &options.train).allocator(&ALLOCATOR);
    trainer.main_with(|_| BertTask::new(&options, &program))
}

fn batch(task: &BertTask, rows: &Rows, device: &Device) -> zero_train::Result<Batch> {
    let (batch, seq) = task.batch(rows)?;
    let of = |numbers| Tensor::from_data(TensorData::new(numbers, [rows.len(), seq]), device);
    let list = |numbers: Vec<i32>| Tensor::from_data(TensorData::from(&*numbers), device);
    let labels = batch.predicted_positions.iter().map(|&row| batch.labels[row as usize]).collect();
    Ok(Batch {
        ids_bt: of(batch.input_ids),
        types_bt: of(batch.token_type_ids),
        mask_bt: of(batch.attention_mask),
        predicted_m: list(batch.predicted_positions),
        labels_m: list(labels),
        follows_b: list(batch.next_sentence_labels),
    })
}
