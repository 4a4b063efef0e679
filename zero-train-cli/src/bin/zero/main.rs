//! `zero`: writes and checks configurations, estimates memory, trains, and inspects and exports checkpoints.

mod ask;
mod commands;
mod inspect;
mod launch;

use std::alloc::System;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use zero_core::alloc::PageKeeper;
use zero_train::format_error;
use zero_train::language::{generate, tune};
use zero_train_cli::generate::Burn021;

/// An allocator that keeps pages: with the system's, page faults of fresh buffers take a quarter of a step's time.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Train large models with ZeRO on Burn: data-parallel ranks that shard the model state.
#[derive(Parser)]
#[command(
    name = "zero",
    version,
    after_help = "\
Examples:
  zero estimate --model gpt2-xl --ranks 2       show the memory of each stage, and what fits here
  zero config --defaults --stage 3              write a configuration file without questions
  zero check zero.yaml                          explain a configuration file, or list its errors
  zero train --model tiny --data book.txt --config zero.yaml --out run
  zero launch --ranks 4 --hosts hosts -- train --model gpt2 --data book.txt --save run/checkpoints
  zero report run other-run                     write an HTML page that compares runs
  zero inspect run/checkpoints                  list the checkpoints, and verify them

Configuration files of DeepSpeed (JSON) and Accelerate (YAML) are read directly."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a configuration file in Accelerate's format, interactively or from flags
    Config(commands::ConfigArgs),
    /// Validate a DeepSpeed JSON or an Accelerate YAML file, and explain what it sets
    Check(commands::CheckArgs),
    /// Estimate the model state per rank at every stage, and what fits on this machine
    Estimate(commands::EstimateArgs),
    /// Learn a WordPiece vocabulary from texts, for BERT
    Tokenizer(commands::TokenizerArgs),
    /// Train a language model on text, labeled rows or token files
    Train(Box<zero_train::language::Options>),
    /// Find the fastest number of ranks, ZeRO stage and micro-batch size by short trials
    Tune(Box<tune::TuneOptions>),
    /// Generate text with a trained model
    Generate(Box<generate::Options>),
    /// Chat with a model: read messages from standard input, and print its answers
    Chat(Box<generate::Options>),
    /// Start ranks as processes, on one machine or many, and restart them if one dies
    Launch(launch::LaunchArgs),
    /// Read records of the ranks' last operations, and report which rank the others wait for
    Flight(launch::FlightArgs),
    /// Export a checkpoint to a folder that Hugging Face transformers can load
    Export(commands::ExportArgs),
    /// Describe and verify a checkpoint, or list the checkpoints in a folder
    Inspect(inspect::InspectArgs),
    /// Write an HTML page that compares runs, from the files in their --out folders
    Report(commands::ReportArgs),
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Returns the command line. `tune` searches some options of `train`, and `chat` has no use for some of `generate`.
fn command() -> clap::Command {
    let searched = [
        ("stage", "ZeRO stage: 0, 1, 2 or 3 [default: all are tried]"),
        ("ranks", "Number of ranks [default: powers of two up to the number of cores are tried]"),
        (
            "batch",
            "With --ranks and --accumulation, the rows per step; all divisors are tried as micro-batches [default: 1]",
        ),
        ("accumulation", "With --ranks and --batch, the rows per step [default: 1]"),
    ];
    let tune = |tune| {
        searched
            .into_iter()
            .fold(tune, |tune: clap::Command, (name, help)| tune.mut_arg(name, |arg| arg.help(help).long_help(help)))
    };
    let chat = |chat| {
        ["prompt", "prompts", "chat"]
            .into_iter()
            .fold(chat, |chat: clap::Command, name| chat.mut_arg(name, |arg| arg.hide(true)))
    };
    Cli::command().mut_subcommand("tune", tune).mut_subcommand("chat", chat)
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let matches = command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result = match cli.command {
        Command::Config(args) => commands::config(&args).map(done),
        Command::Check(args) => commands::check(&args).map(done),
        Command::Estimate(args) => commands::estimate(&args).map(done),
        Command::Export(args) => commands::export(&args).map(done),
        Command::Tokenizer(args) => commands::tokenizer(&args).map(done),
        Command::Train(options) => Ok(commands::train(&options)),
        Command::Tune(options) => {
            let (_, of_tune) = matches.subcommand().expect("a command was parsed");
            tune::run("zero", &options, of_tune).map(done).map_err(Into::into)
        }
        Command::Generate(options) => generate::run(&Burn021, &options).map(done).map_err(Into::into),
        Command::Chat(options) => generate::chat(&Burn021, *options).map(done).map_err(Into::into),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Launch(args) => launch::launch(&args),
        Command::Flight(args) => launch::flight(&args).map(done),
        Command::Report(args) => commands::report(&args).map(done),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut command(), "zero", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        // In one write, as ranks that are processes share a terminal.
        let _ = std::io::stderr().write_all(format!("error: {}\n", format_error(error.as_ref())).as_bytes());
        ExitCode::from(2)
    })
}
