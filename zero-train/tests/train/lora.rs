//! `cargo test -p zero-train --test train lora`
//!
//! LoRA by the commands: an adapter is trained beside weights that stay as they are.

use std::path::Path;
use std::process::{Command, Output};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::common::{trajectory, wire};

fn zero(args: &[&str], dir: &Path) -> Output {
    Command::cargo_bin("zero").unwrap().args(args).current_dir(dir).output().unwrap()
}

fn ok(args: &[&str], dir: &Path) -> String {
    let ran = zero(args, dir);
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// A small model with GPT-2's tokens that was trained for a few steps, as a folder `hf`.
fn base(dir: &Path) {
    let config = json!({ "model_type": "gpt2", "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0 });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("book.txt"), "The cat sat on the mat, and the dog ran under the tree.\n".repeat(40))
        .unwrap();
    let train = ["train", "--model", "model", "--data", "book.txt", "--seq", "12", "--batch", "2", "--steps", "20"];
    ok(&[&train[..], &["--lr", "1e-2", "--save", "base", "--threads", "1"]].concat(), dir);
    ok(&["export", "base", "hf", "--dtype", "fp32"], dir);
}

const LORA: [&str; 8] =
    ["--lora-r", "4", "--lora-alpha", "8", "--lora-dropout", "0.1", "--lora-targets", "c_attn,mlp.c_proj"];

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common = ["train", "--weights", "hf", "--data", "book.txt", "--seq", "12", "--batch", "2"];
    let rest = ["--threads", "1", "--json", "--out", &out, "--save", &save, "--clip", "1"];
    serde_json::from_str(&ok(&[&common[..], &rest, options].concat(), dir)).unwrap()
}

/// Elements of the adapter: c_attn and the feed-forward layer's c_proj of two blocks.
const TRAINED: u64 = 2 * 4 * ((32 + 96) + (128 + 32));

#[test]
fn stages_and_a_resume_give_the_same_bits_and_what_is_frozen_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    base(dir.path());
    for ranks in 1..=3u64 {
        let count = ranks.to_string();
        let whole = format!("{ranks}-0");
        let of = |stage: &'static str, steps: &'static str| {
            [&LORA[..], &["--ranks", &count, "--stage", stage, "--steps", steps]].concat()
        };
        train(dir.path(), &whole, &of("0", "8"));
        let expected = trajectory(&dir.path().join(&whole));
        assert_eq!(expected.len(), 8);
        for stage in ["1", "2", "3"] {
            let run = format!("{ranks}-{stage}");
            train(dir.path(), &run, &of(stage, "5"));
            let summary = train(dir.path(), &run, &[&of(stage, "8")[..], &["--resume", "auto"]].concat());
            let here = dir.path().join(&run);
            assert_eq!(trajectory(&here), expected, "{ranks} ranks at stage {stage}");
            // Only the adapter has gradients and moments, and only its gradients are sent.
            let (got, formula) = (&summary["model_state_bytes"], &summary["model_state_bytes_formula"]);
            assert_eq!(formula["optimizer"], (8 * TRAINED).div_ceil(ranks));
            for kind in ["parameters", "gradients", "optimizer"] {
                let [got, formula] = [got, formula].map(|state| state[kind].as_f64().unwrap());
                // Pieces are rounded up to whole cache lines.
                assert!(
                    got <= formula + 64.0 * 64.0 && got >= formula * 0.9,
                    "{kind} at stage {stage}: {got}, {formula}"
                );
            }
            let reduced = wire(&here).iter().map(|rank| rank["reduce_scatter"].as_u64().unwrap()).max().unwrap();
            let most = 4 * TRAINED * (ranks - 1) / ranks;
            assert!(reduced <= most + 4096, "{ranks} ranks at stage {stage}: {reduced} of {most}");
        }
    }
}

#[test]
fn an_adapter_alone_is_saved_and_exported_as_peft_reads_it_or_merged() {
    let dir = tempfile::tempdir().unwrap();
    base(dir.path());
    let summary = train(
        dir.path(),
        "run",
        &[&LORA[..], &["--ranks", "2", "--stage", "3", "--steps", "80", "--lr", "5e-2"]].concat(),
    );
    let [first, last] = ["loss_first", "loss_last"].map(|key| summary[key].as_f64().unwrap());
    assert!(last < 0.9 * first, "{first} to {last}");
    let bytes: u64 = walk(&dir.path().join("run/checkpoints"));
    assert!(bytes < 3 * 4 * TRAINED + 32_000, "{bytes} bytes");

    let told = ok(&["export", "run/checkpoints", "adapter", "--dtype", "fp32"], dir.path());
    assert!(told.contains("an adapter with 8 tensors"), "{told}");
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("adapter/adapter_config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("peft_type", json!("LORA")),
        ("task_type", json!("CAUSAL_LM")),
        ("r", json!(4)),
        ("target_modules", json!(["c_attn", "mlp.c_proj"])),
        ("fan_in_fan_out", json!(true)),
        ("base_model_name_or_path", json!("hf")),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert!(dir.path().join("adapter/adapter_model.safetensors").is_file());
    // The same text from the checkpoint, the adapter, and what either is merged into.
    ok(&["export", "run/checkpoints", "merged", "--merge", "--dtype", "fp32"], dir.path());
    ok(&["export", "adapter", "merged-2", "--merge", "--base", "hf", "--dtype", "fp32"], dir.path());
    assert!(
        std::fs::read(dir.path().join("merged/model.safetensors")).unwrap()
            == std::fs::read(dir.path().join("merged-2/model.safetensors")).unwrap()
    );
    let text = |model: &str, options: &[&str]| {
        ok(
            &[&["generate", model, "--prompt", "The cat", "--json", "--max-new-tokens", "12"], options].concat(),
            dir.path(),
        )
    };
    let expected = text("merged", &[]);
    assert_ne!(text("hf", &[]), expected);
    assert_eq!(text("run/checkpoints", &[]), expected);
    assert_eq!(text("adapter", &[]), expected);
    assert_eq!(text("adapter", &["--base", "hf", "--ranks", "2"]), expected);
    // It is gone on with.
    let again = train(dir.path(), "again", &["--adapter", "adapter", "--steps", "1"]);
    assert!(again["loss_first"].as_f64().unwrap() < 0.9 * first);
}

fn walk(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { walk(&path) } else { path.metadata().unwrap().len() }).sum()
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    base(dir.path());
    let told = |args: &[&str]| {
        let ran = zero(args, dir.path());
        let text = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{args:?}: {text}");
        text
    };
    let train = |options: &[&str]| told(&[&["train", "--data", "book.txt", "--seq", "12"], options].concat());
    for (options, expected) in [
        (&["--model", "model", "--lora-r", "4"][..], "--lora-r 4: expected --weights DIR beside it"),
        (&["--weights", "hf", "--lora-r", "0"], "LoRA cannot have r = 0; change it to at least 1"),
        (&["--weights", "hf", "--lora-r", "4", "--lora-targets", "c_atn"], "did you mean \"c_attn\"?"),
        (&["--weights", "hf", "--lora-targets", "c_attn"], "--lora-r <RANK>"),
        (&["--weights", "hf", "--adapter", "hf"], "cannot read hf/adapter_config.json"),
    ] {
        let text = train(options);
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    let text = told(&["export", "base", "out", "--merge"]);
    assert!(text.contains("it holds a whole model and no adapter: leave --merge out"), "{text}");
    assert!(!dir.path().join("out").exists());
    let text = told(&["generate", "hf", "--base", "hf", "--prompt", "a"]);
    assert!(text.contains("--base hf: expected an adapter beside it"), "{text}");
    // Another adapter than the checkpoint's.
    let run = |options: &[&str]| {
        let save = ["--save", "run", "--resume", "auto"];
        zero(
            &[&["train", "--weights", "hf", "--data", "book.txt", "--seq", "12"], &save[..], options].concat(),
            dir.path(),
        )
    };
    assert!(run(&["--lora-r", "4", "--steps", "2"]).status.success());
    let ran = run(&["--lora-r", "2", "--steps", "3"]);
    let text = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.code() == Some(2) && text.contains("configure the same model"), "{text}");
}
