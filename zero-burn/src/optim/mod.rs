//! Fused optimizers: one pass over memory, on this rank's pieces.
//!
//! Burn's AdamW makes a dozen passes, each with a buffer of its own. These read parameter, gradient and state once and
//! write parameter and state in place: 28 bytes a parameter for AdamW in fp32. AdamW rounds as Burn's does, operation by
//! operation, so that over a backend that computes in IEEE arithmetic both give the same bits. A parameter in 16 bit gets
//! an fp32 master, kept with the optimizer's state. LAMB makes two passes, with a small collective between them: every rank
//! steps then, with gradients of the same parameters.
//!
//! * Memory: the host's for burn-flex, the device's for CubeCL's backends (`device`); other backends copy in and out.
//! * Threads: the rank's pool of compute threads.

mod average;
mod distributed;
mod fused;
mod late;
mod plan;
mod state;

pub use distributed::{Distributed, distributed};
pub use fused::{Fused, ParamInfo};
pub use late::{Late, Told};
pub use state::{EMA, StateRecord};
pub use zero_ops::{Clip, Rule};
