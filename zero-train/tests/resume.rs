//! `zero train --save` and `--resume` as a user runs them.

mod common;

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use common::{trajectory, write_inputs};

struct Inputs(tempfile::TempDir);

impl Inputs {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_inputs(dir.path());
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains `steps` steps in all, with metrics in `run/out` and checkpoints in `run/checkpoints`.
    fn train(&self, run: &str, steps: usize, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(self.path("model")).arg("--data").arg(self.path("rows.safetensors"));
        command.args(["--batch", "2", "--threads", "1", "--steps", &steps.to_string()]);
        command.arg("--out").arg(self.path(run).join("out")).arg("--save").arg(self.path(run).join("checkpoints"));
        command.args(options);
        command
    }

    fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name.starts_with("step-"));
        names.sort();
        names
    }
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

fn stderr(command: &mut Command, code: i32) -> String {
    let run = command.assert().code(code);
    String::from_utf8(run.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_run_goes_on_at_another_shape_and_its_files_are_one_run() {
    let inputs = Inputs::new();
    let said = stdout(&mut inputs.train("run", 6, &["--ranks", "2", "--stage", "3", "--save-every", "4"]));
    assert!(said.contains("step 4: saved") && said.contains("step 6: saved"), "{said}");
    assert_eq!(inputs.checkpoints("run"), ["step-00000004", "step-00000006"]);
    let first = trajectory(&inputs.path("run"));

    let said = stdout(&mut inputs.train("run", 9, &["--ranks", "1", "--stage", "0", "--resume", "auto"]));
    assert!(said.contains("resumes from") && said.contains("step 6, saved by 2 rank(s)"), "{said}");
    let both = trajectory(&inputs.path("run"));
    assert_eq!(both[..6], first);
    assert_eq!(
        both.iter().map(|line| line[0].as_str()).collect::<Vec<_>>(),
        ["1", "2", "3", "4", "5", "6", "7", "8", "9"]
    );
    let csv = std::fs::read_to_string(inputs.path("run/out/metrics.csv")).unwrap();
    assert_eq!(csv.lines().count(), 10, "a head and nine steps: {csv}");

    let said = stderr(&mut inputs.train("run", 9, &["--resume", "auto"]), 0);
    assert!(said.contains("has 9 steps behind it") && said.contains("nothing is left to do"), "{said}");
    assert_eq!(trajectory(&inputs.path("run")), both, "nothing is lost when nothing is left to do");
}

#[test]
fn the_newest_sound_checkpoint_is_taken_and_the_others_are_named() {
    let inputs = Inputs::new();
    let whole = ["--ranks", "2", "--save-every", "2"];
    stdout(&mut inputs.train("run", 8, &whole));
    let unbroken = trajectory(&inputs.path("run"));
    let damage = |step: &str, what: &dyn Fn(&Path)| what(&inputs.path("run/checkpoints").join(step));
    damage("step-00000008", &|path| {
        let file = path.join("rank-00001-of-00002.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&file, bytes).unwrap();
    });
    damage("step-00000006", &|path| std::fs::remove_file(path.join("rank-00000-of-00002.safetensors")).unwrap());
    let mut again = inputs.train("run", 8, &["--ranks", "2", "--resume", "auto"]);
    let said = stderr(&mut again, 0);
    for expected in ["step-00000008 is passed over", "is corrupt", "step-00000006 is passed over", "is missing"] {
        assert!(said.contains(expected), "{expected} in {said}");
    }
    assert_eq!(trajectory(&inputs.path("run")), unbroken, "from step 4 on");

    let damaged = inputs.path("run/checkpoints/step-00000006");
    let said = stderr(&mut inputs.train("run", 8, &["--resume", damaged.to_str().unwrap()]), 2);
    assert!(said.contains("is missing") && said.contains("rank-00000-of-00002"), "{said}");
}

#[test]
fn the_last_and_the_best_are_kept() {
    let inputs = Inputs::new();
    // The rate is so high that the loss grows: the first checkpoint stays the best.
    let options = ["--save-every", "2", "--keep-last", "2", "--keep-best", "--lr", "3", "--eval", "2"];
    stdout(&mut inputs.train("run", 8, &options));
    assert_eq!(inputs.checkpoints("run").len(), 3, "{:?}", inputs.checkpoints("run"));
    assert_eq!(inputs.checkpoints("run")[1..], ["step-00000006", "step-00000008"]);
    stdout(&mut inputs.train("plain", 8, &["--save-every", "2", "--keep-last", "2", "--save-async"]));
    assert_eq!(inputs.checkpoints("plain"), ["step-00000006", "step-00000008"]);
}

#[test]
fn other_data_is_told_and_begins_with_its_first_row() {
    let inputs = Inputs::new();
    stdout(&mut inputs.train("run", 3, &[]));
    let text = inputs.path("text.txt");
    std::fs::write(&text, "To be, or not to be, that is the question. ".repeat(30)).unwrap();
    // Text of GPT-2's tokens does not fit a vocabulary of 61: held-out rows make other data as well.
    let said = stdout(&mut inputs.train("run", 5, &["--resume", "auto", "--eval", "2"]));
    assert!(said.contains("37 rows of 12 tokens, the data has 35 rows of 12"), "{said}");
}

#[test]
fn what_cannot_work_is_refused_before_the_first_step() {
    let inputs = Inputs::new();
    let bare = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(inputs.path("model"));
        command.arg("--data").arg(inputs.path("rows.safetensors")).args(options);
        stderr(&mut command, 2)
    };
    let refused = |options: &[&str], expected: &str| {
        let said = bare(options);
        assert!(said.contains(expected), "{expected} in {said}");
    };
    refused(&["--resume", "auto"], "--resume auto: expected --save DIR too");
    refused(&["--resume", "nowhere"], "--resume nowhere: expected a checkpoint (step-...)");
    refused(&["--save-every", "2"], "--save");
    refused(&["--save", "x", "--save-every", "0"], "--save-every 0: expected at least 1");
    refused(&["--save", "x", "--keep-last", "0"], "--keep-last 0: expected at least 1");
    refused(&["--save", "x", "--keep-best"], "--keep-last");
    let file = inputs.path("rows.safetensors");
    refused(&["--save", file.to_str().unwrap()], "expected a folder, or a name for one; this is a file");
    // A file system that nobody may write to, root neither.
    refused(&["--save", "/proc/zero-checkpoints"], "cannot save checkpoints into /proc/zero-checkpoints");

    stdout(&mut inputs.train("run", 2, &[]));
    let other = inputs.path("other");
    std::fs::create_dir(&other).unwrap();
    let config = std::fs::read_to_string(inputs.path("model/config.json")).unwrap();
    std::fs::write(other.join("config.json"), config.replace("\"n_layer\":2", "\"n_layer\":3")).unwrap();
    let said = stderr(inputs.train("run", 4, &["--resume", "auto"]).arg("--model").arg(&other), 2);
    assert!(said.contains("--model"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
    command.arg("train").arg("--model").arg(&other).arg("--data").arg(inputs.path("rows.safetensors"));
    command.args(["--steps", "4", "--resume"]).arg(inputs.path("run/checkpoints"));
    let said = stderr(&mut command, 2);
    assert!(said.contains("cannot go on from") && said.contains("only this model has: h.2."), "{said}");
}

/// What `zero launch` tells the ranks that it starts again.
fn restarted(command: &mut Command, launched_unix_ms: u128) -> &mut Command {
    command.env("ZERO_RESTARTS", "1").env("ZERO_LAUNCHED_UNIX_MS", launched_unix_ms.to_string())
}

#[test]
fn a_restart_goes_on_from_what_its_job_has_saved_and_otherwise_as_it_was_told() {
    let inputs = Inputs::new();
    let shape = ["--ranks", "1", "--stage", "0", "--save-every", "2"];
    stdout(&mut inputs.train("old", 4, &shape));
    let old = inputs.path("old").join("checkpoints/step-00000002").into_os_string().into_string().unwrap();
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    let launched = now();
    let told = [&shape[..], &["--resume", &old]].concat();

    // Nothing saved yet: from where the job was to begin, not from the beginning.
    let said = stdout(restarted(&mut inputs.train("new", 6, &told), launched));
    assert!(said.contains("resumes from") && said.contains("step 2, saved by"), "{said}");
    // A checkpoint of its own, of step 6.
    let said = stdout(restarted(&mut inputs.train("new", 8, &told), launched));
    assert!(said.contains("step 6, saved by"), "{said}");
    // What lay in the folder before the launch is another job's.
    std::thread::sleep(std::time::Duration::from_millis(5));
    let said = stdout(restarted(&mut inputs.train("new", 8, &told), now()));
    assert!(said.contains("step 2, saved by"), "{said}");
}
