//! What a run is trained by: the seam between the trainer, which knows no tensors, and the version of Burn that has them.

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
use super::task::Measured;
use super::{BackendChoice, DecayExcept};
use crate::Result;
use crate::config::ZeroPlan;
use crate::metrics::RankMetrics;
use crate::step::{EngineConfig, Step, Times};

/// What ranks are to train by, checked.
pub struct Run<'a> {
    /// Sharding, batch, precision, optimizer, schedule.
    pub plan: &'a ZeroPlan,
    /// The same as settings of what is sharded.
    pub zero: &'a ZeroConfig,
    /// How an update is made.
    pub engine: EngineConfig,
    /// What weight decay leaves alone.
    pub decay_except: DecayExcept,
    /// Where ranks compute.
    pub backend: BackendChoice,
    /// Threads and deadlines.
    pub launch: &'a LaunchOptions,
    /// Whether checkpoints are written beside the training.
    pub saves_beside: bool,
    /// This process among those of a launcher; none for ranks that are threads.
    pub process: Option<&'a ProcessRun>,
}

/// A version of Burn that trains tasks `T`.
pub trait Front<T>: Sync {
    /// Whether it computes there, and this machine has the device.
    ///
    /// # Errors
    /// What is missing, and what to do.
    fn has(&self, backend: BackendChoice) -> Result<()>;

    /// What training the task on so many rows takes.
    ///
    /// # Errors
    /// Of a model that cannot be made.
    fn profile(&self, task: &T, micro_batch: usize) -> Result<Profile>;

    /// Whether it does what a run asks for; gives what has no effect on it, for a person.
    ///
    /// # Errors
    /// The first thing that it does not, by name.
    fn check(&self, run: &Run<'_>) -> Result<Vec<String>>;

    /// Runs `body` with every rank of this process; the first one's result.
    ///
    /// # Errors
    /// The body's, and those of ranks.
    fn launch<R: Send>(
        &self,
        task: &T,
        run: &Run<'_>,
        body: impl Fn(&mut dyn Trainee) -> Result<R> + Sync,
    ) -> Result<R>;
}

/// Bytes in use and bytes reserved of a device that has memory of its own, from any thread.
pub type MemoryProbe = Box<dyn Fn() -> Option<(u64, u64)> + Send>;

/// A rank's part of a model in training. All ranks make the same calls but for [`metrics`](Self::metrics) and its like.
pub trait Trainee {
    /// The rank's number.
    fn rank(&self) -> usize;

    /// Every rank's `values`, equally many, in rank order. A collective.
    ///
    /// # Errors
    /// That of a rank that is gone.
    fn all_gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>>;

    /// Every rank's `bytes`, however many. A collective.
    ///
    /// # Errors
    /// That of a rank that is gone.
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Trains on rows; updates the parameters with the last micro-batch of a step. `shares` are factors of the loss's terms, 1 for
    /// those that have none.
    ///
    /// # Errors
    /// Of data, and of an update that cannot be made.
    fn micro_batch(&mut self, rows: &Rows, shares: &[f64]) -> Result<()>;

    /// Returns true while a device computes a step that it has been given all of: the time for work that the next step does not need.
    fn is_on_device(&self) -> bool {
        false
    }

    /// The result of the step, and this rank's losses of its micro-batches; waits for a device.
    ///
    /// # Errors
    /// Of a device that has failed.
    fn result(&mut self) -> Result<(Step, Vec<f64>)>;

    /// The learning rate of the next update.
    fn lr(&self) -> f64;

    /// What the loss is multiplied by now.
    fn loss_scale(&self) -> f64;

    /// What has been spent since the last call.
    fn take_times(&mut self) -> Times;

    /// Exchanges the weights with their moving averages, for what follows but training; and back. All ranks do.
    ///
    /// # Errors
    /// An error for a run without averages.
    fn exchange_averages(&mut self) -> Result<()>;

    /// What the task measures of rows that are held out.
    ///
    /// # Errors
    /// As the task's.
    fn evaluate(&self, rows: &Rows) -> Result<Measured>;

    /// What the model says of rows, if it says something.
    ///
    /// # Errors
    /// As the task's.
    fn predict(&self, rows: &Rows) -> Result<Option<Vec<Value>>>;

    /// What the trained model makes, to be shown.
    ///
    /// # Errors
    /// As the task's.
    fn sample(&self) -> Result<Option<String>>;

    /// Goes on from a checkpoint; gives what the trainer has saved beside.
    ///
    /// # Errors
    /// Of a checkpoint of another model or optimizer, or that cannot be read.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<Map<String, Value>>;

    /// Saves a checkpoint; its bytes, if it is durable already ([`Run::saves_beside`]).
    ///
    /// # Errors
    /// Of a disk.
    fn save(&mut self, dir: &Path, step: u64, extra: Map<String, Value>, options: &SaveOptions) -> Result<Option<u64>>;

    /// Waits until the last checkpoint is durable, and gives its place if it was not.
    ///
    /// # Errors
    /// Of a disk.
    fn wait_for_save(&mut self) -> Result<Option<PathBuf>>;

    /// Writes the whole model for Hugging Face, of this configuration or, without one, under the parameters' own names.
    ///
    /// # Errors
    /// Of a disk, and of another configuration than the model's.
    fn export(&self, config: Option<&ModelConfig>, out: &Path, options: &ExportOptions) -> Result<()>;

    /// A new period of peaks begins.
    fn reset_peaks(&self);

    /// Bytes since the last [`reset_peaks`](Self::reset_peaks); those on the wire since the rank began.
    fn metrics(&self) -> RankMetrics;

    /// Of the rank's device.
    fn memory_probe(&self) -> MemoryProbe {
        Box::new(|| None)
    }

    /// Floating-point operations a second that the run's devices can do at most in the type that it computes in, if that is known.
    fn peak_flops(&self) -> Option<f64> {
        None
    }
}
