//! The suite of laws over burn-ndarray.

mod suite;

use suite::laws::{self, Steps};

type Inner = burn_ndarray::NdArray;

#[test]
fn stages_agree_in_a_plain_loop() {
    laws::stages_agree::<Inner>(Steps::Plain);
}

#[test]
fn stages_agree_with_accumulation() {
    laws::stages_agree::<Inner>(Steps::Accumulate);
}

#[test]
fn stages_agree_with_two_forwards_before_two_backwards() {
    laws::stages_agree::<Inner>(Steps::TwoForwards);
}

#[test]
fn stages_agree_with_evaluation_between_steps() {
    laws::stages_agree::<Inner>(Steps::Evaluate);
}

#[test]
fn stages_agree_when_a_layer_is_used_on_some_ranks_only() {
    laws::stages_agree::<Inner>(Steps::RankDependent);
}

#[test]
fn stages_agree_when_ranks_differ_between_unmarked_micro_batches() {
    laws::stages_agree::<Inner>(Steps::RankDependentAccumulate);
}

#[test]
fn stages_agree_when_an_older_module_is_read_after_the_step() {
    laws::stages_agree::<Inner>(Steps::KeepBefore);
}

#[test]
fn worlds_agree() {
    laws::worlds_agree::<Inner>();
}

#[test]
fn optimizers_work() {
    laws::optimizers_work::<Inner>();
}

#[test]
fn gradient_norms_agree() {
    laws::gradient_norms_agree::<Inner>();
}

#[test]
fn records_round_trip() {
    laws::records_round_trip::<Inner>();
}

#[test]
fn forward_keeps_no_gathered_copies() {
    laws::forward_keeps_no_gathered_copies::<Inner>();
}
