//! The main job as a user runs it: its output, its files, and what it says to bad input.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;

/// The example, which `cargo test` builds beside this test.
fn gpt2() -> Command {
    let deps = std::env::current_exe().expect("a test has a path");
    let target = deps.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    Command::new(target.join("examples").join("gpt2_1_5b"))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn trains_on_text_and_writes_what_it_promises() {
    let out = tempfile::tempdir().unwrap();
    let run = gpt2()
        .args(["--model", "tiny", "--steps", "3", "--seq", "32", "--ranks", "2", "--threads", "1", "--json", "--out"])
        .arg(out.path())
        .assert()
        .success();
    let stdout = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    assert_eq!(stdout.lines().count(), 1, "standard output holds the summary and nothing else: {stdout}");
    let summary: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(summary["parameters"], 3_324_736);
    assert_eq!(summary["model_state_bytes"], summary["model_state_bytes_formula"]);

    let steps = lines(&out.path().join("metrics.jsonl"));
    assert_eq!(steps.len(), 3);
    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], i + 1);
        assert_eq!(step["tokens"], 2 * 32);
        assert_eq!(step["skipped"], false);
        for name in ["loss", "grad_norm", "lr", "step_ms", "tokens_per_second"] {
            assert!(step[name].as_f64().is_some_and(|x| x > 0.0), "{name} in {step}");
        }
        let ranks = step["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 2);
        for (r, rank) in ranks.iter().enumerate() {
            assert_eq!(rank["rank"], r);
            for name in ["parameters", "gradients", "optimizer"] {
                assert!(rank["model_state_bytes"][name].as_u64().is_some_and(|x| x > 0), "{name} in {rank}");
            }
            for name in ["all_gather", "reduce_scatter", "all_reduce", "broadcast"] {
                assert!(rank["wire_bytes"][name].is_u64(), "{name} in {rank}");
            }
            assert!(rank["gathered_bytes_peak"].is_u64() && rank["peak_rss_bytes"].is_u64());
        }
    }
}

#[test]
fn hugging_face_weights_and_token_files_train_as_in_pytorch() {
    let reference: Value =
        serde_json::from_slice(&std::fs::read(fixture("gpt2_tiny/reference.json")).unwrap()).unwrap();
    for (stage, weights) in [("0", "gpt2_tiny"), ("3", "gpt2_tiny_sharded")] {
        let out = tempfile::tempdir().unwrap();
        gpt2()
            .args(["--stage", stage, "--ranks", "2", "--batch", "2", "--steps", "20", "--lr", "1e-3", "--json"])
            .arg("--weights")
            .arg(fixture(weights))
            .arg("--data")
            .arg(fixture("gpt2_tiny/batches.safetensors"))
            .arg("--out")
            .arg(out.path())
            .assert()
            .success();
        let steps = lines(&out.path().join("metrics.jsonl"));
        for (key, name) in [("losses", "loss"), ("grad_norms", "grad_norm")] {
            let expected = reference[key].as_array().unwrap();
            assert_eq!(expected.len(), steps.len());
            for (expected, step) in expected.iter().zip(&steps) {
                let (expected, got) = (expected.as_f64().unwrap(), step[name].as_f64().unwrap());
                assert!((expected - got).abs() / expected < 1e-4, "stage {stage}, {name}: {expected} against {got}");
            }
        }
    }
}

#[test]
fn the_plan_and_the_table_are_for_people() {
    let run = gpt2().args(["--model", "tiny", "--steps", "2", "--seq", "16", "--stage", "2"]).assert().success();
    let stdout = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    for part in
        ["plan", "3324736 parameters", "2 at stage 2", "loss", "tokens per second", "optimizer", "wire, per step"]
    {
        assert!(stdout.contains(part), "{part} in:\n{stdout}");
    }
}

/// Runs with bad input: exit code 2, one line of error that contains `expected`, and no output folder.
fn refused(args: &[&str], expected: &str) {
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    let run = gpt2().args(args).arg("--out").arg(&out).assert().code(2);
    let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains(expected), "expected {expected:?} in:\n{stderr}");
    let errors = stderr.lines().filter(|line| line.starts_with("error")).count();
    assert_eq!(errors, 1, "one error in:\n{stderr}");
    assert!(run.get_output().stdout.is_empty() || !stderr.contains("panicked"), "{stderr}");
    assert!(!out.join("metrics.jsonl").exists() || std::fs::read(out.join("metrics.jsonl")).unwrap().is_empty());
}

#[test]
fn bad_options_are_refused() {
    refused(&["--model", "gpt3"], "there is no GPT-2 preset \"gpt3\"");
    refused(&["--model", "tiny", "--ranks", "0"], "--ranks 0: expected at least 1");
    refused(&["--model", "tiny", "--steps", "0"], "--steps 0: expected at least 1");
    refused(&["--model", "tiny", "--batch", "0"], "--batch 0: expected at least 1");
    refused(&["--model", "tiny", "--threads", "0"], "--threads 0: expected at least 1");
    refused(&["--model", "tiny", "--stage", "4"], "expected 0, 1, 2 or 3");
    refused(&["--model", "tiny", "--seq", "129"], "expected 2 to 128");
    refused(&["--model", "tiny", "--lr", "nan"], "--lr NaN: expected a number of 0 or more");
    refused(&["--model", "tiny", "--beta2", "1"], "--beta2 1: expected 0 or more and less than 1");
    refused(&["--model", "tiny", "--batch", "two"], "invalid value 'two'");
    refused(&["--model", "tiny", "--rank", "2"], "unexpected argument '--rank'");
    refused(&["--model", "gpt2-10b"], "does not fit");
}

#[test]
fn bad_data_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    refused(&["--model", "tiny", "--data", &path("absent.txt")], "cannot read");

    std::fs::write(path("short.txt"), "To be").unwrap();
    refused(&["--model", "tiny", "--data", &path("short.txt")], "has 2 tokens, but one row needs 128");

    std::fs::write(path("latin1.txt"), b"caf\xe9".repeat(1000)).unwrap();
    refused(&["--model", "tiny", "--data", &path("latin1.txt")], "is not UTF-8 text (byte 3)");

    let ids: Vec<u8> = [0i32, 1, 2, 50_257].iter().flat_map(|id| id.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![2, 2], &ids).unwrap();
    safetensors::serialize_to_file([("input_ids", view)], None, Path::new(&path("ids.safetensors"))).unwrap();
    let expected = "token id 50257 at row 1, column 1 is outside the model's vocabulary of 50257";
    refused(&["--model", "tiny", "--data", &path("ids.safetensors")], expected);

    let whole = std::fs::read(path("ids.safetensors")).unwrap();
    std::fs::write(path("cut.safetensors"), &whole[..whole.len() - 2]).unwrap();
    refused(&["--model", "tiny", "--data", &path("cut.safetensors")], "not a whole safetensors file");
}

#[test]
fn bad_weights_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        std::fs::copy(fixture("gpt2_tiny").join(name), dir.path().join(name)).unwrap();
    };
    let data = fixture("gpt2_tiny/batches.safetensors");
    let with = |weights: &Path, expected: &str| {
        refused(&["--weights", weights.to_str().unwrap(), "--data", data.to_str().unwrap()], expected);
    };
    with(&dir.path().join("absent"), "config.json");
    copy("config.json");
    with(dir.path(), "model.safetensors");

    copy("model.safetensors");
    let file = dir.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    with(dir.path(), "model.safetensors");

    std::fs::write(&file, &whole).unwrap();
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.replace("\"n_positions\": 32", "\"n_positions\": 40"))
        .unwrap();
    with(dir.path(), "wpe");
}
