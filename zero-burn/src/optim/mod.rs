//! Fused optimizers: one pass over memory, on this rank's shards.
//!
//! Burn's AdamW makes a dozen passes, each with a buffer of its own. These optimizers read parameter, gradient and state once and write
//! parameter and state in place: 28 bytes per parameter for AdamW in fp32. AdamW rounds like Burn's, operation by operation, so both give
//! the same bits on a backend that computes in IEEE arithmetic. A 16-bit parameter gets an fp32 master, kept with the optimizer's state.
//! LAMB makes two passes with a small collective between them, so every rank must step, with gradients of the same parameters.
//!
//! * Memory: host memory for burn-flex, device memory for CubeCL's backends (`device`); other backends copy in and out.
//! * Threads: the rank's pool of compute threads.

mod average;
mod distributed;
mod fused;
mod pending;
mod state;

pub use distributed::{Distributed, distributed};
pub use fused::{Fused, ParamInfo};
pub use pending::{PendingStep, StepResult};
pub use state::StateRecord;
pub use zero_engine::update::plan::EMA;
pub use zero_ops::{Clip, Rule};
