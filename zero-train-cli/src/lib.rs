//! Parts of the command `zero`: text generation, launcher, checkpoint inspection and configuration wizard.
//!
//! Training is in `zero-train`; its [`language`](zero_train::language) module has the options of `zero train`.

pub mod generate;
pub mod inspect;
pub mod launcher;
pub mod wizard;
