//! `cargo run --release --example peft_seq2seq`
//!
//! Fine-tunes a BART with LoRA to name the speaker of a line: conditional generation at ZeRO stage 3 with optimizer state and
//! parameters offloaded to host memory, as in PEFT's guide for DeepSpeed. All data is in the repository. The example builds
//! labelled rows from the plays (`lines.rs`), learns a vocabulary, pre-trains a base on masked scenes, adapts it, and compares
//! it with a bag of words (`bayes.rs`). Results are stored in --work and reused by the next run. `-- --help` lists the options.

mod bayes;
mod lines;

use std::alloc::System;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use serde_json::{Value, json};
use zero_core::alloc::PageKeeper;
use zero_core::collective::launcher::started;
use zero_models::BartConfig;
use zero_models::hf_export::{ExportDtype, ExportOptions};
use zero_train::data::{Source, Tokenizer};
use zero_train::export::{Weights, export_checkpoint};
use zero_train::language::{self, LoraOptions, Program, Seq2SeqTask, TaskChoice};
use zero_train::monitor::{MemoryFigures, MemoryReport};
use zero_train::trainer::{self, Hyperparameters, Result, ScheduleChoice, Setup, Summary, Trainer, outline};
use zero_train::{TrainError, exit};

use bayes::Bayes;
use lines::{Lines, Row};

/// An allocator that keeps pages: with the system's, page faults of fresh buffers take a quarter of a step's time.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

const PLAYS: &str = include_str!("../../data/tinyshakespeare.txt");
/// The output of `zero config` for stage 3 with both offloads on two ranks.
const CONFIG: &str = include_str!("../../data/zero3_offload.yaml");
const PROGRAM: Program<'_> = Program {
    model: "bart-tiny",
    data: Source::Text(PLAYS, "examples/data/tinyshakespeare.txt"),
    allocator: Some(&ALLOCATOR),
};

/// Size of the vocabulary, and tokens of the longest scene.
const VOCABULARY: usize = 2048;
const SEQ: usize = 96;

/// Fine-tune BART with LoRA at stage 3 to predict who speaks.
#[derive(Parser)]
struct Cli {
    /// Folder for all outputs: data, vocabulary, base model, checkpoints, predictions
    #[arg(long, value_name = "DIR", default_value = "peft_seq2seq")]
    work: PathBuf,
    /// Number of speakers to choose from
    #[arg(long, value_name = "N", default_value_t = 12)]
    speakers: usize,
    /// Train the base model for this many steps if --work has none
    #[arg(long, value_name = "STEPS", default_value_t = 2000)]
    base_steps: usize,
    /// Number of passes over the labelled rows, if --steps is not given
    #[arg(long, value_name = "N", default_value_t = 5)]
    epochs: usize,
    /// LoRA's options, by default rank 8, alpha 32 and dropout 0.1.
    #[command(flatten)]
    lora: LoraOptions,
    /// The trainer's options.
    #[command(flatten)]
    train: trainer::Options,
}

fn main() -> ExitCode {
    let command = Cli::command().mut_arg("steps", |arg| arg.default_value("0").hide_default_value(true));
    let cli = Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit());
    let (lines, work) = (Lines::of(PLAYS, cli.speakers), cli.work.clone());
    let options = match prepared(cli, &lines) {
        Ok(options) => options,
        Err(error) => return exit(Err::<(), _>(error)),
    };
    let trainer = Trainer::new(&options.train).allocator(&ALLOCATOR);
    let task = |setup: &Setup<'_>| {
        setup.local_main_process_first(|| write_data(&work, &lines))?;
        Seq2SeqTask::<BartConfig>::new(&options, &PROGRAM)
    };
    trainer.main_then(task, |summary| told(&options, &lines, summary))
}

/// Creates missing inputs and returns the training options.
fn prepared(cli: Cli, lines: &Lines) -> Result<language::Options> {
    let Cli { work, base_steps, epochs, mut lora, mut train, .. } = cli;
    let at = |name: &str| work.join(name);
    if lora.adapter.is_none() && lora.lora_r.is_none() {
        lora = LoraOptions { lora_r: Some(8), lora_alpha: Some(32.0), lora_dropout: Some(0.1), ..lora };
    }
    let hyper = &mut train.hyper;
    hyper.batch = hyper.batch.or(Some(8));
    hyper.lr = hyper.lr.or(Some(3e-3));
    hyper.schedule = hyper.schedule.or(Some(ScheduleChoice::Cosine));
    if started().is_some() && !at("base").is_dir() {
        let problem =
            "does not exist: run this example once without a launcher, which trains it; then start it with one";
        return Err(TrainError::Data { path: at("base"), problem: problem.into() });
    }
    std::fs::create_dir_all(&work).map_err(io("create", &work))?;
    if train.config.is_none() {
        train.config = Some(at("zero3_offload.yaml"));
        write(&at("zero3_offload.yaml"), CONFIG)?;
    }
    let config = train.config.as_deref().expect("it has just been set");
    let (plan, _) = outline(config, &train.hyper, train.steps.max(1), train.ranks, None)?;
    if train.steps == 0 {
        train.steps = (epochs * lines.train.len()).div_ceil(plan.batch.global);
    }
    train.eval = train.eval.or(Some(lines.held_out.len()));
    train.save = train.save.or(Some(at("checkpoints")));
    train.predictions = train.predictions.or(Some(at("predictions.jsonl")));
    train.save_every = train.save_every.or(Some(100));
    train.keep_last = train.keep_last.or(Some(2));
    train.resume = train.resume.or(Some("auto".into()));
    train.memory_breakdown = true;
    if !at("base").is_dir() {
        write_data(&work, lines)?;
        make_base(&work, base_steps, &train, plan.world)?;
    }
    Ok(language::Options {
        task: Some(TaskChoice::Seq2Seq),
        weights: Some(at("base")),
        data: Some(at("lines.jsonl")),
        tokenizer: Some(at("tokenizer")),
        seq: Some(SEQ),
        lora,
        train,
        ..language::Options::default()
    })
}

/// Writes the vocabulary and the rows, if they are missing.
fn write_data(work: &Path, lines: &Lines) -> Result<()> {
    let at = |name: &str| work.join(name);
    if !at("tokenizer").is_dir() {
        Tokenizer::learn(&PROGRAM.data, None, VOCABULARY, true)?.save(&at("tokenizer"))?;
    }
    let labelled = |rows: &[Row]| -> String { rows.iter().map(|row| line(row, true)).collect() };
    let unlabelled: String = lines.test.iter().map(|row| line(row, false)).collect();
    write(&at("gaps.jsonl"), &labelled(&lines.gaps))?;
    write(&at("lines.jsonl"), &(labelled(&lines.train) + &labelled(&lines.held_out) + &unlabelled))
}

/// Pre-trains the base on masked scenes, into the folder `base`; resumes an interrupted run.
fn make_base(work: &Path, steps: usize, train: &trainer::Options, ranks: usize) -> Result<()> {
    let at = |name: &str| work.join(name);
    let config = json!({
        "model_type": "bart", "vocab_size": VOCABULARY, "max_position_embeddings": SEQ, "d_model": 96, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 384,
        "decoder_ffn_dim": 384, "init_std": 0.1, "dropout": 0.1, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3,
        "forced_bos_token_id": 2, "forced_eos_token_id": 3
    });
    let model = at("model");
    std::fs::create_dir_all(&model).map_err(io("create", &model))?;
    if !model.join("config.json").is_file() {
        write(&model.join("config.json"), &config.to_string())?;
    }
    eprintln!("Pre-training the base model on scenes with gaps for {steps} steps:");
    let hyper = Hyperparameters {
        batch: Some(16),
        lr: Some(2e-3),
        warmup: Some(steps / 20),
        schedule: Some(ScheduleChoice::Cosine),
        clip: Some(1.0),
        ..Hyperparameters::default()
    };
    let options = language::Options {
        task: Some(TaskChoice::Seq2Seq),
        model: Some(model.display().to_string()),
        data: Some(at("gaps.jsonl")),
        tokenizer: Some(at("tokenizer")),
        seq: Some(SEQ),
        train: trainer::Options {
            backend: train.backend,
            ranks: Some(ranks),
            threads: train.threads,
            seed: train.seed,
            log_every: train.log_every,
            json: train.json,
            steps,
            hyper,
            save: Some(at("base-checkpoints")),
            save_every: Some(250),
            keep_last: Some(2),
            resume: Some("auto".into()),
            ..trainer::Options::default()
        },
        ..language::Options::default()
    };
    let trainer = Trainer::new(&options.train).allocator(&ALLOCATOR);
    trainer.run_with(|_| Seq2SeqTask::<BartConfig>::new(&options, &PROGRAM))?;
    let whole = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
    let written = export_checkpoint(&at("base-checkpoints"), &at("base"), &whole, None, Weights::Trained);
    written.map_err(|error| TrainError::Run(error.to_string()))?;
    Ok(())
}

/// Prints the result of a finished run: each epoch with its memory, and the accuracy of the model and of a bag of words.
fn told(options: &language::Options, lines: &Lines, summary: Option<&Summary>) -> Result<()> {
    let path = options.train.predictions.as_deref().expect("it was set");
    let text = std::fs::read_to_string(path).map_err(io("read", path))?;
    let predictions: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let predicted: Vec<&str> = predictions.iter().filter_map(|said| said["prediction"].as_str()).collect();
    let (held_out, test) = predicted.split_at(predicted.len().saturating_sub(lines.test.len()));
    let accuracy = |said: &[&str], rows: &[Row]| {
        let right = said.iter().zip(rows).filter(|(said, row)| **said == row.label.to_lowercase()).count();
        right as f64 / rows.len().max(1) as f64
    };
    let bayes = Bayes::learn(&lines.train, &lines.held_out);
    let own = &lines.held_out[lines.held_out.len() - held_out.len()..];
    // No summary: all steps were done before.
    let mut told = summary.map(epochs).unwrap_or_default();
    let _ = writeln!(told, "\n{:<34} {:>8} {:>16} {:>14}", "accuracy", "rows", "BART with LoRA", "bag of words");
    for (name, said, rows) in [("held out", held_out, own), ("test, without labels", test, &lines.test[..])] {
        let (model, words) = (accuracy(said, rows), bayes.accuracy(rows));
        let _ = writeln!(told, "{name:<34} {:>8} {model:>16.3} {words:>14.3}", rows.len());
    }
    let labels: Vec<String> = lines.test.iter().map(|row| row.label.to_lowercase()).collect();
    let ten = |all: &[String]| all.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
    let test: Vec<String> = test.iter().map(ToString::to_string).collect();
    let _ = writeln!(told, "\nfirst 10 test predictions: {}\n                   labels: {}", ten(&test), ten(&labels));
    let _ = write!(told, "\nall predictions: {}", path.display());
    // If --json is set, standard output has only the summary.
    if options.train.json {
        eprintln!("{told}")
    } else {
        println!("\n{told}")
    }
    Ok(())
}

/// Formats the metrics and the memory use of each epoch.
fn epochs(summary: &Summary) -> String {
    let mut table = format!(
        "{:<8} {:>17} {:>10} {:>10} {:>10}\n",
        "epoch", "train_epoch_loss", "train_ppl", "eval_ppl", "accuracy"
    );
    for epoch in &summary.epochs {
        let eval = |name: &str| {
            epoch.eval.iter().flatten().find(|(known, _)| known == name).map_or(f64::NAN, |(_, value)| *value)
        };
        let (ppl, eval_ppl) = (epoch.loss.exp(), eval("loss").exp());
        let _ = writeln!(
            table,
            "{:<8} {:>17.4} {ppl:>10.4} {eval_ppl:>10.4} {:>10.4}",
            epoch.epoch,
            epoch.loss,
            eval("accuracy")
        );
    }
    let _ = writeln!(table, "\n{:<34} {:>8} {:>8} {:>8} {:>8}", "memory in MiB", "begin", "end", "delta", "peak");
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    for epoch in &summary.epochs {
        for MemoryReport { phase, host, device } in &epoch.memory {
            for (place, figures) in [("host", host), ("device", device)] {
                let name = format!("epoch {}, {phase}, {place}", epoch.epoch);
                let Some(MemoryFigures { before_bytes, consumed_bytes, total_peak_bytes, .. }) = *figures else {
                    continue;
                };
                let (begin, delta, peak) =
                    (mib(before_bytes as f64), mib(consumed_bytes as f64), mib(total_peak_bytes as f64));
                let _ = writeln!(table, "{name:<34} {begin:>8.1} {:>8.1} {delta:>8.1} {peak:>8.1}", begin + delta);
            }
        }
    }
    if summary.epochs.iter().flat_map(|epoch| &epoch.memory).all(|memory| memory.device.is_none()) {
        table += "(on the CPU, device memory is host memory)\n";
    }
    table
}

fn line(row: &Row, labelled: bool) -> String {
    let Row { text, label } = row;
    let object = if labelled { json!({ "text": text, "label": label }) } else { json!({ "text": text }) };
    format!("{object}\n")
}

/// Writes a file atomically, unless it already has this text.
fn write(path: &Path, text: &str) -> Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    let aside = path.with_extension(format!("{}.making", std::process::id()));
    std::fs::write(&aside, text).and_then(|()| std::fs::rename(&aside, path)).map_err(io("write", path))
}

fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> TrainError + use<> {
    let path = path.to_path_buf();
    move |source| TrainError::Io { action, path: path.clone(), source }
}
