//! Parity between stages and numbers of ranks, on GPT-2: same seed and data give bit-equal fp32 losses at stages 0 to 3.
//!
//! `cargo test -p zero-tests --test ranks stage_parity -- --nocapture` prints the figures.

use crate::common;

use common::{Run, gpt2_losses};
use zero_core::Stage;

const STEPS: usize = 50;

#[test]
fn losses_are_bit_equal_at_all_stages_for_one_to_four_ranks() {
    for ranks in 1..=4 {
        let run = |stage| gpt2_losses(&Run { ranks, batch: 2, steps: STEPS, ..Run::tiny(stage) });
        let reference = run(Stage::DataParallel);
        assert!(reference[STEPS - 1] < 0.9 * reference[0], "the loss does not fall: {reference:?}");
        for stage in &Stage::ALL[1..] {
            let losses = run(*stage);
            let differing = reference.iter().zip(&losses).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differing, 0, "{ranks} ranks, stage {stage}: {reference:?} against {losses:?}");
        }
        println!(
            "{ranks} rank(s): stages 0 to 3 bit-equal over {STEPS} steps, loss {:.6} to {:.6}",
            reference[0],
            reference[STEPS - 1]
        );
    }
}

#[test]
fn losses_of_one_two_and_four_ranks_agree_at_the_same_global_batch() {
    let run = |ranks| gpt2_losses(&Run { ranks, batch: 8 / ranks, steps: STEPS, ..Run::tiny(Stage::Parameters) });
    let one = run(1);
    for ranks in [2, 4] {
        let many = run(ranks);
        let worst = one.iter().zip(&many).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
        println!("{ranks} ranks against 1: largest relative difference {worst:.2e} over {STEPS} steps");
        assert!(worst < 1e-5, "{worst}");
    }
}
