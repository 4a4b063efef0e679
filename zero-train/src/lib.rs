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

mod caught;
pub mod config;
pub mod data;
#[cfg(feature = "burn")]
pub mod engine;
mod error;
pub mod estimate;
pub mod export;
#[cfg(feature = "burn")]
pub mod generate;
pub mod inspect;
pub mod language;
pub mod launcher;
#[cfg(feature = "burn")]
pub mod learner;
pub mod loss_scale;
pub mod memory;
pub mod metrics;
pub mod monitor;
pub mod schedule;
mod signals;
pub mod step;
pub mod trainer;
pub mod wizard;

pub use error::{Result, TrainError, exit, told_once};
