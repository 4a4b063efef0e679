//! Training on [`Zero<B>`](zero_burn::Zero): data, launching ranks, metrics, and the GPT-2 command.
//!
//! * In: command-line options ([`gpt2::Options`]), a text or token file, a preset or a Hugging Face folder.
//! * Out: `metrics.jsonl` (one [`metrics::StepMetrics`] a step), a table or a JSON summary.
//! * Threads: ranks are threads of this process ([`zero_burn::launch`]); rank 0 alone writes and prints.

pub mod data;
pub mod engine;
mod error;
pub mod gpt2;
pub mod loss_scale;
pub mod memory;
pub mod metrics;
pub mod schedule;

pub use error::TrainError;
