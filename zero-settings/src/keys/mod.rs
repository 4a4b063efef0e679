//! Every known key of both formats: the one place that says what a key may hold, its default, and what becomes of it.

mod accelerate;
mod deepspeed;
mod training;
mod zero;

pub(super) use accelerate::ACCELERATE;
pub(super) use deepspeed::DEEPSPEED;
