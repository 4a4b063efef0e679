//! `cargo test -p zero-train-cli --test train reported`
//!
//! Issues that users of DeepSpeed, transformers and others reported: settings without effect, non-finite rows,
//! unwritable log files.

use std::path::Path;
use std::process::{Command, Stdio};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{FloatDType, Tensor, TensorData};
use serde_json::{Value, json};
use zero_core::checkpoint::Checkpoint;
use zero_core::random::Draws;
use zero_train::TrainError;
use zero_train::trainer::{FusedBackend, Hyperparameters, Options, Result, Rows, Summary, Task, Trainer};

use crate::common::texts::{json_lines, ok, refused, zero};

const MICRO: &str = r#""train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0"#;

fn dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("book.txt"), "It was the best of times, it was the worst. ".repeat(60)).unwrap();
    dir
}

/// A configuration file with these entries.
fn file(dir: &Path, entries: &str) {
    std::fs::write(dir.join("ds.json"), format!("{{{MICRO}, {entries}}}")).unwrap();
}

const TRAIN: [&str; 8] = ["train", "--model", "tiny", "--data", "book.txt", "--seq", "16", "--threads"];

fn train<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&TRAIN[..], &["1", "--json", "--out", "run"], options].concat()
}

fn column(dir: &Path, name: &str) -> Vec<f64> {
    json_lines(&dir.join("run/metrics.jsonl")).iter().map(|step| step[name].as_f64().unwrap()).collect()
}

/// A rate given together with a schedule that has its own (DeepSpeed#7303, transformers#15508).
#[test]
fn the_rate_that_is_asked_for_is_trained_with_or_refused() {
    let dir = dir();
    let dir = dir.path();
    let run = ["--config", "ds.json", "--steps", "6", "--warmup", "2"];
    let asked = ["--lr", "5e-7"];
    let check = ["check", "ds.json", "--model", "tiny", "--ranks", "2", "--steps", "6", "--warmup", "2"];
    // Schedules that take the optimizer's.
    for kind in ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] {
        for rate in ["", r#""warmup_max_lr": "auto", "#] {
            let total = if kind == "WarmupLR" { "" } else { r#""total_num_steps": "auto", "# };
            let rate = if kind == "WarmupCosineLR" { "" } else { rate };
            for (lr, given) in [("\"auto\"", &asked[..]), ("5e-7", &[])] {
                file(
                    dir,
                    &format!(
                        r#""optimizer": {{"type": "AdamW", "params": {{"lr": {lr}}}}},
                        "scheduler": {{"type": "{kind}", "params": {{{rate}{total}"warmup_num_steps": "auto"}}}}"#
                    ),
                );
                ok(&train(&[&run[..], given].concat()), dir);
                let top = column(dir, "lr").into_iter().fold(0.0, f64::max);
                assert!((top - 5e-7).abs() < 1e-12, "{kind} {rate} {lr}: {top}");
                ok(&[&check[..], given].concat(), dir);
            }
        }
    }
    // Those that have their own refuse another.
    for scheduler in [
        r#"{"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2}}"#,
        r#"{"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3, "total_num_steps": 6, "warmup_num_steps": 2}}"#,
        r#"{"type": "OneCycle", "params": {"cycle_max_lr": 1e-3, "cycle_min_lr": 0, "cycle_first_step_size": 3, "cycle_momentum": false}}"#,
        r#"{"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3}}"#,
    ] {
        file(
            dir,
            &format!(r#""optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}, "scheduler": {scheduler}"#),
        );
        let steps = ["--config", "ds.json", "--steps", "6"];
        let told = refused(&train(&[&steps[..], &asked].concat()), dir);
        assert!(told.contains("--lr 0.0000005: ds.json has 0.001"), "{told}");
        let told = refused(&["check", "ds.json", "--model", "tiny", "--steps", "6", "--lr", "5e-7"], dir);
        assert!(told.contains("ds.json has 0.001"), "{told}");
        // In one file, the one that has no effect is told.
        file(dir, &format!(r#""optimizer": {{"type": "AdamW", "params": {{"lr": 5e-7}}}}, "scheduler": {scheduler}"#));
        let told = zero(&["check", "ds.json", "--model", "tiny", "--steps", "6"], dir);
        let told = String::from_utf8_lossy(&[told.stdout, told.stderr].concat()).into_owned();
        assert!(told.contains("the optimizer's lr, 0.0000005, has no effect"), "{told}");
    }
}

/// One meaning of `--warmup N`, that of transformers (DeepSpeed PR 5287, transformers#34754).
#[test]
fn a_warmup_has_the_same_rates_with_every_schedule() {
    let dir = dir();
    let dir = dir.path();
    for (steps, warmup) in [("7", 4), ("6", 1), ("5", 0)] {
        for schedule in ["constant", "linear", "cosine"] {
            let warmup_steps = warmup.to_string();
            let options = ["--steps", steps, "--lr", "1", "--schedule", schedule, "--warmup", &warmup_steps];
            // The rates alone are looked at.
            ok(&train(&[&options[..], &["--clip", "1e-9"]].concat()), dir);
            let lr = column(dir, "lr");
            let rising: Vec<f64> = (0..=warmup).map(|step| step as f64 / warmup.max(1) as f64).collect();
            let expected = if warmup == 0 { vec![1.0] } else { rising };
            assert_eq!(lr[..expected.len()], expected, "{schedule} {warmup}: {lr:?}");
        }
    }
}

/// A launcher of one process means one rank (bigcode-project/starcoder#41).
#[test]
fn a_process_that_was_started_alone_has_one_rank() {
    let dir = dir();
    let dir = dir.path();
    file(dir, r#""zero_optimization": {"stage": 2}"#);
    let ranks = |config: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.args(TRAIN).args(["1", "--steps", "1", "--dry-run"]).args(config).current_dir(dir);
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29555")];
        let ran = command.envs(alone).output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
        let plan = String::from_utf8(ran.stdout).unwrap();
        plan.lines().find_map(|line| line.trim().strip_prefix("ranks ")).unwrap().trim().chars().next().unwrap()
    };
    assert_eq!((ranks(&[]), ranks(&["--config", "ds.json"])), ('1', '1'));
    let launched = ["launch", "--ranks", "1", "--sockets", "--", "train", "--config", "ds.json", "--model", "tiny"];
    let plan = ok(&[&launched[..], &["--data", "book.txt", "--seq", "16", "--steps", "1", "--dry-run"]].concat(), dir);
    assert!(plan.contains("1 at stage 2"), "{plan}");
    // A file that says a number is believed.
    std::fs::write(
        dir.join("a.yaml"),
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n",
    )
    .unwrap();
    assert_eq!(ranks(&["--config", "a.yaml"]), '2');
}

/// Loss-scale settings come from the command line, also after a resume (LLaMA-Factory#315, DeepSpeed#4021).
#[test]
fn a_loss_scale_that_was_changed_before_a_resume_has_an_effect() {
    let dir = dir();
    let dir = dir.path();
    let run = |fp16: &str, steps: &str| {
        file(dir, &format!(r#""fp16": {{"enabled": true{fp16}}}"#));
        let options = ["--config", "ds.json", "--ranks", "1", "--save", "ck", "--resume", "auto", "--steps", steps];
        ok(&train(&options), dir);
        column(dir, "loss_scale").pop().unwrap()
    };
    assert_eq!(run(r#", "initial_scale_power": 10, "loss_scale_window": 100"#, "3"), 1024.0);
    // The scale is the checkpoint's, and the window of the file: with 2 it doubles at each second update.
    let doubled = run(r#", "loss_scale_window": 2"#, "6");
    assert!(doubled >= 2048.0, "{doubled}");
    assert_eq!(run(r#", "loss_scale": 8"#, "8"), 8.0);
    assert_eq!(run("", "10"), 65536.0);
}

/// A file that `check` accepts can train, and both reject one that cannot (DeepSpeed#2174, #7852, #7856).
#[test]
fn check_and_train_say_the_same() {
    let dir = dir();
    let dir = dir.path();
    let both = |entries: &str| {
        file(dir, entries);
        let check = zero(&["check", "ds.json", "--model", "tiny", "--ranks", "2"], dir);
        let train = zero(&train(&["--config", "ds.json", "--ranks", "2", "--steps", "1"]), dir);
        let of = |ran: std::process::Output| {
            (ran.status.code(), String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap())
        };
        let (check, train) = (of(check), of(train));
        assert_eq!(check.0, train.0, "{entries}: {check:?} {train:?}");
        (check.0, check.1, train.1)
    };
    let ok = both(r#""zero_optimization": {"stage": 0, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}"#);
    assert!(ok.0 == Some(0) && ok.1.contains("has no effect at stage 0"), "{ok:?}");
    for (entries, told) in [
        (r#""fp16": {"enabled": true, "initial_scale_power": 4, "min_loss_scale": 100}"#, "fp16.min_loss_scale is 100"),
        (r#""fp16": {"enabled": true, "loss_scale": 1e300}"#, "fp16.loss_scale"),
        (r#""fp16": {"enabled": true, "loss_scale": 1e39}"#, "fp16.loss_scale"),
        (r#""zero_optimization": {"stage": 2, "reduce_bucket_size": 1}"#, "bucket"),
    ] {
        let (code, check, train) = both(entries);
        assert!(code == Some(2) && check.contains(told) && train.contains(told), "{entries}: {check}\n{train}");
    }
    let told = refused(&["check", "infinite.json"], {
        std::fs::write(dir.join("infinite.json"), r#"{"steps_per_print": Infinity}"#).unwrap();
        dir
    });
    assert!(told.contains("JSON has no Infinity"), "{told}");
}

/// Keys from walkthroughs that can be ignored without loss are accepted with a message, and so are lists of identical groups.
#[test]
fn keys_of_walkthroughs_are_accepted() {
    let dir = dir();
    let dir = dir.path();
    let told = |entries: &str| {
        file(dir, entries);
        let ran = zero(&["check", "ds.json", "--model", "tiny", "--ranks", "2"], dir);
        let told = String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap();
        assert!(ran.status.success(), "{entries}: {told}");
        told
    };
    let leaves = told(
        r#""zero_optimization": {"stage": 3, "stage3_allgather_sequential": true, "leaf_module": {"classes": ["A"]}}"#,
    );
    assert!(leaves.matches("not needed").count() == 2 && !leaves.contains("not supported yet"), "{leaves}");
    assert!(told(r#""managed_gradient_accumulation": false"#).contains("step_partial"));
    let summed = told(r#""gradient_allreduce_op": "sum""#);
    assert!(summed.contains("added over the ranks"), "{summed}");
    let cycle = |rates: &str| {
        format!(
            r#""optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, "scheduler": {{"type": "OneCycle", "params":
            {{"cycle_min_lr": {rates}, "cycle_max_lr": [1e-3, 1e-3], "cycle_max_mom": [0.95], "cycle_first_step_size": 10}}}}"#
        )
    };
    assert!(told(&cycle("[1e-4, 1e-4]")).contains("one cycle from 0.0001 to 0.001"));
    file(dir, &cycle("[1e-4, 2e-4]"));
    let told = refused(&["check", "ds.json"], dir);
    assert!(told.contains("all parameter groups share one schedule"), "{told}");
}

/// A fixed scale under which every update overflows trains nothing (DeepSpeed#1958, #697).
#[test]
fn a_run_that_never_updates_is_no_success() {
    let dir = dir();
    let dir = dir.path();
    file(dir, r#""fp16": {"enabled": true, "loss_scale": 1e30}"#);
    let told = refused(&train(&["--config", "ds.json", "--ranks", "1", "--steps", "4"]), dir);
    assert!(told.contains("all 4 steps were skipped"), "{told}");
    // Not without end: and what there is has been saved.
    let told = refused(&train(&["--config", "ds.json", "--ranks", "1", "--steps", "400", "--save", "ck"]), dir);
    assert!(told.contains("the last 20 updates in a row were skipped"), "{told}");
    assert!(dir.join("ck/step-00000020").is_dir());
}

/// A failed log write is reported once, and training continues (kohya-ss/sd-scripts#1160, ultralytics#3414).
#[test]
fn a_log_that_cannot_be_written_does_not_end_a_run() {
    let dir = dir();
    let dir = dir.path();
    let limited = |ignored: bool| {
        let trap = if ignored { "trap '' XFSZ; " } else { "" };
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{trap}ulimit -f 32; exec \"$0\" \"$@\"")]).arg(env!("CARGO_BIN_EXE_zero"));
        shell.args(train(&["--ranks", "1", "--steps", "150", "--batch", "1"])).current_dir(dir);
        shell.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap()
    };
    for ignored in [false, true] {
        let ran = limited(ignored);
        let told = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{told}");
        assert_eq!(told.matches("metrics.jsonl").count(), 1, "{told}");
        assert!(told.contains("training continues") && told.contains("step 150/150"), "{told}");
        // Whole lines.
        let steps = json_lines(&dir.join("run/metrics.jsonl"));
        assert!(steps.len() > 3 && steps.len() < 150, "{}", steps.len());
    }
}

/// Regression on rows of two numbers; the loss of some rows is multiplied by a non-finite number.
struct Spoilt {
    rows: usize,
    spoilt: Vec<usize>,
    by: f32,
    /// Rows to use instead of the others.
    only: Option<Vec<usize>>,
}

#[derive(Module, Debug)]
struct Line<B: burn::tensor::backend::Backend> {
    linear: Linear<B>,
}

impl Spoilt {
    fn row(&self, row: usize) -> usize {
        self.only.as_ref().map_or(row, |only| only[row])
    }
}

impl Task for Spoilt {
    type Model<B: FusedBackend> = Line<B>;

    fn rows(&self) -> usize {
        self.only.as_ref().map_or(self.rows, Vec::len)
    }

    fn shuffle(&self) -> bool {
        false
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Line<B>> {
        Ok(Line { linear: LinearConfig::new(2, 3).init(device) })
    }

    fn loss<B: FusedBackend>(&self, model: &Line<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let rows: Vec<usize> = rows.iter().map(|&row| self.row(row)).collect();
        let values: Vec<f32> = rows.iter().flat_map(|&row| [row as f32 / 8.0, 1.0 - row as f32 / 16.0]).collect();
        let factor = |row: &usize| if self.spoilt.contains(row) { self.by } else { 1.0 };
        let factors: Vec<f32> = rows.iter().map(factor).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [rows.len(), 2]), device);
        let x = x.cast(model.linear.weight.val().dtype());
        let squares = (model.linear.forward(x) - 0.5).powi_scalar(2).mean_dim(1).cast(FloatDType::F32);
        Ok((squares * Tensor::from_data(TensorData::new(factors, [rows.len(), 1]), device)).mean())
    }
}

fn values(saved: &Checkpoint, (name, elements): (&str, usize)) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&saved.read(&format!("model.{name}"), 0..elements).unwrap())
}

fn spoilt_run(dir: &Path, task: &Spoilt, ranks: usize, dtype: Option<&str>) -> Result<(Summary, Vec<Value>, Vec<f32>)> {
    let precision = match dtype {
        Some("bf16") => json!({ "bf16": { "enabled": true } }),
        Some("fp16") => json!({ "fp16": { "enabled": true, "initial_scale_power": 8 } }),
        _ => json!({}),
    };
    let mut file = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "optimizer": { "type": "SGD", "params": { "lr": 0.05 } }, "zero_optimization": { "stage": ranks },
    });
    file.as_object_mut().unwrap().extend(precision.as_object().unwrap().clone());
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("ds.json"), file.to_string()).unwrap();
    let options = Options {
        ranks: Some(ranks),
        steps: task.rows() / ranks,
        threads: Some(1),
        json: true,
        save: Some(dir.join("ck")),
        out: Some(dir.join("out")),
        config: Some(dir.join("ds.json")),
        hyper: Hyperparameters::default(),
        ..Options::default()
    };
    let summary = Trainer::new(&options).run(task)?.unwrap();
    let events = json_lines(&dir.join("out/events.jsonl"));
    let saved = Checkpoint::open(&dir.join(format!("ck/step-{:08}", options.steps))).unwrap();
    let weights =
        [("linear.weight", 6), ("linear.bias", 3)].into_iter().flat_map(|name| values(&saved, name)).collect();
    Ok((summary, events, weights))
}

/// One row with a non-finite loss costs one update, and the row is reported (DeepSpeed#1496, #5879).
#[test]
fn fifty_runs_with_a_row_that_is_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let mut draws = Draws::new(4);
    for run in 0..50 {
        let (ranks, rows) = (1 + draws.below(3), 12);
        let (bad, by) = (draws.below(rows), [f32::NAN, f32::INFINITY][draws.below(2)]);
        let dtype = [None, None, Some("bf16"), Some("fp16")][draws.below(4)];
        let at = |name: &str| dir.path().join(format!("{run}-{name}"));
        let task = Spoilt { rows, spoilt: vec![bad], by, only: None };
        let (summary, events, weights) = spoilt_run(&at("with"), &task, ranks, dtype).unwrap();
        assert_eq!((summary.skipped, summary.steps), (1, rows / ranks));
        let skips: Vec<&Value> = events.iter().filter(|event| event["kind"] == "skip").collect();
        let told = format!("the loss of row {bad} is not finite, update skipped on all ranks (1 so far)");
        assert!(skips.len() == 1 && skips[0]["text"].as_str().unwrap().contains(&told), "{skips:?}, {told}");
        // Plain gradient descent without these rows, those of the other ranks of the step too, has the same weights.
        let step = bad / ranks;
        let others = (0..rows).filter(|row| row / ranks != step).collect();
        let without = Spoilt { rows, spoilt: Vec::new(), by: 1.0, only: Some(others) };
        let (_, _, expected) = spoilt_run(&at("without"), &without, ranks, dtype).unwrap();
        let worst = weights.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // In fp16 the smaller scale after it rounds otherwise.
        let bound = if dtype == Some("fp16") { 1e-3 } else { 0.0 };
        assert!(worst <= bound && weights.len() == 9, "run {run}, {dtype:?}: {weights:?} {expected:?}");
    }
}

#[test]
fn rows_that_are_never_finite_end_a_run_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let task = Spoilt { rows: 40, spoilt: (3..40).collect(), by: f32::NAN, only: None };
    let error = spoilt_run(dir.path(), &task, 1, None).unwrap_err();
    assert!(matches!(error, TrainError::Diverged(_)) && error.exit_code() == 2, "{error}");
    assert!(error.to_string().contains("the last 20 updates in a row were skipped"), "{error}");
    // It can go on behind them.
    let saved = Checkpoint::open(&dir.path().join("ck/step-00000023")).unwrap();
    assert!(values(&saved, ("linear.weight", 6)).iter().all(|weight| weight.is_finite()));
}

#[test]
fn a_step_is_profiled_and_collectives_are_summed() {
    let dir = dir();
    let profiled = r#""zero_optimization": {"stage": 3}, "flops_profiler": {"enabled": true, "profile_step": 2}, "comms_logger": {"enabled": true}"#;
    file(dir.path(), profiled);
    let ran = zero(&train(&["--steps", "3", "--config", "ds.json"]), dir.path());
    let told = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success() && !told.contains("warning: flops") && !told.contains("warning: comms"), "{told}");
    assert_eq!(told.matches("profile of step ").count(), 1);
    assert!(
        told.contains(
            "profile of step 2, 2 ranks\n  parameters                  3.32 M\n  rows                           2\n"
        ),
        "{told}"
    );
    // All gathers and reductions: the large embedding is gathered once per step, and its gradient reduced.
    let row = |op: &str| told.lines().find(|line| line.trim_start().starts_with(op)).map(str::to_string);
    let gathers = row("all-gather (one-sided)").unwrap_or_default();
    let calls: usize = gathers.split_whitespace().nth(2).unwrap().parse().unwrap();
    assert!(calls >= 3 && row("reduce_scatter").is_some() && row("all_reduce").is_some(), "{told}");

    // Only these operations, and the profile in a file.
    let some = r#""zero_optimization": {"stage": 3}, "flops_profiler": {"enabled": true, "output_file": "profile.txt"}, "comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["all_reduce"]}"#;
    file(dir.path(), some);
    let ran = zero(&train(&["--steps", "2", "--config", "ds.json"]), dir.path());
    let told = String::from_utf8(ran.stderr).unwrap();
    assert!(!told.contains("profile of") && !told.contains("reduce_scatter") && told.contains("all_reduce"), "{told}");
    assert!(
        std::fs::read_to_string(dir.path().join("profile.txt")).unwrap().starts_with("profile of step 1, 2 ranks\n")
    );
}

#[test]
fn a_large_step_is_compared_with_the_speed_of_light() {
    let dir = dir();
    let large = [
        "train", "--model", "mini", "--data", "book.txt", "--seq", "128", "--batch", "8", "--ranks", "1", "--steps",
        "1",
    ];
    let ran = zero(&[&large[..], &["--json", "--out", "run"]].concat(), dir.path());
    let told = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success() && told.contains(" % of the speed of light (products), ETA"), "{told}");
    let summary: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let of = |key: &str| summary["speed_of_light"][key].as_f64().unwrap();
    assert!(of("products") > of("update") && of("update") > 0.0 && of("disk") == 0.0, "{summary}");
    let share = summary["speed_of_light_share"].as_f64().unwrap();
    assert!(share > 0.0 && share.is_finite(), "{share}");
    let page = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(page.contains("\"fastest\":["), "the page has the rate");
    // A small step is not worth a probe.
    let small: Value = serde_json::from_str(&ok(&train(&["--steps", "1"]), dir.path())).unwrap();
    assert_eq!(small["speed_of_light"], Value::Null);
}
