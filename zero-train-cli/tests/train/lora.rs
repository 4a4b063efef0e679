//! `cargo test -p zero-train-cli --test train lora`
//!
//! LoRA through the commands: an adapter is trained while the base weights stay frozen.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::{self, ok, refused, zero};
use crate::common::{trajectory, wire};

/// A small GPT-2 trained for a few steps.
fn base(dir: &Path) {
    let config = json!({ "model_type": "gpt2", "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0 });
    texts::gpt2(dir, &config, "12", "20");
}

const LORA: [&str; 8] =
    ["--lora-r", "4", "--lora-alpha", "8", "--lora-dropout", "0.1", "--lora-targets", "c_attn,mlp.c_proj"];

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let common = ["--weights", "gpt2-hf", "--data", "book.txt", "--seq", "12", "--batch", "2", "--clip", "1"];
    texts::train(dir, run, &[&common, options])
}

/// Elements of the adapter: c_attn and the feed-forward layer's c_proj of two blocks.
const TRAINED: u64 = 2 * 4 * ((32 + 96) + (128 + 32));

#[test]
fn stages_and_a_resume_give_the_same_bits_and_what_is_frozen_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    base(dir.path());
    let mut first = Vec::new();
    for (ranks, format) in [(2u64, ""), (2, "int8"), (2, "nf4"), (1, ""), (3, ""), (3, "int8")] {
        let count = ranks.to_string();
        let whole = format!("{ranks}-0{format}");
        let quantize = ["--quantize", format];
        let quantize = if format.is_empty() { &[] } else { &quantize[..] };
        let of = |stage: &'static str, steps: &'static str| {
            [&LORA[..], &["--ranks", &count, "--stage", stage, "--steps", steps], quantize].concat()
        };
        train(dir.path(), &whole, &of("0", "8"));
        let expected = trajectory(&dir.path().join(&whole));
        assert_eq!(expected.len(), 8);
        first.push(expected[0][1].parse::<f64>().unwrap());
        for stage in ["1", "2", "3"] {
            let run = format!("{ranks}-{stage}{format}");
            train(dir.path(), &run, &of(stage, "5"));
            let summary = train(dir.path(), &run, &[&of(stage, "8")[..], &["--resume", "auto"]].concat());
            let here = dir.path().join(&run);
            assert_eq!(trajectory(&here), expected, "{ranks} ranks at stage {stage}, {format}");
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
    // What a quantised base predicts is nearly what the base does.
    let off = |at: usize| ((first[at] - first[0]) / first[0]).abs();
    assert!(off(1) > 0.0 && off(1) < 1e-2 && off(2) > 0.0 && off(2) < 1e-1, "{first:?}");
}

#[test]
fn frozen_weights_are_gathered_in_8_bit_where_the_file_says_so() {
    let dir = tempfile::tempdir().unwrap();
    base(dir.path());
    let run = |name: &str, keys: &str| {
        let zero = format!(
            r#"{{"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0{keys}}}"#
        );
        let text =
            format!(r#"{{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1, "zero_optimization": {zero}}}"#);
        std::fs::write(dir.path().join("ds.json"), text).unwrap();
        let options = ["--config", "ds.json", "--ranks", "2", "--steps", "4"];
        let summary = train(dir.path(), name, &[&LORA[..], &options].concat());
        let number = |key: &str| summary[key].as_f64().unwrap();
        let (wire, formula) = (number("wire_bytes_per_step"), number("wire_bytes_per_step_formula"));
        println!("{name}: {wire} bytes for {formula}");
        assert!((wire / formula - 1.0).abs() < 0.05, "{name}: {wire} bytes for {formula}");
        let [held, expected] =
            ["model_state_bytes", "model_state_bytes_formula"].map(|key| summary[key]["parameters"].as_f64().unwrap());
        assert!((held / expected - 1.0).abs() < 0.05, "{name}: {held} bytes for {expected}");
        (wire, number("loss_first"))
    };
    let (exact, loss) = run("exact", "");
    let (quantized, with) = run("quantized", r#", "zero_quantized_nontrainable_weights": true"#);
    assert!(quantized < 0.5 * exact, "{quantized} bytes, {exact} as they are");
    assert!(with != loss && ((with - loss) / loss).abs() < 1e-2, "{with}, {loss} as they are");
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
    let told = ok(&["export", "run/checkpoints", "adapter", "--dtype", "fp32"], dir.path());
    assert!(told.contains("an adapter with 8 tensors"), "{told}");
    // With the tokenizer.
    let bytes: u64 = walk(&dir.path().join("run/checkpoints"));
    let tokenizer = std::fs::metadata(dir.path().join("adapter/tokenizer.json")).unwrap().len();
    assert!(bytes < 3 * 4 * TRAINED + 32_000 + tokenizer, "{bytes} bytes, {tokenizer} of the tokenizer");
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("adapter/adapter_config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("peft_type", json!("LORA")),
        ("task_type", json!("CAUSAL_LM")),
        ("r", json!(4)),
        ("target_modules", json!(["c_attn", "mlp.c_proj"])),
        ("fan_in_fan_out", json!(true)),
        ("base_model_name_or_path", json!("gpt2-hf")),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert!(dir.path().join("adapter/adapter_model.safetensors").is_file());
    // The same text from the checkpoint, the adapter, and what either is merged into.
    ok(&["export", "run/checkpoints", "merged", "--merge", "--dtype", "fp32"], dir.path());
    ok(&["export", "adapter", "merged-2", "--merge", "--base", "gpt2-hf", "--dtype", "fp32"], dir.path());
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
    assert_ne!(text("gpt2-hf", &[]), expected);
    assert_eq!(text("run/checkpoints", &[]), expected);
    assert_eq!(text("adapter", &[]), expected);
    assert_eq!(text("adapter", &["--base", "gpt2-hf", "--ranks", "2"]), expected);
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
    let told = |args: &[&str]| refused(args, dir.path());
    let train = |options: &[&str]| told(&[&["train", "--data", "book.txt", "--seq", "12"], options].concat());
    for (options, expected) in [
        (&["--model", "model", "--lora-r", "4"][..], "--lora-r 4: expected --weights DIR as well"),
        (&["--weights", "gpt2-hf", "--lora-r", "0"], "LoRA cannot have r = 0; change it to at least 1"),
        (&["--weights", "gpt2-hf", "--lora-r", "4", "--lora-targets", "c_atn"], "did you mean \"c_attn\"?"),
        (&["--weights", "gpt2-hf", "--lora-targets", "c_attn"], "--lora-r <RANK>"),
        (&["--weights", "gpt2-hf", "--quantize", "nf4"], "--quantize nf4: expected --lora-r or --adapter as well"),
        (&["--weights", "gpt2-hf", "--lora-r", "4", "--quantize", "int2"], "expected int8, int4, nf4"),
        (&["--weights", "gpt2-hf", "--adapter", "gpt2-hf"], "cannot read gpt2-hf/adapter_config.json"),
    ] {
        let text = train(options);
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    let text = told(&["export", "gpt2-base", "out", "--merge"]);
    assert!(text.contains("it holds a full model and no adapter: omit --merge"), "{text}");
    assert!(!dir.path().join("out").exists());
    let text = told(&["generate", "gpt2-hf", "--base", "gpt2-hf", "--prompt", "a"]);
    assert!(text.contains("--base gpt2-hf: expected an adapter as the model"), "{text}");
    // Another adapter than the checkpoint's.
    let run = |options: &[&str]| {
        let save = ["--save", "run", "--resume", "auto"];
        zero(
            &[&["train", "--weights", "gpt2-hf", "--data", "book.txt", "--seq", "12"], &save[..], options].concat(),
            dir.path(),
        )
    };
    assert!(run(&["--lora-r", "4", "--steps", "2"]).status.success());
    let ran = run(&["--lora-r", "2", "--steps", "3"]);
    let text = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.code() == Some(2) && text.contains("configure the same model"), "{text}");
}
