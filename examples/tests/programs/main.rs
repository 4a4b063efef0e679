//! `cargo test -p zero-examples --test programs [MODULE]`
//!
//! Programs as users of Burn write them, on two ranks at every stage, against one rank that has all rows.

mod common;
mod constants;
mod edits;
mod gradients;
mod loading;
mod modules;
mod optimizers;
mod passes;
mod threads;
