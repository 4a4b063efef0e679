//! `cargo test -p zero-train --test train classes`
//!
//! Fine-tuning of a BERT to tell classes, by the command.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::common::trajectory;

fn zero(args: &[&str], dir: &Path) -> Output {
    Command::cargo_bin("zero").unwrap().args(args).current_dir(dir).output().unwrap()
}

fn ok(args: &[&str], dir: &Path) -> String {
    let ran = zero(args, dir);
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

const WORDS: [&str; 12] = ["cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "was", "glad", "not", "here"];

/// 163 rows whose class is in their words, a vocabulary, and a small BERT that was pre-trained for a few steps: `hf`.
fn inputs(dir: &Path) {
    let sentence = |at: usize| -> String {
        let words: Vec<&str> = (0..4 + at % 5).map(|i| WORDS[(at * at + 5 * i + at * i) % 12]).collect();
        words.join(" ")
    };
    let class = |text: &str| {
        if text.contains("cat") {
            "cats"
        } else if text.contains("dog") {
            "dogs"
        } else {
            "none"
        }
    };
    let row = |at: usize| {
        let text = sentence(at);
        format!("{}\n", json!({ "label": class(&text), "text": text, "other": sentence(at + 7), "n": at % 2 }))
    };
    std::fs::write(dir.join("rows.jsonl"), (0..163).map(row).collect::<String>()).unwrap();
    let text: String = (0..240).map(|at| sentence(at) + if at % 6 == 5 { "\n\n" } else { "\n" }).collect();
    std::fs::write(dir.join("text.txt"), text).unwrap();
    ok(&["tokenizer", "tok", "--data", "text.txt", "--vocab-size", "61"], dir);
    let config = json!({
        "model_type": "bert", "vocab_size": 61, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    let pretrain = ["train", "--model", "model", "--tokenizer", "tok", "--data", "text.txt", "--seq", "24"];
    ok(&[&pretrain[..], &["--threads", "1", "--steps", "3", "--save", "base"]].concat(), dir);
    ok(&["export", "base", "hf", "--dtype", "fp32"], dir);
}

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common =
        ["train", "--task", "text-classification", "--tokenizer", "tok", "--data", "rows.jsonl", "--seq", "16"];
    let rest = ["--threads", "1", "--json", "--out", &out, "--save", &save, "--eval", "20"];
    let batch: &[&str] = if options.contains(&"--batch") { &[] } else { &["--batch", "3"] };
    let weights: &[&str] = if options.contains(&"--weights") { &[] } else { &["--weights", "hf"] };
    serde_json::from_str(&ok(&[&common[..], &rest, batch, weights, options].concat(), dir)).unwrap()
}

#[test]
fn stages_and_a_resume_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    for ranks in ["1", "2", "3"] {
        let whole = format!("{ranks}-0");
        train(dir.path(), &whole, &["--ranks", ranks, "--stage", "0", "--steps", "8"]);
        let expected = trajectory(&dir.path().join(&whole));
        assert_eq!(expected.len(), 8);
        for stage in ["1", "2", "3"] {
            let run = format!("{ranks}-{stage}");
            train(dir.path(), &run, &["--ranks", ranks, "--stage", stage, "--steps", "5"]);
            train(dir.path(), &run, &["--ranks", ranks, "--stage", stage, "--steps", "8", "--resume", "auto"]);
            assert_eq!(trajectory(&dir.path().join(&run)), expected, "{ranks} ranks at stage {stage}");
        }
    }
}

/// Accuracy and F1 of the last evaluation, and of the predictions, counted here.
fn measured(summary: &Value, predictions: &Path) -> ([f64; 2], [f64; 2]) {
    let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].as_array().unwrap().clone();
    let names: Vec<&str> = told.iter().map(|pair| pair[0].as_str().unwrap()).collect();
    assert_eq!(names, ["loss", "accuracy", "f1"]);
    let lines = std::fs::read_to_string(predictions).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rows: Vec<u64> = lines.iter().map(|line| line["row"].as_u64().unwrap()).collect();
    assert!(rows.iter().copied().eq(143..163), "every row that is held out, once, in order: {rows:?}");
    let count = |wanted: &dyn Fn(&Value) -> bool| lines.iter().filter(|line| wanted(line)).count() as f64;
    let accuracy = count(&|line| line["label"] == line["prediction"]) / 20.0;
    let classes: BTreeSet<String> = ["cats", "dogs", "none"].map(String::from).into();
    let f1 = classes.iter().map(|class| {
        let hits = count(&|line| line["label"] == **class && line["prediction"] == **class);
        let all = count(&|line| line["label"] == **class) + count(&|line| line["prediction"] == **class);
        if all == 0.0 { 0.0 } else { 2.0 * hits / all }
    });
    let f1 = f1.sum::<f64>() / 3.0;
    (["1", "2"].map(|at| told[at.parse::<usize>().unwrap()][1].as_f64().unwrap()), [accuracy, f1])
}

#[test]
fn it_learns_and_its_figures_count_every_row_once() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let mut all = Vec::new();
    for ranks in ["1", "3"] {
        let options =
            ["--ranks", ranks, "--stage", "3", "--steps", "150", "--lr", "4e-3", "--predictions", "told.jsonl"];
        let batch: &[&str] = if ranks == "1" { &["--batch", "9"] } else { &[] };
        let summary = train(dir.path(), &format!("run-{ranks}"), &[&options[..], batch].concat());
        let (told, counted) = measured(&summary, &dir.path().join("told.jsonl"));
        for (told, counted) in told.into_iter().zip(counted) {
            assert!((told - counted).abs() < 1e-9, "{ranks} ranks: {told}, {counted}");
        }
        assert!(told[0] >= 0.7, "accuracy {}", told[0]);
        all.push(summary["loss_first"].as_f64().unwrap());
    }
    // As transformers have it, and it goes on from there.
    ok(&["export", "run-3/checkpoints", "classes", "--dtype", "fp32"], dir.path());
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("classes/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({ "0": "cats", "1": "dogs", "2": "none" }));
    let again = train(dir.path(), "again", &["--weights", "classes", "--steps", "1"]);
    assert!(again["loss_first"].as_f64().unwrap() < 0.7 * all[0], "{again}");
    // An adapter with a fresh head.
    let lora = ["--lora-r", "4", "--steps", "60", "--lr", "1e-2", "--ranks", "2"];
    let summary = train(dir.path(), "lora", &lora);
    let [first, last] = ["loss_first", "loss_last"].map(|key| summary[key].as_f64().unwrap());
    assert!(last < first, "{first} to {last}");
    let told = ok(&["export", "lora/checkpoints", "adapter"], dir.path());
    assert!(told.contains("an adapter with 12 tensors"), "8 of the adapter, 4 of pooler and classifier: {told}");
}

#[test]
fn two_texts_and_numbers_as_labels() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let pairs = ["--second-field", "other", "--label-field", "n", "--steps", "2", "--predictions", "told.jsonl"];
    let summary = train(dir.path(), "pairs", &pairs);
    assert_eq!(summary["epochs"][0]["eval"].as_array().unwrap().len(), 3);
    let told = std::fs::read_to_string(dir.path().join("told.jsonl")).unwrap();
    assert!(told.starts_with("{\"label\":\"1\",\"prediction\":") || told.contains("\"label\":\"1\""), "{told}");
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let told = |options: &[&str]| {
        let ran =
            zero(&[&["train", "--task", "text-classification", "--tokenizer", "tok"], options].concat(), dir.path());
        let text = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{options:?}: {text}");
        text
    };
    let rows = ["--data", "rows.jsonl"];
    for (options, expected) in [
        (&["--model", "tiny"][..], "--model tiny: expected a BERT for --task text-classification"),
        (&["--weights", "hf", "--seq", "3"], "--seq 3: expected 4 to 24, the positions of the model"),
        (
            &["--weights", "hf", "--label-field", "class"],
            "its \"class\" is not there: expected a text or a whole number; name another key with --label-field",
        ),
        (
            &["--weights", "hf", "--text-field", "n"],
            "its \"n\" is a number: expected a text; name another key with --text-field",
        ),
        (&["--weights", "hf", "--predictions", "p.jsonl"], "expected rows that are held out: --eval ROWS"),
        (
            &["--weights", "hf", "--eval", "5", "--predictions", "no/p.jsonl"],
            "expected a file in a folder that is there",
        ),
    ] {
        let text = told(&[options, &rows].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    assert!(told(&["--weights", "hf"]).contains("--data is missing"));
    assert!(told(&["--weights", "hf", "--data", "text.txt"]).contains("is text: expected .jsonl or .parquet"));
    // Classes of another model.
    ok(
        &[
            "train",
            "--task",
            "text-classification",
            "--tokenizer",
            "tok",
            "--weights",
            "hf",
            "--data",
            "rows.jsonl",
            "--steps",
            "1",
            "--save",
            "run",
        ],
        dir.path(),
    );
    ok(&["export", "run", "classes"], dir.path());
    std::fs::write(dir.path().join("other.jsonl"), "{\"text\": \"a cat\", \"label\": \"birds\"}\n").unwrap();
    let text = told(&["--weights", "classes", "--data", "other.jsonl"]);
    assert!(
        text.contains("has the label \"birds\", and the model's classes are [\"cats\", \"dogs\", \"none\"]"),
        "{text}"
    );
}
