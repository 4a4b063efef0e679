//! The GPT-2 training command: options to a validated plan, ranks that train, a report.

mod observer;
mod options;
mod plan;
mod report;
mod train;
mod zero_plan;

use std::process::ExitCode;

pub use options::{Dtype, Options};
pub use plan::{MemoryNeed, Plan};
pub use report::Summary;

use crate::TrainError;
use crate::data::Source;

/// Runs the whole command and turns its outcome into an exit code: 0, 2 for bad input, 1 for a run that failed. The
/// error, if any, is printed once, on standard error.
///
/// `default_model` is trained when the options name none; if it does not fit into memory, the largest preset that does
/// is. `default_data` is read when the options name no file.
pub fn main(options: &Options, default_model: &str, default_data: &Source<'_>) -> ExitCode {
    match run(options, default_model, default_data) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

/// An error with its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// As [`main`], with the summary or the error as a value.
///
/// # Errors
///
/// [`TrainError`].
pub fn run(options: &Options, default_model: &str, default_data: &Source<'_>) -> Result<Summary, TrainError> {
    let plan = Plan::new(options, default_model, default_data)?;
    if !options.json {
        println!("{plan}");
    }
    for warning in &plan.plan.warnings {
        eprintln!("warning: {warning}");
    }
    let measured = train::train(&plan)?;
    let summary = Summary::new(&plan, &measured);
    if options.json {
        println!("{}", serde_json::to_string(&summary).expect("a summary is plain numbers and names"));
    } else {
        println!("{summary}");
    }
    Ok(summary)
}
