//! `cargo test -p zero-train-cli --test train muon`
//!
//! Muon by a DeepSpeed file: losses equal those of `torch.optim.Muon` with `AdamW`, and bits do not depend on the stage, the tier or a
//! resume; `tests/fixtures/make_muon.py` creates the references.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_kernels::NewtonSchulz;
use zero_kernels::cpu::orthogonal::orthogonalize;

use crate::common::assert_stages_agree;
use crate::common::texts::{self, json_lines, refused};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn made() -> Vec<Value> {
    let made: Value = serde_json::from_slice(&std::fs::read(fixtures().join("muon.json")).unwrap()).unwrap();
    made["training"].as_array().unwrap().clone()
}

/// Writes `muon.json`, a configuration with the settings of a reference, and others.
fn configure(dir: &Path, case: &Value, others: &Value) {
    let params = json!({
        "muon_lr": case["lr"], "adam_lr": case["adam_lr"], "momentum": 0.95, "weight_decay": 0.05, "betas": [0.9, 0.95], "eps": 1e-8,
        "adjust_lr_fn": case["scale"], "ns_method": case["ns_method"].as_str().unwrap_or("standard")
    });
    let mut config = json!({
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "optimizer": { "type": "Muon", "params": params }
    });
    config.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    std::fs::write(dir.join("muon.json"), config.to_string()).unwrap();
}

fn how(case: &Value) -> Vec<String> {
    let model = fixtures().join(case["model"].as_str().unwrap());
    let (model, rows) = (model.display(), model.join("batches.safetensors"));
    let how = format!(
        "--config muon.json --weights {model} --data {} --shuffle false --decay-except nothing",
        rows.display()
    );
    how.split(' ').map(str::to_string).collect()
}

fn losses(dir: &Path, run: &str) -> Vec<f64> {
    json_lines(&dir.join(run).join("out/metrics.jsonl")).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[test]
fn orthogonal_matrices_are_those_of_torch() {
    let made: Value = serde_json::from_slice(&std::fs::read(fixtures().join("muon.json")).unwrap()).unwrap();
    for matrix in made["matrices"].as_array().unwrap() {
        let [rows, columns]: [usize; 2] = serde_json::from_value(matrix["sizes"].clone()).unwrap();
        let [mut x, y] = ["x", "y"].map(|key| serde_json::from_value::<Vec<f32>>(matrix[key].clone()).unwrap());
        orthogonalize(&mut x, rows, columns, NewtonSchulz::Standard);
        assert_eq!(x, y, "{rows} x {columns}");
    }
}

/// Trains with a configuration of the stage that `more` asks for.
fn train(dir: &Path, case: &Value, others: &Value, run: &str, more: &[&str]) -> Value {
    let stage = more.iter().position(|option| *option == "--stage").expect("a stage is given");
    let mut others = others.clone();
    let number: u8 = more[stage + 1].parse().unwrap();
    others["zero_optimization"]["stage"] = number.into();
    others["zero_optimization"]["stage3_param_persistence_threshold"] = 0.into();
    configure(dir, case, &others);
    let how = how(case);
    let how: Vec<&str> = how.iter().map(String::as_str).collect();
    texts::train(dir, run, &[&how, &more[..stage], &more[stage + 2..]])
}

#[test]
fn losses_are_those_of_torch() {
    for case in made() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let expected: Vec<f64> = serde_json::from_value(case["losses"].clone()).unwrap();
        for (ranks, batch, stage) in [("1", "4", "0"), ("2", "2", "3"), ("4", "1", "2")] {
            let cut = ["--ranks", ranks, "--batch", batch, "--steps", "20", "--stage", stage];
            train(dir, &case, &json!({ "gradient_clipping": 0 }), ranks, &cut);
            let got = losses(dir, ranks);
            let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            println!("{}, {ranks} ranks at stage {stage}: losses within {apart:.1e}", case["model"]);
            assert!(got.len() == 20 && apart <= 1e-5, "{got:?}, expected {expected:?}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_stages_tiers_or_a_resume() {
    for case in made() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let clipped = json!({ "gradient_clipping": 1.0 });
        let of = |others: &Value, run: &str, more: &[&str]| {
            train(dir, &case, others, run, &[&["--batch", "2"], more].concat())
        };
        assert_stages_agree(dir, "run-", ["2", "5"], |run, more| of(&clipped, run, more));
        for (name, tier) in
            [("cpu", json!({ "device": "cpu" })), ("nvme", json!({ "device": "nvme", "nvme_path": dir }))]
        {
            let zero = json!({ "offload_optimizer": tier, "offload_param": tier });
            let others = json!({ "gradient_clipping": 1.0, "zero_optimization": zero });
            of(&others, name, &["--ranks", "3", "--stage", "3", "--steps", "5"]);
            assert_eq!(losses(dir, name), losses(dir, "run-3-0"), "{name}");
        }
        // Shards of two ranks, and copies on two others.
        let four = |run: &str, stage: &str, others: Value| {
            let summary = of(&others, run, &["--ranks", "4", "--steps", "5", "--stage", stage]);
            assert_eq!(summary["model_state_bytes"], summary["model_state_bytes_formula"], "{run}");
        };
        four("four", "0", json!({ "gradient_clipping": 0 }));
        four("hybrid", "3", json!({ "gradient_clipping": 0, "zero_optimization": { "mics_shard_size": 2 } }));
        // The sums of gradients have another order.
        let (hybrid, four) = (losses(dir, "hybrid"), losses(dir, "four"));
        assert!(hybrid.iter().zip(&four).all(|(a, b)| (a - b).abs() < 1e-5), "{hybrid:?}, {four:?}");
        let half = |run: &str, stage: &str, tier: Value| {
            let half = json!({ "enabled": true, "bf16_optimizer_states": true });
            let others = json!({ "bf16": half, "zero_optimization": { "offload_optimizer": tier } });
            of(&others, run, &["--ranks", "2", "--steps", "4", "--stage", stage]);
        };
        half("half-0", "0", json!({ "device": "none" }));
        half("half-3", "3", json!({ "device": "nvme", "nvme_path": dir }));
        assert_eq!(losses(dir, "half-3"), losses(dir, "half-0"));
    }
}

#[test]
fn gram_newton_schulz_has_the_same_losses_up_to_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for mut case in made() {
        // DeepSpeed's default.
        case["ns_method"] = "gram".into();
        for (run, ranks, batch, stage) in [("one", "1", "4", "0"), ("two", "2", "2", "0"), ("three", "2", "2", "3")] {
            let options = ["--ranks", ranks, "--batch", batch, "--steps", "20", "--stage", stage];
            train(dir, &case, &json!({ "gradient_clipping": 0 }), run, &options);
        }
        assert_eq!(losses(dir, "three"), losses(dir, "two"));
        let (got, expected) = (losses(dir, "one"), serde_json::from_value::<Vec<f64>>(case["losses"].clone()).unwrap());
        let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{}: losses within {apart:.1e} of the standard variant's", case["model"]);
        assert!(got.len() == 20 && apart > 0.0 && apart < 2e-4, "{got:?}, expected {expected:?}");
    }
}

#[test]
fn the_plan_names_both_rules_and_bad_values_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let case = &made()[0];
    let how = how(case);
    let how: Vec<&str> = how.iter().map(String::as_str).collect();
    configure(dir, case, &json!({}));
    let plan = texts::ok(&[&["train", "--dry-run"], &how[..]].concat(), dir);
    let expected = "Muon for matrices in layers, AdamW for the rest, lr 0.0001 and 0.001, betas 0.9 and 0.95";
    assert!(plan.contains(expected), "{plan}");
    for (key, value, expected) in [
        ("momentum", json!("fast"), "optimizer.params.momentum"),
        ("adjust_lr_fn", json!("none"), "optimizer.params.adjust_lr_fn"),
        ("muon_lr", json!(0), "give a `muon_lr` above 0"),
    ] {
        configure(dir, case, &json!({}));
        let mut config: Value = serde_json::from_slice(&std::fs::read(dir.join("muon.json")).unwrap()).unwrap();
        config["optimizer"]["params"][key] = value;
        std::fs::write(dir.join("muon.json"), config.to_string()).unwrap();
        let text = refused(&[&["train", "--dry-run"], &how[..]].concat(), dir);
        assert!(text.contains(expected), "{key}: {text}");
    }
}
