//! The GPT-2 training command: options to a validated plan, ranks that train, a report.

mod backend;
mod checkpoints;
mod fit;
mod observer;
mod options;
mod plan;
mod predict;
mod ranks;
mod report;
mod trace;
mod train;
mod zero_plan;

use std::process::ExitCode;

pub use backend::BackendChoice;
pub use fit::{MemoryNeed, model};
pub use options::{Dtype, GathersChoice, Hyperparameters, OffloadChoice, OffloadTo, Options};
pub use report::Summary;
pub use zero_plan::outline;

use zero_core::alloc::PageKeeper;
use zero_core::collective::exit::end_process;
use zero_core::collective::launcher::started;

use self::plan::Plan;
use self::ranks::{Ranks, with_ranks};
use crate::TrainError;
use crate::data::Source;
use crate::launcher::write_status;
use crate::signals::Signal;

/// What a program brings along.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    /// Trained when the options name no model; if it does not fit into memory, the largest preset that does is.
    pub model: &'a str,
    /// Read when the options name no file.
    pub data: Source<'a>,
    /// The program's allocator, if it is one that counts: memory that a step takes afresh is then part of its metrics.
    pub allocator: Option<&'a PageKeeper>,
}

/// Runs the whole command and turns its outcome into an exit code: 0, 2 for bad input, 1 for a run that failed, 128 and the
/// signal's number for one that SIGINT, SIGTERM or SIGUSR1 has ended. The error, if any, is printed once, on standard error.
pub fn main(options: &Options, program: &Program<'_>) -> ExitCode {
    let launched = started();
    let (stopped, label) = match with_ranks(options, |ranks| run_on(ranks, options, program)) {
        Ok(Ended { signal: None, .. }) => return ExitCode::SUCCESS,
        Ok(Ended { signal: Some(signal), .. }) => (signal.into(), "stopped"),
        Err(stopped) => (stopped, "error"),
    };
    let (text, code) = (told_once(&stopped.error), stopped.error.exit_code());
    // What a signal has ended all ranks say alike.
    if label == "error" || launched.as_ref().is_none_or(|launched| launched.rank == 0) {
        eprintln!("{label}: {text}");
    }
    if let Some(launched) = launched {
        write_status(launched.rank, code, &format!("rank {}: {text}", launched.rank));
        drop(stopped);
        // Not through the exit handlers of an MPI library, which may wait for a rank that is gone.
        end_process(code.into());
    }
    ExitCode::from(code)
}

/// How a run has ended that did not fail.
struct Ended {
    summary: Option<Summary>,
    /// [`TrainError::Signal`], if it was not by its last step.
    signal: Option<TrainError>,
}

/// A line on standard output. That nobody reads it any more (`| head`) is no reason to stop training.
fn tell(line: &dyn core::fmt::Display) {
    use std::io::Write;

    let _ = writeln!(std::io::stdout(), "{line}");
}

/// An error with its causes, which some errors tell themselves, on one line.
pub fn told_once(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}

/// As [`main`], with the summary or the error as a value. No summary when the checkpoint to resume from has all the steps
/// behind it, nor in a process that is not rank 0.
///
/// # Errors
///
/// [`TrainError`]; [`TrainError::Signal`] when SIGINT, SIGTERM or SIGUSR1 has ended the run, which has then saved what it was to
/// save. While it trains, the process handles these.
pub fn run(options: &Options, program: &Program<'_>) -> Result<Option<Summary>, TrainError> {
    let ended = with_ranks(options, |ranks| run_on(ranks, options, program)).map_err(|stopped| stopped.error)?;
    ended.signal.map_or(Ok(ended.summary), Err)
}

fn run_on(ranks: &Ranks<'_>, options: &Options, program: &Program<'_>) -> Result<Ended, TrainError> {
    ranks.quieten(options.out.as_deref())?;
    let plan = Plan::new(options, program.model, &program.data, ranks)?;
    ranks.agree(&plan.fingerprint())?;
    let trace = options.trace.as_deref().filter(|_| ranks.is_main());
    let _trace = trace.map(trace::begin).transpose()?;
    if !options.json {
        tell(&plan);
    }
    for warning in plan.plan.warnings.iter().map(|warning| warning.to_string()).chain(plan.checkpoints.warnings.clone())
    {
        eprintln!("warning: {warning}");
    }
    let done = plan.checkpoints.resumed_steps();
    if done >= plan.steps {
        eprintln!("the checkpoint has {done} steps behind it, --steps is {}: nothing is left to do", plan.steps);
        return Ok(Ended { summary: None, signal: None });
    }
    let measured = train::train(&plan, ranks, program.allocator)?;
    let signal = measured.signal.map(|signal| ended_by(signal, done + measured.steps.len(), &plan));
    if !ranks.is_main() {
        return Ok(Ended { summary: None, signal });
    }
    let summary = Summary::new(&plan, &measured);
    if options.json {
        tell(&serde_json::to_string(&summary).expect("a summary is plain numbers and names"));
    } else {
        tell(&summary);
    }
    Ok(Ended { summary: Some(summary), signal })
}

fn ended_by(signal: Signal, step: usize, plan: &Plan) -> TrainError {
    let kept = match &plan.checkpoints.dir {
        Some(dir) => format!(
            "the checkpoint of this step is in {}: the same command resumes there with --resume auto",
            dir.display()
        ),
        None => "no checkpoint was saved; --save DIR saves one".to_string(),
    };
    let told = format!("{} ended the run after step {step} of {}; {kept}", signal.name(), plan.steps);
    TrainError::Signal { told, code: signal.exit_code() }
}
