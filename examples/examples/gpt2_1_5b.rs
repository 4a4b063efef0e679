//! `cargo run --release --example gpt2_1_5b`
//!
//! Trains GPT-2 1.5B (or the largest preset that fits into memory) on Shakespeare, on the CPU, with two ranks at ZeRO
//! stage 3 and 2 rows of 128 tokens per rank (with `--model`, 1). All data is in the repository. `-- --help` lists the
//! options.

use std::alloc::System;
use std::process::ExitCode;

use clap::Parser;
use zero_core::alloc::PageKeeper;
use zero_train::data::Source;
use zero_train::language::{self, Options, Program};

/// An allocator that keeps pages: with the system's, page faults of fresh buffers take a quarter of a step's time.
#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

const TEXT: &str = include_str!("../data/tinyshakespeare.txt");

/// Train GPT-2 with ZeRO.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    let Options { model, weights, train, .. } = &mut cli.options;
    if model.is_none() && weights.is_none() && train.config.is_none() && !train.auto_find_batch_size {
        // The gradient of one row per rank is too noisy for such a deep model.
        train.hyper.batch.get_or_insert(2);
    }
    let program = Program {
        model: "gpt2-xl",
        data: Source::Text(TEXT, "examples/data/tinyshakespeare.txt"),
        allocator: Some(&ALLOCATOR),
    };
    language::main(&cli.options, &program)
}
