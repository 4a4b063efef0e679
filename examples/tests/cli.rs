//! The main example from a user's view: its output, its files, and its errors on bad input.

#[path = "../../zero-core/tests/common/port.rs"]
mod port;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use assert_cmd::Command;
use port::free_port;
use serde_json::Value;

/// An example that `cargo test` builds together with this test.
fn example(name: &str) -> Command {
    let deps = std::env::current_exe().expect("a test has a path");
    let target = deps.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    Command::new(target.join("examples").join(name))
}

fn gpt2() -> Command {
    example("gpt2_1_5b")
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
            .args(["--decay-except", "nothing", "--weights"])
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

/// Losses of a run with `args`, on the tiny preset.
fn losses(args: &[&str]) -> (Vec<f64>, Vec<f64>, String) {
    let out = tempfile::tempdir().unwrap();
    let run = gpt2()
        .args(["--model", "tiny", "--seq", "32", "--threads", "1", "--json", "--out"])
        .arg(out.path())
        .args(args)
        .assert()
        .success();
    let steps = lines(&out.path().join("metrics.jsonl"));
    let of = |name: &str| steps.iter().map(|step| step[name].as_f64().unwrap()).collect();
    (of("loss"), of("lr"), String::from_utf8(run.get_output().stderr.clone()).unwrap())
}

#[test]
fn a_deepspeed_config_trains_as_the_same_settings_by_hand() {
    let config = fixture("configs/deepspeed_zero3.json");
    let (by_config, rates, stderr) = losses(&["--steps", "6", "--config", config.to_str().unwrap()]);
    // All of it is acted on, the 16-bit model too.
    assert!(!stderr.contains("warning:") && stderr.contains("the 16-bit model (bf16) is saved in"), "{stderr}");
    // The schedule warms up over 5 steps and then falls; while it warms up it is DeepSpeed's WarmupLR. Buckets do not change the
    // numbers.
    let dir = tempfile::tempdir().unwrap();
    let schedule = dir.path().join("schedule.json");
    let warmup = serde_json::json!({ "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear" });
    let text = serde_json::json!({
        "zero_optimization": { "stage": 3 }, "scheduler": { "type": "WarmupLR", "params": warmup },
    });
    std::fs::write(&schedule, text.to_string()).unwrap();
    let by_hand = ["--ranks", "2", "--batch", "2", "--accumulation", "2", "--clip", "1", "--lr", "1e-3", "--config"];
    let (expected, expected_rates, _) =
        losses(&[&["--steps", "6"], &by_hand[..], &[schedule.to_str().unwrap()]].concat());
    assert_eq!(by_config, expected);
    assert_eq!(rates, expected_rates);
    assert!(rates.last().is_some_and(|&last| last > 7e-4), "{rates:?}");
}

#[test]
fn an_accelerate_config_trains_as_the_same_settings_by_hand() {
    let config = fixture("configs/accelerate_zero3_cpu.yaml");
    let (by_config, _, stderr) = losses(&["--steps", "4", "--batch", "2", "--config", config.to_str().unwrap()]);
    assert!(stderr.contains("the 16-bit model (bf16) is saved in"), "{stderr}");
    // To host memory: on the CPU it is the device's, which the plan says.
    assert!(!stderr.contains("offload_"), "{stderr}");
    let (expected, ..) = losses(&["--steps", "4", "--batch", "2", "--ranks", "1", "--stage", "3", "--clip", "1"]);
    assert_eq!(by_config, expected);
}

#[test]
fn everything_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("ds.json");
    let logs = dir.path().join("logs");
    let text = serde_json::json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2},
        "fp16": {"enabled": true, "initial_scale_power": 32, "hysteresis": 1},
        "steps_per_print": 2, "wall_clock_breakdown": true, "memory_breakdown": true,
        "tensorboard": {"enabled": true, "output_path": logs, "job_name": "tb"},
        "csv_monitor": {"enabled": true, "output_path": logs, "job_name": "csv"},
    });
    std::fs::write(&config, text.to_string()).unwrap();
    let out = dir.path().join("out");
    let run = gpt2()
        .args(["--model", "tiny", "--seq", "32", "--steps", "4", "--eval", "4", "--config"])
        .arg(&config)
        .arg("--out")
        .arg(&out)
        .assert()
        .success();
    let stdout = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("step 2/4: loss"), "{stderr}");
    for part in [
        "step 1: gradients overflowed, update skipped on all ranks (1 so far), loss scale 4294967296 -> 2147483648",
        "| forward",
        "memory of train",
        "memory of eval",
        "total peak",
        "held out: loss",
        "held-out perplexity",
        "skipped updates",
        "fp16 with the loss scaled by 2^32",
    ] {
        assert!(stdout.contains(part), "{part} in:\n{stdout}");
    }
    let steps = lines(&out.join("metrics.jsonl"));
    assert_eq!(steps[0]["skipped"], true);
    assert_eq!(steps[0]["grad_norm"], Value::Null);
    let csv = std::fs::read_to_string(out.join("metrics.csv")).unwrap();
    assert_eq!(csv.lines().count(), 5);
    assert!(csv.starts_with("step,loss,perplexity,grad_norm,lr,loss_scale,skipped,"), "{csv}");
    assert_eq!(csv, std::fs::read_to_string(logs.join("csv/metrics.csv")).unwrap());
    assert!(std::fs::read_to_string(out.join("report.html")).unwrap().contains("\"state\":\"done\""));
    assert_eq!(std::fs::read_dir(logs.join("tb")).unwrap().count(), 1);
}

#[test]
fn configs_and_options_must_agree() {
    let config = fixture("configs/deepspeed_zero3.json");
    let config = config.to_str().unwrap();
    refused(&["--model", "tiny", "--config", config, "--stage", "2"], "has 3; omit the option, or change the file");
    refused(&["--model", "tiny", "--config", config, "--ranks", "3"], "train_batch_size");
    refused(&["--model", "tiny", "--config", "absent.json"], "absent.json");
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.json");
    std::fs::write(&wrong, r#"{"zero_optimization": {"stage": 3, "stage3_max_live_params": 5}}"#).unwrap();
    let expected = "unknown key; did you mean `stage3_max_live_parameters`?";
    refused(&["--model", "tiny", "--config", wrong.to_str().unwrap()], expected);
    refused(&["--model", "tiny", "--eval", "99999"], "--eval 99999: expected fewer than the 2640 rows");
    refused(&["--model", "tiny", "--warmup", "20"], "--warmup 20: expected fewer than the 20 steps");
}

#[test]
fn the_plan_and_the_table_are_for_people() {
    let run = gpt2().args(["--model", "tiny", "--steps", "2", "--seq", "16", "--stage", "2"]).assert().success();
    let stdout = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    for part in
        ["plan", "3324736 parameters", "2 at stage 2", "loss", "tokens per second", "optimizer", "received, per step"]
    {
        assert!(stdout.contains(part), "{part} in:\n{stdout}");
    }
}

/// Checks a run with bad input: exit code 2, one line of error that contains `expected`, and no output folder.
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
    refused(&["--model", "tiny", "--backend", "tpu"], "invalid value 'tpu'");
    let to_host = ["--model", "tiny", "--offload", "optimizer", "--offload-to", "host"];
    refused(&to_host, "--offload-to host: expected disk: the cpu backend computes in host memory");
    if cfg!(not(feature = "cuda")) {
        let expected = "--backend cuda: this program was built without this backend: build it with `--features cuda`";
        refused(&["--model", "tiny", "--backend", "cuda"], expected);
    }
    refused(&["--model", "gpt2-10b", "--offload", "none", "--memory", "20GiB"], "does not fit");
    refused(&["--model", "tiny", "--memory", "much"], "--memory much: ");
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
    refused(
        &["--model", "tiny", "--data", &path("cut.safetensors")],
        "cut.safetensors: cannot be read as a safetensors file",
    );
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

/// PEFT's guide on a small scale: first with the example's own file and a base of few steps, then with the guide's file, unchanged.
#[test]
fn an_adapter_learns_who_speaks() {
    let dir = tempfile::tempdir().unwrap();
    let run = |options: &[&str]| {
        let common = ["--work", "work", "--base-steps", "4", "--batch", "8", "--eval", "24", "--threads", "1"];
        example("peft_seq2seq").current_dir(dir.path()).args(common).args(options).assert()
    };
    let told = run(&["--steps", "3"]).success();
    let stdout = String::from_utf8(told.get_output().stdout.clone()).unwrap();
    for part in [
        "2 at stage 3",
        "of which 18432 are trained",
        "Offload: optimizer state in host memory",
        "Offload: parameters in host memory",
        "train_epoch_loss  train_ppl",
        "epoch 1, train, host",
        "epoch 1, eval, host",
        "BART with LoRA   bag of words",
    ] {
        assert!(stdout.contains(part), "{part} in:\n{stdout}");
    }
    // A bag of words tells as much in every run.
    let row = |name: &str| -> Vec<f64> {
        let line = stdout.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in:\n{stdout}"));
        line[name.len()..].split_whitespace().map(|figure| figure.parse().unwrap()).collect()
    };
    let (held_out, test) = (row("held out"), row("test, without labels"));
    assert_eq!((held_out[0], test[0]), (24.0, 184.0));
    assert!(test[2] > 0.5 && test[1] < test[2], "a model of a few steps tells less: {test:?}");
    let said = lines(&dir.path().join("work/predictions.jsonl"));
    assert_eq!(said.len(), 24 + 184);
    assert!(said[..24].iter().all(|line| line["label"].is_string()), "{said:?}");
    assert!(said[24..].iter().all(|line| line["label"].is_null() && line["prediction"].is_string()), "{said:?}");
    let base = dir.path().join("work/base/model.safetensors");
    let bytes = std::fs::read(&base).unwrap();

    // The base is there.
    let config = fixture("configs/accelerate_zero3_cpu.yaml").display().to_string();
    let other = ["--steps", "2", "--config", &config, "--save", "guide", "--predictions", "guide.jsonl"];
    let told = run(&other).success();
    let (out, err) = (&told.get_output().stdout, &told.get_output().stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(out.contains("1 at stage 3") && out.contains("the 16-bit model (bf16) is saved in guide"), "{out}");
    assert!(!err.contains("warning:"), "{err}");
    assert!(std::fs::read(&base).unwrap() == bytes);
    assert!(dir.path().join("guide/16bit-model-00000002/adapter_model.safetensors").is_file());
    // What it has done, it does not do again.
    let again = run(&["--steps", "3"]).success();
    assert!(String::from_utf8_lossy(&again.get_output().stderr).contains("nothing is left to do"));

    // Ranks that are processes: the first makes the rows anew, and what they say is what threads said. They need a base.
    std::fs::remove_file(dir.path().join("work/lines.jsonl")).unwrap();
    let port = free_port().to_string();
    let processes = |options: &[&str]| -> Vec<std::process::Output> {
        let begin = |rank: &&str| {
            let numbers = [("RANK", *rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")];
            let mut command = std::process::Command::new(example("peft_seq2seq").get_program());
            command.current_dir(dir.path()).envs(numbers).envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).args(["--deadline", "60", "--threads", "1"]);
            command.args(options).spawn().unwrap()
        };
        let children: Vec<_> = ["0", "1"].iter().map(begin).collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    };
    let same = ["--work", "work", "--batch", "8", "--eval", "24", "--steps", "3"];
    let told = processes(&[&same[..], &["--save", "processes", "--predictions", "processes.jsonl"]].concat());
    assert!(told.iter().all(|ended| ended.status.success()), "{told:?}");
    assert_eq!(lines(&dir.path().join("processes.jsonl")), said);
    for ended in processes(&["--work", "none"]) {
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(2), "{told}");
        assert!(told.contains("none/base: does not exist: run this example once without a launcher"), "{told}");
    }
    assert!(!dir.path().join("none").exists());
}
