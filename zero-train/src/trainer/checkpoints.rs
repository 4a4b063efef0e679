//! The policy of checkpoints: when they are saved, which are kept, and which one a run resumes from.

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

/// The key of the trainer's state in a checkpoint's state.
const TRAINER: &str = "trainer";

/// Checked settings of checkpoints; and the checkpoint to resume from, open and verified.
#[derive(Default)]
pub(super) struct Checkpoints {
    /// Folder to save into.
    pub dir: Option<PathBuf>,
    /// Steps between two checkpoints; `None` saves only the last.
    pub every: Option<usize>,
    pub keep_last: Option<NonZeroUsize>,
    /// True if the best checkpoint is kept too.
    pub keep_best: bool,
    /// True if saving overlaps with training.
    pub beside: bool,
    /// The checkpoint to resume from.
    pub resume: Option<Arc<Checkpoint>>,
    /// Warnings about invalid checkpoints that were skipped, and about those of an earlier run.
    pub warnings: Vec<String>,
}

/// State that the trainer's next step depends on, in addition to the engine's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TrainerState {
    /// Steps so far, including skipped ones.
    pub(super) step: usize,
    pub(super) data: DataPosition,
    pub(super) epoch: EpochState,
    pub(super) best: Option<Best>,
}

/// The position in the data at which the next step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DataPosition {
    /// Rows used so far, over all epochs.
    pub(super) used: usize,
    /// Rows of the data.
    pub(super) rows: usize,
    /// Tokens of a row; 1 if rows have none.
    pub(super) seq: usize,
    /// Checksum of all rows; absent in checkpoints of earlier versions and of tasks without one. Data is then known only by its size.
    #[serde(default)]
    pub(super) checksum: Option<u32>,
    /// The seed of the shuffles, if rows are shuffled.
    #[serde(default)]
    pub(super) shuffle: Option<u64>,
    /// Rows of a step, over all ranks; absent in checkpoints of earlier versions.
    #[serde(default)]
    pub(super) batch: Option<usize>,
}

impl DataPosition {
    /// Returns the position at the start of `data`.
    pub(super) fn first(data: &Data, batch: usize) -> Self {
        let ([checksum, _], shuffle) = (data.checksums, data.order.seed);
        Self { used: 0, rows: data.order.rows, seq: data.units(), checksum, shuffle, batch: Some(batch) }
    }

    /// Returns how `data` differs from the data of this position, if it does.
    pub(super) fn differs_from(&self, data: &Self) -> Option<String> {
        let again = "training starts again at the first row";
        let sizes = [self, data].map(|data| (data.rows, data.seq));
        let sums = [self, data].map(|data| data.checksum);
        if sizes[0] == sizes[1] && (sums[0] == sums[1] || sums.contains(&None)) {
            let order = |position: &Self| match position.shuffle {
                Some(seed) => format!("shuffled with --seed {seed}"),
                None => "in its original order".to_string(),
            };
            return (self.shuffle != data.shuffle).then(|| {
                let [there, here] = [self, data].map(order);
                format!(
                    "the checkpoint was trained on data {there}, but this run's data is {here}: {again}; to continue \
                     where the checkpoint was saved, use the --shuffle and --seed of the checkpoint's run"
                )
            });
        }
        let [(rows_there, seq_there), (rows, seq)] = sizes;
        let tokens = match sums {
            [Some(there), Some(here)] => format!(", and its tokens have checksum {here:08x} instead of {there:08x}"),
            _ => String::new(),
        };
        Some(format!(
            "the checkpoint was trained on {rows_there} rows of {seq_there} tokens, but this run's data has {rows} \
             rows of {seq}{tokens}: {again}; to continue where the checkpoint was saved, use the data of the \
             checkpoint's run"
        ))
    }
}

/// Returns a warning if this run's number of rows in a step differs from the checkpoint's.
pub(super) fn other_batch(there: Option<usize>, here: usize) -> Option<String> {
    let there = there.filter(|&there| there != here)?;
    Some(format!(
        "the checkpoint was trained with {there} rows per step, but this run has {here}: the learning rate may need to \
         change; to keep {there}, change --batch, --accumulation or the number of ranks"
    ))
}

/// The current epoch.
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

    /// Counts a step on `used` of the data's rows; the mean excludes a non-finite loss.
    pub(super) fn add(&mut self, loss: f64, used: usize) {
        self.seen += used;
        if loss.is_finite() {
            self.loss_sum += loss;
            self.steps += 1;
        }
    }

    /// Returns true once all of the data's rows have been seen.
    pub(super) fn has_ended(&self, rows: usize) -> bool {
        self.seen >= rows
    }

    /// Returns true if the epoch ends with a step on `used` more rows.
    pub(super) fn ends_with(&self, used: usize, rows: usize) -> bool {
        self.seen + used >= rows
    }

    /// Ends the epoch and begins the next; a step on more rows than the data has ends several.
    pub(super) fn end(&mut self, rows: usize, step: usize, eval: Option<Evaluated>) -> EpochMetrics {
        let Self { number, seen, loss_sum, steps } = *self;
        let passes = (seen / rows).max(1);
        *self = Self { number: number + passes, seen: seen.saturating_sub(passes * rows), ..Self::first() };
        EpochMetrics::new(number + passes - 1, step, loss_sum / steps as f64, eval)
    }
}

/// The checkpoint with the lowest loss so far.
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
                    [] => "expected a checkpoint (step-...), or a folder of checkpoints".to_string(),
                    reasons => format!("no checkpoint there is intact: {}", reasons.join("; ")),
                };
                Some(latest.ok_or_else(|| wrong("resume", path.display(), found()))?)
            }
        };
        if let (None, Some(dir)) = (&checkpoints.resume, &options.save) {
            let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
            if let Some(last) = names.filter(|name| name.as_encoded_bytes().starts_with(b"step-")).max() {
                checkpoints.warnings.push(format!(
                    "{} has checkpoints of an earlier run, up to {}: this run starts anew, and its checkpoints replace them; to \
                     continue the earlier run, pass --resume auto; to keep it, choose another --save folder",
                    dir.display(),
                    last.display()
                ));
            }
        }
        Ok(checkpoints)
    }

    /// Returns the newest valid checkpoint in `dir`; every byte of it is verified by one rank.
    fn latest(&mut self, dir: &Path, ranks: &Ranks<'_>) -> Result<Option<Arc<Checkpoint>>> {
        let found = ranks.find_latest(dir, Check::Contents)?;
        for (path, reason) in found.skipped {
            self.warnings.push(format!("checkpoint {} is skipped: {reason}", path.display()));
        }
        let open = |path: PathBuf| Checkpoint::open_as_read(&path).map_err(EngineError::from);
        Ok(found.checkpoint.map(open).transpose()?.map(Arc::new))
    }

    /// Creates the folder and checks that it is writable, so that an error appears before the first step.
    pub(super) fn prepare(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let io = io("save checkpoints into", dir);
        std::fs::create_dir_all(dir).map_err(&io)?;
        tempfile::tempfile_in(dir).map_err(io)?;
        Ok(())
    }

    /// Returns the number of steps that the checkpoint to resume from has completed; 0 without one.
    pub fn resumed_steps(&self) -> usize {
        self.resume.as_ref().map_or(0, |checkpoint| checkpoint.step() as usize)
    }

    /// Returns the folder to save to if a checkpoint is due after `step` (from 1), which may be the last of the run.
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
    /// Returns the state that is saved along with the engine's: this state, the model, and the plan in words.
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

    /// Reads this state from the state that the engine has loaded.
    pub(super) fn loaded(state: &Map<String, Value>, checkpoint: &Checkpoint) -> Result<Self> {
        let what = |problem: String| EngineError::Mismatch { path: checkpoint.path().to_path_buf(), what: problem };
        let none = "it has no trainer state: it was saved by another program; load it with ZeroEngine::load";
        let own = state.get(TRAINER).ok_or_else(|| what(none.into()))?;
        let read = Self::deserialize(own);
        Ok(read.map_err(|error| what(format!("its trainer state cannot be read: {error}")))?)
    }
}
