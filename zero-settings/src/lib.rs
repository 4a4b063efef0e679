//! Builds one validated [`ZeroPlan`] from a DeepSpeed JSON, an Accelerate YAML, or code.
//!
//! Input: the bytes of a file or a [`ZeroPlanBuilder`]. Output: a [`ZeroPlan`] owned by the caller; later code reads
//! the plan and never the file. This crate starts no threads and reads only the named files.
//!
//! ```text
//! bytes -> node (a tree) -> walk against keys (every known key, its type, default, fate) -> Config
//!       Config + Context (ranks, values for "auto") -> reader -> batch, optimizer, schedule, ... -> ZeroPlan
//! ZeroPlanBuilder -> the same tree -> walk, reader -> ZeroPlan
//! ```
//!
//! Three rules always hold:
//!
//! - An unknown key is an error at any level.
//! - A known key that is not supported gives a warning, or an error if ignoring it would change the training result.
//! - All problems of a file are reported together.

mod accelerate;
mod auto;
mod batch;
mod builder;
mod deepspeed;
mod engine;
mod error;
mod explain;
mod keys;
mod load;
pub mod loss_scale;
mod node;
mod optimizer;
mod plan;
mod reader;
mod resolve;
mod rule;
pub mod schedule;
mod scheduler;
mod table;
mod walk;

pub use auto::{Auto, Context, Filled, MixedPrecision};
pub use batch::{Batch, BatchError};
pub use builder::ZeroPlanBuilder;
pub use engine::EngineConfig;
pub use error::{ConfigError, Format, Problem, ProblemKind, Warning};
pub use load::Config;
pub use node::Node;
pub use optimizer::OptimizerPlan;
pub use plan::{
    CommsLogger, FlopsProfiler, LogFiles, LossScale, Offload, OffloadDevice, Precision, Report, Watchdog, ZeroPlan,
};
pub use table::key_table;
pub use zero_core::config::Float;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
