//! Parity between stages and numbers of ranks, on GPT-2: the same seed and data give bit-equal fp32 losses at stages 0 to 3.
//!
//! `cargo test -p zero-tests --test ranks stage_parity -- --nocapture` prints the figures.

use crate::common;

use common::{Run, adamw, gpt2_losses, on_ranks, step};
use zero_burn::config::{Disk, Offload, Tier};
use zero_burn::module::prepare;
use zero_burn::optim::{Fused, Rule};
use zero_core::Stage;
use zero_models::Gpt2;
use zero_ops::quantized::Format;

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

/// Losses and gradient norms with Burn's AdamW, or with the fused one.
fn losses_and_norms(run: &Run, is_fused: bool) -> Vec<(f64, f64)> {
    let rule = is_fused.then(|| Rule::adamw().with_weight_decay(0.01));
    on_ranks(run.ranks, &run.zero, |device| {
        let mut model = prepare::<common::B, _>(run.model.init(&device), &device);
        let (mut burns, mut fused) = (adamw::<Gpt2<common::B>>(), rule.map(Fused::new));
        let mut steps = Vec::new();
        for s in 0..run.steps {
            let loss = |model: &Gpt2<common::B>| model.loss(run.tokens(s, device.rank(), &device));
            let (next, loss, norm) = match &mut fused {
                Some(fused) => step(model, fused, loss),
                None => step(model, &mut burns, loss),
            };
            steps.push((loss, norm));
            model = next;
        }
        steps
    })
    .swap_remove(0)
}

#[test]
fn meshes_train_as_the_flat_world_does() {
    let swap = tempfile::tempdir().unwrap();
    for (ranks, shards) in [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2)] {
        for is_fused in [false, true] {
            let run = |stage| Run { ranks, steps: 10, ..Run::tiny(stage) };
            let flat = losses_and_norms(&run(Stage::DataParallel), is_fused);
            let mut first = None;
            for stage in Stage::ALL {
                let mut run = run(stage);
                run.zero.shard_size = Some(shards);
                if is_fused && stage == Stage::Parameters {
                    let disk = Disk { path: swap.path().into(), ..Disk::default() };
                    let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
                    run.zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
                }
                let on_mesh = losses_and_norms(&run, is_fused);
                let apart = |a: &(f64, f64), b: &(f64, f64)| ((a.0 - b.0).abs() / a.0).max((a.1 - b.1).abs() / a.1);
                let worst = flat.iter().zip(&on_mesh).map(|(a, b)| apart(a, b)).fold(0.0, f64::max);
                let name = format!("{} x {shards} ranks, stage {stage}, fused {is_fused}", ranks / shards);
                println!("{name}: losses and norms within {worst:.1e} of the flat world's");
                assert!(worst < 1e-6, "{name}: {worst:e}");
                // One group, or groups of one: sums have the order of the flat world's.
                assert!(worst == 0.0 || ![1, ranks].contains(&shards), "{name}: {worst:e}");
                let first = first.get_or_insert_with(|| on_mesh.clone());
                assert_eq!(*first, on_mesh, "{name}");
            }
        }
    }
}

/// Parameters are gathered from secondary shards, in memory and from a disk.
#[test]
fn a_second_cut_of_the_parameters_changes_no_bit() {
    let swap = tempfile::tempdir().unwrap();
    for (ranks, size) in [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2)] {
        for (is_fused, is_offloaded) in [(false, false), (true, false), (true, true)] {
            let mut run = Run { ranks, ..Run::tiny(Stage::Parameters) };
            if is_offloaded {
                let disk = Disk { path: swap.path().into(), ..Disk::default() };
                let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
                run.zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
            }
            let flat = losses_and_norms(&run, is_fused);
            run.zero.secondary_shard_size = Some(size);
            let cut_again = losses_and_norms(&run, is_fused);
            assert_eq!(flat, cut_again, "{ranks} ranks, {size} in a group, fused {is_fused}, offloaded {is_offloaded}");
        }
    }
}

#[test]
fn quantized_gradients_have_the_same_bits_at_all_stages_and_move_the_loss_little() {
    const STEPS: usize = 50;
    for (ranks, shards, how, most) in
        [(2, 2, Format::Int8, 0.01), (4, 2, Format::Int8, 0.01), (3, 1, Format::Int8, 0.01), (4, 2, Format::Int4, 0.05)]
    {
        let run = |stage| {
            let mut run = Run { ranks, steps: STEPS, ..Run::tiny(stage) };
            run.zero.shard_size = Some(shards);
            run
        };
        let plain = losses_and_norms(&run(Stage::DataParallel), true);
        let mut first = None;
        for stage in Stage::ALL {
            let mut run = run(stage);
            run.zero.quantized_gradients = Some(how);
            let losses = losses_and_norms(&run, true);
            let first = first.get_or_insert_with(|| losses.clone());
            assert_eq!(*first, losses, "{} x {shards}, stage {stage}, {how:?}", ranks / shards);
        }
        let (plain, with) = (plain[STEPS - 1].0, first.expect("there are stages")[STEPS - 1].0);
        let apart = (with - plain).abs() / plain;
        println!(
            "{} x {shards} ranks, {how:?}: loss {with:.5} after {STEPS} steps, {apart:.1e} from {plain:.5}",
            ranks / shards
        );
        assert!(apart > 0.0 && apart < most, "{how:?}: {with} against {plain}");
    }
}

/// Weights are gathered quantized: passes compute with the same values for any sharding or storage.
#[test]
fn quantized_weights_have_the_same_bits_with_a_second_cut_and_from_a_disk_and_move_the_loss_little() {
    const STEPS: usize = 50;
    let swap = tempfile::tempdir().unwrap();
    for (ranks, how, most) in [(2, Format::Int8, 0.01), (4, Format::Int8, 0.01), (4, Format::Int4, 0.05)] {
        let mut run = Run { ranks, steps: STEPS, ..Run::tiny(Stage::Parameters) };
        let plain = losses_and_norms(&run, true);
        run.zero.quantized_weights = Some(how);
        let with = losses_and_norms(&run, true);
        let (last, exact) = (with[STEPS - 1].0, plain[STEPS - 1].0);
        let apart = (last - exact).abs() / exact;
        println!("{ranks} ranks, {how:?}: loss {last:.5} after {STEPS} steps, {apart:.1e} from {exact:.5}");
        assert!(apart > 0.0 && apart < most, "{how:?}: {last} against {exact}");
        // The first steps of the same.
        run.steps = 10;
        let with = &with[..run.steps];
        if ranks == 4 {
            run.zero.secondary_shard_size = Some(2);
            assert_eq!(with, &losses_and_norms(&run, true)[..], "{how:?}, a second cut");
            run.zero.secondary_shard_size = None;
        }
        let disk = Disk { path: swap.path().into(), ..Disk::default() };
        let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
        run.zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
        assert_eq!(with, &losses_and_norms(&run, true)[..], "{how:?}, from a disk");
    }
}

/// Gradients are summed within groups, and then across them.
#[test]
fn quantized_gradients_with_a_second_cut_move_the_loss_little() {
    const STEPS: usize = 50;
    for (ranks, size, how, most) in [(4, 2, Format::Int8, 0.01), (6, 3, Format::Int4, 0.05), (4, 1, Format::Int8, 0.01)]
    {
        let mut run = Run { ranks, steps: STEPS, ..Run::tiny(Stage::Parameters) };
        let plain = losses_and_norms(&run, true)[STEPS - 1].0;
        (run.zero.secondary_shard_size, run.zero.quantized_gradients) = (Some(size), Some(how));
        let with = losses_and_norms(&run, true)[STEPS - 1].0;
        let apart = (with - plain).abs() / plain;
        println!("{ranks} / {size}, {how:?}: loss {with:.5} after {STEPS} steps, {apart:.1e} from {plain:.5}");
        assert!(apart > 0.0 && apart < most, "{how:?}: {with} against {plain}");
    }
}
