//! Tests of the models, in one binary because each links all of Burn: `cargo test -p zero-models --test models [MODULE]`.

mod any_module;
mod bert;
mod checkpoint_fuzz;
mod checkpoints;
mod common;
mod families;
mod generate;
mod gpt2;
mod hf_export;
mod hf_parity;
mod lora;
#[path = "../../../zero-core/tests/common/mutate.rs"]
mod mutate;
mod quantize;
