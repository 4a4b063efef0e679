//! Questions on a terminal.

use std::ops::RangeInclusive;

use inquire::validator::Validation;
use inquire::{Confirm, CustomType, InquireError, Select, Text};
use zero_train_cli::wizard::{Ask, Stopped};

/// Asks on the terminal; Enter selects the default.
pub struct Terminal;

fn stopped(question: &str) -> impl Fn(InquireError) -> Stopped + '_ {
    move |error| match error {
        InquireError::OperationCanceled | InquireError::OperationInterrupted => Stopped(question.into()),
        other => Stopped(format!("{question} {other}")),
    }
}

impl Ask for Terminal {
    fn choose(&mut self, question: &str, options: &[&str], default: usize) -> Result<usize, Stopped> {
        let asked = Select::new(question, options.to_vec()).with_starting_cursor(default);
        asked.raw_prompt().map(|chosen| chosen.index).map_err(stopped(question))
    }

    fn yes(&mut self, question: &str, default: bool) -> Result<bool, Stopped> {
        Confirm::new(question).with_default(default).prompt().map_err(stopped(question))
    }

    fn number(&mut self, question: &str, range: RangeInclusive<usize>, default: usize) -> Result<usize, Stopped> {
        CustomType::<usize>::new(question)
            .with_default(default)
            .with_error_message("a whole number, please")
            .with_validator(move |value: &usize| {
                Ok(if range.contains(value) {
                    Validation::Valid
                } else if *value < *range.start() {
                    Validation::Invalid(format!("at least {}, please", range.start()).into())
                } else {
                    Validation::Invalid(format!("at most {}, please", range.end()).into())
                })
            })
            .prompt()
            .map_err(stopped(question))
    }

    fn fraction(&mut self, question: &str, default: f64) -> Result<f64, Stopped> {
        CustomType::<f64>::new(question)
            .with_default(default)
            .with_error_message("a number, please")
            .with_validator(|value: &f64| {
                Ok(if *value > 0.0 && value.is_finite() {
                    Validation::Valid
                } else {
                    Validation::Invalid("a number above 0, please".into())
                })
            })
            .prompt()
            .map_err(stopped(question))
    }

    fn text(&mut self, question: &str, default: &str) -> Result<String, Stopped> {
        Text::new(question).with_default(default).prompt().map_err(stopped(question))
    }
}
