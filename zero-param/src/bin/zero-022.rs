//! The command `zero-022`: `zero train` on Burn 0.22.

use std::alloc::System;
use std::process::ExitCode;

use clap::Parser;
use zero_core::alloc::PageKeeper;
use zero_param::models;
use zero_train::data::Source;
use zero_train::language::{Options, Program};

/// Reuses the pages of the previous step.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// ZeRO on Burn 0.22. The command `zero` does the same on Burn 0.21, and more
#[derive(Parser)]
#[command(name = "zero-022", version)]
enum Cli {
    /// Train a GPT-2, Llama, Mistral, Qwen, Gemma, Phi or BERT
    Train(Box<Options>),
}

fn main() -> ExitCode {
    let Cli::Train(options) = Cli::parse();
    let program = Program { model: "gpt2", data: Source::Text("", "no data"), allocator: Some(&ALLOCATOR) };
    models::main(&options, &program)
}
