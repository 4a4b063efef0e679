//! `zero diff`: what differs between two checkpoints.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use zero_train::inspect::{Tolerance, diff};

use crate::inspect::print;

#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 the same, 1 different, 2 a checkpoint that cannot be read.")]
pub struct DiffArgs {
    /// The folder of a checkpoint (step-...), saved by any number of ranks
    a: PathBuf,
    /// The folder of another
    b: PathBuf,
    /// Take elements for the same when |a - b| <= X * max(1, |a|, |b|); without it, when their bits are the same. The
    /// state is compared exactly in any case
    #[arg(long, value_name = "X")]
    tolerance: Option<Tolerance>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &DiffArgs) -> Result<ExitCode> {
    let found = diff(&args.a, &args.b, args.tolerance)?;
    print(&found, args.json)?;
    Ok(ExitCode::from(u8::from(!found.same)))
}
