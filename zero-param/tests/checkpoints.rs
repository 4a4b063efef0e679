//! Saving and resuming: `cargo test --test checkpoints`.

mod common;

use std::path::Path;

use burn_optim::{AdamWConfig, LambConfig, SgdConfig};
use common::{Gpt, LR, Net, Told, config, device, options, seed, value, weights};
use serde_json::{Map, json};
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_param::{Error, OptimizerConfig, Ranks, run_threads, shard};

const FIRST: usize = 3;
const STEPS: usize = 6;

/// Returns the losses from `from` on and the final weights. Saves after `FIRST` steps, or resumes from there.
fn run<N: Net>(
    ranks: &Ranks,
    stage: Stage,
    dir: &Path,
    resume: bool,
    config_of: &impl OptimizerConfig,
) -> Result<Told, Error> {
    let device = device();
    let (mut net, zero) = shard(N::build(&device), ranks, &config(stage))?;
    let mut optimizer = zero.optimizer(config_of)?;
    let mut from = 0;
    if resume {
        let found = Checkpoint::open(&dir.join("step-00000003"))?;
        let resumed = zero.load(net, optimizer, &found)?;
        assert_eq!((resumed.steps, &resumed.extra["program"]), (FIRST, &json!("its own")));
        (net, optimizer, from) = (resumed.model, resumed.optimizer, resumed.steps);
    }
    let mut told = Told::default();
    for step in from..STEPS {
        if step == FIRST && !resume {
            let extra = Map::from_iter([("program".to_string(), json!("its own"))]);
            zero.save(&net, &optimizer, dir, step, extra, &SaveOptions::default())?;
        }
        let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
        told.losses.push(value(loss));
        net = optimizer.step(LR, net, grads)?;
    }
    told.weights = weights(&net);
    Ok(told)
}

#[test]
fn a_run_resumes_at_any_stage_with_the_same_bits() {
    resumes::<Gpt<1>>(&AdamWConfig::new(), "adamw");
    resumes::<Gpt<1>>(&LambConfig::new(), "lamb");
    // Dropout draws continue.
    resumes::<Gpt<1, 20>>(&AdamWConfig::new(), "adamw");
}

fn resumes<N: Net>(config_of: &(impl OptimizerConfig + Sync), name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = |ranks: &Ranks, stage, resume| run::<N>(ranks, stage, dir.path(), resume, config_of);
    let whole = run_threads(2, &options(), |ranks| run(ranks, Stage::Parameters, false)).unwrap();
    let saved = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
    // The names that zero-train uses.
    assert_eq!(saved.state().unwrap()["engine"]["optimizer"]["name"], name);
    assert!(["exp_avg", "exp_avg_sq"].iter().all(|state| saved.tensor(&format!("optimizer.wte.{state}")).is_ok()));
    for stage in Stage::ALL {
        let resumed = run_threads(2, &options(), |ranks| run(ranks, stage, true)).unwrap();
        for (told, whole) in resumed.iter().zip(&whole) {
            assert_eq!(told.losses[..], whole.losses[FIRST..], "{name}, stage {stage}");
            assert!(told.weights == whole.weights, "{name}, stage {stage}: other weights");
        }
    }
    // On a different number of ranks.
    run_threads(3, &options(), |ranks| run(ranks, Stage::Parameters, true)).unwrap();
}

#[test]
fn another_optimizer_or_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let adamw = AdamWConfig::new();
    run_threads(1, &options(), |ranks| run::<Gpt<1>>(ranks, Stage::Parameters, dir.path(), false, &adamw)).unwrap();
    run_threads(1, &options(), |ranks| {
        let found = Checkpoint::open(&dir.path().join("step-00000003"))?;
        let (net, zero) = shard(Gpt::<2>::build(&device()), ranks, &config(Stage::Parameters))?;
        let optimizer = zero.optimizer(&AdamWConfig::new())?;
        let error = zero.load(net, optimizer, &found).err().expect("it has one block").to_string();
        assert!(error.contains("blocks.1"), "{error}");
        let (net, zero) = shard(Gpt::<1>::build(&device()), ranks, &config(Stage::Parameters))?;
        let optimizer = zero.optimizer(&SgdConfig::new())?;
        let error = zero.load(net, optimizer, &found).err().expect("it has no place for that state").to_string();
        assert!(error.contains("AdamW"), "{error}");
        Ok::<_, Error>(())
    })
    .unwrap();
}
