//! The commands, on files of all kinds, in one binary, because each links all of Burn:
//! `cargo test -p zero-train-cli --test train [MODULE]`.

mod averages;
mod batch_law;
mod bert;
mod classes;
#[path = "../common/mod.rs"]
mod common;
mod conversations;
mod export;
mod generate;
mod hostile;
mod inspect_command;
mod llama;
mod lora;
mod muon;
#[path = "../../../zero-core/tests/common/mutate.rs"]
mod mutate;
mod preferences;
mod reported;
mod seq2seq;
#[path = "../sharded/mod.rs"]
mod sharded;
mod tokenizers;
mod trainer;
mod tune;
mod zero_command;
