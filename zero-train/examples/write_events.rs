//! Writes a TensorBoard event file with known scalars, for `tests/tensorboard.sh`.
//!
//! `cargo run --example write_events -- DIR`

use std::path::Path;
use std::process::ExitCode;

use zero_train::monitor::{MonitorError, TensorBoardMonitor};

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("usage: write_events DIR");
        return ExitCode::from(2);
    };
    match run(Path::new(&dir)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `tests/read_tensorboard.py` knows these formulas.
fn run(dir: &Path) -> Result<(), MonitorError> {
    let mut events = TensorBoardMonitor::create(dir)?;
    for step in 1..=300 {
        let loss = 4.0 / step as f64 + 0.5;
        events.write(step, &[("train/loss", loss), ("train/lr", step as f64 * 1e-6), ("größe", -1.5)])?;
    }
    events.write(1_000_000, &[("train/loss", f64::INFINITY)])?;
    println!("{}", events.path().display());
    Ok(())
}
