//! `cargo run --release --example gpt2_steps -- PRESET BATCH SEQ STEPS`
//!
//! Timed GPT-2 steps on one rank of `Zero<Flex>`: the other half of `bench/bare/run.sh`, which compares it with the
//! bare backend.

#[path = "../../bench/gpt2_steps.rs"]
mod gpt2_steps;

use std::alloc::System;

use burn::backend::Autodiff;
use burn_flex::Flex;
use zero_burn::Zero;
use zero_burn::config::ZeroConfig;
use zero_burn::launch::launch;
use zero_burn::module::{collect_grads, prepare};
use zero_core::alloc::PageKeeper;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

type B = Autodiff<Zero<Flex>>;

fn main() {
    let sizes = gpt2_steps::Sizes::from_args();
    let results = launch::<Flex, _, String>(1, &ZeroConfig::default(), &Default::default(), |device| {
        Ok(gpt2_steps::train::<B>(&sizes, &device, |model| prepare::<B, _>(model, &device), collect_grads::<B, _>))
    });
    match results {
        Ok(mut results) => {
            let (seconds, loss) = results.swap_remove(0);
            gpt2_steps::report("zero", &sizes, &seconds, loss);
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}
