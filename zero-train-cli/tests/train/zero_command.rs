//! The `zero` command from a user's view.

use std::path::{Path, PathBuf};

use assert_cmd::Command;

use crate::common;

fn zero() -> Command {
    Command::new(env!("CARGO_BIN_EXE_zero"))
}

fn configs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../zero-settings/tests/configs").join(name)
}

/// Returns the output of a successful run.
fn prints(args: &[&str]) -> String {
    let run = zero().args(args).assert().success();
    String::from_utf8(run.get_output().stdout.clone()).unwrap()
}

/// Returns the error of a run with exit code 2, and checks that it prints nothing else.
fn refused(args: &[&str]) -> String {
    let run = zero().args(args).assert().code(2);
    assert!(run.get_output().stdout.is_empty());
    String::from_utf8(run.get_output().stderr.clone()).unwrap()
}

#[test]
fn help_teaches() {
    insta::assert_snapshot!(prints(&["--help"]), @r"
    Train large models with ZeRO on Burn: data-parallel ranks that shard the model state

    Usage: zero <COMMAND>

    Commands:
      config       Write a configuration file in Accelerate's format, interactively or from flags
      check        Validate a DeepSpeed JSON or an Accelerate YAML file, and explain what it sets
      estimate     Estimate the model state per rank at every stage, and what fits on this machine
      tokenizer    Learn a WordPiece vocabulary from texts, for BERT
      train        Train a language model on text, labeled rows or token files
      tune         Find the fastest number of ranks, ZeRO stage and micro-batch size by short trials
      generate     Generate text with a trained model
      chat         Chat with a model: read messages from standard input, and print its answers
      launch       Start ranks as processes, on one machine or many, and restart them if one dies
      flight       Read records of the ranks' last operations, and report which rank the others wait for
      export       Export a checkpoint to a folder that Hugging Face transformers can load
      inspect      Describe and verify a checkpoint, or list the checkpoints in a folder
      report       Write an HTML page that compares runs, from the files in their --out folders
      completions  Print a completion script for your shell
      help         Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help
      -V, --version  Print version

    Examples:
      zero estimate --model gpt2-xl --ranks 2       show the memory of each stage, and what fits here
      zero config --defaults --stage 3              write a configuration file without questions
      zero check zero.yaml                          explain a configuration file, or list its errors
      zero train --model tiny --data book.txt --config zero.yaml --out run
      zero launch --ranks 4 --hosts hosts -- train --model gpt2 --data book.txt --save run/checkpoints
      zero report run other-run                     write an HTML page that compares runs
      zero inspect run/checkpoints                  list the checkpoints, and verify them

    Configuration files of DeepSpeed (JSON) and Accelerate (YAML) are read directly.
    ");
}

#[test]
fn estimates_are_for_any_number_of_parameters() {
    let told = prints(&["estimate", "--parameters", "7e9", "--ranks", "8", "--nodes", "2", "--memory", "40GiB"]);
    assert!(told.contains("a model: 7000000000 parameters, AdamW, 8 ranks, 4 on this machine"), "{told}");
    assert!(told.contains("Least offload that fits 40.00 GiB: stage 3 with --offload"), "{told}");
    for wrong in
        [&["estimate"][..], &["estimate", "--parameters", "0"], &["estimate", "--parameters", "7e9", "--model", "gpt2"]]
    {
        Command::new(env!("CARGO_BIN_EXE_zero")).args(wrong).assert().code(2);
    }
}

#[test]
fn schedules_by_option_are_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    common::write_inputs(dir.path());
    let rates = |options: &[&str]| -> Vec<f64> {
        let run = dir.path().join(options.join("-").replace("--", ""));
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_zero"));
        command
            .args(["train", "--steps", "12", "--batch", "1", "--threads", "1", "--lr", "0.1", "--json"])
            .args(options);
        command.arg("--model").arg(dir.path().join("model")).arg("--data").arg(dir.path().join("rows.safetensors"));
        let done = command.arg("--out").arg(run.join("out")).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = std::fs::read_to_string(run.join("out/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.map(|line| line["lr"].as_f64().unwrap()).collect()
    };
    assert_eq!(rates(&[]), [0.1; 12]);
    assert_eq!(rates(&["--schedule", "constant", "--warmup", "4"])[6..], [0.1; 6]);
    // As transformers has them: 12 steps from the whole rate, or 8 after a warm-up of 4 from 0.
    let progress = |warmup: f64, step: usize| (step as f64 - warmup) / (12.0 - warmup);
    let value = |shape: &str, at: f64| match shape {
        "linear" => 1.0 - at,
        _ => 0.5 * (1.0 + (std::f64::consts::PI * at).cos()),
    };
    for shape in ["linear", "cosine"] {
        for warmup in [0.0, 4.0] {
            let rates = rates(&["--schedule", shape, "--warmup", &warmup.to_string()]);
            for (step, rate) in rates.iter().enumerate() {
                let at = progress(warmup, step);
                let expected = 0.1 * if at < 0.0 { step as f64 / warmup } else { value(shape, at) };
                assert!(
                    (rate - expected).abs() < 1e-12,
                    "{shape}, warm-up {warmup}, step {step}: {rate} for {expected}"
                );
            }
        }
    }
}

/// `zero check --keys KIND >docs/book/src/keys-KIND.md` regenerates them.
#[test]
fn the_books_tables_of_keys_are_the_programs() {
    for kind in ["deepspeed", "accelerate"] {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../docs/book/src/keys-{kind}.md"));
        let table = prints(&["check", "--keys", kind]);
        assert!(table.lines().count() > 50 && table.contains("| supported |"));
        assert!(
            std::fs::read_to_string(page).unwrap() == table,
            "zero check --keys {kind} >docs/book/src/keys-{kind}.md"
        );
    }
}

#[test]
fn config_writes_the_file_of_the_walkthrough() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("zero.yaml");
    let flags = ["--stage", "3", "--ranks", "2", "--clip", "1", "--offload-optimizer", "cpu", "--offload-param", "cpu"];
    prints(&[&["config", "--defaults", "--save-16bit", "--output", file.to_str().unwrap()], &flags[..]].concat());
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/zero3_offload.yaml");
    assert_eq!(std::fs::read_to_string(file).unwrap(), std::fs::read_to_string(ours).unwrap());
}

#[test]
fn config_writes_a_file_that_check_explains() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("zero.yaml");
    let path = file.to_str().unwrap();
    let said = prints(&["config", "--defaults", "--stage", "3", "--ranks", "4", "--clip", "1", "--output", path]);
    assert_eq!(said, format!("Wrote the configuration to {path}\n"));
    let explained = prints(&["check", path]);
    for part in ["is valid", "ZeRO stage 3 over 4 ranks", "clipped to a global norm of 1", "Precision: fp32"] {
        assert!(explained.contains(part), "{part} in\n{explained}");
    }
    let error = refused(&["config", "--defaults", "--output", path]);
    assert!(error.contains("already exists") && error.contains("--force"), "{error}");
    prints(&["config", "--defaults", "--dtype", "bf16", "--force", "--output", path]);
    assert!(std::fs::read_to_string(&file).unwrap().contains("mixed_precision: 'bf16'"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn config_refuses_what_does_not_go_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zero.yaml");
    let with = |args: &[&str]| {
        let error = refused(&[&["config", "--output", path.to_str().unwrap()], args].concat());
        assert!(!path.exists());
        error
    };
    assert!(with(&[]).contains("cannot ask questions without a terminal: use --defaults"));
    assert!(with(&["--defaults", "--stage", "2", "--offload-param", "cpu"]).contains("expected stage 3 or above"));
    assert!(with(&["--defaults", "--stage", "3", "--offload-param", "nvme"]).contains("--nvme-path DIR"));
    assert!(with(&["--defaults", "--stage", "1", "--save-16bit"]).contains("omit --save-16bit"));
    assert!(with(&["--defaults", "--clip=-1"]).contains("expected a norm above 0"));
    assert!(with(&["--defaults", "--ranks", "0"]).contains("expected at least 1"));
    // Nothing that is given is left out of the file without a word.
    assert!(with(&["--defaults", "--stage", "3", "--nvme-path", "/fast"]).contains("--nvme-path"));
    for flag in
        [["--dtype", "bf16"], ["--zero-stage", "2"], ["--gradient-accumulation-steps", "2"], ["--max-grad-norm", "1"]]
    {
        assert!(
            with(&[&["--defaults", "--deepspeed-config", "ds.json"], &flag[..]].concat())
                .contains("--deepspeed-config")
        );
    }
}

#[test]
fn check_says_what_is_wrong() {
    let shared = configs("deepspeed_zero3.json");
    let explained = prints(&["check", shared.to_str().unwrap(), "--ranks", "2"]);
    assert!(
        explained.contains("2 rows per rank × 2 micro-batches × 2 ranks = 8 rows per optimizer step"),
        "{explained}"
    );
    let error = refused(&["check", shared.to_str().unwrap(), "--ranks", "3"]);
    assert!(error.contains("train_batch_size"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("typo.json");
    std::fs::write(&file, r#"{"train_batch_size": 4, "gradient_cliping": 1.0, "zero_optimization": {"stage": 4}}"#)
        .unwrap();
    let error = refused(&["check", file.to_str().unwrap()]);
    assert!(error.contains("gradient_cliping: unknown key; did you mean `gradient_clipping`?"), "{error}");
    assert!(error.contains("zero_optimization.stage: expected"), "{error}");
    assert!(refused(&["check", "absent.yaml"]).contains("absent.yaml"));

    let auto = dir.path().join("auto.json");
    let text = r#"{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}"#;
    std::fs::write(&auto, text).unwrap();
    let explained = prints(&["check", auto.to_str().unwrap()]);
    assert!(explained.contains("hidden size of --model") && explained.contains("buckets of \"auto\""), "{explained}");
    let explained = prints(&["check", auto.to_str().unwrap(), "--model", "gpt2"]);
    assert!(explained.contains("buckets of 589,824 elements"), "768 x 768: {explained}");
}

/// Returns the line of `text` that starts with `start`.
fn line<'a>(text: &'a str, start: &str) -> &'a str {
    let found = text.lines().find(|line| line.trim_start().starts_with(start));
    found.unwrap_or_else(|| panic!("no line begins with {start} in\n{text}"))
}

#[test]
fn check_needs_no_model_for_the_templates_of_others() {
    let templates = configs("templates");
    let mut files: Vec<_> = std::fs::read_dir(&templates).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 16);
    for file in &files {
        let (file, text) = (file.to_str().unwrap(), std::fs::read_to_string(file).unwrap());
        let explained = prints(&["check", file]);
        assert!(explained.contains("is valid") && !explained.contains("Auto::"), "{explained}");
        // One of the YAMLs names a JSON.
        let auto = |key: &str| text.contains(&format!("{key:?}: \"auto\"")) || text.contains("deepspeed_config_file");
        assert_eq!(auto("lr"), explained.contains("--lr"), "{explained}");
        assert_eq!(auto("reduce_bucket_size"), explained.contains("hidden size"), "{explained}");
    }
    let file = configs("templates/hugging_face_stage3.json");
    let file = file.to_str().unwrap();
    let listed = prints(&["check", file]);
    for (key, option) in [
        ("optimizer.params.lr", "--lr"),
        ("optimizer.params.betas", "--beta1, --beta2"),
        ("optimizer.params.eps", "--eps"),
        ("optimizer.params.weight_decay", "--weight-decay"),
        ("scheduler.params.warmup_num_steps", "--warmup"),
        ("zero_optimization.stage3_prefetch_bucket_size", "--model"),
        ("fp16.enabled", "--dtype"),
        ("gradient_clipping", "--clip"),
        ("train_batch_size", "--batch"),
        ("train_micro_batch_size_per_gpu", "--batch"),
        ("gradient_accumulation_steps", "--accumulation"),
    ] {
        assert!(line(&listed, key).contains(option), "{key} in\n{listed}");
    }
    // What is given is filled and shown, under the names of others too.
    let given =
        ["--model", "gpt2", "--learning-rate", "3e-5", "--per-device-train-batch-size", "4", "--max-grad-norm", "0.5"];
    let more = ["--gradient-accumulation-steps", "2", "--mixed-precision", "bf16", "--warmup", "10", "--ranks", "2"];
    let filled = prints(&[&["check", file], &given[..], &more].concat());
    for (key, value) in [
        ("optimizer.params.lr", " 0.00003 "),
        ("train_batch_size", " 16 "),
        ("train_micro_batch_size_per_gpu", " 4 "),
        ("gradient_accumulation_steps", " 2 "),
        ("gradient_clipping", " 0.5 "),
        ("bf16.enabled", " true "),
        ("fp16.enabled", " false "),
        ("scheduler.params.warmup_num_steps", " 10 "),
        ("zero_optimization.reduce_bucket_size", " 589824 "),
    ] {
        assert!(line(&filled, key).contains(value), "{key} in\n{filled}");
    }
    assert!(filled.contains("AdamW, lr 0.00003") && filled.contains("Precision: bf16"), "{filled}");
    // As in `zero train`, what a file says is not contradicted.
    let shared = configs("deepspeed_zero3.json");
    let error = refused(&["check", shared.to_str().unwrap(), "--ranks", "2", "--lr", "0.5"]);
    assert!(error.contains("--lr 0.5") && error.contains("has 0.001"), "{error}");
}

/// The lookup order of Accelerate: the working directory, regardless of the YAML's folder; otherwise next to the YAML.
#[test]
fn a_deepspeed_config_file_is_found_from_the_working_directory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("yamls")).unwrap();
    std::fs::create_dir(dir.path().join("yamls/ds")).unwrap();
    std::fs::create_dir(dir.path().join("ds")).unwrap();
    let yaml = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds/x.json\n";
    std::fs::write(dir.path().join("yamls/acc.yaml"), yaml).unwrap();
    let json = |stage: u8| format!(r#"{{"train_batch_size": 4, "zero_optimization": {{"stage": {stage}}}}}"#);
    let check = || {
        let run = zero().args(["check", "yamls/acc.yaml"]).current_dir(dir.path()).output().unwrap();
        String::from_utf8([run.stdout, run.stderr].concat()).unwrap()
    };
    let neither = check();
    assert!(neither.contains("working directory") && neither.contains("ds/x.json"), "{neither}");
    std::fs::write(dir.path().join("yamls/ds/x.json"), json(2)).unwrap();
    assert!(check().contains("ZeRO stage 2 over 2 ranks"), "{}", check());
    std::fs::write(dir.path().join("ds/x.json"), json(1)).unwrap();
    assert!(check().contains("ZeRO stage 1 over 2 ranks"), "{}", check());
}

#[test]
fn estimate_fits_into_the_memory_that_is_named() {
    let fits = |memory: &str| {
        let table = prints(&["estimate", "--model", "gpt2", "--memory", memory]);
        table.lines().filter(|line| line.starts_with(['0', '1', '2', '3']) && line.ends_with("yes")).count()
    };
    assert_eq!((fits("1KiB"), fits("1000GiB")), (0, 8));
}

#[test]
fn estimate_names_the_largest_model_of_a_family_that_fits() {
    let of =
        |family: &str, memory: &str| prints(&["estimate", "--largest", family, "--memory", memory, "--ranks", "2"]);
    // 16 bytes per parameter over both ranks: 23.2 GiB for GPT-2 1.5B, and 11.5 GiB for gpt2-large.
    let table = of("gpt2", "20GiB");
    let row = |table: &str, option: &str| table.lines().find(|line| line.starts_with(option)).unwrap().to_string();
    assert!(row(&table, "no offload").contains(" gpt2-large "), "{table}");
    // Only parameters of 4 bytes stay: 5.8 GiB for GPT-2 1.5B, and 38.3 GiB for 10B.
    assert!(row(&table, "--offload optimizer").contains(" gpt2-xl "), "{table}");
    assert!(row(&table, "--offload all").contains(" gpt2-10b "), "{table}");
    let none = of("qwen3", "1MiB");
    assert_eq!(none.matches("none fits 1.00 MiB").count(), 3, "{none}");
    assert!(refused(&["estimate", "--largest", "gtp"]).contains("expected a family such as gpt2"));
    assert!(refused(&["estimate", "--largest", "gpt2", "--model", "gpt2"]).contains("cannot be used with"));
}

#[test]
fn estimate_prints_every_stage() {
    let table = prints(&["estimate", "--model", "gpt2", "--ranks", "4", "--nodes", "2", "--dtype", "bf16"]);
    assert!(table.starts_with("gpt2: 124439808 parameters, AdamW, 4 ranks, 2 on this machine"), "{table}");
    // 16 bytes a parameter at stage 0.
    assert!(table.contains("1.85 GiB"), "{table}");
    assert_eq!(table.lines().filter(|line| line.starts_with(['0', '1', '2', '3'])).count(), 8);
    assert!(
        refused(&["estimate", "--model", "gpt2", "--ranks", "3", "--nodes", "2"]).contains("multiple of the 2 nodes")
    );
    assert!(refused(&["estimate", "--model", "gtp2"]).contains("gpt2"));
    // Meshes, by links: over two machines with two ranks each.
    assert!(table.contains("\n--shard-size 2 --quantized-gradients int8 ") && table.contains("Shortest network time"));
    assert!(!prints(&["estimate", "--model", "gpt2", "--ranks", "4"]).contains("Shortest network time"));
    assert!(refused(&["estimate", "--model", "gpt2", "--link", "0"]).contains("expected Gbit/s above 0"));
}

#[test]
fn train_trains_with_a_config() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("book.txt"), dir.path().join("run"));
    std::fs::write(&data, "It was the best of times, it was the worst of times. ".repeat(60)).unwrap();
    let config = configs("deepspeed_zero3.json");
    let args = ["train", "--model", "tiny", "--seq", "16", "--steps", "2", "--json", "--data", data.to_str().unwrap()];
    let args = [&args[..], &["--config", config.to_str().unwrap(), "--out", out.to_str().unwrap()]].concat();
    let summary = prints(&args);
    assert!(summary.contains("\"accumulation\":2"), "{summary}");
    assert_eq!(std::fs::read_to_string(out.join("metrics.jsonl")).unwrap().lines().count(), 2);
    assert!(refused(&["train", "--model", "tiny"]).contains("--data is missing"));
}

/// Runs `zero train` on the tiny model in `dir`; returns its output and its folder.
fn trains(dir: &Path, args: &[&str]) -> (std::process::Output, PathBuf) {
    let (data, out) = (dir.join("book.txt"), dir.join("run"));
    std::fs::write(&data, "It was the best of times, it was the worst of times. ".repeat(60)).unwrap();
    let mut run = zero();
    run.args(["train", "--model", "tiny", "--seq", "16", "--threads", "1", "--json", "--data"])
        .arg(data)
        .arg("--out")
        .arg(&out);
    (run.args(args).output().unwrap(), out)
}

/// Returns a column of metrics.jsonl.
fn column(out: &Path, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()[name].as_f64().unwrap()).collect()
}

#[test]
fn the_canonical_file_of_hugging_face_trains_and_saves_16_bit() {
    let dir = tempfile::tempdir().unwrap();
    let file = configs("templates/hugging_face_stage3.json");
    let args =
        ["--config-file", file.to_str().unwrap(), "--steps", "4", "--learning-rate", "1e-4", "--mixed-precision", "no"];
    let (run, out) = trains(dir.path(), &args);
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert!(run.status.success(), "{stderr}");
    // No warm-up is one of 2 steps, as in DeepSpeed: two updates at its lowest rate, and then the rate itself.
    assert_eq!(column(&out, "lr"), [0.0, 0.0, 1e-4, 1e-4]);
    let saved = out.join("16bit-model-00000004");
    assert!(saved.join("model.safetensors").is_file() && saved.join("config.json").is_file(), "{stderr}");
    assert!(stderr.contains("16-bit model") && stderr.contains("16bit-model-00000004"), "{stderr}");
    // What is there is not replaced, and that is told before anything is trained.
    let (run, _) = trains(dir.path(), &args);
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("16bit-model-00000004") && stderr.contains("--out"), "{stderr}");
}

#[test]
fn a_16_bit_model_without_a_folder_is_told() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text"), "some text ".repeat(200)).unwrap();
    let run = zero()
        .args(["train", "--model", "tiny", "--seq", "16", "--steps", "1", "--json", "--data", "text", "--config"])
        .arg(configs("templates/hugging_face_stage3.json"))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert!(run.status.success(), "{stderr}");
    assert!(stderr.contains("stage3_gather_16bit_weights_on_model_save") && stderr.contains("--save DIR"), "{stderr}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn no_warmup_in_a_file_is_deepspeeds_two_steps() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ds.json");
    let text = r#"{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}"#;
    std::fs::write(&file, text).unwrap();
    let (run, out) = trains(dir.path(), &["--config", file.to_str().unwrap(), "--steps", "3"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(column(&out, "lr"), [0.0, 0.0, 5e-4]);
}

#[test]
fn a_warmup_beside_a_file_keeps_its_rate() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ds.json");
    let text = r#"{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}"#;
    std::fs::write(&file, text).unwrap();
    let (run, out) = trains(dir.path(), &["--config", file.to_str().unwrap(), "--steps", "4", "--warmup", "2"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(column(&out, "lr"), [0.0, 2.5e-4, 5e-4, 5e-4]);
}

#[test]
fn offload_options_do_not_contradict_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, offload: &str| {
        let path = dir.path().join(name);
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {{"stage": 3{offload}}}}}"#
        );
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    std::fs::create_dir(dir.path().join("fast")).unwrap();
    let fast = dir.path().join("fast").display().to_string();
    let none = write("none.json", "");
    let off = write("off.json", r#", "offload_optimizer": {"device": "none"}"#);
    let nvme = write("nvme.json", &format!(r#", "offload_optimizer": {{"device": "nvme", "nvme_path": {fast:?}}}"#));
    for (file, options, told) in [
        (&off, &["--offload", "optimizer"][..], "--offload optimizer"),
        (&none, &["--offload-to", "disk"], "--offload-to disk"),
        (&none, &["--swap", "/elsewhere"], "--swap /elsewhere"),
        (&nvme, &["--offload", "optimizer", "--offload-ratio", "0.5"], "--offload-ratio 0.5"),
        (&nvme, &["--swap", "/elsewhere"], "--swap /elsewhere"),
    ] {
        let (run, _) = trains(dir.path(), &[&["--config", file.as_str(), "--steps", "1"], options].concat());
        let stderr = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(2), "{options:?}: {stderr}");
        assert!(stderr.contains(told) && stderr.contains("omit the option, or change the file"), "{stderr}");
    }
    for (options, told) in [
        (&["--offload-ratio", "0.5"][..], "expected --offload optimizer or all"),
        (&["--offload", "optimizer", "--offload-ratio", "1.5"], "expected a fraction from 0 to 1"),
        (&["--stage", "2", "--quantized-weights", "int8"], "expected --stage 3"),
    ] {
        let (run, _) = trains(dir.path(), &[&["--steps", "1"], options].concat());
        let stderr = String::from_utf8(run.stderr).unwrap();
        assert!(run.status.code() == Some(2) && stderr.contains(told), "{options:?}: {stderr}");
    }
    // A folder that is not there is bad input.
    let absent = write("absent.json", r#", "offload_optimizer": {"device": "nvme", "nvme_path": "/absent/folder"}"#);
    let (run, _) = trains(dir.path(), &["--config", &absent, "--steps", "1"]);
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("/absent/folder: is not a folder"), "{stderr}");
    // Options that say the same, or what the file lacks, are taken.
    for file in [&nvme, &none] {
        let options = ["--offload", "optimizer", "--offload-to", "disk", "--swap", &fast, "--stage", "3"];
        let (run, _) = trains(dir.path(), &[&["--config", file.as_str(), "--steps", "1"][..], &options].concat());
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }
}

/// The available disk space is measured at the file's nvme_path, not in the current folder, which has none here.
#[test]
#[cfg(target_os = "linux")]
fn the_disk_of_a_file_is_the_one_that_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let (data, file) = (dir.path().join("book.txt"), dir.path().join("ds.json"));
    std::fs::write(&data, "It was the best of times, it was the worst of times. ".repeat(60)).unwrap();
    let text = serde_json::json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": dir.path()}}
    });
    std::fs::write(&file, text.to_string()).unwrap();
    let run = zero()
        .args(["train", "--model", "tiny", "--seq", "16", "--steps", "1", "--json", "--data"])
        .arg(&data)
        .arg("--config")
        .arg(&file)
        .current_dir("/proc")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn names_of_others_are_aliases() {
    for (command, options) in [
        (
            "train",
            &[
                "--per-device-train-batch-size",
                "--gradient-accumulation-steps",
                "--mixed-precision",
                "--zero-stage",
                "--config-file",
                "--max-grad-norm",
                "--learning-rate",
            ][..],
        ),
        (
            "check",
            &[
                "--per-device-train-batch-size",
                "--gradient-accumulation-steps",
                "--mixed-precision",
                "--max-grad-norm",
                "--learning-rate",
            ],
        ),
        ("config", &["--gradient-accumulation-steps", "--mixed-precision", "--zero-stage", "--max-grad-norm"]),
        ("estimate", &["--mixed-precision"]),
    ] {
        let help = prints(&[command, "--help"]);
        for option in options {
            assert!(help.contains(option), "{option} in\n{help}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "--zero-stage",
        "2",
        "--per-device-train-batch-size",
        "2",
        "--gradient-accumulation-steps",
        "2",
        "--steps",
        "1",
    ];
    let (run, out) = trains(dir.path(), &[&args[..], &["--learning-rate", "3e-4", "--max-grad-norm", "1"]].concat());
    let summary: serde_json::Value = serde_json::from_slice(&run.stdout).expect("a summary");
    assert_eq!((&summary["stage"], &summary["batch"], &summary["accumulation"]), (&2.into(), &2.into(), &2.into()));
    assert_eq!(column(&out, "lr"), [3e-4]);
}

#[test]
fn completions_for_shells() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(prints(&["completions", shell]).contains("estimate"), "{shell}");
    }
}

/// Otherwise each process of `mpirun -n N` would train a copy, and all would write the same files.
#[test]
#[cfg(not(feature = "mpi"))]
fn a_program_without_mpi_is_no_rank_of_a_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::write(&text, "some text ".repeat(200)).unwrap();
    let mut run = zero();
    run.args(["train", "--model", "tiny", "--data"]).arg(&text).env("PMI_RANK", "1").env("PMI_SIZE", "4");
    let run = run.assert().code(2);
    let told = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    assert!(told.contains("rank 1 of 4 (by PMI_SIZE)") && told.contains("--features mpi"), "{told}");
}

#[test]
fn launch_starts_a_job_again_that_failed_but_not_one_that_a_signal_has_ended() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let (mpirun, calls) = (dir.path().join("mpirun"), dir.path().join("calls"));
    for (code, expected) in [(1, 2), (137, 2), (129, 1), (130, 1), (138, 1), (140, 1), (143, 1)] {
        let script = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit; fi\n\
             echo >>{}; exit {code}\n",
            calls.display()
        );
        std::fs::write(&mpirun, script).unwrap();
        std::fs::set_permissions(&mpirun, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut launch = zero();
        launch.args(["launch", "--ranks", "2", "--max-restarts", "1", "--mpirun"]).arg(&mpirun);
        launch.args(["--", "train", "--save"]).arg(dir.path()).assert().code(code);
        assert_eq!(std::fs::read_to_string(&calls).unwrap().lines().count(), expected, "exit code {code}");
        std::fs::remove_file(&calls).unwrap();
    }
}

/// Compares the bytes received per step and held by a run with the plan's formulas.
#[test]
fn bytes_are_those_of_the_formulas() {
    let dir = tempfile::tempdir().unwrap();
    let gradients = r#", "zero_quantized_gradients": true"#;
    let cut = r#", "zero_hpz_partition_size": 2, "zero_quantized_gradients": true"#;
    let weights =
        r#", "zero_hpz_partition_size": 2, "zero_quantized_weights": true, "zero_quantized_weights_format": "int4""#;
    let mics = r#", "mics_shard_size": 2, "zero_quantized_gradients": true, "zero_quantized_gradients_format": "int4""#;
    let plain_cut = r#", "zero_hpz_partition_size": 2"#;
    let runs = [
        (0, 1, ""),
        (0, 1, gradients),
        (2, 2, gradients),
        (3, 2, ""),
        (3, 1, gradients),
        (2, 1, r#", "mics_shard_size": 2"#),
        (2, 2, mics),
        (3, 1, mics),
        (3, 2, plain_cut),
        (3, 2, cut),
        (3, 1, weights),
    ];
    for (stage, accumulation, keys) in runs {
        let zero = format!(
            r#"{{"stage": {stage}, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1e6{keys}}}"#
        );
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {accumulation}, "gradient_clipping": 0, "zero_optimization": {zero}}}"#
        );
        let file = dir.path().join("ds.json");
        std::fs::write(&file, text).unwrap();
        let (run, out) = trains(dir.path(), &["--config", file.to_str().unwrap(), "--ranks", "4", "--steps", "3"]);
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        // Of a rank, on average: a second cut's pieces are partly there already on some.
        let received = |operation: &str| {
            let ranks = last["ranks"].as_array().unwrap().iter();
            ranks.map(|rank| rank["wire_bytes"][operation].as_f64().unwrap()).sum::<f64>() / 4.0
        };
        let operations = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"];
        let wire = operations.iter().map(|operation| received(operation)).sum::<f64>();
        let summary: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        let near = |got: &serde_json::Value, formula: &serde_json::Value| {
            let (got, formula) = (got.as_f64().unwrap(), formula.as_f64().unwrap());
            println!("stage {stage}, {accumulation} micro-batches{keys}: {got} bytes for {formula}");
            assert!((got / formula - 1.0).abs() < 0.01, "stage {stage}{keys}: {got} bytes for {formula}");
        };
        near(&wire.into(), &summary["wire_bytes_per_step_formula"]);
        let uncompressed = summary["wire_bytes_per_step_uncompressed"].as_u64().unwrap();
        let sent = summary["wire_bytes_per_step"].as_u64().unwrap();
        assert_eq!(uncompressed > sent, keys.contains("quantized"), "{keys}: {uncompressed}, and {sent} sent");
        // Those of micro-batches are added up beside those that come.
        if accumulation == 1 {
            let [held, formula] =
                ["model_state_bytes", "model_state_bytes_formula"].map(|key| &summary[key]["gradients"]);
            near(held, formula);
        }
    }
}
