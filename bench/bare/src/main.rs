//! GPT-2 steps on the bare backend, `Autodiff<Flex>`: see `run.sh`.

#[path = "../../gpt2_steps.rs"]
mod gpt2_steps;

use std::alloc::System;

use burn::backend::Autodiff;
use burn_flex::{Flex, FlexDevice};
use zero_core::alloc::PageKeeper;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

fn main() {
    let sizes = gpt2_steps::Sizes::from_args();
    // Like a rank of `Zero`, compute on a worker of the pool.
    let pool = rayon::ThreadPoolBuilder::new().build().expect("threads");
    let (seconds, loss) =
        pool.install(|| gpt2_steps::train::<Autodiff<Flex>>(&sizes, &FlexDevice, |model| model, |grads, _| grads));
    gpt2_steps::report("bare", &sizes, &seconds, loss);
}
