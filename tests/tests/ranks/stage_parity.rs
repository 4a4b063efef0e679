//! Parity between stages and numbers of ranks, on GPT-2: same seed and data give bit-equal fp32 losses at stages 0 to 3.
//!
//! `cargo test -p zero-tests --test ranks stage_parity -- --nocapture` prints the figures.

use crate::common;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use common::{B, Run, adamw, gpt2_losses, on_ranks, step};
use zero_burn::config::{Disk, ErrorFeedback, Offload, Tier, ZeroConfig};
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
    losses_and_norms_by(run, is_fused.then(|| Rule::adamw().with_weight_decay(0.01)))
}

/// With a rule of the fused optimizer, or Burn's AdamW.
fn losses_and_norms_by(run: &Run, rule: Option<Rule>) -> Vec<(f64, f64)> {
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

/// Of parameters that are gathered from a second cut, in memory and from a disk.
#[test]
fn a_second_cut_of_the_parameters_changes_no_bit() {
    let swap = tempfile::tempdir().unwrap();
    for (ranks, size) in [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2)] {
        for (is_fused, is_offloaded) in [(false, false), (true, false), (true, true)] {
            let mut run = Run { ranks, steps: 10, ..Run::tiny(Stage::Parameters) };
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

/// Of weights that are gathered in few bits: however they are cut again or kept, passes compute with the same ones.
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
        if ranks == 4 {
            run.zero.secondary_shard_size = Some(2);
            assert_eq!(with, losses_and_norms(&run, true), "{how:?}, a second cut");
            run.zero.secondary_shard_size = None;
        }
        let disk = Disk { path: swap.path().into(), ..Disk::default() };
        let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
        run.zero.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
        assert_eq!(with, losses_and_norms(&run, true), "{how:?}, from a disk");
    }
}

/// They are added within groups, and then across.
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

/// Weights and norms after each step of SGD along gradients that are each rank's own and stay as they are. Rank 1's are infinite at step
/// `odd`. Of two layers the first is used at even steps alone: so gradients lie in other buckets from step to step.
fn along_one_gradient(ranks: usize, zero: &ZeroConfig, steps: usize, odd: Option<usize>) -> Vec<(Vec<f32>, f64)> {
    on_ranks(ranks, zero, |device| {
        let layer = || LinearConfig::new(6, 50).init(&device);
        let mut model = prepare::<B, _>((layer(), layer()), &device);
        let mut optimizer = Fused::new(Rule::sgd());
        let matrix = |columns: usize, factor: f32| {
            let values = (0..3 * columns).map(|i| ((device.rank() * 37 + i * i * 11) % 101) as f32 / 50.0 - 1.0);
            let values: Vec<f32> = values.map(|value| factor * value).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [3, columns]), &device)
        };
        let mut seen = Vec::new();
        for s in 0..steps {
            let is_odd = odd == Some(s) && device.rank() == 1;
            let (x, weights) = (matrix(6, if is_odd { f32::INFINITY } else { 1.0 }), matrix(50, 1.0));
            let (next, _, norm) = step(model, &mut optimizer, |(sometimes, always): &(Linear<B>, Linear<B>)| {
                let loss = (always.forward(x.clone()) * weights.clone()).sum();
                let more = || (sometimes.forward(x.clone()) * weights.clone()).sum();
                if s.is_multiple_of(2) { loss + more() } else { loss }
            });
            model = next;
            let values = |layer: &Linear<B>| layer.weight.val().into_data().into_vec::<f32>().unwrap();
            seen.push(([values(&model.0), values(&model.1)].concat(), norm));
        }
        seen
    })
    .swap_remove(0)
}

/// Ranks, in a group, and in a group of a second cut.
const GROUPS: [(usize, Option<usize>, Option<usize>); 4] =
    [(3, None, None), (4, Some(2), None), (3, Some(1), None), (4, None, Some(2))];

/// Quantised gradients at the stages that groups can have.
fn quantized(
    (_, shard_size, secondary_shard_size): (usize, Option<usize>, Option<usize>),
    how: Option<Format>,
    error_feedback: Option<ErrorFeedback>,
) -> impl Iterator<Item = ZeroConfig> {
    let stages =
        Stage::ALL.into_iter().filter(move |stage| secondary_shard_size.is_none() || stage.shards_parameters());
    stages.map(move |stage| ZeroConfig {
        shard_size,
        secondary_shard_size,
        quantized_gradients: how,
        error_feedback,
        reduce_bucket_size: 200,
        param_persistence_threshold: 100,
        ..ZeroConfig::new(stage)
    })
}

/// What is sent sums up to what was to be sent, up to what is kept, which does not grow.
#[test]
fn error_feedback_loses_nothing_over_the_steps() {
    const STEPS: usize = 100;
    for groups in GROUPS {
        for how in [Format::Int4, Format::Nf4] {
            let run = |how, feedback| {
                let mut runs = quantized(groups, how, feedback);
                let first = along_one_gradient(groups.0, &runs.next().unwrap(), STEPS, None);
                for config in runs {
                    let stage = config.stage;
                    assert!(first == along_one_gradient(groups.0, &config, STEPS, None), "{groups:?}, stage {stage}");
                }
                first[STEPS - 1].0.clone()
            };
            let exact = run(None, None);
            let off = |weights: Vec<f32>| exact.iter().zip(weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let (without, with) = (off(run(Some(how), None)), off(run(Some(how), Some(ErrorFeedback::default()))));
            println!("{groups:?}, {how}: weights are off by {with:.2e} with error feedback, {without:.2e} without");
            assert!(with < without / 4.0, "{groups:?}, {how}: {with:e}, and {without:e} without");
        }
    }
}

#[test]
fn error_feedback_begins_anew_as_often_as_it_is_told_to() {
    let every = |reset_interval| Some(ErrorFeedback { reset_interval, ..ErrorFeedback::default() });
    for groups in GROUPS {
        let run = |feedback| {
            let config = quantized(groups, Some(Format::Int4), feedback).last().unwrap();
            along_one_gradient(groups.0, &config, 24, None)
        };
        assert!(run(every(1)) == run(None), "{groups:?}: nothing is fed back");
        // The first layer has a gradient at every other step, and the layout is that of the second pass from there on.
        let again = |steps: Vec<(Vec<f32>, f64)>| (0..8).all(|s| steps[8 + s].1 == steps[16 + s].1);
        assert!(again(run(every(4))) && !again(run(every(1024))), "{groups:?}");
    }
}

#[test]
fn error_feedback_outlives_gradients_that_are_not_finite() {
    for groups in GROUPS {
        for config in quantized(groups, Some(Format::Int4), Some(ErrorFeedback::default())) {
            let norms = along_one_gradient(groups.0, &config, 6, Some(2));
            let finite: Vec<bool> = norms.iter().map(|(_, norm)| norm.is_finite()).collect();
            assert_eq!(finite, [true, true, false, true, true, true], "{groups:?}, stage {}", config.stage);
        }
    }
}

/// By SGD, whose parameters are the sum of what was sent; what AdamW makes of it is shown.
#[test]
fn error_feedback_keeps_losses_nearer_to_the_exact_ones() {
    const STEPS: usize = 50;
    for (ranks, shards) in [(2, 2), (4, 2)] {
        for rule in [Rule::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }, Rule::adamw()] {
            let losses = |how, error_feedback| {
                let mut run = Run { ranks, steps: STEPS, ..Run::tiny(Stage::Gradients) };
                (run.zero.shard_size, run.zero.quantized_gradients, run.zero.error_feedback) =
                    (Some(shards), how, error_feedback);
                losses_and_norms_by(&run, Some(rule))
            };
            let exact = losses(None, None);
            let off = |losses: Vec<(f64, f64)>| {
                exact.iter().zip(losses).map(|(a, b)| (a.0 - b.0).abs() / a.0).sum::<f64>() / STEPS as f64
            };
            let how = Some(Format::Int4);
            let (without, with) = (off(losses(how, None)), off(losses(how, Some(ErrorFeedback::default()))));
            println!(
                "{} x {shards} ranks, {}: losses off by {with:.1e} with error feedback, {without:.1e} without",
                ranks / shards,
                rule.name()
            );
            assert!(with < without / 2.0 || rule == Rule::adamw(), "{with:e} with, {without:e} without");
        }
    }
}
