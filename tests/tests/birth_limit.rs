//! Initialization: a model whose full parameters exceed each rank's share of a memory limit is built at stage 3 on 4 ranks.
//!
//! The limit is the operating system's (`ulimit -v`) on a process of four ranks. A quarter of it is less than the model's
//! parameters. The test also shows that stage 0, where every rank holds all of them, fails under the limit.
//!
//! `cargo test -p zero-tests --test birth_limit -- --nocapture` prints the figures.

mod common;

use std::process::{Command, Output};

use burn::module::Module;
use common::{B, Run, on_ranks};
use zero_burn::config::ZeroConfig;
use zero_burn::module::prepare;
use zero_burn::stats::rank_stats;
use zero_core::Stage;
use zero_models::Gpt2Config;

const RANKS: usize = 4;
const STAGE: &str = "ZERO_TEST_BIRTH_STAGE";

/// 64 M parameters, 256 MB.
fn model() -> Gpt2Config {
    Gpt2Config { n_embd: 1024, n_layer: 5, ..Run::tiny(Stage::Parameters).model }
}

/// Not a separate test: the parent runs it under the limit.
#[test]
fn build_under_the_parents_limit() {
    let Ok(stage) = std::env::var(STAGE) else { return };
    let stage = Stage::try_from(stage.parse::<u8>().unwrap()).unwrap();
    let measured = on_ranks(RANKS, &ZeroConfig::new(stage), |device| {
        let model = prepare::<B, _>(model().init::<B>(&device), &device);
        (model.num_params(), rank_stats::<burn_flex::Flex>().model_state_bytes.parameters)
    });
    println!("built: {measured:?}");
}

fn build(stage: Stage, limit_kib: usize) -> Output {
    Command::new("sh")
        .args([
            "-c",
            &format!("ulimit -v {limit_kib} && exec \"$0\" --exact build_under_the_parents_limit --nocapture"),
        ])
        .arg(std::env::current_exe().unwrap())
        .env(STAGE, stage.number().to_string())
        // The allocator's arenas reserve address space that they do not use, which the limit would count.
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap()
}

#[test]
fn a_model_larger_than_a_ranks_share_of_the_limit_is_built() {
    let parameters = 4 * model().num_params();
    let limit = 700 << 20;
    assert!(parameters > limit / RANKS, "{parameters} bytes of parameters, {} per rank", limit / RANKS);
    let sharded = build(Stage::Parameters, limit >> 10);
    let text = String::from_utf8_lossy(&sharded.stdout).into_owned() + &String::from_utf8_lossy(&sharded.stderr);
    assert!(sharded.status.success() && text.contains("built:"), "stage 3: {text}");
    let whole = build(Stage::DataParallel, limit >> 10);
    assert!(!whole.status.success(), "stage 0 must not fit: {}", String::from_utf8_lossy(&whole.stdout));
    println!(
        "{parameters} bytes of parameters on {RANKS} ranks under a limit of {limit} bytes ({} per rank): stage 3 built, \
         stage 0 not",
        limit / RANKS
    );
}
