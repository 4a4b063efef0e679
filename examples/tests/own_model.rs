//! A user's program on the trainer: it learns, and resumes after a SIGKILL with an identical trajectory, at any stage.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn own_model(out: &Path, options: &[&str]) -> Command {
    let mut command = example("own_model", out, options);
    command.arg("--json");
    command
}

/// An example that `cargo test` builds together with this test.
fn example(name: &str, out: &Path, options: &[&str]) -> Command {
    let deps = std::env::current_exe().expect("a test has a path");
    let target = deps.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let mut command = Command::new(target.join("examples").join(name));
    command.args(["--threads", "1", "--out"]).arg(out.join("out"));
    command.args(options).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn summary(done: &Output) -> Value {
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// Step, loss and gradient norm of every line, as written: equal exactly if the numbers are.
fn trajectory(out: &Path) -> Vec<[String; 3]> {
    let text = std::fs::read_to_string(out.join("out/metrics.jsonl")).unwrap();
    let of = |line: &str| {
        let metrics: Value = serde_json::from_str(line).unwrap();
        ["step", "loss", "grad_norm"].map(|key| metrics[key].to_string())
    };
    text.lines().map(of).collect()
}

fn accuracy(epoch: &Value) -> f64 {
    let values = epoch["eval"].as_array().unwrap();
    values.iter().find(|value| value[0] == "accuracy").unwrap()[1].as_f64().unwrap()
}

#[test]
fn it_learns_and_every_stage_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let out = |stage: &str| -> PathBuf { dir.path().join(stage) };
    let run = |stage| own_model(&out(stage), &["--batch", "32", "--steps", "200", "--stage", stage]).output().unwrap();
    let whole = summary(&run("3"));
    let last = whole["epochs"].as_array().unwrap().last().unwrap().clone();
    assert!(accuracy(&last) > 0.95, "{last}");
    assert_eq!(whole["unit"], "rows");
    assert_eq!(whole["model_state_bytes"], whole["model_state_bytes_formula"]);
    summary(&run("0"));
    assert_eq!(trajectory(&out("0")), trajectory(&out("3")));
}

/// 297 rows over 2 or 4 ranks: some ranks have one more.
#[test]
fn held_out_rows_count_once_each_at_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let evaluated = |ranks: &str, batch: &str| {
        let out = dir.path().join(format!("{ranks}-{batch}"));
        let options = ["--steps", "1", "--lr", "0", "--weight-decay", "0", "--ranks", ranks, "--batch", batch];
        let mut command = own_model(&out, &options);
        let whole = summary(&command.output().unwrap());
        whole["epochs"][0]["eval"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value[1].as_f64().unwrap())
            .collect::<Vec<_>>()
    };
    let whole = evaluated("1", "297");
    for (ranks, batch) in [("2", "32"), ("4", "10"), ("3", "99"), ("4", "75")] {
        for (part, whole) in evaluated(ranks, batch).iter().zip(&whole) {
            assert!((part - whole).abs() < 1e-6 * whole.abs(), "{ranks} ranks of {batch}: {part} for {whole}");
        }
    }
}

#[test]
fn killed_and_resumed_it_goes_on_as_if_nothing_had_happened() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, steps: &str| {
        let out = dir.path().join(name);
        let mut command =
            own_model(&out, &["--batch", "32", "--steps", steps, "--resume", "auto", "--save-every", "5"]);
        command.arg("--save").arg(out.join("checkpoints"));
        command
    };
    summary(&run("unbroken", "120").output().unwrap());
    let mut process = run("broken", "120").spawn().unwrap();
    let checkpoint = dir.path().join("broken/checkpoints/latest");
    let begin = Instant::now();
    while !checkpoint.exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "no checkpoint within a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
    process.kill().unwrap();
    assert!(!process.wait().unwrap().success(), "it ended before it was killed");
    summary(&run("broken", "120").output().unwrap());
    assert_eq!(trajectory(&dir.path().join("broken")), trajectory(&dir.path().join("unbroken")));
}

#[test]
fn a_task_on_conversations_learns_to_answer() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["--steps", "300", "--batch", "4", "--lr", "3e-3"];
    let done = example("chat", dir.path(), &options).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(
        text.contains("What does stage 3 shard? The optimizer's state, the gradients and the parameters."),
        "{text}"
    );
}
