//! `cargo test -p zero-examples --test programs [MODULE]`
//!
//! Typical programs of Burn users, on two ranks at every stage, compared with one rank that has all rows.

mod common;
mod constants;
mod edits;
mod gradients;
mod loading;
mod modules;
mod optimizers;
mod passes;
mod threads;
