//! `cargo test -p zero-train --test train classes`
//!
//! Fine-tuning of a BERT to tell classes, by the command.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::assert_stages_agree;
use crate::common::texts::{self, json_lines, ok, refused};

fn inputs(dir: &Path) {
    texts::labelled(dir);
    texts::bert(dir);
}

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let common = ["--task", "text-classification", "--tokenizer", "tok", "--data", "rows.jsonl", "--seq", "16"];
    let unless = |option: &str, or: &'static [&'static str]| if options.contains(&option) { &[][..] } else { or };
    let batch = unless("--batch", &["--batch", "3"]);
    let weights = unless("--weights", &["--weights", "bert-hf"]);
    let label = unless("--label-field", &["--label-field", "class"]);
    texts::train(dir, run, &[&common, &["--eval", "20"], batch, weights, label, options])
}

#[test]
fn stages_and_a_resume_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    assert_stages_agree(dir.path(), "", ["5", "8"], |run, options| train(dir.path(), run, options));
}

/// Accuracy and F1 of the last evaluation, and of the predictions, counted here.
fn measured(summary: &Value, predictions: &Path) -> ([f64; 2], [f64; 2]) {
    let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].as_array().unwrap().clone();
    let names: Vec<&str> = told.iter().map(|pair| pair[0].as_str().unwrap()).collect();
    assert_eq!(names, ["loss", "accuracy", "f1"]);
    let lines = json_lines(predictions);
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
        refused(&[&["train", "--task", "text-classification", "--tokenizer", "tok"], options].concat(), dir.path())
    };
    let rows = ["--data", "rows.jsonl"];
    for (options, expected) in [
        (&["--model", "tiny"][..], "--model tiny: expected a BERT for --task text-classification"),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--seq", "3"],
            "--seq 3: expected 4 to 24, the positions of the model",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "kind"],
            "its \"kind\" is not there: expected a text or a whole number; name another key with --label-field",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--text-field", "n"],
            "its \"n\" is a number: expected a text; name another key with --text-field",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--predictions", "p.jsonl"],
            "expected rows that are held out: --eval ROWS",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--eval", "5", "--predictions", "no/p.jsonl"],
            "expected a file in a folder that is there",
        ),
    ] {
        let text = told(&[options, &rows].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    assert!(told(&["--weights", "bert-hf"]).contains("--data is missing"));
    assert!(
        told(&["--weights", "bert-hf", "--data", "text.txt"])
            .contains("is text: expected .jsonl, .json, .csv or .parquet")
    );
    // Classes of another model.
    train(dir.path(), "run", &["--steps", "1"]);
    ok(&["export", "run/checkpoints", "classes"], dir.path());
    std::fs::write(dir.path().join("other.jsonl"), "{\"text\": \"a cat\", \"label\": \"birds\"}\n").unwrap();
    let text = told(&["--weights", "classes", "--data", "other.jsonl"]);
    assert!(
        text.contains("has the label \"birds\", and the model's classes are [\"cats\", \"dogs\", \"none\"]"),
        "{text}"
    );
}
