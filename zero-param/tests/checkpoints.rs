//! What is saved and resumed: `cargo test --test checkpoints`.

mod common;

use std::path::Path;

use burn_optim::{AdamWConfig, SgdConfig};
use common::{Gpt, LR, Net, config, device, options, seed, value, weights};
use serde_json::{Map, json};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_param::{Error, Ranks, run_threads, shard};

const FIRST: usize = 3;
const STEPS: usize = 6;

type Net1 = Gpt<1>;

/// Losses from `from` on, and the weights in the end. Saves after `FIRST` steps, or resumes from there.
fn run(
    ranks: &Ranks,
    stage: Stage,
    dir: &Path,
    resume: bool,
) -> Result<(Vec<f32>, impl PartialEq + Send + use<>), Error> {
    let device = device();
    let (mut net, zero) = shard(Net1::build(&device), ranks, &config(stage))?;
    let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
    let mut from = 0;
    if resume {
        let found = Checkpoint::open(&dir.join("step-00000003"))?;
        let resumed = zero.load(net, optimizer, &found)?;
        assert_eq!((resumed.steps, &resumed.extra["program"]), (FIRST, &json!("its own")));
        (net, optimizer, from) = (resumed.model, resumed.optimizer, resumed.steps);
    }
    let mut losses = Vec::new();
    for step in from..STEPS {
        if step == FIRST && !resume {
            let extra = Map::from_iter([("program".to_string(), json!("its own"))]);
            zero.save(&net, &optimizer, dir, step, extra, &SaveOptions::default())?;
        }
        let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
        losses.push(value(loss));
        net = optimizer.step(LR, net, grads)?;
    }
    Ok((losses, weights(&net)))
}

#[test]
fn a_run_resumes_at_any_stage_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let whole = run_threads(2, &options(), |ranks| run(ranks, Stage::Parameters, dir.path(), false)).unwrap();
    for stage in Stage::ALL {
        let resumed = run_threads(2, &options(), |ranks| run(ranks, stage, dir.path(), true)).unwrap();
        for ((losses, weights), (all, expected)) in resumed.iter().zip(&whole) {
            assert_eq!(losses[..], all[FIRST..], "stage {stage}");
            assert!(weights == expected, "stage {stage}: other weights");
        }
    }
    // On another number of ranks.
    run_threads(3, &options(), |ranks| run(ranks, Stage::Parameters, dir.path(), true)).unwrap();
}

#[test]
fn another_optimizer_or_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run_threads(1, &options(), |ranks| run(ranks, Stage::Parameters, dir.path(), false)).unwrap();
    run_threads(1, &options(), |ranks| {
        let found = Checkpoint::open(&dir.path().join("step-00000003"))?;
        let (net, zero) = shard(Gpt::<2>::build(&device()), ranks, &config(Stage::Parameters))?;
        let optimizer = zero.optimizer(&AdamWConfig::new())?;
        let error = zero.load(net, optimizer, &found).err().expect("it has one block").to_string();
        assert!(error.contains("blocks.1"), "{error}");
        let (net, zero) = shard(Net1::build(&device()), ranks, &config(Stage::Parameters))?;
        let optimizer = zero.optimizer(&SgdConfig::new())?;
        let error = zero.load(net, optimizer, &found).err().expect("it has no place for that state").to_string();
        assert!(error.contains("AdamW"), "{error}");
        Ok::<_, Error>(())
    })
    .unwrap();
}
