//! A task's description of its model and of its data.

use std::path::Path;

use serde_json::Value;
use zero_core::checkpoint::SideFile;
use zero_models::ModelConfig;

use super::options::Options;
use super::order::Order;
use super::profile::Profile;
use super::task::Task;
use crate::error::{Result, wrong, wrong_data};

/// A [`Task`]'s description of its model.
pub(super) struct Model {
    pub name: String,
    pub profile: Profile,
    /// The configuration in a checkpoint's state, if the task has one.
    pub config: Option<ModelConfig>,
    pub settings: Value,
    /// The model's files other than its weights.
    pub files: Vec<SideFile>,
}

/// A [`Task`]'s description of its data.
pub(super) struct Data {
    /// Order of the rows that are trained on.
    pub order: Order,
    /// Number of rows after the trained ones, held out for evaluation.
    pub held_out: usize,
    /// Number of rows after the held-out ones, for which only predictions are written.
    pub unlabelled: usize,
    pub tokens_per_row: Option<usize>,
    /// True if `exp(loss)` is a perplexity.
    pub has_perplexity: bool,
    /// Checksums of the rows that are trained on, and of all others.
    pub checksums: [Option<u32>; 2],
}

impl Data {
    pub(super) fn new<T: Task>(task: &T, options: &Options) -> Result<Self> {
        let (unlabelled, held_out) = (task.unlabelled(), options.eval.unwrap_or(task.held_out()));
        let all = task.rows() - unlabelled;
        if all == 0 {
            return Err(wrong_data(Path::new(&task.name()), "has no rows: expected at least one to train on"));
        }
        if let (Some(every), 0) = (options.eval_every, held_out) {
            return Err(wrong("eval-every", every, "expected held-out rows: add --eval ROWS"));
        }
        let rows = all.saturating_sub(held_out);
        if rows == 0 {
            let expected = format!("expected fewer than the {all} rows of the data");
            return Err(wrong("eval", held_out, expected));
        }
        let seed = options.shuffle.unwrap_or(task.shuffle()).then_some(options.seed);
        let checksums = [task.checksum(0..rows)?, task.checksum(rows..task.rows())?];
        let (tokens_per_row, has_perplexity) = (task.tokens_per_row(), task.has_perplexity());
        Ok(Self { order: Order { rows, seed }, held_out, unlabelled, tokens_per_row, has_perplexity, checksums })
    }

    /// Returns the unit of speeds: tokens, or rows if they have no tokens.
    pub(super) fn unit(&self) -> &'static str {
        if self.tokens_per_row.is_some() { "tokens" } else { "rows" }
    }

    /// Returns the number of units per row.
    pub(super) fn units(&self) -> usize {
        self.tokens_per_row.unwrap_or(1)
    }
}
