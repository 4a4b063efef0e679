//! Trains a GPT-2 of Hugging Face's on rows of ids, over ranks that are threads or processes:
//!
//! `cargo run --release --example gpt2 -- --folder ../tests/fixtures/gpt2_tiny --stage 3 --ranks 2 --steps 20`
//!
//! `--batch` are the rows of a step, over all ranks. Parameters of up to `--persistence-threshold` elements stay whole. `--dropout P` takes the
//! place of what `config.json` says. `--optimizer lamb` takes that of AdamW, with DeepSpeed's bounds.
//! `--save DIR` saves a checkpoint in the end, and `--resume DIR/step-...` goes on from one, also from one of `zero train`. With torchrun's
//! variables each process is a rank.

mod model;
#[path = "../shared/mod.rs"]
mod shared;

use std::alloc::System;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_optim::{AdamWConfig, LambConfig};
use model::Config;
use safetensors::SafeTensors;
use serde_json::Map;
use zero_core::alloc::PageKeeper;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::collective::launcher::Start;
use zero_core::collective::process;
use zero_core::collective::threads::ThreadOptions;
use zero_core::{Buffer, ReduceOp, Stage};
use zero_param::{BoundedLamb, Error, Ranks, Resumed, ZeroConfig, run_process, run_threads, shard};

/// A step finds the pages of the one before.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

struct Options {
    folder: PathBuf,
    stage: Stage,
    ranks: usize,
    steps: usize,
    /// Rows of a step, over all ranks.
    batch: usize,
    persistence_threshold: Option<usize>,
    dropout: Option<f64>,
    is_lamb: bool,
    save: Option<PathBuf>,
    resume: Option<PathBuf>,
}

impl Options {
    fn from_arguments() -> Result<Self, Box<dyn std::error::Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let (pairs, _) = arguments.as_chunks::<2>();
        let mut given: HashMap<&str, &str> = pairs.iter().map(|[name, value]| (&name[..], &value[..])).collect();
        let folder =
            given.remove("--folder").ok_or("--folder DIR: expected the folder of a GPT-2 with batches.safetensors")?;
        let options = Self {
            folder: folder.into(),
            stage: given.remove("--stage").unwrap_or("3").parse::<u8>()?.try_into()?,
            ranks: given.remove("--ranks").unwrap_or("2").parse()?,
            steps: given.remove("--steps").unwrap_or("20").parse()?,
            batch: given.remove("--batch").unwrap_or("4").parse()?,
            persistence_threshold: given.remove("--persistence-threshold").map(str::parse).transpose()?,
            dropout: given.remove("--dropout").map(str::parse).transpose()?,
            is_lamb: match given.remove("--optimizer").unwrap_or("adamw") {
                "adamw" => false,
                "lamb" => true,
                other => return Err(format!("--optimizer {other}: expected adamw or lamb").into()),
            },
            save: given.remove("--save").map(PathBuf::from),
            resume: given.remove("--resume").map(PathBuf::from),
        };
        match given.keys().next() {
            Some(unknown) => Err(format!("{unknown} is no option: see the head of examples/gpt2/main.rs").into()),
            None => Ok(options),
        }
    }
}

fn train(ranks: &Ranks, options: &Options) -> Result<(), Error> {
    let device = Device::flex().autodiff();
    let bytes = std::fs::read(options.folder.join("batches.safetensors")).expect("the folder has rows of ids");
    let file = SafeTensors::deserialize(&bytes).expect("it is a safetensors file");
    let rows = file.tensor("input_ids").expect("it has ids");
    let ids: Vec<i32> = rows.data().as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as i32).collect();
    let (count, width) = (rows.shape()[0], rows.shape()[1]);
    let (rank, own) = (ranks.comm().rank(), options.batch / ranks.comm().world());

    let mut config = ZeroConfig::new(options.stage);
    config.param_persistence_threshold = options.persistence_threshold.unwrap_or(config.param_persistence_threshold);
    let (mut model, zero) = shard(Config::load(&options.folder, options.dropout, &device), ranks, &config)?;
    let lamb = LambConfig::new().with_epsilon(1e-8).with_weight_decay(0.01);
    let mut optimizer = match options.is_lamb {
        true => zero.optimizer(&BoundedLamb { lamb, ratios: 0.01..=10.0 })?,
        false => zero.optimizer(&AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01))?,
    };
    let (mut begin, mut extra) = (0, Map::new());
    if let Some(folder) = &options.resume {
        let resumed = zero.load(model, optimizer, &Checkpoint::open(folder)?)?;
        Resumed { model, optimizer, steps: begin, extra } = resumed;
    }
    // What was read from files is another phase than training.
    ALLOCATOR.trim();
    let mut seconds = Vec::new();
    for step in begin..options.steps {
        let begin = Instant::now();
        let rows = (0..own).map(|row| (options.batch * step + rank * own + row) % count);
        let batch: Vec<i32> = rows.flat_map(|row| ids[row * width..][..width].iter().copied()).collect();
        let batch = Tensor::<2, Int>::from_data(TensorData::new(batch, [own, width]), &device);
        let (loss, grads) = zero.backward(|| model.loss(batch))?;
        model = optimizer.step(1e-3, model, grads)?;
        let loss = Buffer::F64(vec![loss.into_scalar::<f64>()]);
        let loss = ranks.comm().all_reduce(loss, ReduceOp::Mean)?.into_f64()[0];
        if rank == 0 {
            println!("{loss}");
        }
        seconds.push(begin.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    if let Some(median) = seconds.get(seconds.len() / 2).filter(|_| rank == 0) {
        eprintln!("{:.1} tokens/s by the median step", (options.batch * width) as f64 / median);
    }
    if let Some(dir) = &options.save {
        zero.save(&model, &optimizer, dir, options.steps.max(begin), extra, &SaveOptions::default())?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_arguments()?;
    match Start::from_environment()? {
        Start::Alone => {
            run_threads(options.ranks, &ThreadOptions::default(), |ranks| train(ranks, &options))?;
        }
        start => {
            let run = |run: &process::ProcessRun| run_process(run, |ranks| train(ranks, &options));
            if let Err(failed) = process::run(&process::ProcessOptions::default(), &start, run) {
                eprintln!("{failed}");
                failed.end_process();
            }
        }
    }
    Ok(())
}
