//! The command `zero-022`: `zero train`, `zero generate` and `zero chat` on Burn 0.22.

use std::alloc::System;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use zero_core::alloc::PageKeeper;
use zero_param::models::{self, generate::TextGenerator};
use zero_train::data::Source;
use zero_train::format_error;
use zero_train::language::{Options, Program, generate, tune};

/// Reuses the pages of the previous step.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// ZeRO on Burn 0.22. The command `zero` does the same on Burn 0.21, and exports, inspects and reports
#[derive(Parser)]
#[command(name = "zero-022", version)]
enum Cli {
    /// Train a language model on text, labeled rows or token files
    Train(Box<Options>),
    /// Find the fastest number of ranks, ZeRO stage and micro-batch size by short trials
    Tune(Box<tune::TuneOptions>),
    /// Generate text with a trained model
    Generate(Box<generate::Options>),
    /// Chat with a model: read messages from standard input, and print its answers
    Chat(Box<generate::Options>),
}

fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let done = match cli {
        Cli::Train(options) => {
            let program = Program { model: "gpt2", data: Source::Text("", "no data"), allocator: Some(&ALLOCATOR) };
            return models::main(&options, &program);
        }
        Cli::Tune(options) => {
            let (_, of_tune) = matches.subcommand().expect("a command was parsed");
            tune::run("zero-022", &options, of_tune)
        }
        Cli::Generate(options) => generate::run(&TextGenerator, &options),
        Cli::Chat(options) => generate::chat(&TextGenerator, *options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", format_error(&error));
            ExitCode::from(2)
        }
    }
}
