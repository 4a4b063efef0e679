//! Ranks that are processes, over sockets: `cargo test --test processes`; with `--features mpi` also ranks of mpirun. The binary starts
//! itself once per rank.

mod common;

use burn_optim::SgdConfig;
use common::processes::{be_a_rank, bits, train_processes};
use common::{Gpt, STEPS, config, train, train_threads};
use zero_core::Stage;
use zero_param::{Uses, Zero};

/// A net with dropout, whose masks depend on the rank, not on its process.
type Net = Gpt<2, 10>;

/// The body of a rank, not a test by itself.
#[test]
fn rank() {
    be_a_rank(|ranks, stage| {
        let (told, zero) = train::<Net>(ranks, &config(stage), &SgdConfig::new())?;
        if stage == Stage::Parameters {
            assert_all_are_gathered_ahead(&zero);
        }
        Ok(told)
    });
}

/// From the second pass on, all gathers but a pass's first are prefetched.
fn assert_all_are_gathered_ahead(zero: &Zero) {
    let uses: Vec<Uses> = zero.paths().map(|path| zero.uses(path).unwrap()).collect();
    let sum = |count: fn(&Uses) -> usize| uses.iter().map(count).sum::<usize>();
    // At the end weights are read out.
    let read_out = sum(|uses| uses.gathered_forward.min(1));
    let in_a_pass = (sum(|uses| uses.gathered_forward + uses.gathered_backward) - read_out) / STEPS;
    assert!(in_a_pass > 10, "{uses:?}");
    // So may be what is read out, as it begins like a pass.
    let ahead = (STEPS - 1) * (in_a_pass - 1);
    assert!((ahead..ahead + read_out).contains(&sum(|uses| uses.gathered_ahead)), "{uses:?}");
}

#[test]
fn processes_train_as_threads_do() {
    for world in 2..=4 {
        let threads = bits(&train_threads::<Net>(world, &config(Stage::DataParallel), &SgdConfig::new()));
        for stage in Stage::ALL {
            assert!(train_processes(world, stage) == threads, "{world} processes at stage {stage}");
        }
    }
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_of_mpirun_train_as_threads_do() {
    let threads = bits(&train_threads::<Net>(3, &config(Stage::DataParallel), &SgdConfig::new()));
    for stage in Stage::ALL {
        assert!(common::processes::train_under_mpirun(3, stage) == threads, "stage {stage}");
    }
}
