//! What a task says of its model and of its data.

use std::path::Path;

use serde_json::Value;
use zero_core::checkpoint::SideFile;
use zero_models::ModelConfig;

use super::options::Options;
use super::order::Order;
use super::profile::Profile;
use super::task::Task;
use crate::error::{Result, wrong, wrong_data};

/// What a [`Task`] says of its model.
pub(super) struct Model {
    pub name: String,
    pub profile: Profile,
    /// As in a checkpoint's state, if transformers know such a model.
    pub config: Option<ModelConfig>,
    pub settings: Value,
    /// Its files beside its weights.
    pub files: Vec<SideFile>,
}

/// What a [`Task`] says of its data.
pub(super) struct Data {
    /// Of the rows that are trained on.
    pub order: Order,
    /// Rows after these, held out for evaluation.
    pub held_out: usize,
    /// Rows after these, of which only predictions are written.
    pub unlabelled: usize,
    pub tokens_per_row: Option<usize>,
    /// Whether `exp(loss)` is one.
    pub has_perplexity: bool,
    /// Of the rows that are trained on, and of all others.
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
            return Err(wrong("eval-every", every, "expected rows that are held out: give --eval ROWS too"));
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

    /// What is counted in speeds: tokens, or rows where they have none.
    pub(super) fn unit(&self) -> &'static str {
        if self.tokens_per_row.is_some() { "tokens" } else { "rows" }
    }

    /// So many of it in a row.
    pub(super) fn units(&self) -> usize {
        self.tokens_per_row.unwrap_or(1)
    }
}
