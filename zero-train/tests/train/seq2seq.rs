//! `cargo test -p zero-train --test train seq2seq`
//!
//! Training of a BART to make texts of texts, by the command; and LoRA on it.

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

/// 163 rows whose answer of one to three words is in their text, a vocabulary, and a small model.
fn inputs(dir: &Path) {
    let sentence = |at: usize| -> String {
        let words: Vec<&str> = (0..4 + at % 5).map(|i| WORDS[(at * at + 5 * i + at * i) % 12]).collect();
        words.join(" ")
    };
    let answer = |text: &str| {
        if text.contains("cat") {
            "cat"
        } else if text.contains("dog") {
            "dog ran"
        } else {
            "not here glad"
        }
    };
    let row = |at: usize| {
        let text = sentence(at);
        format!("{}\n", json!({ "label": answer(&text), "text": text }))
    };
    std::fs::write(dir.join("rows.jsonl"), (0..163).map(row).collect::<String>()).unwrap();
    std::fs::write(dir.join("text.txt"), (0..240).map(|at| sentence(at) + "\n").collect::<String>()).unwrap();
    ok(&["tokenizer", "tok", "--data", "text.txt", "--vocab-size", "61"], dir);
    let config = json!({
        "model_type": "bart", "vocab_size": 61, "max_position_embeddings": 24, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 48, "dropout": 0.1, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3,
        "forced_bos_token_id": 2, "forced_eos_token_id": 3
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
}

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common = ["train", "--tokenizer", "tok", "--data", "rows.jsonl", "--seq", "16", "--batch", "3"];
    let rest = ["--threads", "1", "--json", "--out", &out, "--save", &save, "--eval", "20"];
    serde_json::from_str(&ok(&[&common[..], &rest, options].concat(), dir)).unwrap()
}

#[test]
fn stages_and_a_resume_give_the_same_bits_and_adapters_too() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    train(dir.path(), "base", &["--model", "model", "--steps", "3"]);
    ok(&["export", "base/checkpoints", "hf", "--dtype", "fp32"], dir.path());
    let whole: &[&str] = &["--model", "model"];
    let adapter: &[&str] = &["--weights", "hf", "--lora-r", "4", "--lora-dropout", "0.1"];
    for (what, options) in [("whole", whole), ("adapter", adapter)] {
        for ranks in ["1", "2", "3"] {
            let of = |stage: &'static str, steps: &'static str| {
                [options, &["--ranks", ranks, "--stage", stage, "--steps", steps]].concat()
            };
            let first = format!("{what}-{ranks}-0");
            train(dir.path(), &first, &of("0", "6"));
            let expected = trajectory(&dir.path().join(&first));
            assert_eq!(expected.len(), 6);
            for stage in ["1", "2", "3"] {
                let run = format!("{what}-{ranks}-{stage}");
                train(dir.path(), &run, &of(stage, "4"));
                train(dir.path(), &run, &[&of(stage, "6")[..], &["--resume", "auto"]].concat());
                assert_eq!(trajectory(&dir.path().join(&run)), expected, "{what}: {ranks} ranks at stage {stage}");
            }
        }
    }
    // Parameters and optimizer state on a disk.
    let disk =
        ["--ranks", "2", "--stage", "3", "--steps", "6", "--offload", "all", "--offload-to", "disk", "--swap", "."];
    train(dir.path(), "disk", &[adapter, &disk].concat());
    assert_eq!(trajectory(&dir.path().join("disk")), trajectory(&dir.path().join("adapter-2-0")));
}

#[test]
fn it_learns_what_it_is_to_make_and_every_row_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    for ranks in ["1", "3"] {
        let options =
            ["--model", "model", "--ranks", ranks, "--steps", "220", "--lr", "4e-3", "--predictions", "told.jsonl"];
        let summary = train(dir.path(), &format!("run-{ranks}"), &options);
        let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].clone();
        assert_eq!((&told[0][0], &told[1][0]), (&json!("loss"), &json!("accuracy")));
        let lines = std::fs::read_to_string(dir.path().join("told.jsonl")).unwrap();
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.iter().map(|line| line["row"].as_u64().unwrap()).eq(143..163), "{lines:?}");
        let right = lines.iter().filter(|line| line["label"] == line["prediction"]).count() as f64 / 20.0;
        let accuracy = told[1][1].as_f64().unwrap();
        assert!((accuracy - right).abs() < 1e-9 && accuracy >= 0.7, "{accuracy}, {right}: {lines:?}");
    }
    // Exported, it goes on from its weights, and an adapter on it is a small file.
    ok(&["export", "run-3/checkpoints", "hf", "--dtype", "fp32"], dir.path());
    let summary = train(dir.path(), "lora", &["--weights", "hf", "--lora-r", "4", "--steps", "5", "--ranks", "2"]);
    assert!(summary["loss_first"].as_f64().unwrap() < 1.0, "{summary}");
    let told = ok(&["export", "lora/checkpoints", "adapter"], dir.path());
    assert!(told.contains("an adapter with 24 tensors"), "q_proj and v_proj of six attentions: {told}");
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["task_type"], &config["target_modules"]),
        (&json!("SEQ_2_SEQ_LM"), &json!(["q_proj", "v_proj"]))
    );
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let told = |options: &[&str]| {
        let ran = zero(&[&["train", "--tokenizer", "tok"], options].concat(), dir.path());
        let text = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{options:?}: {text}");
        text
    };
    let rows = ["--data", "rows.jsonl"];
    for (options, expected) in [
        (&["--task", "seq2seq", "--model", "tiny"][..], "--model tiny: expected a BART for --task seq2seq"),
        (&["--model", "model", "--seq", "25"], "--seq 25: expected 3 to 24, the positions of the model"),
        (&["--model", "model", "--label-field", "answer"], "its \"answer\" is not there"),
    ] {
        let text = told(&[options, &rows].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    let long = json!({ "text": "cat", "label": "cat ".repeat(30) }).to_string();
    std::fs::write(dir.path().join("long.jsonl"), long).unwrap();
    let text = told(&["--model", "model", "--data", "long.jsonl"]);
    assert!(text.contains("row 0: the text to be made has more tokens than the model's 24 positions"), "{text}");
}
