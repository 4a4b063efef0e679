//! `cargo test -p zero-train-cli --test train averages`
//!
//! Moving averages of the weights, through the command.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::{self, json_lines, ok, refused};

const TASK: [&str; 12] = [
    "--task",
    "text-classification",
    "--tokenizer",
    "tok",
    "--data",
    "rows.jsonl",
    "--label-field",
    "class",
    "--seq",
    "16",
    "--eval",
    "20",
];

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    texts::train(dir, run, &[&TASK, options])
}

/// Returns loss and accuracy of the last evaluation.
fn evaluated(summary: &Value) -> [f64; 2] {
    let told = &summary["epochs"].as_array().unwrap().last().unwrap()["eval"];
    [0, 1].map(|at| told[at][1].as_f64().unwrap())
}

fn losses(dir: &Path, run: &str) -> Vec<f64> {
    let lines = json_lines(&dir.join(run).join("out/metrics.jsonl"));
    lines.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

#[test]
fn averages_are_evaluated_predicted_saved_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    texts::labelled(dir);
    texts::bert(dir);
    let file = json!({
        "train_micro_batch_size_per_gpu": 3, "zero_optimization": { "stage": 3, "stage3_gather_16bit_weights_on_model_save": true },
        "optimizer": { "type": "AdamW", "params": { "lr": 4e-3 } }
    });
    std::fs::write(dir.join("ds.json"), file.to_string()).unwrap();
    let common = ["--weights", "bert-hf", "--ranks", "2", "--config", "ds.json", "--steps", "24"];
    let run = |name: &str, options: &[&str]| train(dir, name, &[&common[..], options].concat());
    let averaged = run("averaged", &["--ema-decay", "0.9", "--eval-ema", "--predictions", "averaged.jsonl"]);
    let trained = run("trained", &["--ema-decay", "0.9", "--predictions", "trained.jsonl"]);
    let plain = run("plain", &[]);
    assert_eq!(losses(dir, "averaged"), losses(dir, "plain"), "averages change nothing of the training");
    assert_eq!(evaluated(&trained), evaluated(&plain), "without --eval-ema weights are evaluated");
    assert!(evaluated(&averaged) != evaluated(&plain));
    // As a model of these weights, which no step changes.
    ok(&["export", "averaged/checkpoints", "ema", "--ema", "--dtype", "fp32"], dir);
    ok(&["export", "averaged/checkpoints", "weights", "--dtype", "fp32"], dir);
    ok(&["export", "plain/checkpoints", "plain-hf", "--dtype", "fp32"], dir);
    let bytes = |name: &str| std::fs::read(dir.join(name).join("model.safetensors")).unwrap();
    assert!(bytes("weights") == bytes("plain-hf") && bytes("weights") != bytes("ema"));
    let still = [
        "--weights",
        "ema",
        "--ranks",
        "1",
        "--steps",
        "1",
        "--lr",
        "0",
        "--batch",
        "3",
        "--predictions",
        "again.jsonl",
    ];
    let again = train(dir, "again", &still);
    for (a, b) in evaluated(&averaged).into_iter().zip(evaluated(&again)) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }
    let predicted = |name: &str| -> Vec<Value> {
        json_lines(&dir.join(name)).iter().map(|line| line["prediction"].clone()).collect()
    };
    assert_eq!(predicted("averaged.jsonl"), predicted("again.jsonl"));
    // The 16-bit model at the end is what is evaluated.
    ok(&["export", "averaged/checkpoints", "ema-16", "--ema"], dir);
    assert!(bytes("averaged/out/16bit-model-00000024") == bytes("ema-16"));
    let told = refused(&["export", "plain/checkpoints", "none", "--ema"], dir);
    assert!(told.contains("it holds no moving averages: train with --ema-decay, or omit --ema"), "{told}");
    assert!(!dir.join("none").exists());
}

#[test]
fn what_makes_no_average_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text.txt"), "The cat sat on the mat.\n".repeat(40)).unwrap();
    let model = ["train", "--model", "tiny", "--data", "text.txt", "--seq", "16"];
    let train = |options: &[&str]| refused(&[&model[..], options].concat(), dir.path());
    for decay in ["0", "1", "1.5", "NaN"] {
        let told = train(&["--ema-decay", decay]);
        assert!(told.contains("expected a number between 0 and 1, such as 0.999"), "{told}");
    }
    let told = train(&["--eval-ema"]);
    assert!(told.contains("--ema-decay"), "{told}");
}
