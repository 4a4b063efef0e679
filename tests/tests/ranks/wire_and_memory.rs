//! Bytes on the wire and bytes of model state against the ZeRO formulas.
//!
//! `cargo test -p zero-tests --test ranks wire_and_memory -- --nocapture` prints the figures.

use crate::common;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use common::{B, Run, gpt2_stats, on_ranks};
use zero_burn::config::ZeroConfig;
use zero_burn::module::prepare;
use zero_burn::stats::rank_stats;
use zero_core::estimate::{Precision, model_state};
use zero_core::{Partition, Stage};
use zero_models::Gpt2Config;
use zero_ops::quantized::Format;

/// 1.2 M parameters, none of them dominant or persistent.
fn run(stage: Stage, ranks: usize) -> Run {
    let mut run = Run::tiny(stage);
    run.model = Gpt2Config { vocab_size: 512, n_embd: 128, n_layer: 6, n_positions: 16, ..run.model };
    run.zero = ZeroConfig {
        reduce_bucket_size: 20_000,
        prefetch_bucket_size: 100_000,
        max_live_parameters: 150_000,
        param_persistence_threshold: 0,
        ..ZeroConfig::new(stage)
    };
    Run { ranks, batch: 1, steps: 3, ..run }
}

#[test]
fn wire_bytes_follow_the_formula() {
    for (ranks, shards) in [(2, 2), (3, 3), (4, 4), (4, 2), (4, 1)] {
        for stage in Stage::ALL {
            let mut run = run(stage, ranks);
            run.zero.shard_size = Some(shards);
            let psi = run.model.num_params() as f64;
            let times = if stage == Stage::Parameters { 3.0 } else { 2.0 };
            // Across groups what a rank keeps of its gradients is all-reduced.
            let (groups, kept) = (ranks / shards, if stage == Stage::DataParallel { 1 } else { shards });
            let received = |by: usize| (by - 1) as f64 / by as f64;
            let formula = 4.0 * psi * (times * received(shards) + 2.0 / kept as f64 * received(groups));
            for (rank, stats) in gpt2_stats(&run).iter().enumerate() {
                let ratio = stats.wire_bytes.total() as f64 / formula;
                println!(
                    "stage {stage}, rank {rank} of {groups} x {shards}: {} bytes a step, {ratio:.4} of {times} psi (N-1)/N \
                     within groups of N and an all-reduce across",
                    stats.wire_bytes.total()
                );
                assert!((ratio - 1.0).abs() < 0.01, "stage {stage}, rank {rank} of {groups} x {shards}: {ratio}");
            }
        }
    }
}

/// A version crosses groups once, when its secondary shards are gathered; a rank's own part is no traffic.
#[test]
fn a_second_cut_takes_its_bytes_and_serves_every_gather() {
    for (ranks, size) in [(4, 2), (4, 1), (6, 3)] {
        let mut run = run(Stage::Parameters, ranks);
        run.zero.secondary_shard_size = Some(size);
        let stats = gpt2_stats(&run);
        let psi = run.model.num_params() as f64;
        let of_group = |rank: usize| rank % size == rank / (ranks / size);
        let there = (0..ranks).filter(|&rank| of_group(rank)).count();
        let received = |by: usize| (by - 1) as f64 / by as f64;
        let filled = ranks as f64 / size as f64 - there as f64 / ranks as f64;
        let formula = 4.0 * psi * (filled + ranks as f64 * (2.0 * received(size) + received(ranks)));
        let ratio = stats.iter().map(|stats| stats.wire_bytes.total()).sum::<u64>() as f64 / formula;
        println!("{ranks} ranks, {size} in a group: {ratio:.4} of the formula on the wire");
        assert!((ratio - 1.0).abs() < 0.01, "{ranks} ranks, {size} in a group: {ratio}");
        let state = stats[0].model_state_bytes.parameters as f64 / (4.0 * psi);
        let expected = 1.0 / ranks as f64 + 1.0 / size as f64;
        println!("  parameters {state:.4} of a whole model's for {expected:.4}");
        assert!((state / expected - 1.0).abs() < 0.02, "{state} for {expected}");
    }
}

/// Summed within groups first; each rank then exchanges its sums with its counterparts in all groups.
#[test]
fn quantized_gradients_cross_the_groups_of_a_second_cut_once() {
    for (ranks, size, how) in [(4, 2, Format::Int8), (4, 2, Format::Int4), (6, 3, Format::Int4), (6, 2, Format::Int4)] {
        let mut run = run(Stage::Parameters, ranks);
        (run.zero.secondary_shard_size, run.zero.quantized_gradients) = (Some(size), Some(how));
        let wire = gpt2_stats(&run)[0].wire_bytes;
        let psi = run.model.num_params();
        let within = 4 * psi * (size - 1) / size;
        let across = how.bytes(psi) / size * (ranks / size - 1) / (ranks / size);
        println!(
            "{ranks} / {size}, {how:?}: {} bytes for {within} and {}, {across}",
            wire.reduce_scatter, wire.all_to_all
        );
        assert!((wire.reduce_scatter as f64 / within as f64 - 1.0).abs() < 0.02);
        assert!((wire.all_to_all as f64 / across as f64 - 1.0).abs() < 0.05);
    }
}

/// Gathered twice per use, and once across groups for secondary shards, which are themselves exact.
#[test]
fn quantized_weights_take_the_bytes_of_their_bits() {
    for (second, how) in [(None, Format::Int8), (None, Format::Int4), (Some(2), Format::Int8)] {
        let mut run = run(Stage::Parameters, 4);
        run.zero.secondary_shard_size = second;
        let gathers = |run: &Run| -> (u64, u64) {
            let stats = gpt2_stats(run);
            let wire = stats.iter().map(|stats| stats.wire_bytes.all_gather).sum();
            (wire, stats[0].model_state_bytes.parameters)
        };
        let (plain, held) = gathers(&run);
        run.zero.quantized_weights = Some(how);
        let (quantized, with_codes) = gathers(&run);
        let psi = run.model.num_params() as u64;
        let codes = how.bytes(psi as usize) as u64;
        // Of four ranks' in groups of two, each takes half of a version, but of what two of them have themselves.
        let filled = |bytes: u64| (4 * bytes / 2) - 2 * bytes / 4;
        let expected = match second {
            None => 4 * 2 * codes * 3 / 4,
            Some(_) => plain - filled(4 * psi) + filled(codes),
        };
        println!("{second:?}, {how:?}: {quantized} bytes for {expected}, {plain} as they are");
        assert!((quantized as f64 / expected as f64 - 1.0).abs() < 0.02, "{quantized} for {expected}");
        let beside = with_codes - held;
        assert!((beside as f64 / (codes as f64 / 4.0) - 1.0).abs() < 0.05, "{beside} of codes for {}", codes / 4);
    }
}

#[test]
fn quantized_gradients_take_the_bytes_of_their_bits() {
    for (shards, how) in [(4, Format::Int8), (2, Format::Int8), (2, Format::Int4)] {
        let mut run = run(Stage::Gradients, 4);
        run.zero.shard_size = Some(shards);
        let gradients = |run: &Run| {
            let wire = gpt2_stats(run)[0].wire_bytes;
            // Parameters are all-gathered, and so is the sum across groups, where all-reduces are not quantised.
            (wire.total() - wire.all_gather, wire.all_gather)
        };
        let (plain, gathered) = gradients(&run);
        run.zero.quantized_gradients = Some(how);
        let (quantized, with_sums) = gradients(&run);
        // Across groups the sum goes back as it came: half of an all-reduce is a gather.
        let (psi, is_meshed) = (run.model.num_params() as u64, shards < 4);
        let part =
            if is_meshed { how.bytes(psi as usize / 2) as u64 / 2 } else { how.bytes(psi as usize) as u64 * 3 / 4 };
        let within = if is_meshed { 4 * psi / 2 } else { 0 };
        println!("{} groups, {how:?}: {quantized} + {} bytes for {plain}", 4 / shards, with_sums - gathered);
        assert!((quantized as f64 / (within + part) as f64 - 1.0).abs() < 0.02, "{quantized} for {}", within + part);
        let back = if is_meshed { part } else { 0 };
        assert!((with_sums - gathered).abs_diff(back) <= back / 50, "{with_sums} - {gathered} for {back}");
    }
}

/// Returns the outputs of a frozen and a trained layer for the same rows, and the bytes of their all-gathers on rank 0.
fn frozen_beside_trained(config: &ZeroConfig, ranks: usize) -> ([Vec<f32>; 2], [u64; 2]) {
    on_ranks(ranks, config, |device| {
        let layer = || LinearConfig::new(64, 60).with_bias(false).init::<B>(&device);
        let layers: (Linear<B>, Linear<B>) = prepare::<B, _>((layer().no_grad(), layer()), &device);
        let rows: Vec<f32> = (0..128).map(|i| (i * i % 13) as f32 / 6.0 - 1.0).collect();
        let rows = Tensor::<B, 2>::from_data(TensorData::new(rows, [2, 64]), &device);
        let use_of = |layer: &Linear<B>| {
            let before = rank_stats::<Flex>().wire_bytes.all_gather;
            let made = layer.forward(rows.clone()).into_data().into_vec().unwrap();
            (made, rank_stats::<Flex>().wire_bytes.all_gather - before)
        };
        let (frozen, trained) = (use_of(&layers.0), use_of(&layers.1));
        ([frozen.0, trained.0], [frozen.1, trained.1])
    })
    .swap_remove(0)
}

/// Trained and frozen weights can be quantized independently; the others are gathered exactly.
#[test]
fn frozen_weights_alone_take_the_bytes_of_their_bits() {
    for (ranks, second) in [(2, None), (3, None), (4, Some(2))] {
        let run = |trained: Option<Format>, frozen: Option<Format>| {
            let config = ZeroConfig {
                param_persistence_threshold: 0,
                secondary_shard_size: second,
                quantized_weights: trained,
                quantized_nontrainable_weights: frozen,
                ..ZeroConfig::new(Stage::Parameters)
            };
            frozen_beside_trained(&config, ranks)
        };
        let ([frozen, trained], exact_bytes) = run(None, None);
        for how in [Format::Int8, Format::Int4] {
            let ([made, as_it_is], bytes) = run(None, Some(how));
            assert_eq!(as_it_is, trained, "{ranks} ranks, {second:?}, {how}");
            let off = made.iter().zip(&frozen).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off > 0.0 && off < 0.5, "{ranks} ranks, {second:?}, {how}: {off}");
            assert_eq!(bytes[1], exact_bytes[1], "{ranks} ranks, {second:?}, {how}");
            if second.is_none() {
                let pieces = (1..ranks).map(|rank| Partition::new(64 * 60, ranks).len(rank));
                assert_eq!(bytes[0], pieces.map(|numel| how.bytes(numel) as u64).sum::<u64>());
            }
            let ([both, other], _) = run(Some(how), None);
            assert!(both == made && other != trained, "{ranks} ranks, {second:?}, {how}: all of them");
            let ([frozen_so, trained_so], _) = run(Some(Format::Int8), Some(Format::Nf4));
            assert!(frozen_so != both && trained_so != trained, "{ranks} ranks, {second:?}: each its own");
        }
    }
}

/// The uncompressed bytes of quantized runs equal the bytes of plain runs.
#[test]
fn uncompressed_bytes_are_those_of_a_run_without_quantisation() {
    for (stage, shards, second) in [
        (Stage::Gradients, None, None),
        (Stage::Parameters, None, None),
        (Stage::Parameters, Some(2), None),
        (Stage::Parameters, None, Some(2)),
    ] {
        let mut run = run(stage, 4);
        (run.zero.shard_size, run.zero.secondary_shard_size) = (shards, second);
        let plain = gpt2_stats(&run)[0].wire_bytes;
        assert_eq!((plain.total(), plain.all_gather), (plain.uncompressed.total(), plain.uncompressed.all_gather));
        run.zero.quantized_gradients = Some(Format::Int4);
        run.zero.quantized_weights = Some(Format::Int8).filter(|_| stage.shards_parameters());
        let quantized = gpt2_stats(&run)[0].wire_bytes;
        // Two hops of gradients, when they are quantised beside a second cut, bring as much as one over all ranks.
        let (uncompressed, expected) = (quantized.uncompressed.total(), plain.total());
        println!("stage {stage}, {shards:?}, {second:?}: {} sent, {uncompressed} for {expected}", quantized.total());
        assert_eq!(uncompressed, expected);
        assert!(10 * quantized.total() < 9 * uncompressed, "{} and {uncompressed}", quantized.total());
    }
}

#[test]
fn the_persistence_threshold_saves_one_gather_of_small_parameters() {
    let none = run(Stage::Parameters, 2);
    let threshold = 1_000;
    let some = Run { zero: ZeroConfig { param_persistence_threshold: threshold, ..none.zero.clone() }, ..none.clone() };
    let shapes = none.model.parameter_shapes();
    let small = |shape: &[usize]| shape.iter().product::<usize>() <= threshold;
    // What a backward pass reads again: layer norms' weights, and the biases inside activations. Other biases are not.
    let gathered_twice: usize = shapes
        .iter()
        .filter(|(name, shape)| {
            let normed = name.contains("ln_") && name.ends_with("weight");
            small(shape) && (normed || name.ends_with("c_fc.bias"))
        })
        .map(|(_, shape)| shape[0])
        .sum();
    let bytes = |run: &Run| gpt2_stats(run)[0].wire_bytes.all_gather as usize;
    assert_eq!(bytes(&none) - bytes(&some), 4 * gathered_twice / 2);
}

#[test]
fn model_state_follows_the_formula_and_gathers_are_bounded() {
    for (ranks, shards) in [(1, 1), (2, 2), (4, 4), (4, 2)] {
        for stage in Stage::ALL {
            let mut run = run(stage, ranks);
            run.zero.shard_size = Some(shards);
            let psi = run.model.num_params() as u64;
            let formula = model_state(psi, stage, shards as u64, Precision::FP32_ADAMW);
            let bucket = 4 * run.zero.reduce_bucket_size as u64;
            for stats in gpt2_stats(&run) {
                let state = stats.model_state_bytes;
                println!(
                    "stage {stage}, {ranks} rank(s): parameters {:.4}, gradients {:.4}, optimizer {:.4} of the formula; \
                     gathered at most {}",
                    state.parameters as f64 / formula.parameters as f64,
                    state.gradients as f64 / formula.gradients as f64,
                    state.optimizer as f64 / formula.optimizer as f64,
                    stats.gathered_bytes_peak
                );
                for (measured, formula) in [
                    (state.parameters, formula.parameters),
                    (state.gradients, formula.gradients),
                    (state.optimizer, formula.optimizer),
                ] {
                    let slack = (formula as f64 * 0.02) as u64 + bucket;
                    assert!(
                        measured.abs_diff(formula) <= slack,
                        "stage {stage}, {ranks} ranks: {state:?}, {formula:?}"
                    );
                }
                if stage == Stage::Parameters && ranks > 1 {
                    assert!(stats.gathered_bytes_peak > 0);
                    assert!(stats.gathered_bytes_peak <= 4 * run.zero.max_live_parameters as u64);
                    assert!(4 * run.zero.max_live_parameters as u64 * 4 < 4 * psi, "the bound is far below the model");
                }
            }
        }
    }
}
