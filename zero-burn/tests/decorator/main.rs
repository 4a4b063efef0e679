//! The decorator, one binary, as each links all of Burn: `cargo test -p zero-burn --test decorator [MODULE]`.

mod birth;
mod forwarding;
mod fused_operations;
mod laws_flex;
mod laws_ndarray;
mod misuse;
#[path = "../../../zero-core/tests/common/port.rs"]
mod port;
mod suite;
mod together;
