//! Training on [`Zero<B>`](zero_burn::Zero): the engine of a training loop, Burn's learner on ranks, and a trainer for any Burn model.
//!
//! * Input: a plan of [`config`] (a DeepSpeed JSON, an Accelerate YAML, or a builder), or the trainer's options ([`trainer::Options`]).
//! * Output: a trained module ([`engine::ZeroEngine`], [`learner::ZeroStrategy`]); `metrics.jsonl` (one
//!   [`metrics::StepMetrics`] per step), CSV, TensorBoard event files, an HTML report or a JSON summary; a Hugging Face
//!   checkpoint from a checkpoint of the engine ([`export`](mod@export)).
//! * Threads: ranks are threads of this process ([`zero_burn::launch`]); only rank 0 writes and prints.
//!
//! # Features
//!
//! * `burn` (default): Burn 0.21. Without it, the trainer needs another [`trainer::Integration`]: `zero-param` for Burn 0.22.
//! * `cli`: the trainer's options are arguments of a `clap` command line, and a progress bar is shown.
//! * `language`: tasks for language models, with their data and tokenizers.
//! * `mpi`, `cuda`, `vulkan`: ranks over MPI, and devices.

#[cfg(feature = "burn")]
pub mod engine;
pub mod error;
pub mod estimate;
pub mod export;
#[cfg(feature = "language")]
pub mod language;
pub mod launched;
#[cfg(feature = "burn")]
pub mod learner;
pub mod memory;
pub mod monitor;
mod signals;
pub mod step;
pub mod trainer;

pub use monitor::metrics;
#[cfg(feature = "language")]
pub use zero_data as data;
pub use zero_settings as config;
pub use zero_settings::{loss_scale, schedule};

pub use error::{Result, TrainError, exit, format_error};
