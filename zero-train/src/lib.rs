//! Training on [`Zero<B>`](zero_burn::Zero): configurations, the engine, Burn's learner on ranks, data, metrics, and a
//! trainer for any Burn model, of which the commands for language models are users.
//!
//! * In: a DeepSpeed JSON or an Accelerate YAML ([`config`]), command-line options ([`trainer::Options`]), a text or token
//!   file, a preset or a Hugging Face folder.
//! * Out: a trained module ([`engine::ZeroEngine`], [`learner::ZeroStrategy`]); `metrics.jsonl` (one
//!   [`metrics::StepMetrics`] a step), CSV, TensorBoard event files, an SVG plot, a table or a JSON summary; a Hugging
//!   Face checkpoint of what the engine saved ([`export`](mod@export)).
//! * Without the feature `burn` it knows no Burn, and trains by what a [`trainer::Front`] brings along: `zero-param` for Burn 0.22.
//! * Threads: ranks are threads of this process ([`zero_burn::launch`]); rank 0 alone writes and prints.

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
pub mod metrics;
pub mod monitor;
mod signals;
pub mod step;
pub mod trainer;

pub use zero_config as config;
pub use zero_config::{loss_scale, schedule};
#[cfg(feature = "language")]
pub use zero_data as data;

pub use error::{Result, TrainError, exit, told_once};
