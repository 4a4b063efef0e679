//! The engine: accumulation, clipping, loss scales, mixed precision, evaluation, uneven data, access to sharded state.
//!
//! `cargo test -p zero-tests --test ranks engine -- --nocapture` prints the differences that are asserted on. The reference is
//! `tests/fixtures/engine.json`, made by `tests/fixtures/make_engine_reference.py`.

mod module;
mod numerics;
mod sixteen_bit;

use crate::common;

use std::fs;

use burn::optim::AdamWConfig;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use common::{B, Device, Run, fixture, launch_options, on_ranks};
use safetensors::SafeTensors;
use serde_json::Value;
use zero_burn::config::{Float, ZeroConfig};
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{all_gather, rank_stats, reset_peaks};
use zero_core::Stage;
use zero_models::{Gpt2, gpt2};
use zero_train::engine::{EngineConfig, EngineError, NextBatch, Step, ZeroEngine};
use zero_train::schedule::Schedule;

type Engine = ZeroEngine<B, Gpt2<B>, Fused<B>>;

fn config(accumulation: usize) -> EngineConfig {
    EngineConfig { accumulation, ..EngineConfig::default() }
}

fn engine(run: &Run, config: EngineConfig, device: &Device) -> Engine {
    ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(Rule::adamw()), config, device).unwrap()
}

/// Rows `rows` of a stream of learnable token rows.
fn tokens(run: &Run, rows: std::ops::Range<usize>, device: &Device) -> Tensor<B, 2, Int> {
    let (len, vocab) = (rows.len(), run.model.vocab_size);
    let ids: Vec<i32> =
        rows.flat_map(|row| (0..run.seq).map(move |i| ((row * 7 + i * (1 + row % 2)) % vocab) as i32)).collect();
    Tensor::from_data(TensorData::new(ids, [len, run.seq]), device)
}

fn mean(values: Vec<Vec<f64>>) -> f64 {
    values.iter().map(|values| values[0]).sum::<f64>() / values.len() as f64
}

fn value(loss: &Tensor<B, 1>) -> f64 {
    f64::from(loss.clone().into_data().iter::<f32>().next().unwrap())
}

/// Returns the global losses of `updates` updates of 8 rows per rank, split into `accumulation` micro-batches, and wire bytes of the last.
fn accumulated(run: &Run, accumulation: usize, updates: usize, no_sync: bool) -> (Vec<f64>, Vec<f64>, u64) {
    on_ranks(run.ranks, &run.zero, |device| {
        let mut engine = engine(run, config(accumulation), &device);
        let (rank, per_rank, micro_rows) = (device.rank(), 8, 8 / accumulation);
        let (mut losses, mut norms, mut wire) = (Vec::new(), Vec::new(), 0);
        for update in 0..updates {
            let before = rank_stats::<Flex>().wire_bytes.total();
            let mut loss_sum = 0.0;
            for micro in 0..accumulation {
                let first = (update * run.ranks + rank) * per_rank + micro * micro_rows;
                let batch = tokens(run, first..first + micro_rows, &device);
                let mut pass = |engine: &mut Engine| {
                    let loss = engine.forward(|model| model.loss(batch.clone()));
                    loss_sum += value(&loss) / accumulation as f64;
                    engine.backward(loss);
                };
                if no_sync && micro + 1 < accumulation {
                    engine.no_sync(pass)
                } else {
                    pass(&mut engine)
                }
                let step = engine.step().unwrap();
                assert_eq!(matches!(step, Step::Updated(_)), micro + 1 == accumulation, "{step:?}");
                if let Step::Updated(update) = step {
                    norms.push(update.grad_norm);
                }
            }
            wire = rank_stats::<Flex>().wire_bytes.total() - before;
            losses.push(mean(all_gather::<Flex>(&[loss_sum])));
        }
        assert_eq!(engine.steps(), updates);
        (losses, norms, wire)
    })
    .swap_remove(0)
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
}

#[test]
fn four_micro_batches_of_two_are_one_of_eight() {
    for ranks in [1, 2] {
        for stage in Stage::ALL {
            let run = Run { ranks, ..Run::tiny(stage) };
            let (whole, norms, one) = accumulated(&run, 1, 10, false);
            let (parts, part_norms, four) = accumulated(&run, 4, 10, false);
            let (held, held_norms, held_bytes) = accumulated(&run, 4, 10, true);
            // Adam does not see a gradient's scale; its norm does.
            assert!(worst(&norms, &part_norms) < 2e-6 && worst(&norms, &held_norms) < 2e-6, "stage {stage}: {norms:?}");
            let (difference, with_no_sync) = (worst(&whole, &parts), worst(&whole, &held));
            println!(
                "stage {stage}, {ranks} ranks: 4 x 2 against 8 rows: {difference:.1e}, with no_sync {with_no_sync:.1e}; \
                 bytes on the wire {one}, {four}, {held_bytes}"
            );
            assert!(difference < 1e-6 && with_no_sync < 1e-6, "stage {stage}: {difference:e}, {with_no_sync:e}");
            if ranks > 1 && !stage.shards_gradients() {
                // An update of four micro-batches costs as many bytes as one of one: a quarter per sample where
                // micro-batches are of one size.
                assert!((four as f64 / one as f64 - 1.0).abs() < 0.01, "stage {stage}: {four} against {one} bytes");
            }
            if ranks > 1 && stage.shards_gradients() {
                assert!(held_bytes < four, "stage {stage}: no_sync sends {held_bytes}, not fewer than {four}");
            }
        }
    }
}

#[test]
fn wire_bytes_per_sample_fall_to_a_quarter_with_accumulation_at_stage_1() {
    let per_sample = |accumulation: usize| {
        let run = Run { batch: 2, ..Run::tiny(Stage::OptimizerState) };
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, config(accumulation), &device);
            let mut bytes = 0;
            for update in 0..3 {
                let before = rank_stats::<Flex>().wire_bytes.total();
                for micro in 0..accumulation {
                    let first = (update * accumulation + micro) * 4 + device.rank() * 2;
                    let batch = tokens(&run, first..first + 2, &device);
                    let loss = engine.forward(|model| model.loss(batch));
                    engine.backward(loss);
                    engine.step().unwrap();
                }
                bytes = rank_stats::<Flex>().wire_bytes.total() - before;
            }
            bytes as f64 / (2 * accumulation) as f64
        })
        .swap_remove(0)
    };
    let ratio = per_sample(4) / per_sample(1);
    println!("stage 1, 2 ranks: bytes per sample with accumulation 4 to those without: {ratio:.4}");
    assert!((ratio - 0.25).abs() < 0.0025, "{ratio}");
}

struct Fixture(Value);

impl Fixture {
    fn read() -> Self {
        Self(serde_json::from_slice(&fs::read(fixture("engine.json")).unwrap()).unwrap())
    }

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    }
}

#[test]
fn clipping_follows_pytorchs_clip_grad_norm() {
    let fixture_of_engine = Fixture::read();
    let reference = &fixture_of_engine.0["clipping"];
    let (losses, norms) = (Fixture::numbers(&reference["losses"]), Fixture::numbers(&reference["norms"]));
    let max_norm = reference["max_norm"].as_f64().unwrap();
    assert!(norms.iter().any(|&norm| norm > max_norm) && norms.iter().any(|&norm| norm < max_norm));
    let bytes = fs::read(fixture("gpt2_tiny").join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("input_ids").unwrap();
    let ids: Vec<i32> = view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32).collect();
    let (rows, seq) = (view.shape()[0], view.shape()[1]);
    for stage in Stage::ALL {
        let zero = ZeroConfig { param_persistence_threshold: 0, reduce_bucket_size: 5_000, ..ZeroConfig::new(stage) };
        for burns in [false, true] {
            let got = on_ranks(2, &zero, |device| {
                let model = gpt2::weights::from_pretrained::<B>(&fixture("gpt2_tiny"), &device).unwrap();
                let config = EngineConfig { clipping: Some(max_norm), ..config(1) };
                let batch = |step: usize| {
                    let ids: Vec<i32> = (0..2)
                        .map(|i| (step * 4 + device.rank() * 2 + i) % rows)
                        .flat_map(|row| ids[row * seq..][..seq].to_vec())
                        .collect();
                    Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [2, seq]), &device)
                };
                macro_rules! train {
                    ($optimizer:expr) => {{
                        let mut engine = ZeroEngine::initialize(model, $optimizer, config, &device).unwrap();
                        (0..losses.len())
                            .map(|step| {
                                let loss = engine.forward(|model| model.loss(batch(step)));
                                let loss_value = mean(all_gather::<Flex>(&[value(&loss)]));
                                engine.backward(loss);
                                let Step::Updated(update) = engine.step().unwrap() else { panic!("not updated") };
                                assert_eq!(update.clip_factor < 1.0, update.grad_norm > max_norm - 1e-6);
                                (loss_value, update.grad_norm)
                            })
                            .collect::<Vec<_>>()
                    }};
                }
                if burns {
                    train!(AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init())
                } else {
                    train!(Fused::new(Rule::adamw()))
                }
            })
            .swap_remove(0);
            let (got_losses, got_norms): (Vec<f64>, Vec<f64>) = got.into_iter().unzip();
            let (loss, norm) = (worst(&losses, &got_losses), worst(&norms, &got_norms));
            let name = if burns { "Burn's AdamW" } else { "fused AdamW" };
            println!("{name}, stage {stage}: loss {loss:.1e}, norm {norm:.1e} from clip_grad_norm_'s");
            assert!(loss < 1e-4 && norm < 1e-4, "{name}, stage {stage}: loss {loss:e}, norm {norm:e}");
        }
    }
}

#[test]
fn fused_optimizers_follow_pytorchs() {
    use burn::module::{Module, Param};
    use burn::optim::{GradientsParams, Optimizer};
    use zero_burn::module::{collect_grads, prepare};

    #[derive(Module, Debug)]
    struct Weights<B: burn::tensor::backend::Backend> {
        w: Param<Tensor<B, 1>>,
    }
    let fixture = Fixture::read();
    let reference = &fixture.0["optimizers"];
    let floats = |value: &Value| Fixture::numbers(value).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    let start = floats(&reference["start"]);
    let gradients: Vec<Vec<f32>> = reference["gradients"].as_array().unwrap().iter().map(floats).collect();
    let adam = |decoupled, bias_correction| {
        let (beta_1, beta_2, epsilon, weight_decay) = (0.8, 0.95, 1e-6, 0.1);
        if decoupled {
            Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction }
        } else {
            Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction }
        }
    };
    let sgd = |momentum, nesterov| Rule::Sgd { momentum, nesterov, weight_decay: 0.1 };
    let lamb = |bias_correction, max_coeff| {
        let (beta_1, beta_2, epsilon, weight_decay) = (0.8, 0.95, 1e-6, 0.1);
        Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, max_coeff, min_coeff: 0.01 }
    };
    for (name, rule) in [
        ("adamw", adam(true, true)),
        ("adamw_uncorrected", adam(true, false)),
        ("adam", adam(false, true)),
        ("adam_uncorrected", adam(false, false)),
        ("lamb", lamb(true, 10.0)),
        ("lamb_uncorrected", lamb(false, 0.3)),
        ("sgd", sgd(0.0, false)),
        ("momentum", sgd(0.9, false)),
        ("nesterov", sgd(0.9, true)),
        ("adagrad", Rule::adagrad().with_weight_decay(0.1)),
        ("lion", Rule::lion().with_weight_decay(0.1)),
    ] {
        let mut bits = None;
        for (ranks, stage) in [1, 2, 4].into_iter().flat_map(|ranks| Stage::ALL.map(|stage| (ranks, stage))) {
            let zero = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
            let after = on_ranks(ranks, &zero, |device| {
                let data = TensorData::new(start.clone(), [start.len()]);
                let weights = Weights { w: Param::from_data(data, &device) };
                let mut weights = prepare::<B, _>(weights, &device);
                let mut optimizer = Fused::<B>::new(rule);
                gradients
                    .iter()
                    .map(|gradient| {
                        // The same on every rank: the average of 1, 2 or 4 of them is exact.
                        let gradient = TensorData::new(gradient.clone(), [start.len()]);
                        let loss = (weights.w.val() * Tensor::<B, 1>::from_data(gradient, &device)).sum();
                        let grads = GradientsParams::from_grads(loss.backward(), &weights);
                        let grads = collect_grads::<B, _>(grads, &weights);
                        weights = optimizer.step(0.02, weights.clone(), grads);
                        weights.w.val().into_data().iter::<f32>().collect::<Vec<f32>>()
                    })
                    .collect::<Vec<_>>()
            })
            .swap_remove(0);
            let got: Vec<u32> = after.iter().flatten().map(|x| x.to_bits()).collect();
            assert_eq!(bits.get_or_insert_with(|| got.clone()), &got, "{name}, {ranks} ranks, stage {stage}");
            let mut largest = 0f32;
            for (expected, got) in reference["after"][name].as_array().unwrap().iter().zip(&after) {
                largest = floats(expected).iter().zip(got).map(|(e, g)| (e - g).abs()).fold(largest, f32::max);
            }
            println!("{name}, {ranks} ranks, stage {stage}: {largest:.1e} from torch's after 8 steps, the same bits");
            assert!(largest < 2e-6, "{name}, stage {stage}: {largest:e}");
        }
    }
}

/// Returns losses of 6 updates as seen by one rank, and rank 0's measurements of the last one.
fn measured(zero: &ZeroConfig, accumulation: usize) -> (Vec<u64>, zero_burn::stats::RankStats) {
    let run = Run { zero: zero.clone(), ..Run::tiny(zero.stage) };
    on_ranks(run.ranks, zero, |device| {
        let mut engine = engine(&run, config(accumulation), &device);
        let mut losses = Vec::new();
        let mut stats = rank_stats::<Flex>();
        for update in 0..6 {
            reset_peaks::<Flex>();
            let before = rank_stats::<Flex>().wire_bytes;
            for micro in 0..accumulation {
                let first = (update * accumulation + micro) * 4 + device.rank() * 2;
                let loss = engine.forward(|model| model.loss(tokens(&run, first..first + 2, &device)));
                losses.push(value(&loss).to_bits());
                engine.backward(loss);
                engine.step().unwrap();
            }
            stats = rank_stats::<Flex>();
            stats.wire_bytes = stats.wire_bytes.since(&before);
        }
        (losses, stats)
    })
    .swap_remove(0)
}

#[test]
fn settings_of_reductions_do_what_they_say() {
    for stage in Stage::ALL {
        let base = ZeroConfig { param_persistence_threshold: 0, ..Run::tiny(stage).zero };
        let (losses, stats) = measured(&base, 1);
        // When gradients are reduced, and powers of two before or after the sum, change no bit.
        for changed in [
            ZeroConfig { overlap_comm: false, ..base.clone() },
            ZeroConfig { gradient_predivide_factor: 2.0, ..base.clone() },
        ] {
            let (same, other) = measured(&changed, 1);
            assert_eq!(losses, same, "stage {stage}: {changed:?}");
            // Without a reducing backward pass there is one agreement less, of a byte a parameter.
            let (bytes, other) = (stats.wire_bytes.total(), other.wire_bytes.total());
            assert!(other <= bytes && bytes - other < 100, "stage {stage}: {bytes}, {other} with {changed:?}");
        }
        // Gradients sent in 16 bit: half of their bytes, other numbers.
        let sent = ZeroConfig { communication_dtype: Some(Float::Bf16), ..base.clone() };
        let (rounded, half) = measured(&sent, 1);
        assert_ne!(losses, rounded, "stage {stage}");
        let bytes = |stats: &zero_burn::stats::RankStats| {
            let wire = stats.wire_bytes;
            if stage == Stage::DataParallel { wire.all_reduce } else { wire.reduce_scatter }
        };
        let ratio = bytes(&half) as f64 / bytes(&stats) as f64;
        assert!((ratio - 0.5).abs() < 0.01, "stage {stage}: {ratio}");

        // Sums over micro-batches kept in fp32: twice the bytes of gradients, nearer to fp32.
        let half = ZeroConfig { param_dtype: Float::Bf16, ..base.clone() };
        let full = ZeroConfig { gradient_dtype: Some(Float::F32), ..half.clone() };
        let ((bf16, small), (fp32, large)) = (measured(&half, 2), measured(&full, 2));
        // At stages 0 and 1 sums are in fp32 anyway, and rounded once, by what they are sent as.
        assert_eq!(bf16 != fp32, stage.shards_gradients(), "stage {stage}");
        if stage.shards_gradients() {
            assert_eq!(2 * small.model_state_bytes.gradients, large.model_state_bytes.gradients, "stage {stage}");
        }
    }
}

#[test]
fn one_cycle_moves_the_momentum() {
    use zero_train::schedule::{CycleMomentum, OneCycle};
    let run = Run::tiny(Stage::Parameters);
    let cycle = |momentum| {
        Schedule::OneCycle(OneCycle {
            cycle_min_lr: 1e-3,
            cycle_max_lr: 1e-2,
            decay_lr_rate: 0.0,
            first_step_size: 3,
            second_step_size: 3,
            first_stair_count: 0,
            second_stair_count: 0,
            decay_step_size: 0,
            momentum,
        })
    };
    // After the first update, the first moment is `1 - momentum` times the gradient.
    let share = |momentum: Option<CycleMomentum>| {
        on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, EngineConfig { schedule: cycle(momentum), ..config(1) }, &device);
            let loss = engine.forward(|model| model.loss(tokens(&run, 0..2, &device)));
            engine.backward(loss);
            let gradient = engine.full_gradient("wte").unwrap().values;
            engine.step().unwrap();
            let moment = engine.full_optimizer_state("wte", "exp_avg").unwrap().values;
            let at = gradient.iter().position(|x| x.abs() > 1e-3).expect("a gradient that is not small");
            moment[at] / gradient[at]
        })[0]
    };
    assert!((share(None) - 0.1).abs() < 1e-5);
    let cycled = share(Some(CycleMomentum { min_mom: 0.75, max_mom: 0.95, decay_mom_rate: 0.0 }));
    assert!((cycled - 0.25).abs() < 1e-5, "{cycled}");
    let error = launch::<Flex, (), EngineError>(2, &run.zero, &launch_options(), |device| {
        let momentum = Some(CycleMomentum { min_mom: 0.75, max_mom: 0.95, decay_mom_rate: 0.0 });
        let config = EngineConfig { schedule: cycle(momentum), ..config(1) };
        ZeroEngine::initialize(run.model.init::<B>(&device), AdamWConfig::new().init(), config, &device).map(|_| ())
    });
    assert!(error.unwrap_err().to_string().contains("cycle_momentum"));
}

#[test]
fn evaluation_in_the_middle_of_an_update_changes_nothing() {
    for stage in Stage::ALL {
        let run = Run::tiny(stage);
        let losses = |evaluate: bool| {
            on_ranks(run.ranks, &run.zero, |device| {
                let mut engine = engine(&run, config(2), &device);
                (0..6)
                    .map(|micro| {
                        let batch = tokens(&run, micro * 4..micro * 4 + 2, &device);
                        let loss = engine.forward(|model| model.loss(batch));
                        let loss_value = value(&loss);
                        engine.backward(loss);
                        // Ranks evaluate differently often.
                        for _ in 0..if evaluate { device.rank() + 1 } else { 0 } {
                            let inner = tokens(&run, 40..42, &device).inner();
                            engine.evaluate(|model| model.loss(inner.clone())).into_data();
                        }
                        engine.step().unwrap();
                        loss_value.to_bits()
                    })
                    .collect::<Vec<_>>()
            })
        };
        assert_eq!(losses(false), losses(true), "stage {stage}");
    }
}

#[test]
fn ranks_may_run_out_of_data_at_different_times() {
    for accumulation in [1, 2] {
        let mut reference = None;
        for stage in Stage::ALL {
            let run = Run { ranks: 3, ..Run::tiny(stage) };
            let losses = on_ranks(run.ranks, &run.zero, |device| {
                let mut engine = engine(&run, config(accumulation), &device);
                // 3, 5 and 7 micro-batches.
                let mut data = (0..3 + 2 * device.rank()).map(|i| tokens(&run, i * 2..i * 2 + 2, &device));
                let mut turns = Vec::new();
                loop {
                    match engine.next_batch(data.next()) {
                        NextBatch::Batch(batch) => {
                            let loss = engine.forward(|model| model.loss(batch));
                            turns.push(value(&loss));
                            engine.backward(loss);
                        }
                        NextBatch::Skip => {
                            turns.push(0.0);
                            engine.skip_batch();
                        }
                        NextBatch::End => break,
                    }
                    engine.step().unwrap();
                }
                if accumulation == 2 {
                    assert_eq!(engine.steps(), 3);
                    engine.step_partial().unwrap();
                }
                assert_eq!(engine.steps(), if accumulation == 2 { 4 } else { 7 });
                let last = engine.full_parameter("ln_f.gamma").unwrap().values;
                (turns, last)
            });
            assert!(losses.iter().all(|(turns, _)| turns.len() == 7));
            assert!(losses.iter().all(|(_, last)| *last == losses[0].1), "ranks hold the same parameters");
            let first = reference.get_or_insert_with(|| losses.clone());
            for ((a, _), (b, _)) in first.iter().zip(&losses) {
                assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * a.abs()), "stage {stage}: {a:?}, {b:?}");
            }
        }
    }
}

#[test]
fn an_idle_ranks_part_of_the_average_is_zero() {
    // One of two ranks without data: half the gradient of the other.
    let mut run = Run::tiny(Stage::Parameters);
    run.zero.check_replicas = 1;
    let norm = |idle: bool| {
        on_ranks(2, &run.zero, |device| {
            let mut engine = engine(&run, config(1), &device);
            if idle && device.rank() == 1 {
                engine.skip_batch();
            } else {
                let loss = engine.forward(|model| model.loss(tokens(&run, 0..2, &device)));
                engine.backward(loss);
            }
            let Step::Updated(update) = engine.step().unwrap() else { panic!("not updated") };
            update.grad_norm
        })[0]
    };
    let (half, whole) = (norm(true), norm(false));
    assert!((half / whole - 0.5).abs() < 1e-6, "{half} of {whole}");
}

#[test]
fn the_schedule_counts_updates() {
    let run = Run::tiny(Stage::Gradients);
    let schedule =
        Schedule::WarmupLr { min_lr: 0.0, max_lr: 1e-2, warmup_steps: 4, kind: zero_train::schedule::Warmup::Linear };
    let rates = on_ranks(2, &run.zero, |device| {
        let mut engine = engine(&run, EngineConfig { schedule: schedule.clone(), ..config(2) }, &device);
        let mut rates = Vec::new();
        for micro in 0..12 {
            let batch = tokens(&run, micro * 2..micro * 2 + 2, &device);
            let loss = engine.forward(|model| model.loss(batch));
            engine.backward(loss);
            if let Step::Updated(update) = engine.step().unwrap() {
                rates.push(update.lr);
            }
        }
        rates
    });
    assert_eq!(rates[0], (0..6).map(|step| schedule.lr(step)).collect::<Vec<_>>());
}

/// A plan with batch sizes for two ranks does not train four (DeepSpeed#3341).
#[test]
fn a_plan_for_another_number_of_ranks_is_refused() {
    let run = Run::tiny(Stage::Parameters);
    let config = EngineConfig { world: Some(2), ..EngineConfig::default() };
    for ranks in [1, 2, 3] {
        let launched = launch::<Flex, (), EngineError>(ranks, &run.zero, &launch_options(), |device| {
            let optimizer = Fused::new(Rule::sgd());
            ZeroEngine::initialize(run.model.init::<B>(&device), optimizer, config.clone(), &device).map(|_| ())
        });
        match launched {
            Ok(_) => assert_eq!(ranks, 2),
            Err(error) => {
                let told = format!("the plan's number of ranks is 2: expected {ranks}, the number of running ranks");
                assert!(ranks != 2 && error.to_string().contains(&told), "{error}");
            }
        }
    }
}

/// Summed gradients are the mean times the number of ranks.
#[test]
fn gradients_are_added_if_asked_for() {
    let updated = |sums_gradients, lr| {
        let run = Run::tiny(Stage::Gradients);
        let weights = on_ranks(2, &run.zero, |device| {
            let (schedule, optimizer) = (Schedule::Constant(lr), Fused::new(Rule::sgd()));
            let config = EngineConfig { sums_gradients, schedule, ..EngineConfig::default() };
            let model = run.model.init::<B>(&device);
            let mut engine = ZeroEngine::initialize(model, optimizer, config, &device).unwrap();
            numerics::train(&run, &mut engine, &device, 0, None);
            let Step::Updated(update) = engine.step().unwrap() else { panic!("not updated") };
            (update.grad_norm, engine.full_parameter("ln_f.gamma").unwrap().values)
        });
        weights[0].clone()
    };
    let ((mean, expected), (sum, values)) = (updated(false, 0.2), updated(true, 0.1));
    assert!((sum - 2.0 * mean).abs() < 1e-6 * sum, "{sum} {mean}");
    assert!(values.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
}
