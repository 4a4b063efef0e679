//! `metrics.jsonl`, one JSON object per step, and `events.jsonl`, one per other event. The names are a contract: new ones
//! may be added, none changes its meaning.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zero_core::accounting::{StateBytes, WireBytes};

use super::{MemoryReport, MonitorError, append, io_error};
use crate::memory::format_bytes;

/// One training step.
// A field for each column of the metrics.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Number of the step, from 1.
    pub step: usize,
    /// Mean loss over the global batch, before the update; null in the file if it is not finite.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss: f64,
    /// Global L2 norm of the averaged gradient, before clipping.
    #[serde(deserialize_with = "number_or_infinity")]
    pub grad_norm: f64,
    /// Learning rate of the update.
    pub lr: f64,
    /// Tokens of the global batch, including those of target texts and excluding padding; or its rows, if they have no tokens.
    pub tokens: usize,
    /// Duration of the step in milliseconds: data, forward, backward, update.
    pub step_ms: f64,
    /// `tokens` per second.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization: the fraction of the devices' peak rate that the model's operations reach, if the peak is known.
    #[serde(default)]
    pub mfu: Option<f64>,
    /// Milliseconds of rank 0's forward passes.
    #[serde(default)]
    pub forward_ms: f64,
    /// Milliseconds of its backward passes, including concurrent reductions.
    #[serde(default)]
    pub backward_ms: f64,
    /// Milliseconds of its update.
    #[serde(default)]
    pub update_ms: f64,
    /// True if the update was skipped because gradients overflowed (never in fp32); `grad_norm` is then null.
    pub skipped: bool,
    /// Factor that the loss was multiplied by; 1 except in fp16.
    pub loss_scale: f64,
    /// Bytes of memory, in large blocks, that this step newly took from the system (never used before, or returned since);
    /// absent if the program's allocator does not count them.
    #[serde(default)]
    pub fresh_bytes: Option<u64>,
    /// Bytes that rank 0's tensors hold on its device at the end of the step; absent on the CPU.
    #[serde(default)]
    pub device_bytes_in_use: Option<u64>,
    /// Bytes reserved on rank 0's device, by all its users if it is an NVIDIA GPU; absent on the CPU.
    #[serde(default)]
    pub device_bytes_reserved: Option<u64>,
    /// Each rank's memory and traffic.
    pub ranks: Vec<RankMetrics>,
}

/// Reads a number. Null stands for NaN, which JSON does not have.
pub(crate) fn number_or_nan<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads a number. Null stands for infinity, which JSON does not have.
fn number_or_infinity<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// One pass over the training data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochMetrics {
    /// Number of the epoch, from 1.
    pub epoch: usize,
    /// Its last step.
    pub step: usize,
    /// Mean training loss over its steps.
    pub loss: f64,
    /// Mean loss over the held-out rows, at its end.
    pub eval_loss: Option<f64>,
    /// All values measured on these rows, including the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<Evaluated>,
    /// Memory of its training and evaluation phases, if measured (`--memory-breakdown`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryReport>,
}

/// Means over the held-out rows, by name; the loss is the first.
pub type Evaluated = Vec<(String, f64)>;

/// An event of a run other than a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Steps so far.
    pub step: usize,
    /// The kind of event.
    pub kind: EventKind,
    /// Human-readable description.
    pub text: String,
    /// Values measured in an evaluation or an epoch, the loss first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Evaluated,
    /// Seconds that training stalled for it.
    #[serde(default)]
    pub seconds: f64,
    /// Milliseconds since 1970.
    #[serde(default)]
    pub unix_ms: u64,
}

/// Kinds of [`Event`]s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// The run resumes from a checkpoint.
    Resume,
    /// A problem that does not end the run.
    #[default]
    Warning,
    /// The update was skipped because gradients overflowed.
    Skip,
    /// Held-out rows were evaluated.
    Evaluation,
    /// The prediction for a held-out row, at an evaluation.
    Sample,
    /// An epoch has ended; `values` holds the mean training loss.
    Epoch,
    /// A checkpoint was saved.
    Save,
    /// All steps are done.
    End,
    /// A signal has ended the run.
    Stop,
    /// An error has ended the run.
    Fail,
}

impl Event {
    pub(crate) fn new(kind: EventKind, step: usize, text: String) -> Self {
        Self { step, kind, text, ..Self::default() }
    }
}

impl EpochMetrics {
    pub(crate) fn new(epoch: usize, step: usize, loss: f64, eval: Option<Evaluated>) -> Self {
        let eval_loss = eval.as_ref().map(|eval| eval[0].1);
        Self { epoch, step, loss, eval_loss, eval, memory: Vec::new() }
    }
}

/// One checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SaveMetrics {
    /// Number of steps completed.
    pub step: usize,
    /// Seconds that training stalled for it.
    pub stall_seconds: f64,
    /// Size of all ranks' files; not known yet if saving overlaps with training.
    pub bytes: Option<u64>,
}

impl core::fmt::Display for SaveMetrics {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let seconds = self.stall_seconds;
        match self.bytes {
            Some(bytes) => write!(f, "step {}: saved {} in {seconds:.2} s", self.step, format_bytes(bytes)),
            None => write!(f, "step {}: copied in {seconds:.2} s; saving overlaps with training", self.step),
        }
    }
}

/// One rank in one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankMetrics {
    /// The rank, from 0.
    pub rank: usize,
    /// Bytes of model state: parameters and gradients at their peak in the step, optimizer state at its end.
    pub model_state_bytes: StateBytes,
    /// Peak bytes of full gradients waiting to be reduced in the step, at stages 2 and 3 (at stages 0 and 1 they are part
    /// of the model state).
    pub gradients_in_flight_bytes_peak: u64,
    /// Peak bytes of gathered parameters in the step.
    pub gathered_bytes_peak: u64,
    /// Bytes received from other ranks in the step, by operation.
    pub wire_bytes: WireBytes,
    /// Peak bytes of memory of the rank's process so far; ranks that are threads share one process and value.
    pub peak_rss_bytes: u64,
}

/// Numbers of one rank that all ranks receive at the end of a step.
pub(crate) struct RankReport {
    pub(crate) loss: f64,
    /// The signal that this rank's process has received; 0 for none.
    pub(crate) signal: f64,
    /// Tokens of its rows; or the number of rows, if they have no tokens.
    pub(crate) tokens: f64,
    pub(crate) metrics: RankMetrics,
}

impl RankReport {
    /// Gathers every rank's report, in rank order. Numbers are exchanged as floats, which represent counts below 2^53 exactly.
    pub(crate) fn of_all_ranks<E>(
        mut self,
        all_gather: impl FnOnce(&[f64]) -> Result<Vec<Vec<f64>>, E>,
    ) -> Result<Vec<Self>, E> {
        let counts: Vec<f64> = self.metrics.counts().map(|count| *count as f64).collect();
        let all = all_gather(&[&[self.loss, self.signal, self.tokens][..], &counts].concat())?;
        let read = |(rank, values): (usize, &Vec<f64>)| {
            let mut metrics = RankMetrics { rank, ..RankMetrics::default() };
            metrics.counts().zip(&values[3..]).for_each(|(count, &value)| *count = value as u64);
            Self { loss: values[0], signal: values[1], tokens: values[2], metrics }
        };
        Ok(all.iter().enumerate().map(read).collect())
    }
}

impl RankMetrics {
    /// Returns all counts, without the rank.
    fn counts(&mut self) -> impl Iterator<Item = &mut u64> {
        let state = &mut self.model_state_bytes;
        let state = [&mut state.parameters, &mut state.gradients, &mut state.optimizer];
        let others =
            [&mut self.gradients_in_flight_bytes_peak, &mut self.gathered_bytes_peak, &mut self.peak_rss_bytes];
        state.into_iter().chain(self.wire_bytes.counts_mut()).chain(others)
    }
}

/// A file of JSON objects, written one complete line at a time.
#[derive(Debug)]
pub struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    /// Creates `dir` if necessary, and an empty file in it, which replaces that of an earlier run.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn create(dir: &Path, name: &str) -> Result<Self, MonitorError> {
        std::fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let path = dir.join(name);
        let file = File::create(&path).map_err(io_error("create", &path))?;
        Ok(Self { file, path })
    }

    /// Opens the file of a run that resumes: keeps and returns the lines of an existing file that `keep` selects, and drops
    /// those that an interrupted run wrote after them.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn resume<T: Serialize + DeserializeOwned>(
        dir: &Path,
        name: &str,
        keep: impl Fn(&T) -> bool,
    ) -> Result<(Self, Vec<T>), MonitorError> {
        let path = dir.join(name);
        if !path.exists() {
            return Ok((Self::create(dir, name)?, Vec::new()));
        }
        let mut kept: Vec<T> = Self::read(&path)?;
        kept.retain(keep);
        // Beside it and renamed, so that no moment loses what is kept.
        let aside = dir.join(format!(".{name}"));
        let mut writer = Self { file: File::create(&aside).map_err(io_error("create", &aside))?, path };
        kept.iter().try_for_each(|line| writer.write(line))?;
        std::fs::rename(&aside, &writer.path).map_err(io_error("replace", &writer.path))?;
        Ok((writer, kept))
    }

    /// Reads the lines of a file, except those that cannot be read, such as a last line cut off when its process ended.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, MonitorError> {
        let text = match std::fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            text => text.map_err(io_error("read", path))?,
        };
        Ok(text.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Appends one object and passes it to the operating system.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn write(&mut self, object: &impl Serialize) -> Result<(), MonitorError> {
        let mut line = serde_json::to_vec(object).expect("metrics are plain numbers and texts");
        line.push(b'\n');
        append(&mut self.file, &line, &self.path)
    }
}
