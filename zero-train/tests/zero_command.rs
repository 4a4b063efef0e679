//! The `zero` command as a user runs it.

use std::path::{Path, PathBuf};

use assert_cmd::Command;

fn zero() -> Command {
    Command::new(env!("CARGO_BIN_EXE_zero"))
}

fn configs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name)
}

/// What a successful run prints.
fn prints(args: &[&str]) -> String {
    let run = zero().args(args).assert().success();
    String::from_utf8(run.get_output().stdout.clone()).unwrap()
}

/// What a run with exit code 2 says, and that it prints nothing else.
fn refused(args: &[&str]) -> String {
    let run = zero().args(args).assert().code(2);
    assert!(run.get_output().stdout.is_empty());
    String::from_utf8(run.get_output().stderr.clone()).unwrap()
}

#[test]
fn help_teaches() {
    insta::assert_snapshot!(prints(&["--help"]), @r"
    Train large models with ZeRO on Burn: data-parallel ranks that do not each hold a whole copy

    Usage: zero <COMMAND>

    Commands:
      config       Write a configuration file that Accelerate reads too, by questions or by flags
      check        Validate a DeepSpeed JSON or an Accelerate YAML, and say in words what it means
      estimate     Bytes of model state per rank at every stage, and what fits into this machine
      train        Train a GPT-2 on text or token files
      launch       Start ranks as processes, on one machine or many, and again after one has died
      flight       Say from the ranks' last operations which of them is late, and where
      export       Write a saved model as a folder that Hugging Face's transformers loads
      inspect      Say what a checkpoint holds, whether it is sound and who can resume it; list a folder
      diff         Compare two checkpoints, saved by any numbers of ranks
      completions  Print a completion script for your shell
      help         Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help
      -V, --version  Print version

    First steps:
      zero estimate --model gpt2-xl --ranks 2       what each stage needs, and what fits here
      zero config --defaults --stage 3              a configuration file without questions
      zero check zero.yaml                          what a file means, in words; what is wrong with it
      zero train --model tiny --data book.txt --config zero.yaml --out run
      zero launch --ranks 4 --hosts hosts -- train --model gpt2 --data book.txt --save run/checkpoints
      zero inspect run/checkpoints                  what was saved, and whether it is sound

    Files of DeepSpeed (JSON) and of Accelerate (YAML) are read as they are.
    ");
}

#[test]
fn config_writes_a_file_that_check_explains() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("zero.yaml");
    let path = file.to_str().unwrap();
    let said = prints(&["config", "--defaults", "--stage", "3", "--ranks", "4", "--clip", "1", "--output", path]);
    assert_eq!(said, format!("The configuration is saved at {path}\n"));
    let explained = prints(&["check", path]);
    for part in ["is right", "ZeRO stage 3 over 4 ranks", "clipped to a global norm of 1", "Precision: fp32"] {
        assert!(explained.contains(part), "{part} in\n{explained}");
    }
    let error = refused(&["config", "--defaults", "--output", path]);
    assert!(error.contains("is there already") && error.contains("--force"), "{error}");
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
    assert!(with(&[]).contains("no terminal to ask questions on: use --defaults"));
    assert!(with(&["--defaults", "--stage", "2", "--offload-param", "cpu"]).contains("expected stage 3 or above"));
    assert!(with(&["--defaults", "--stage", "3", "--offload-param", "nvme"]).contains("--nvme-path DIR"));
    assert!(with(&["--defaults", "--stage", "1", "--save-16bit"]).contains("leave it out"));
    assert!(with(&["--defaults", "--clip=-1"]).contains("expected a norm above 0"));
    assert!(with(&["--defaults", "--ranks", "0"]).contains("expected at least 1"));
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
    assert!(refused(&["check", auto.to_str().unwrap()]).contains("hidden size"));
    let explained = prints(&["check", auto.to_str().unwrap(), "--model", "gpt2"]);
    assert!(explained.contains("buckets of 589,824 elements"), "768 x 768: {explained}");
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
    for (code, expected) in [(1, 2), (137, 2), (130, 1), (138, 1), (143, 1)] {
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
