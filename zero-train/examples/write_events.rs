//! Writes a TensorBoard event file with known scalars, for `tests/tensorboard.sh`, and a plot beside it.
//!
//! `cargo run --example write_events -- DIR`

use std::path::Path;
use std::process::ExitCode;

use zero_train::monitor::{LossPlot, MonitorError, TensorBoardMonitor};

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
    let mut plot = LossPlot { title: "example".to_string(), ..LossPlot::default() };
    for step in 1..=300 {
        let loss = 4.0 / step as f64 + 0.5;
        events.write(step, &[("train/loss", loss), ("train/lr", step as f64 * 1e-6), ("größe", -1.5)])?;
        plot.loss.push((step, loss));
        plot.memory_bytes.push((step, (3 << 30) + (step as u64 % 7) * (1 << 25)));
    }
    events.write(1_000_000, &[("train/loss", f64::INFINITY)])?;
    plot.write(&dir.join("loss.svg"))?;
    println!("{}", events.path().display());
    Ok(())
}
