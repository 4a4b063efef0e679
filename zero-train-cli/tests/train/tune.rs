//! `zero tune`: trials of different settings, of which the fastest is printed as a command.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::texts::{ok, refused};

/// The arguments of a search on tiny rows, and others.
fn args(options: &str) -> Vec<&str> {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/data/tinyshakespeare.txt");
    let common = ["tune", "--model", "tiny", "--seq", "16", "--data", data, "--trial-steps", "2"];
    common.into_iter().chain(options.split(' ')).collect()
}

/// The numbers of a setting: ranks, stage, rows of a micro-batch, micro-batches.
fn setting(value: &Value) -> [u64; 4] {
    ["ranks", "stage", "batch", "accumulation"].map(|key| value[key].as_u64().unwrap())
}

#[test]
fn trials_keep_the_rows_per_step_and_the_fastest_is_a_command_that_runs() {
    let dir = tempfile::tempdir().unwrap();
    let told = ok(&args("--train-batch-size 4 --threads 1 --lr 1e-3 --steps 3 --json"), dir.path());
    let told: Value = serde_json::from_str(&told).unwrap();
    let trials = told["trials"].as_array().unwrap();
    let settings: BTreeSet<[u64; 4]> = trials.iter().map(setting).collect();
    assert_eq!(settings.len(), trials.len());
    assert!(settings.iter().all(|[ranks, _, batch, accumulation]| ranks * batch * accumulation == 4), "{settings:?}");
    // Both numbers of ranks with the largest micro-batch, and all stages.
    assert!(settings.contains(&[1, 3, 4, 1]) && settings.contains(&[2, 3, 2, 1]), "{settings:?}");
    assert_eq!(settings.iter().map(|setting| setting[1]).collect::<BTreeSet<_>>(), BTreeSet::from([0, 1, 2, 3]));
    let seconds = |trial: &Value| trial["seconds_per_step"].as_f64().unwrap();
    let best = trials.iter().find(|trial| setting(trial) == setting(&told["best"])).unwrap();
    assert!(trials.iter().all(|trial| seconds(trial) >= seconds(best)), "{told}");
    assert!(trials.iter().all(|trial| trial["peak_rss_bytes"].as_u64().unwrap() > 1 << 20));
    let command: Vec<&str> = told["command"].as_str().unwrap().split(' ').collect();
    assert_eq!(command[..2], ["zero", "train"]);
    let [ranks, stage, batch, accumulation] = setting(&told["best"]);
    let chosen = format!("--ranks {ranks} --stage {stage} --batch {batch} --accumulation {accumulation}");
    assert!(command.join(" ").ends_with(&chosen), "{command:?}");
    for kept in ["--steps 3", "--threads 1", "--lr 1e-3"] {
        assert!(command.join(" ").contains(kept), "{command:?}");
    }
    ok(&[&command[1..], &["--json"]].concat(), dir.path());
    // Trials leave nothing.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn given_ranks_and_stage_stay() {
    let dir = tempfile::tempdir().unwrap();
    let told = ok(&args("--batch 2 --accumulation 3 --ranks 1 --stage 1 --json"), dir.path());
    let told: Value = serde_json::from_str(&told).unwrap();
    for trial in told["trials"].as_array().unwrap() {
        let [ranks, stage, batch, accumulation] = setting(trial);
        assert_eq!([ranks, stage, batch * accumulation], [1, 1, 6]);
    }
}

#[test]
fn a_deepspeed_file_is_written_with_the_fastest_settings() {
    let dir = tempfile::tempdir().unwrap();
    let file = json!({
        "train_batch_size": 8, "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } }, "zero_optimization": { "stage": 2 },
        "autotuning": { "enabled": true, "max_train_micro_batch_size_per_gpu": 4, "min_train_micro_batch_size_per_gpu": 2, "tuner_num_trials": 3 }
    });
    std::fs::write(dir.path().join("ds.json"), format!("// With a comment, as DeepSpeed reads it.\n{file}")).unwrap();
    let table = ok(&args("--config ds.json --output tuned.json --threads 1 --ranks 1"), dir.path());
    assert!(table.contains("--config tuned.json"), "{table}");
    let tuned: Value = serde_json::from_slice(&std::fs::read(dir.path().join("tuned.json")).unwrap()).unwrap();
    let [batch, accumulation] =
        ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"].map(|key| tuned[key].as_u64().unwrap());
    assert!(batch * accumulation == 8 && [2, 4].contains(&batch), "{tuned}");
    assert_eq!(tuned["zero_optimization"]["stage"], 2);
    assert_eq!([&tuned["autotuning"], &tuned["optimizer"]], [&Value::Null, &file["optimizer"]]);
    // Nothing is overwritten.
    let told = refused(&args("--config ds.json --output tuned.json --ranks 1"), dir.path());
    assert!(told.contains("--output tuned.json: expected a file that does not exist yet"), "{told}");
}

#[test]
fn bad_input_gets_one_message() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("zero.yaml"), "zero_stage: 3\n").unwrap();
    for (name, stage) in [("ds.json", 9), ("stage.json", 2)] {
        let file = json!({ "train_batch_size": 4, "zero_optimization": { "stage": stage } });
        std::fs::write(dir.path().join(name), file.to_string()).unwrap();
    }
    for (options, message) in [
        ("--stage 9", "--stage 9: ZeRO stage 9 does not exist"),
        ("--train-batch-size 7 --ranks 2", "--train-batch-size 7: expected a multiple of --ranks 2"),
        ("--weights nowhere", "nowhere"),
        ("--config ds.json --ranks 2", "zero_optimization.stage: expected a whole number from 0 to 3, got 9"),
        ("--ranks 0", "--ranks 0: expected at least 1"),
        ("--train-batch-size 0", "--train-batch-size 0: expected at least 1"),
        ("--config stage.json --stage 1", "--stage 1: the --config file sets 2"),
        ("--config stage.json --output nowhere/tuned.json", "in an existing folder"),
        ("--trial-timeout 1e20", "expected a number of seconds above 0, and at most"),
        ("--trials 0", "--trials 0: expected at least 1"),
        ("--trial-timeout 0", "--trial-timeout 0: expected a number of seconds above 0"),
        ("--trial-timeout 0.001", "took more than 0.001 s"),
        ("--memory 1MiB", "model tiny does not fit"),
        ("--config zero.yaml", "zero.yaml: expected a DeepSpeed JSON file"),
        ("--output tuned.json", "--config <FILE>"),
    ] {
        let told = refused(&args(options), dir.path());
        assert!(told.contains(message) && told.matches("error: ").count() == 1, "{options}: {told}");
    }
    let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    let launched = Command::new(env!("CARGO_BIN_EXE_zero")).args(args("--ranks 1")).envs(variables).output().unwrap();
    let told = String::from_utf8_lossy(&launched.stderr);
    assert!(launched.status.code() == Some(2) && told.contains("started by a launcher"), "{told}");
}

/// Keys that would write files or print lines of their own, and a warm-up that is longer than a trial, do not disturb trials.
#[test]
fn trials_leave_out_logs_and_schedules() {
    let dir = tempfile::tempdir().unwrap();
    let file = json!({
        "train_batch_size": 2.0, "wall_clock_breakdown": true, "steps_per_print": 1, "zero_optimization": true,
        "tensorboard": { "enabled": true, "output_path": "tb" }, "flops_profiler": { "enabled": true, "output_file": "profile.txt" },
        "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 100 } }
    });
    std::fs::write(dir.path().join("ds.json"), file.to_string()).unwrap();
    let told = ok(&args("--config ds.json --ranks 2 --threads 1 --steps 1000 --trials 3 --json"), dir.path());
    let told: Value = serde_json::from_str(&told).unwrap();
    let seconds = |trial: &Value| trial["seconds_per_step"].as_f64().unwrap();
    assert!(told["trials"].as_array().unwrap().iter().all(|trial| seconds(trial) > 1e-3), "{told}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    // One rank cannot shard over two, but two ranks can.
    let told = ok(
        &args("--train-batch-size 4 --shard-size 2 --stage 3 --threads 1 --warmup 100 --steps 1000 --json"),
        dir.path(),
    );
    assert_eq!(serde_json::from_str::<Value>(&told).unwrap()["best"]["ranks"], 2);
}
