//! Training in 16 bit: loss scales, skipped updates, state memory and bytes sent.

use zero_core::estimate::{Precision, model_state};
use zero_train::loss_scale::{DynamicLossScale, LossScaler};

use super::*;

/// Losses, scales and skipped updates of 16 updates in 16 bit; on rank 1 the losses of updates `bad` are infinite.
fn half(stage: Stage, float: Float, lr: f64, window: u64, bad: &[usize]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let base = Run::tiny(stage);
    let run = Run { zero: ZeroConfig { param_dtype: float, ..base.zero.clone() }, ..base };
    let updates = 16;
    let results = on_ranks(run.ranks, &run.zero, |device| {
        let scaler = LossScaler::dynamic(DynamicLossScale { initial_scale_power: 10, window, ..Default::default() });
        let loss_scale = (float == Float::F16).then(|| scaler.unwrap());
        let schedule = Schedule::Constant(lr);
        let config = EngineConfig { loss_scale, skip_overflow: true, schedule, ..config(1) };
        let mut engine = engine(&run, config, &device);
        let (mut losses, mut scales, mut norms) = (Vec::new(), Vec::new(), Vec::new());
        for update in 0..updates {
            scales.push(engine.loss_scale());
            let first = (update * run.ranks + device.rank()) * 2;
            let batch = tokens(&run, first..first + 2, &device);
            let mut loss = engine.forward(|model| model.loss(batch));
            losses.push(mean(all_gather::<Flex>(&[value(&loss)])));
            if device.rank() == 1 && bad.contains(&update) {
                loss = loss * f32::INFINITY;
            }
            let before = engine.full_parameter("wte").unwrap().values;
            engine.backward(loss);
            let step = engine.step().unwrap();
            if let Step::Updated(update) = step {
                norms.push(update.grad_norm);
            }
            let skipped = matches!(step, Step::Skipped { .. });
            assert_eq!(skipped, bad.contains(&update), "update {update}: {step:?}");
            assert_eq!(before == engine.full_parameter("wte").unwrap().values, skipped, "update {update}");
        }
        assert_eq!(engine.skipped(), bad.len());
        assert_eq!(engine.steps(), updates - bad.len());
        (losses, scales, norms)
    });
    assert_eq!(results[0], results[1], "all ranks skip the same updates");
    results.into_iter().next().unwrap()
}

#[test]
fn an_overflow_on_one_rank_skips_the_update_on_all() {
    for stage in Stage::ALL {
        // DeepSpeed's rules, hysteresis 2: the first overflow changes nothing, the second halves the scale; the window
        // of 4 good updates doubles it with the fifth, and fills the hysteresis up again.
        let (losses, scales, norms) = half(stage, Float::F16, 5e-3, 4, &[2, 5, 6]);
        let expected =
            [1024., 1024., 1024., 1024., 1024., 1024., 512., 256., 256., 256., 256., 256., 512., 512., 512., 512.];
        assert_eq!(scales, expected, "stage {stage}");
        assert_eq!(norms.len(), 13);
        assert!(losses[15] < losses[0] - 0.3, "training recovers: {losses:?}");
    }
}

#[test]
fn sixteen_bit_training_follows_fp32_and_is_bit_equal_over_stages() {
    for (float, tolerance) in [(Float::Bf16, 1e-3), (Float::F16, 2e-4)] {
        let (reference, _, norms) = half(Stage::DataParallel, float, 1e-3, 1000, &[]);
        let (full, _, full_norms) = half(Stage::DataParallel, Float::F32, 1e-3, 1000, &[]);
        let norm = worst(&full_norms, &norms);
        println!("{float:?}: gradient norms {norm:.1e} from fp32's");
        assert!(norm < 10.0 * tolerance, "{float:?}: {norm:e}");
        let difference = worst(&full, &reference);
        println!("{float:?} against fp32 over 16 updates: {difference:.1e}");
        assert!(difference < tolerance && difference > 0.0, "{float:?}: {difference:e}");
        for stage in &Stage::ALL[1..] {
            let losses = half(*stage, float, 1e-3, 1000, &[]).0;
            assert!(reference.iter().zip(&losses).all(|(a, b)| a.to_bits() == b.to_bits()), "{float:?}, stage {stage}");
        }
    }
}

#[test]
fn mixed_precision_state_is_two_two_and_twelve_bytes_a_parameter_and_sends_half() {
    for stage in Stage::ALL {
        let measure = |float: Float| {
            let base = Run::tiny(stage);
            let zero = ZeroConfig { param_dtype: float, param_persistence_threshold: 0, ..base.zero.clone() };
            let run = Run { zero, ..base };
            let stats = on_ranks(run.ranks, &run.zero, |device| {
                let mut engine = engine(&run, config(1), &device);
                let mut stats = rank_stats::<Flex>();
                for update in 0..3 {
                    reset_peaks::<Flex>();
                    let before = rank_stats::<Flex>().wire_bytes;
                    let batch = tokens(&run, update * 4..update * 4 + 2, &device);
                    let loss = engine.forward(|model| model.loss(batch));
                    engine.backward(loss);
                    engine.step().unwrap();
                    stats = rank_stats::<Flex>();
                    stats.wire_bytes = stats.wire_bytes.since(&before);
                }
                stats
            });
            (run.model.num_params() as u64, stats[0])
        };
        let (psi, stats) = measure(Float::Bf16);
        // At stage 3 in host memory, a shard is its fp32 master, which each gather rounds.
        let parameter = if stage.shards_parameters() { 0 } else { 2 };
        let formula = model_state(psi, stage, 2, Precision { parameter, ..Precision::MIXED_ADAMW });
        let state = stats.model_state_bytes;
        let ratio = state.total() as f64 / formula.total() as f64;
        let wire = stats.wire_bytes.total() as f64 / measure(Float::F32).1.wire_bytes.total() as f64;
        println!("stage {stage}: {state:?} against {formula:?}: {ratio:.4}; wire to fp32's {wire:.4}");
        assert_eq!(state.optimizer as f64 / formula.optimizer as f64, 1.0, "stage {stage}: {state:?}, {formula:?}");
        assert!((ratio - 1.0).abs() < 0.02, "stage {stage}: {ratio}");
        assert!((wire - 0.5).abs() < 0.005, "stage {stage}: {wire}");
    }
}

#[test]
fn a_clone_keeps_its_values_while_the_masters_of_the_original_are_updated() {
    for float in [Float::Bf16, Float::F16] {
        let base = Run::tiny(Stage::Parameters);
        let run = Run { zero: ZeroConfig { param_dtype: float, ..base.zero.clone() }, ..base };
        on_ranks(run.ranks, &run.zero, |device| {
            let scaler = LossScaler::dynamic(DynamicLossScale { initial_scale_power: 10, ..Default::default() });
            let loss_scale = (float == Float::F16).then(|| scaler.unwrap());
            let mut engine = engine(&run, EngineConfig { loss_scale, skip_overflow: true, ..config(1) }, &device);
            let batch = || tokens(&run, 0..2, &device);
            let step = |engine: &mut Engine| {
                let loss = engine.forward(|model| model.loss(batch()));
                engine.backward(loss);
                engine.step().unwrap();
            };
            step(&mut engine);
            let optimizer = rank_stats::<Flex>().model_state_bytes.optimizer;
            // Of the second version, whose shards are masters.
            let kept = engine.model().clone();
            let of_kept = || value(&kept.loss(batch())).to_bits();
            let before = of_kept();
            let of_engine = engine.full_parameter("wte").unwrap().values;
            step(&mut engine);
            step(&mut engine);
            assert_eq!(of_kept(), before, "{float:?}");
            assert_ne!(engine.full_parameter("wte").unwrap().values, of_engine, "{float:?}");
            drop(kept);
            step(&mut engine);
            assert_eq!(rank_stats::<Flex>().model_state_bytes.optimizer, optimizer, "{float:?}");
        });
    }
}
