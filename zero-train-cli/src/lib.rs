//! Parts of the command `zero`: generation, the launcher, the inspection of checkpoints, and the wizard for configurations.
//!
//! Training itself is in `zero-train`, whose [`language`](zero_train::language) has the options of `zero train`.

pub mod generate;
pub mod inspect;
pub mod launcher;
pub mod wizard;
