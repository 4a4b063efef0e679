//! The laws of the decorator, generic over the inner backend.

pub mod identities;
pub mod laws;
pub mod model;

use std::time::Duration;

use burn_backend::Backend;
use zero_burn::ZeroDevice;
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_core::Stage;

/// Small buckets and no persistence, so that small models take every path.
pub fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        reduce_bucket_size: 64,
        prefetch_bucket_size: 2_000,
        max_live_parameters: 100_000,
        param_persistence_threshold: 0,
        seed: 7,
        ..ZeroConfig::new(stage)
    }
}

pub fn ranks<B: Backend, T: Send>(
    world: usize,
    config: &ZeroConfig,
    body: impl Fn(ZeroDevice<B::Device>) -> T + Sync,
) -> Vec<T> {
    // A device compiles kernels while the other ranks wait.
    let seconds =
        std::env::var("ZERO_DEADLINE").map_or(60, |seconds| seconds.parse().expect("ZERO_DEADLINE is seconds"));
    let options =
        LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(seconds), ..LaunchOptions::default() };
    launch::<B, T, String>(world, config, &options, |device| Ok(body(device))).unwrap_or_else(|error| panic!("{error}"))
}

/// One test per law, over one inner backend.
#[macro_export]
macro_rules! laws {
    ($inner:ty) => {
        #[test]
        fn stages_agree_in_a_plain_loop() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::Plain);
        }

        #[test]
        fn stages_agree_with_accumulation() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::Accumulate);
        }

        #[test]
        fn stages_agree_with_two_forwards_before_two_backwards() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::TwoForwards);
        }

        #[test]
        fn stages_agree_with_evaluation_between_steps() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::Evaluate);
        }

        #[test]
        fn stages_agree_when_a_layer_is_used_on_some_ranks_only() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::RankDependent);
        }

        #[test]
        fn stages_agree_when_ranks_differ_between_unmarked_micro_batches() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::RankDependentAccumulate);
        }

        #[test]
        fn stages_agree_when_an_older_module_is_read_after_the_step() {
            $crate::suite::laws::stages_agree::<$inner>($crate::suite::laws::Steps::KeepBefore);
        }

        #[test]
        fn state_in_the_hosts_memory_changes_nothing() {
            $crate::suite::laws::host_memory_changes_nothing::<$inner>();
        }

        #[test]
        fn worlds_agree() {
            $crate::suite::laws::worlds_agree::<$inner>();
        }

        #[test]
        fn optimizers_work() {
            $crate::suite::laws::optimizers_work::<$inner>();
        }

        #[test]
        fn fused_adamw_is_burns() {
            $crate::suite::laws::fused_adamw_is_burns::<$inner>();
        }

        #[test]
        fn fused_rules_work() {
            $crate::suite::laws::fused_rules_work::<$inner>();
        }

        #[test]
        fn averages_follow_the_weights() {
            $crate::suite::laws::averages_follow_the_weights::<$inner>();
        }

        #[test]
        fn reductions_are_right() {
            $crate::suite::laws::reductions_are_right::<$inner>();
        }

        #[test]
        fn gradient_norms_agree() {
            $crate::suite::laws::gradient_norms_agree::<$inner>();
        }

        #[test]
        fn records_round_trip() {
            $crate::suite::laws::records_round_trip::<$inner>();
        }

        #[test]
        fn loaded_records_are_recorded_again() {
            $crate::suite::laws::loaded_records_are_recorded_again::<$inner>();
        }

        #[test]
        fn forward_keeps_no_gathered_copies() {
            $crate::suite::laws::forward_keeps_no_gathered_copies::<$inner>();
        }

        #[test]
        fn a_parameter_and_its_detached_copy_have_a_gradient_each() {
            $crate::suite::identities::a_parameter_and_its_detached_copy_have_a_gradient_each::<$inner>();
        }

        #[test]
        fn parameters_made_of_one_tensor_are_two() {
            $crate::suite::identities::parameters_made_of_one_tensor_are_two::<$inner>();
        }

        #[test]
        fn a_clone_of_a_parameter_is_the_same() {
            $crate::suite::identities::a_clone_of_a_parameter_is_the_same::<$inner>();
        }

        #[test]
        fn modules_of_one_record_train_apart() {
            $crate::suite::identities::modules_of_one_record_train_apart::<$inner>();
        }

        #[test]
        fn a_parameter_may_be_compared_with_an_ordinary_tensor() {
            $crate::suite::identities::a_parameter_may_be_compared_with_an_ordinary_tensor::<$inner>();
        }
    };
}
