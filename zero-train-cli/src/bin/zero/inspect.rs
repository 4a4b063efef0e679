//! `zero inspect`: shows the contents of a checkpoint and checks its integrity.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use zero_core::checkpoint::Check;
use zero_train_cli::inspect::{self, Subject, folder};

#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 intact, 1 damaged (every problem is listed), 2 no checkpoint found.")]
pub struct InspectArgs {
    /// A checkpoint folder (step-...), or its parent folder
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Check only manifest, sizes and headers, without computing checksums of tensors
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn inspect(args: &InspectArgs) -> Result<ExitCode> {
    let check = if args.quick { Check::Sizes } else { Check::Contents };
    let sound = match Subject::of(&args.path)? {
        Subject::Checkpoint => {
            let found = inspect::inspect(&args.path, check, args.tensors)?;
            print(&found, args.json)?;
            found.sound
        }
        Subject::Folder => {
            let found = folder(&args.path, check)?;
            print(&found, args.json)?;
            found.sound
        }
    };
    Ok(ExitCode::from(u8::from(!sound)))
}

/// Prints one finding. A reader that closes the pipe early, such as `head`, is not an error.
fn print<T: Display + Serialize>(finding: &T, json: bool) -> Result<()> {
    let text = if json { serde_json::to_string_pretty(finding)? + "\n" } else { finding.to_string() };
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}
