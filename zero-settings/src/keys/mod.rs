//! Every known key of both formats: the only place that defines a key's accepted values, default and handling.

mod accelerate;
mod deepspeed;
mod training;
mod zero;

pub(super) use accelerate::ACCELERATE;
pub(super) use deepspeed::DEEPSPEED;
