//! `cargo run --release --example bing_bert`
//!
//! Pre-trains a BERT on Shakespeare, with masked-token and next-sentence prediction, on the CPU with two ranks at ZeRO
//! stage 3. It learns its vocabulary first; all data is in the repository. `-- --help` lists the options.

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

/// Pre-train BERT with ZeRO.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let program = Program {
        model: "bert-tiny",
        data: Source::Text(TEXT, "examples/data/tinyshakespeare.txt"),
        allocator: Some(&ALLOCATOR),
    };
    language::main(&cli.options, &program)
}
