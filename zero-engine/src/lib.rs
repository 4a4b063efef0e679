//! The engine of ZeRO, over any tensor library.
//!
//! * In: a tensor library that implements [`backend::Backend`], a group of ranks and a window (`zero-core`), parameters.
//! * A [`cell::Cell`] is this rank's shard of one tensor and, while it is worth keeping, the gathered full tensor.
//! * [`gather`] loads full parameters, [`reduce`] reduces gradients, [`update`] runs optimizer rules on shards. A [`runtime::Runtime`] has
//!   them for one rank, and its position in the step.
//! * Shards are kept with the backend, in host memory or on a disk ([`tier`], [`copier`]).
//! * Errors: functions that a backward pass calls cannot return errors; [`abort`] carries them to the launcher.
//!
//! Nothing here depends on Burn. `zero-burn` is the adapter for Burn 0.21, `zero-param` that for Burn 0.22.

pub mod abort;
pub mod activations;
pub mod backend;
pub mod cell;
pub mod copier;
pub mod current;
pub mod gather;
pub mod gauges;
pub mod random;
pub mod reduce;
pub mod replicas;
pub mod runtime;
pub mod tensor_collectives;
#[cfg(test)]
mod testing;
pub mod tier;
pub mod update;
pub mod values;
pub mod worker;
