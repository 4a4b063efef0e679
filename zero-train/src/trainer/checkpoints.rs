//! When checkpoints are saved, which are kept, and from which one a run resumes.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zero_core::checkpoint::{Check, Checkpoint, SaveOptions, SideFile};

use super::facts::{Data, Model};
use super::options::{Options, at_least_one};
use super::ranks::Ranks;
use crate::config::ZeroPlan;
use crate::error::{Result, io, wrong};
use crate::metrics::{EpochMetrics, Evaluated};
use crate::step::EngineError;

/// The key of the trainer's state in a checkpoint's.
const TRAINER: &str = "trainer";

/// Settings of checkpoints, checked; and the checkpoint to resume from, open and verified.
#[derive(Default)]
pub(super) struct Checkpoints {
    /// Folder to save into.
    pub dir: Option<PathBuf>,
    /// Steps between two checkpoints; none but the last without.
    pub every: Option<usize>,
    pub keep_last: Option<NonZeroUsize>,
    /// Whether the best is kept too.
    pub keep_best: bool,
    /// Whether saving overlaps with training.
    pub beside: bool,
    /// What training resumes from.
    pub resume: Option<Arc<Checkpoint>>,
    /// What was found unsound on the way to it.
    pub warnings: Vec<String>,
}

/// What the trainer's next step depends on, besides the engine's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TrainerState {
    /// Steps so far, skipped ones too.
    pub(super) step: usize,
    pub(super) data: DataPosition,
    pub(super) epoch: EpochState,
    pub(super) best: Option<Best>,
}

/// Where in the data the next step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DataPosition {
    /// Rows used so far, over all passes.
    pub(super) used: usize,
    /// Rows of the data.
    pub(super) rows: usize,
    /// Tokens of a row; 1 where it has none.
    pub(super) seq: usize,
    /// Of all rows; absent in checkpoints of earlier versions and of tasks that give none: data is known by its size only.
    #[serde(default)]
    pub(super) checksum: Option<u32>,
    /// The seed by which rows are shuffled, if they are.
    #[serde(default)]
    pub(super) shuffle: Option<u64>,
    /// Rows of a step, over all ranks; absent in checkpoints of earlier versions.
    #[serde(default)]
    pub(super) batch: Option<usize>,
}

impl DataPosition {
    /// The beginning of `data`.
    pub(super) fn first(data: &Data, batch: usize) -> Self {
        let ([checksum, _], shuffle) = (data.checksums, data.order.seed);
        Self { used: 0, rows: data.order.rows, seq: data.units(), checksum, shuffle, batch: Some(batch) }
    }

    /// How `data` differs from the data that this is in, if it does.
    pub(super) fn differs_from(&self, data: &Self) -> Option<String> {
        let again = "training goes on with its first row";
        let sizes = [self, data].map(|data| (data.rows, data.seq));
        let sums = [self, data].map(|data| data.checksum);
        if sizes[0] == sizes[1] && (sums[0] == sums[1] || sums.contains(&None)) {
            let order = |position: &Self| match position.shuffle {
                Some(seed) => format!("shuffled with --seed {seed}"),
                None => "in its own order".to_string(),
            };
            return (self.shuffle != data.shuffle).then(|| {
                let [there, here] = [self, data].map(order);
                format!(
                    "the checkpoint was trained on data {there}, this is {here}: {again}; to go on where the checkpoint was \
                     saved, give the --shuffle and --seed it was trained with"
                )
            });
        }
        let [(rows_there, seq_there), (rows, seq)] = sizes;
        let tokens = match sums {
            [Some(there), Some(here)] => format!(", and its tokens have checksum {here:08x} instead of {there:08x}"),
            _ => String::new(),
        };
        Some(format!(
            "the checkpoint was trained on {rows_there} rows of {seq_there} tokens, the data has {rows} rows of {seq}{tokens}: \
             {again}; to go on where the checkpoint was saved, give the data it was trained on"
        ))
    }
}

/// Returns a warning if this run has another number of rows in a step than the checkpoint.
pub(super) fn other_batch(there: Option<usize>, here: usize) -> Option<String> {
    let there = there.filter(|&there| there != here)?;
    Some(format!(
        "the checkpoint was trained with {there} rows in a step, this run has {here}: the learning rate may no longer suit; to keep \
         {there}, change --batch x --accumulation x ranks"
    ))
}

/// The pass over the data that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct EpochState {
    pub(super) number: usize,
    pub(super) seen: usize,
    pub(super) loss_sum: f64,
    pub(super) steps: usize,
}

impl EpochState {
    pub(super) fn first() -> Self {
        Self { number: 1, seen: 0, loss_sum: 0.0, steps: 0 }
    }

    /// Counts a step on `used` of the data's rows; a loss that is not finite is no part of the mean.
    pub(super) fn add(&mut self, loss: f64, used: usize) {
        self.seen += used;
        if loss.is_finite() {
            self.loss_sum += loss;
            self.steps += 1;
        }
    }

    /// Returns true when all of the data's rows have been seen.
    pub(super) fn has_ended(&self, rows: usize) -> bool {
        self.seen >= rows
    }

    /// Returns true if the pass ends with a step on `used` more rows.
    pub(super) fn ends_with(&self, used: usize, rows: usize) -> bool {
        self.seen + used >= rows
    }

    /// The next pass begins: a step on more rows than there are ends several.
    pub(super) fn end(&mut self, rows: usize, step: usize, eval: Option<Evaluated>) -> EpochMetrics {
        let Self { number, seen, loss_sum, steps } = *self;
        let passes = (seen / rows).max(1);
        *self = Self { number: number + passes, seen: seen.saturating_sub(passes * rows), ..Self::first() };
        EpochMetrics::new(number + passes - 1, step, loss_sum / steps as f64, eval)
    }
}

/// The checkpoint with the least loss so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Best {
    pub(super) step: u64,
    pub(super) loss: f64,
}

impl Checkpoints {
    pub(super) fn new(options: &Options, ranks: &Ranks<'_>) -> Result<Self> {
        at_least_one(&[("save-every", options.save_every), ("keep-last", options.keep_last)])?;
        let mut checkpoints = Self {
            dir: options.save.clone(),
            every: options.save_every,
            keep_last: options.keep_last.and_then(NonZeroUsize::new),
            keep_best: options.keep_best,
            beside: options.save_async,
            ..Self::default()
        };
        if let Some(dir) = options.save.as_ref().filter(|dir| dir.exists() && !dir.is_dir()) {
            return Err(wrong("save", dir.display(), "expected a folder, or a name for one; this is a file"));
        }
        checkpoints.resume = match options.resume.as_deref() {
            None => None,
            Some(auto) if auto == Path::new("auto") => {
                let expected = "expected --save DIR too, the folder to look for checkpoints in";
                let dir = options.save.as_ref().ok_or_else(|| wrong("resume", "auto", expected))?;
                checkpoints.latest(dir, ranks)?
            }
            Some(path) if path.join("manifest.json").is_file() => Some(Arc::new(ranks.open(path)?)),
            Some(path) => {
                let latest = checkpoints.latest(path, ranks)?;
                let found = || match checkpoints.warnings.as_slice() {
                    [] => "expected a checkpoint (step-...), or a folder that has some".to_string(),
                    reasons => format!("no checkpoint there is sound: {}", reasons.join("; ")),
                };
                Some(latest.ok_or_else(|| wrong("resume", path.display(), found()))?)
            }
        };
        Ok(checkpoints)
    }

    /// The newest sound checkpoint in `dir`, every byte of it verified, by one rank.
    fn latest(&mut self, dir: &Path, ranks: &Ranks<'_>) -> Result<Option<Arc<Checkpoint>>> {
        let found = ranks.find_latest(dir, Check::Contents)?;
        for (path, reason) in found.skipped {
            self.warnings.push(format!("checkpoint {} is skipped: {reason}", path.display()));
        }
        let open = |path: PathBuf| Checkpoint::open_as_read(&path).map_err(EngineError::from);
        Ok(found.checkpoint.map(open).transpose()?.map(Arc::new))
    }

    /// Makes the folder, and sees that it can be written to, before the first step rather than after the hundredth.
    pub(super) fn prepare(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let io = io("save checkpoints into", dir);
        std::fs::create_dir_all(dir).map_err(&io)?;
        tempfile::tempfile_in(dir).map_err(io)?;
        Ok(())
    }

    /// Steps that the checkpoint to resume from has behind it; 0 without.
    pub fn resumed_steps(&self) -> usize {
        self.resume.as_ref().map_or(0, |checkpoint| checkpoint.step() as usize)
    }

    /// Whether a checkpoint is due after `step` (from 1), which may be the last of the run.
    pub(super) fn due(&self, step: usize, last: bool) -> Option<&Path> {
        let due = last || self.every.is_some_and(|every| step.is_multiple_of(every));
        self.dir.as_deref().filter(|_| due)
    }

    pub(super) fn options(&self, best: Option<Best>, files: &[SideFile]) -> SaveOptions {
        let protect = best.filter(|_| self.keep_best).map(|best| best.step).into_iter().collect();
        SaveOptions { keep_last: self.keep_last, protect, files: files.to_vec() }
    }
}

impl TrainerState {
    /// What is saved beside the engine's state: this, the model, and the plan in words.
    pub(super) fn saved(&self, model: &Model, plan: &ZeroPlan) -> Map<String, Value> {
        let lines = plan.explain();
        let mut entries = vec![
            (TRAINER, serde_json::to_value(self).expect("plain numbers")),
            ("plan", json!(lines.lines().collect::<Vec<_>>())),
        ];
        if let Some(config) = &model.config {
            let mut config = serde_json::to_value(config).expect("a configuration is numbers and texts");
            config["name"] = json!(model.name);
            entries.push(("model", config));
        }
        if !model.settings.is_null() {
            entries.push(("task", model.settings.clone()));
        }
        entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }

    /// The state in what the engine has loaded.
    pub(super) fn loaded(state: &Map<String, Value>, checkpoint: &Checkpoint) -> Result<Self> {
        let what = |problem: String| EngineError::Mismatch { path: checkpoint.path().to_path_buf(), what: problem };
        let none = "it has no state of this command: it was saved by another program; load it with ZeroEngine::load";
        let own = state.get(TRAINER).ok_or_else(|| what(none.into()))?;
        let read = Self::deserialize(own);
        Ok(read.map_err(|error| what(format!("the state of this command cannot be read: {error}")))?)
    }
}
