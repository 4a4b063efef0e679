//! Training on ranks, one binary, as each links all of Burn: `cargo test -p zero-tests --test ranks [MODULE]`.

mod averages;
mod axes;
mod checkpointing;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod engine;
mod experts;
mod hugging_face;
mod lamb;
mod learner;
mod offload;
mod pytorch_parity;
mod stage_parity;
mod tiling;
mod wire_and_memory;
