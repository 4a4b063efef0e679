//! `zero`: writes and checks configurations, estimates memory, trains, and inspects and exports checkpoints.

mod ask;
mod commands;
mod inspect;
mod launch;

use std::alloc::System;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use zero_core::alloc::PageKeeper;
use zero_train::told_once;

/// An allocator that keeps pages: with the system's, page faults of fresh buffers take a quarter of a step's time.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Train large models with ZeRO on Burn: data-parallel ranks that do not each hold a whole copy.
#[derive(Parser)]
#[command(
    name = "zero",
    version,
    after_help = "\
First steps:
  zero estimate --model gpt2-xl --ranks 2       what each stage needs, and what fits here
  zero config --defaults --stage 3              a configuration file without questions
  zero check zero.yaml                          what a file means, in words; what is wrong with it
  zero train --model tiny --data book.txt --config zero.yaml --out run
  zero launch --ranks 4 --hosts hosts -- train --model gpt2 --data book.txt --save run/checkpoints
  zero report run other-run                     an HTML page that compares runs
  zero inspect run/checkpoints                  what was saved, and whether it is sound

Files of DeepSpeed (JSON) and of Accelerate (YAML) are read as they are."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a configuration file that Accelerate reads too, by questions or by flags
    Config(commands::ConfigArgs),
    /// Validate a DeepSpeed JSON or an Accelerate YAML, and say in words what it means
    Check(commands::CheckArgs),
    /// Bytes of model state per rank at every stage, and what fits into this machine
    Estimate(commands::EstimateArgs),
    /// Learn a WordPiece vocabulary from texts, for BERT
    Tokenizer(commands::TokenizerArgs),
    /// Train a language model on text, labeled rows or token files
    Train(Box<zero_train::language::Options>),
    /// Generate text with a trained model
    Generate(Box<zero_train_cli::generate::Options>),
    /// Chat with a model: messages from standard input, answers on standard output
    Chat(Box<zero_train_cli::generate::Options>),
    /// Start ranks as processes, on one machine or many, and again after one has died
    Launch(launch::LaunchArgs),
    /// Find out from flight records, the ranks' last operations, which rank is late, and where
    Flight(launch::FlightArgs),
    /// Write a saved model as a folder that Hugging Face's transformers loads
    Export(commands::ExportArgs),
    /// Say what a checkpoint holds, whether it is sound and who can resume it; list a folder
    Inspect(inspect::InspectArgs),
    /// Make an HTML page of runs beside each other, from the files in their --out folders
    Report(commands::ReportArgs),
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let result = match Cli::parse().command {
        Command::Config(args) => commands::config(&args).map(done),
        Command::Check(args) => commands::check(&args).map(done),
        Command::Estimate(args) => commands::estimate(&args).map(done),
        Command::Export(args) => commands::export(&args).map(done),
        Command::Tokenizer(args) => commands::tokenizer(&args).map(done),
        Command::Train(options) => Ok(commands::train(&options)),
        Command::Generate(options) => zero_train_cli::generate::run(&options).map(done).map_err(Into::into),
        Command::Chat(options) => zero_train_cli::generate::chat(*options).map(done).map_err(Into::into),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Launch(args) => launch::launch(&args),
        Command::Flight(args) => launch::flight(&args).map(done),
        Command::Report(args) => commands::report(&args).map(done),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "zero", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {}", told_once(error.as_ref()));
        ExitCode::from(2)
    })
}
