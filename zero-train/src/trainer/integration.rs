//! The interface between the trainer, which knows no tensors, and the version of Burn that has them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::process::ProcessRun;
use zero_core::config::ZeroConfig;
use zero_models::ModelConfig;
use zero_models::hf_export::ExportOptions;

use super::profile::Profile;
use super::rows::Rows;
use super::task::{Measured, Task};
use super::{BackendChoice, DecayExcept};
use crate::Result;
use crate::config::ZeroPlan;
use crate::metrics::RankMetrics;
use crate::step::{EngineConfig, Step, Times};

/// Checked settings of a training run.
pub struct Run<'a> {
    /// Sharding, batch, precision, optimizer, schedule.
    pub plan: &'a ZeroPlan,
    /// The plan's sharding settings.
    pub zero: &'a ZeroConfig,
    /// Settings of the engine.
    pub engine: EngineConfig,
    /// Parameters without weight decay.
    pub decay_except: DecayExcept,
    /// The task's settings ([`Task::settings`](super::Task::settings)).
    pub settings: &'a Value,
    /// Backend that ranks compute on.
    pub backend: BackendChoice,
    /// Threads and deadlines.
    pub launch: &'a LaunchOptions,
    /// True if saving checkpoints overlaps with training.
    pub async_save: bool,
    /// This process among those of a launcher; `None` if ranks are threads.
    pub process: Option<&'a ProcessRun>,
}

/// A LoRA adapter before its first step, for integrations that add it to a model of their own.
pub struct InitialAdapter {
    /// Factor of the adapter's output.
    pub scale: f64,
    /// Paths of the parameters that are trained: `LAYER.adapter.a` and `LAYER.adapter.b` of each adapted layer, and those of modules that
    /// are trained in full.
    pub trained: Vec<String>,
    /// Shapes and initial values by path: of all parameters of the adapter, and of modules in full if its file has them.
    pub values: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// The integration of a version of Burn, which trains tasks `T`.
pub trait Integration<T: Task>: Sync {
    /// Returns the model's parameters, and the memory and compute of training on `micro_batch` rows: [`Task::profile`], unless the
    /// integration counts them itself.
    ///
    /// # Errors
    /// Same as [`Task::profile`].
    fn profile(&self, task: &T, micro_batch: usize) -> Result<Profile> {
        task.profile(micro_batch)
    }

    /// Checks that it supports the backend, and that this machine has the device.
    ///
    /// # Errors
    /// The error says what is missing, and what to do.
    fn has(&self, backend: BackendChoice) -> Result<()>;

    /// Checks that it supports what a run asks for. Returns a message for each setting that has no effect on it.
    ///
    /// # Errors
    /// An error for the first setting that it does not support, by name.
    fn check(&self, run: &Run<'_>) -> Result<Vec<String>>;

    /// Runs `body` on every rank of this process, and returns the first rank's result.
    ///
    /// # Errors
    /// The errors of `body`, and those of ranks.
    fn launch<R: Send>(
        &self,
        task: &T,
        run: &Run<'_>,
        body: impl Fn(&mut dyn RankEngine) -> Result<R> + Sync,
    ) -> Result<R>;
}

/// A function that returns the bytes in use and reserved on a device that has its own memory; callable from any thread.
pub type MemoryProbe = Box<dyn Fn() -> Option<(u64, u64)> + Send>;

/// One rank's part of a model in training. All ranks make the same calls, except [`metrics`](Self::metrics) and similar ones.
pub trait RankEngine {
    /// Returns the rank's number.
    fn rank(&self) -> usize;

    /// Gathers every rank's `values`, equally many, in rank order. A collective operation.
    ///
    /// # Errors
    /// An error if a rank is gone.
    fn all_gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>>;

    /// Gathers every rank's `bytes`, of any number. A collective operation.
    ///
    /// # Errors
    /// An error if a rank is gone.
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Trains on rows; updates the parameters with the last micro-batch of a step. `shares` are factors of the loss's
    /// terms; a missing factor is 1.
    ///
    /// # Errors
    /// An error if data cannot be read or an update cannot be made.
    fn micro_batch(&mut self, rows: &Rows, shares: &[f64]) -> Result<()>;

    /// Returns true while a device computes a step that is queued in full: the time for work that the next step does not need.
    fn is_on_device(&self) -> bool {
        false
    }

    /// Returns the result of the step, and this rank's losses of its micro-batches; waits for a device.
    ///
    /// # Errors
    /// An error if a device has failed.
    fn result(&mut self) -> Result<(Step, Vec<f64>)>;

    /// Returns the learning rate of the next update.
    fn lr(&self) -> f64;

    /// Returns the factor that the loss is currently multiplied by.
    fn loss_scale(&self) -> f64;

    /// Returns the time spent since the last call.
    fn take_times(&mut self) -> Times;

    /// Swaps the weights with their moving averages, and back. Training needs the weights. All ranks call it.
    ///
    /// # Errors
    /// An error if the run has no averages.
    fn swap_averages(&mut self) -> Result<()>;

    /// Returns the task's measurements of held-out rows.
    ///
    /// # Errors
    /// The errors of the task.
    fn evaluate(&self, rows: &Rows) -> Result<Measured>;

    /// Returns the task's measurements of rows by the current model, which is the initial one: [`Task::reference`].
    ///
    /// # Errors
    /// The errors of the task.
    fn reference(&self, rows: &Rows) -> Result<Option<Vec<f64>>>;

    /// Returns the model's predictions for rows, if the task makes any.
    ///
    /// # Errors
    /// The errors of the task.
    fn predict(&self, rows: &Rows) -> Result<Option<Vec<Value>>>;

    /// Returns a sample of the trained model's output, for display.
    ///
    /// # Errors
    /// The errors of the task.
    fn sample(&self) -> Result<Option<String>>;

    /// Resumes from a checkpoint. Returns the trainer's state in it.
    ///
    /// # Errors
    /// An error if the checkpoint is of another model or optimizer, or cannot be read.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<Map<String, Value>>;

    /// Saves a checkpoint. Returns its bytes if it is durable already ([`Run::async_save`]).
    ///
    /// # Errors
    /// An error of the disk.
    fn save(&mut self, dir: &Path, step: u64, extra: Map<String, Value>, options: &SaveOptions) -> Result<Option<u64>>;

    /// Waits until the last checkpoint is durable, and returns its path if it was not.
    ///
    /// # Errors
    /// An error of the disk.
    fn wait_for_save(&mut self) -> Result<Option<PathBuf>>;

    /// Writes the full model for Hugging Face, with this configuration or, without one, under the parameters' own names.
    ///
    /// # Errors
    /// An error of the disk, or of a configuration that is not the model's.
    fn export(&self, config: Option<&ModelConfig>, out: &Path, options: &ExportOptions) -> Result<()>;

    /// Begins a new period of peaks.
    fn reset_peaks(&self);

    /// Returns the bytes since the last [`reset_peaks`](Self::reset_peaks); those on the wire since the rank began.
    fn metrics(&self) -> RankMetrics;

    /// Returns the memory probe of the rank's device.
    fn memory_probe(&self) -> MemoryProbe {
        Box::new(|| None)
    }

    /// Returns the peak floating-point operations per second of the run's devices in the type that it computes in, if known.
    fn peak_flops(&self) -> Option<f64> {
        None
    }
}
