//! `cargo test -p zero-train-cli --test train seq2seq`
//!
//! Sequence-to-sequence training of a BART and a T5, through the command; and LoRA on them.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::{self, json_lines, ok, refused, zero};
use crate::common::{assert_stages_agree, trajectory};

fn inputs(dir: &Path) {
    texts::labelled(dir);
    texts::bart(dir);
    texts::t5(dir);
}

const DATA: [&str; 8] = ["--tokenizer", "tok", "--data", "rows.jsonl", "--label-field", "answer", "--seq", "16"];

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    texts::train(dir, run, &[&DATA, &["--batch", "3", "--eval", "20"], options])
}

#[test]
fn stages_and_a_resume_give_the_same_bits_and_adapters_too() {
    same_bits("bart");
}

#[test]
fn stages_and_a_resume_give_the_same_bits_of_a_t5_too() {
    same_bits("t5");
}

fn same_bits(model: &str) {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    train(dir.path(), "base", &["--model", model, "--steps", "3"]);
    ok(&["export", "base/checkpoints", "hf", "--dtype", "fp32"], dir.path());
    let whole: &[&str] = &["--model", model];
    let adapter: &[&str] = &["--weights", "hf", "--lora-r", "4", "--lora-dropout", "0.1"];
    for (what, options) in [("whole-", whole), ("adapter-", adapter)] {
        let train = |run: &str, more: &[&str]| train(dir.path(), run, &[options, more].concat());
        assert_stages_agree(dir.path(), what, ["4", "6"], train);
    }
    // Parameters and optimizer state on a disk.
    let disk =
        ["--ranks", "2", "--stage", "3", "--steps", "6", "--offload", "all", "--offload-to", "disk", "--swap", "."];
    train(dir.path(), "disk", &[adapter, &disk].concat());
    assert_eq!(trajectory(&dir.path().join("disk")), trajectory(&dir.path().join("adapter-2-0")));
}

#[test]
fn it_learns_what_it_is_to_make_and_every_row_counts_once() {
    learns("bart", "24 tensors", "q_proj and v_proj of six attentions", &["q_proj", "v_proj"]);
}

#[test]
fn a_t5_learns_what_it_is_to_make() {
    learns("t5", "24 tensors", "q and v of six attentions", &["q", "v"]);
}

fn learns(model: &str, tensors: &str, which: &str, targets: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    for ranks in ["1", "3"] {
        let options =
            ["--model", model, "--ranks", ranks, "--steps", "220", "--lr", "4e-3", "--predictions", "told.jsonl"];
        let summary = train(dir.path(), &format!("run-{ranks}"), &options);
        let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].clone();
        assert_eq!((&told[0][0], &told[1][0]), (&json!("loss"), &json!("accuracy")));
        let lines = json_lines(&dir.path().join("told.jsonl"));
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
    assert!(told.contains(&format!("an adapter with {tensors}")), "{which}: {told}");
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["task_type"], &config["target_modules"]), (&json!("SEQ_2_SEQ_LM"), &json!(targets)));
}

/// The last rows have no label: they are not evaluated, and each is predicted once, on any number of ranks.
#[test]
fn rows_without_a_label_are_only_predicted() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let rows = json_lines(&dir.path().join("rows.jsonl"));
    let without = |(at, mut row): (usize, Value)| {
        if at >= 150 {
            row.as_object_mut().unwrap().remove("answer");
        }
        format!("{row}\n")
    };
    let some: String = rows.into_iter().enumerate().map(without).collect();
    std::fs::write(dir.path().join("some.jsonl"), some).unwrap();
    let mut all = Vec::new();
    for (ranks, batch) in [("1", "6"), ("3", "2"), ("2", "3")] {
        let data =
            ["--model", "bart", "--tokenizer", "tok", "--label-field", "answer", "--seq", "16", "--batch", batch];
        let told = ["--eval", "7", "--predictions", "told.jsonl", "--memory-breakdown"];
        let options = ["--data", "some.jsonl", "--ranks", ranks, "--steps", "24", "--shuffle", "false"];
        let run = format!("run-{ranks}");
        let summary = texts::train(dir.path(), &run, &[&data, &told, &options]);
        let lines = json_lines(&dir.path().join("told.jsonl"));
        assert!(lines.iter().map(|line| line["row"].as_u64().unwrap()).eq(143..163), "{lines:?}");
        assert!(lines[..7].iter().all(|line| line["label"].is_string()));
        assert!(lines[7..].iter().all(|line| line["label"].is_null() && line["prediction"].is_string()), "{lines:?}");
        let right = lines[..7].iter().filter(|line| line["label"] == line["prediction"]).count() as f64 / 7.0;
        let epochs = summary["epochs"].as_array().unwrap();
        let accuracy = epochs.last().unwrap()["eval"][1][1].as_f64().unwrap();
        assert!((accuracy - right).abs() < 1e-9, "{accuracy}, {right}");
        // 143 rows are trained on, 6 a step: an epoch and 2 steps' rows.
        assert_eq!(epochs.iter().map(|epoch| epoch["step"].as_u64().unwrap()).collect::<Vec<_>>(), [24]);
        let memory = epochs[0]["memory"].as_array().unwrap();
        assert_eq!(memory.iter().map(|phase| phase["phase"].as_str().unwrap()).collect::<Vec<_>>(), ["train", "eval"]);
        for phase in memory {
            let [before, peak, total] = ["before_bytes", "peak_bytes", "total_peak_bytes"]
                .map(|figure| phase["host"][figure].as_u64().unwrap());
            assert!(before > 1 << 20 && before + peak == total && phase["device"].is_null(), "{phase}");
        }
        all.push(lines);
        // A run that is killed behind its last step writes them when it is started again.
        std::fs::remove_file(dir.path().join("told.jsonl")).unwrap();
        let save = format!("{run}/checkpoints");
        let again = ["train", "--threads", "1", "--save", &save, "--resume", "auto"];
        ok(&[&again[..], &data, &told, &options].concat(), dir.path());
        assert_eq!(Some(&json_lines(&dir.path().join("told.jsonl"))), all.last(), "{ranks} ranks");
        let left = zero(&[&again[..], &data, &told, &options].concat(), dir.path());
        assert!(String::from_utf8_lossy(&left.stderr).contains("nothing is left to do"), "{left:?}");
    }
    assert!(all.iter().all(|lines| lines.len() == all[0].len()));
}

/// The unchanged file of PEFT's guide (DeepSpeed ZeRO-3 with offload).
#[test]
fn the_guides_file_trains_an_adapter_as_the_same_settings_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    train(dir.path(), "base", &["--model", "bart", "--steps", "3"]);
    ok(&["export", "base/checkpoints", "hf", "--dtype", "fp32"], dir.path());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../zero-settings/tests/configs/accelerate_zero3_cpu.yaml");
    let file = file.display().to_string();
    let adapter = ["--weights", "hf", "--lora-r", "8", "--lora-alpha", "32", "--lora-dropout", "0.1", "--steps", "6"];
    train(dir.path(), "file", &[&adapter[..], &["--config", &file]].concat());
    let by_hand = ["--ranks", "1", "--stage", "3", "--clip", "1", "--accumulation", "1", "--dtype", "fp32"];
    train(dir.path(), "hand", &[&adapter[..], &by_hand].concat());
    let [by_file, by_hand] = ["file", "hand"].map(|run| trajectory(&dir.path().join(run)));
    assert_eq!((by_file.len(), by_file), (6, by_hand));
    // And the 16-bit model that it asks for, which is the adapter.
    let kept = dir.path().join("file/out/16bit-model-00000006");
    assert!(kept.join("adapter_config.json").is_file() && kept.join("adapter_model.safetensors").is_file());
    let shown = ok(
        &[&["train", "--dry-run", "--config", &file, "--batch", "3", "--out", "dry"], &DATA[..], &adapter].concat(),
        dir.path(),
    );
    for part in [
        "1 at stage 3",
        "Precision: fp32",
        "clipped to a global norm of 1",
        "Offload: optimizer state in host memory",
        "Offload: parameters in host memory",
        "16-bit model",
    ] {
        assert!(shown.contains(part), "{part} in:\n{shown}");
    }
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let told = |options: &[&str]| refused(&[&["train", "--tokenizer", "tok"], options].concat(), dir.path());
    let rows = ["--data", "rows.jsonl"];
    for (options, expected) in [
        (&["--task", "seq2seq", "--model", "tiny"][..], "--model tiny: expected a BART or a T5 for --task seq2seq"),
        (&["--model", "t5", "--seq", "2"], "--seq 2: expected at least 3"),
        (&["--model", "t5", "--loss-on", "all"], "--loss-on all: expected --task causal-lm"),
        (&["--model", "t5", "--second-field", "b"], "--second-field b: expected --task text-classification"),
        (
            &["--model", "bart", "--label-field", "answer", "--seq", "25"],
            "--seq 25: expected 3 to 24, the positions of the model",
        ),
        (&["--model", "bart", "--label-field", "reply"], "its \"reply\" is missing"),
    ] {
        let text = told(&[options, &rows].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    // Rows without a label are the last ones.
    let rows = ["--model", "bart", "--data", "some.jsonl"];
    let row = |label: Option<&str>| format!("{}\n", json!({ "text": "cat", "label": label }));
    std::fs::write(dir.path().join("some.jsonl"), row(Some("cat")) + &row(None) + &row(Some("dog"))).unwrap();
    let text = told(&rows);
    assert!(text.contains("line 2: has no \"label\", but later rows have one"), "{text}");
    std::fs::write(dir.path().join("some.jsonl"), row(None)).unwrap();
    assert!(told(&rows).contains("line 1: its \"label\" is null"));
    let long = json!({ "text": "cat", "label": "cat ".repeat(30) }).to_string();
    std::fs::write(dir.path().join("long.jsonl"), long).unwrap();
    // A T5 knows distances, and no positions.
    ok(&["train", "--tokenizer", "tok", "--model", "t5", "--data", "long.jsonl", "--dry-run"], dir.path());
    let text = told(&["--model", "bart", "--data", "long.jsonl"]);
    assert!(text.contains("line 1: has a \"label\" with more tokens than the model's 24 positions"), "{text}");
}

/// Both forms of a T5 tokenizer.
#[test]
fn an_export_of_a_t5_has_its_tokenizer_and_generates_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let row = |text: &str| json!({ "text": text, "label": "a rose" }).to_string() + "\n";
    std::fs::write(dir.join("rows.jsonl"), ["a rose is", "to be", "or not to be"].map(row).concat().repeat(4)).unwrap();
    for (name, file) in [("t5_tiny", "tokenizer.json"), ("flan_t5_tiny", "spiece.model")] {
        texts::fixture(dir, name);
        let (saved, out) = (format!("{name}-saves"), format!("{name}-out"));
        let train =
            ["train", "--weights", name, "--data", "rows.jsonl", "--steps", "3", "--lr", "1e-2", "--ranks", "2"];
        ok(&[&train[..], &["--save", &saved]].concat(), dir);
        ok(&["export", &saved, &out, "--dtype", "fp32"], dir);
        for file in [file, "tokenizer_config.json", "generation_config.json"] {
            let read = |folder: &str| std::fs::read(dir.join(folder).join(file)).unwrap();
            assert!(read(&out) == read(name), "{out}/{file}");
        }
        let made = |model: &str| {
            ok(&["generate", model, "--prompt", "a rose", "--prompt", "to be or", "--beams", "2", "--json"], dir)
        };
        assert_eq!(made(&saved), made(&out));
        assert_ne!(made(name), made(&out));
    }
}
